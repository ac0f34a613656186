"""The guarded step: many heads, each its own student, teacher and optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from ssl_kd import losses
from ssl_kd.guard.events import Event
from ssl_kd.guard.health import Health, Stage, Thresholds, is_healthy
from ssl_kd.guard.parts import (
    AdamWState,
    adamw_,
    clip_factors,
    keep_unless_,
    only_healthy,
    part_norms,
    rescale_,
)
from ssl_kd.guard.precision import Precision
from ssl_kd.heads.bank import HeadBank


@dataclass(frozen=True)
class Objective:
    """What the heads are trained for; every field is a setting of the same name."""

    loss: Literal["temi", "sharpened"] = "temi"
    beta: float = 0.6
    student_temp: float = 0.1
    teacher_temp: float = 0.1
    instance_weight: losses.InstanceWeight = "none"
    centering: Literal["center", "sinkhorn"] = "center"
    marginal_momentum: float = 0.9
    ema_momentum: float = 0.99
    learning_rate: float = 4e-3
    warmup_fraction: float = 0.1
    weight_decay: float = 1e-4
    clip_grad: float | None = 1.0
    batch_size: int = 256
    seed: int = 0


@dataclass
class HeadsState:
    """Everything the heads own; one row per head, so that a head can be left alone bit by bit.

    Attributes:
        student: `[head, parameter]` float32.
        teacher: the same, the exponential moving average of `student`.
        exp_avg: first moment, `[head, parameter]`.
        exp_avg_sq: second moment, `[head, parameter]`.
        updates: `[head]`, how many updates the head has had.
        marginal: `[head, cluster]`: running mean of the teacher's probabilities, or of its logits
            (the center) for the sharpened loss.
        loss: `[head]`, running mean of the loss over healthy steps.
        scale: `[head]`, the factor its loss is scaled by (1 unless products run in float16).
        health: what the guard remembers of each head.
    """

    student: Tensor
    teacher: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    updates: Tensor
    marginal: Tensor
    loss: Tensor
    scale: Tensor
    health: Health

    @classmethod
    def fresh(
        cls, student: Tensor, n_clusters: int, objective: Objective, precision: Precision
    ) -> HeadsState:
        """A state before the first step, of students `[head, parameter]`."""
        student = student.to(precision.device)
        heads = torch.zeros(len(student), device=student.device)
        start = 1 / n_clusters if objective.loss == "temi" else 0.0
        return cls(
            student=student,
            teacher=student.clone(),
            exp_avg=torch.zeros_like(student),
            exp_avg_sq=torch.zeros_like(student),
            updates=heads.clone(),
            marginal=torch.full((len(student), n_clusters), start, device=student.device),
            loss=heads.clone(),
            scale=torch.full_like(heads, 16.0 if precision.scale else 1.0),
            health=Health.fresh(len(student), student.device),
        )

    def owned(self) -> dict[str, Tensor]:
        """Name -> tensor of what a head learns: all but the guard's memory."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "health"}

    def tensors(self) -> dict[str, Tensor]:
        """Name -> tensor, for a checkpoint."""
        health = {f"health.{name}": value for name, value in self.health.tensors().items()}
        return self.owned() | health

    def rows(self, rows: slice) -> HeadsState:
        """Some heads' state, sharing memory with the whole."""
        owned = {name: tensor[rows] for name, tensor in self.owned().items()}
        return HeadsState(**owned, health=self.health.rows(rows))


def head_chunks(n_heads: int, bytes_per_head: int, device: torch.device) -> list[slice]:
    """Split the heads so that one chunk's tensors stay in the cache (CPU) or in memory (GPU).

    Fifty full-size heads as one batch are a third slower on a CPU than two at a time, and need 25
    times the memory; tiny heads are best run by the dozen. A batched product hands each thread
    whole heads, so a chunk holds as many for one thread as for another: three heads on two threads
    take as long as four.
    """
    if device.type == "cuda":
        size = max(1, 2**31 // bytes_per_head)
    else:
        size = torch.get_num_threads() * max(1, 6 * 2**20 // bytes_per_head)
    return [slice(start, min(start + size, n_heads)) for start in range(0, n_heads, size)]


@dataclass
class StepResult:
    """What a step saw.

    Attributes:
        loss: `[head]`.
        grad_norm: `[head]`, before clipping.
        stage: `[head]` int8, the `Stage` of its fault.
        bad: `[view, batch]`, samples that were left out, in every view, since they are not finite.
        smoothed: `[head]`, whether a cluster's running marginal was exactly 0.
        before: name -> `[head]`: loss scale and health as they were before the step, named as in
            `HeadsState.tensors`.
    """

    loss: Tensor
    grad_norm: Tensor
    stage: Tensor
    bad: Tensor
    smoothed: Tensor
    before: dict[str, Tensor]


class HeadTrainer:
    """The guarded step over a bank of heads.

    Args:
        bank: how a row of weights is run as a head.
        objective: what is trained for.
        precision: dtypes and device.
        n_clusters: K.
        thresholds: when the guard acts.

    Attributes:
        state: everything the heads own.
        good: each head's last good state, as `owned`; what a sick head is restored from.
        good_step: `[head]`, the number of steps done when it was kept.
    """

    def __init__(
        self,
        bank: HeadBank,
        objective: Objective,
        precision: Precision,
        n_clusters: int,
        thresholds: Thresholds | None = None,
    ) -> None:
        self.bank, self.objective, self.precision = bank, objective, precision
        self.n_clusters, self.thresholds = n_clusters, thresholds or Thresholds()
        self.decay = bank.decay_mask().to(precision.device) * objective.weight_decay
        self.state = self._fresh(bank.initial_weights(objective.seed))
        self.good = {name: tensor.clone() for name, tensor in self.state.owned().items()}
        self.good_step = torch.zeros_like(self.state.health.seen)

    def _fresh(self, students: Tensor) -> HeadsState:
        return HeadsState.fresh(students, self.n_clusters, self.objective, self.precision)

    def tensors(self) -> dict[str, Tensor]:
        """Name -> tensor of all that a resumed run needs, sharing memory with the trainer."""
        good = {f"good.{name}": tensor for name, tensor in self.good.items()}
        return self.state.tensors() | good | {"good_step": self.good_step}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `tensors` gave, of this version or an older one.

        An older checkpoint knows no last good state (it is one itself), and `skipped` and `streak`
        are all that it remembers of the heads' health.

        Raises:
            ValueError: a tensor is missing or has another shape.
        """
        older = {
            f"health.{name}": tensors[name] for name in ("skipped", "streak") if name in tensors
        }
        for name, mine in self.tensors().items():
            saved = tensors.get(name)
            if saved is None:
                saved = older.get(name, tensors.get(name.removeprefix("good.")))
            if saved is None and (name == "good_step" or (older and name.startswith("health."))):
                continue
            if saved is None or saved.shape != mine.shape:
                found = "is missing" if saved is None else f"is {list(saved.shape)}"
                raise ValueError(f"{name} {found}, expected {list(mine.shape)}")
            mine.copy_(saved)

    def keep_good(self, step: int, before: dict[str, Tensor], stage: Tensor) -> None:
        """Remember what the heads owned `before` a step as their last good state, where it was.

        Args:
            step: its number, so many steps were done before.
            before: name -> tensor, a copy of `owned`.
            stage: `[head]`, of the step, which has shown the state to be good or not.
        """
        well = is_healthy(stage) & _finite(before)
        for name, tensor in before.items():
            keep_unless_(well, self.good[name], tensor)
        keep_unless_(well, self.good_step, torch.full_like(self.good_step, step))

    def restore(self, head: int) -> str:
        """Put one head back to its last good state; what was done, in words."""
        for name, tensor in self.state.owned().items():
            tensor[head].copy_(self.good[name][head])
        return f"restored to its state after step {int(self.good_step[head])}"

    def heal(self, step: int) -> list[Event]:
        """Restore the heads that hold numbers that are not finite, before a checkpoint is written.

        A head whose weights were hit from outside the step is not updated any more, but its rows
        would carry the damage into the file.
        """
        sick = (~_finite(self.state.owned())).nonzero().flatten().tolist()
        reason = "its weights or moments are not finite"
        return [Event(step, f"head {i}", "weight", reason, self.restore(i)) for i in sick]

    def give_up(self, step: int) -> list[Event]:
        """Put every head that is not well back to its last good state, before the run stops.

        A run that is resumed from it, once the cause is found, finds no head in the middle of a
        fault.
        """
        health = self.state.health
        sick = ((health.streak > 0) | ~_finite(self.state.owned())).nonzero().flatten().tolist()
        health.streak.zero_()
        reason = "it was not well when the run stopped"
        return [Event(step, f"head {i}", "escalation", reason, self.restore(i)) for i in sick]

    def escalate(self, step: int) -> list[Event]:
        """Restore, re-initialise or retire the heads that stay sick; asks the device.

        Raises:
            TooFewHealthyParts: it is no use to go on.
        """
        events = []
        for head, action in self.state.health.escalate(self.thresholds).items():
            if action == "restore":
                done = self.restore(head)
            elif action == "reinitialise":
                # Not the weights that it began with: those led here.
                seed = self.objective.seed + 1
                fresh = self._fresh(self.bank.initial_weights(seed, only=head))
                for name, tensor in self.state.owned().items():
                    tensor[head].copy_(getattr(fresh, name)[0])
                    self.good[name][head].copy_(tensor[head])
                self.good_step[head] = step + 1
                done = "re-initialised"
            else:
                self.restore(head)  # so that its rows are finite, whatever becomes of them
                done = "retired"
            reason = f"{self.thresholds.restore_after} bad steps in a row"
            events.append(Event(step, f"head {head}", "escalation", reason, done))
        return events

    def step(self, views: Tensor, learning_rate: float) -> StepResult:
        """One guarded step of every head.

        forward -> vector of losses -> gradient of each head -> its norm, check and clip -> masked
        update -> masked EMA. Heads share no weight, so a sick one needs no cutting out before the
        backward pass; its row is simply not written.

        Args:
            views: `[view, batch, dim]`, two views or more of the same samples.
            learning_rate: of this step.
        """
        # A sample that is not finite is taken out of every view before any product sees it. Views
        # come from the CPU, so that asking waits for no device.
        bad = bad_samples(views)
        if bad.any():
            views = views[:, ~bad.any(0)]
        views = views.to(self.precision.device, non_blocking=True)
        smoothed = (self.state.marginal == 0).any(1) & (self.objective.loss == "temi")
        remembered = {f"health.{name}": t for name, t in self.state.health.tensors().items()}
        before = {n: t.clone() for n, t in (remembered | {"scale": self.state.scale}).items()}

        n_views, batch, _ = views.shape
        floats = n_views * batch * self.bank.width + self.bank.n_parameters
        chunks = head_chunks(self.bank.n_heads, 4 * floats, views.device)
        teachers: Iterator | list = (self._teach(rows, views) for rows in chunks)
        shared = None
        if self.objective.instance_weight == "mean":  # needs every teacher before any student
            teachers = list(teachers)
            agreements = torch.cat([t[2] for t in teachers])
            agreements.masked_fill_(self.state.health.retired.unsqueeze(1), torch.nan)
            shared = losses.instance_weights(agreements, "mean")

        results = []
        for rows, (targets, marginal, agreements) in zip(chunks, teachers, strict=True):
            weights = shared
            if self.objective.instance_weight == "own":
                weights = losses.instance_weights(agreements, "own")
            results.append(self._learn(rows, views, targets, marginal, weights, learning_rate))
        loss, norm, stage = (torch.cat(column) for column in zip(*results, strict=True))
        self.state.health.record_(stage, norm, self.thresholds)
        return StepResult(loss, norm, stage, bad, smoothed, before)

    def _logits(self, parameters: dict[str, Tensor], views: Tensor, training: bool) -> Tensor:
        with self.precision.autocast():
            logits = self.bank(parameters, views.flatten(0, 1), training=training)
        return logits.unflatten(1, views.shape[:2])

    @torch.no_grad()
    def _teach(self, rows: slice, views: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Targets `[head, view, batch, cluster]`, new marginal, agreement `[head, batch]`."""
        o, state = self.objective, self.state.rows(rows)
        logits = self._logits(self.bank.unflatten(state.teacher), views, training=False)
        if o.loss == "temi":
            targets = losses.log_probabilities(logits, o.teacher_temp)
            latest, log_probs = targets.exp().mean((1, 2)), targets
        else:
            if o.centering == "sinkhorn":
                targets = losses.sinkhorn_targets(logits, o.teacher_temp)
            else:
                targets = losses.centred_targets(logits, state.marginal, o.teacher_temp)
            latest, log_probs = logits.float().mean((1, 2)), targets.log()
        marginal = torch.lerp(state.marginal, latest, 1 - o.marginal_momentum)
        weighted = o.instance_weight != "none"
        agreements = losses.agreement(log_probs) if weighted else marginal.new_empty(0)
        return targets, marginal, agreements

    def _learn(
        self,
        rows: slice,
        views: Tensor,
        targets: Tensor,
        marginal: Tensor,
        weights: Tensor | None,
        learning_rate: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The students' half of the step for some heads: loss, norm and stage, `[head]` each."""
        o, state = self.objective, self.state.rows(rows)
        parameters = {
            name: value.detach().requires_grad_()
            for name, value in self.bank.unflatten(state.student).items()
        }
        logits = self._logits(parameters, views, training=True)
        if o.loss == "temi":
            loss = losses.temi(
                logits, targets, marginal, weights, beta=o.beta, student_temperature=o.student_temp
            )
        else:
            loss = losses.sharpened_cross_entropy(
                logits, targets, weights, student_temperature=o.student_temp
            )
        gradients = torch.autograd.grad((loss * state.scale).sum(), list(parameters.values()))

        with torch.no_grad():
            gradient = torch.cat([g.flatten(1) for g in gradients], dim=1)
            norm = part_norms(gradient) / state.scale
            sound = torch.isfinite(marginal).all(1)
            scale = state.scale if self.precision.scale else None
            stage = state.health.judge(loss, norm, self.thresholds, sound, scale)
            healthy = is_healthy(stage)

            gradient.mul_((clip_factors(norm, o.clip_grad) / state.scale).unsqueeze(1))
            owned = state.owned()
            del owned["scale"]  # the one thing of its own that a fault changes
            with only_healthy(healthy, *owned.values()):
                adamw_(
                    state.student,
                    gradient,
                    AdamWState(state.exp_avg, state.exp_avg_sq, state.updates),
                    learning_rate=learning_rate,
                    weight_decay=self.decay,
                )
                state.teacher.lerp_(state.student, 1 - o.ema_momentum)
                state.marginal.copy_(marginal)
                memory = torch.where(state.updates > 1, 0.98, 0.0)
                state.loss.copy_(torch.lerp(loss, state.loss, memory))
            if self.precision.scale:
                rescale_(state.scale, healthy, stage == int(Stage.OVERFLOW), state.updates)
        return loss.detach(), norm, stage


def _finite(owned: dict[str, Tensor]) -> Tensor:
    """Which heads hold only finite numbers, and none so large that their sum is not: `[head]`."""
    sums = [tensor.view(len(tensor), -1).sum(1) for tensor in owned.values()]  # one fast pass each
    return torch.isfinite(torch.stack(sums)).all(0)


def bad_samples(views: Tensor) -> Tensor:
    """Which samples of `[view, batch, dim]` are not finite: boolean `[view, batch]`."""
    return ~torch.isfinite(views).all(-1)
