"""Train many independent heads at once, and skip the update of a head whose step is faulty."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ssl_kd import losses
from ssl_kd.guard.faults import Stage, Thresholds
from ssl_kd.guard.health import Health, is_healthy
from ssl_kd.guard.memory import to_device_async
from ssl_kd.guard.parts import SNAPSHOT_EVERY, RowParts
from ssl_kd.guard.precision import Precision
from ssl_kd.guard.recovery import Recovery, with_all_kinds
from ssl_kd.guard.seeds import seed_of
from ssl_kd.guard.update import adamw_, clip_factors, only_healthy, part_norms, rescale_
from ssl_kd.heads.bank import HeadBank
from ssl_kd.vision.objectives import make_objective
from ssl_kd.vision.settings import HeadSettings

WEIGHT_DECAY = 1e-4  # of AdamW, of matrices
EMA_MOMENTUM = 0.9  # of the teachers
MARGINAL_MOMENTUM = 0.9  # of the running marginal of the clusters


@dataclass
class HeadsState:
    """Hold the state of all heads, one row per head, so that a skipped head stays bit-identical.

    Attributes:
        student: `[head, parameter]` float32.
        teacher: `[head, parameter]`, the exponential moving average of `student`.
        exp_avg: first moment, `[head, parameter]`.
        exp_avg_sq: second moment, `[head, parameter]`.
        updates: `[head]`, number of updates of the head.
        marginal: `[head, cluster]`, running mean of the cluster probabilities, for the objective.
        loss: `[head]`, running mean of the loss over healthy steps.
        scale: `[head]`, the factor its loss is scaled by (1 unless matrix products are in float16).
        health: the guard's record of each head.
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
        cls, student: Tensor, n_clusters: int, marginal: float, precision: Precision
    ) -> HeadsState:
        """Return the state before the first step, for initial students `[head, parameter]`."""
        student = student.to(precision.device)
        heads = torch.zeros(len(student), device=student.device)
        return cls(
            student=student,
            teacher=student.clone(),
            exp_avg=torch.zeros_like(student),
            exp_avg_sq=torch.zeros_like(student),
            updates=heads.clone(),
            marginal=torch.full((len(student), n_clusters), marginal, device=student.device),
            loss=heads.clone(),
            scale=torch.full_like(heads, 16.0 if precision.scale else 1.0),
            health=Health.fresh(len(student), student.device),
        )

    def owned(self) -> dict[str, Tensor]:
        """Return name -> tensor, without the guard's record."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "health"}

    def tensors(self) -> dict[str, Tensor]:
        """Return name -> tensor, for a checkpoint."""
        health = {f"health.{name}": value for name, value in self.health.tensors().items()}
        return self.owned() | health

    def rows(self, rows: slice) -> HeadsState:
        """Return the state of some heads; its tensors share memory with this state."""
        owned = {name: tensor[rows] for name, tensor in self.owned().items()}
        return HeadsState(**owned, health=self.health.rows(rows))


def head_chunks(n_heads: int, bytes_per_head: int, device: torch.device) -> list[slice]:
    """Split the heads into chunks whose tensors fit into the CPU's cache or the GPU's memory.

    On a CPU, fifty full-size heads in one batch are a third slower than two at a time and need 25
    times the memory, while tiny heads are fastest by the dozen. A batched product gives each thread
    whole heads, so the chunk size is a multiple of the number of threads: three heads on two
    threads take as long as four.
    """
    if device.type == "cuda":
        size = max(1, 2**31 // bytes_per_head)
    else:
        size = torch.get_num_threads() * max(1, 6 * 2**20 // bytes_per_head)
    return [slice(start, min(start + size, n_heads)) for start in range(0, n_heads, size)]


def keep_freed_memory() -> None:
    """Make glibc keep the memory that a step frees, so that the next step need not map it again.

    glibc returns free memory to the system beyond twice the largest block (up to 32 MiB) that was
    ever mapped and freed. Mapping it again takes a tenth of a step with many clusters.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8, device="cpu")  # freed at once, never touched


@dataclass
class HeadsStep:
    """The result of a step.

    Attributes:
        loss: `[head]`.
        grad_norm: `[head]`, before clipping.
        stage: `[head]` int8, the `Stage` of the head's fault.
        bad: `[view, batch]`, which samples are not finite; they were left out of every view.
        smoothed: `[head]`, whether a cluster's running marginal was exactly 0.
        before: name -> `[head]`, loss scale and health before the step, named as in
            `HeadsState.tensors`.
    """

    loss: Tensor
    grad_norm: Tensor
    stage: Tensor
    bad: Tensor
    smoothed: Tensor
    before: dict[str, Tensor]


class HeadTrainer:
    """Hold the state of a bank of heads, and update it by guarded steps.

    Args:
        bank: applies heads, given as rows of weights.
        heads: settings of objective, optimizer and seed.
        precision: dtypes and device.
        n_clusters: number of clusters K.
        thresholds: limits beyond which the guard acts.

    Attributes:
        weigh: with INSTANCE_WEIGHT `mean`, maps the teachers' agreements `[head, batch]` to the
            weights `[1, batch]` of a batch's samples.
        state: state of all heads.
        objective: training objective.
        recovery: reports faulty heads and restores them.
    """

    def __init__(
        self,
        bank: HeadBank,
        heads: HeadSettings,
        precision: Precision,
        n_clusters: int,
        thresholds: Thresholds | None = None,
    ) -> None:
        self.weigh: Callable[[Tensor], Tensor | None]
        self.weigh = functools.partial(losses.instance_weights, how="mean")
        self.bank, self.settings, self.precision = bank, heads, precision
        self.n_clusters, self.thresholds = n_clusters, thresholds or Thresholds()
        self.objective = make_objective(heads.loss, vars(heads))
        keep_freed_memory()
        self.decay = bank.decay_mask().to(precision.device) * WEIGHT_DECAY
        self.state = self._fresh(bank.initial_weights(heads.seed))
        names = [f"head {bank.first + i}" for i in range(bank.n_heads)]
        self._rows = RowParts(names, self.state.owned(), self._new_row)
        self.recovery = Recovery(self._rows, self.state.health, first=bank.first)

    def _fresh(self, students: Tensor) -> HeadsState:
        marginal = self.objective.initial_marginal(self.n_clusters)
        return HeadsState.fresh(students, self.n_clusters, marginal, self.precision)

    def _new_row(self, head: int, seed: int) -> dict[str, Tensor]:
        """Return the initial state of one head, to replace a head that failed."""
        seed = seed_of(self.settings.seed, seed)
        fresh = self._fresh(self.bank.new_row(seed).unsqueeze(0))
        return {name: tensor[0] for name, tensor in fresh.owned().items()}

    def tensors(self) -> dict[str, Tensor]:
        """Return name -> tensor of everything that a resumed run needs, without copying."""
        good = {f"good.{name}": tensor for name, tensor in self._rows.good.items()}
        memory = {f"recovery.{name}": t for name, t in self.recovery.tensors().items()}
        return self.state.tensors() | good | {"good_step": self._rows.good_step} | memory

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore a state that `tensors` returned.

        Raises:
            ValueError: a tensor is missing or has another shape.
        """
        for name, mine in self.tensors().items():
            saved = tensors.get(name)
            if name == "recovery.counts" and saved is not None:
                saved = with_all_kinds(saved)
            if saved is None or saved.shape != mine.shape:
                actual = "is missing" if saved is None else f"is {list(saved.shape)}"
                raise ValueError(f"{name} {actual}, expected {list(mine.shape)}")
            mine.copy_(saved)

    def step(
        self,
        views: Tensor,
        learning_rate: float,
        step: int | None = None,
        fixed_targets: Tensor | None = None,
    ) -> HeadsStep:
        """Do one guarded step of every head.

        Compute the loss and gradient of each head, check the loss and the gradient's norm, clip,
        and update the weights and EMA of healthy heads only. Heads share no weights, so a faulty
        head cannot affect the gradients of others, and its row is simply not written.

        Args:
            views: `[view, batch, dim]`, two views or more of the same samples.
            learning_rate: learning rate of this step.
            step: number of the step, by which the last good state is saved now and then; None: it
                is not saved.
            fixed_targets: `[view, batch, cluster]` probabilities that all heads learn by
                cross-entropy, each view from the targets of another view; None: heads learn from
                their EMA teachers.
        """
        if step is not None and step % SNAPSHOT_EVERY:
            step = None  # no snapshot
        # A sample that is not finite is taken out of every view before any product sees it.
        bad = bad_samples(views)
        good = good_samples(bad, in_place=self.precision.device.type == "cuda")
        if good is not None:
            views = views[:, good]
            fixed_targets = (
                None if fixed_targets is None else fixed_targets[:, good.to(fixed_targets.device)]
            )
        views = to_device_async(views, self.precision.device)
        fixed_targets = (
            None if fixed_targets is None else to_device_async(fixed_targets, self.precision.device)
        )
        smoothed = self.objective.smoothed(self.state.marginal)
        remembered = {f"health.{name}": t for name, t in self.state.health.tensors().items()}
        before = {n: t.clone() for n, t in (remembered | {"scale": self.state.scale}).items()}

        n_views, batch, _ = views.shape
        floats = n_views * batch * self.bank.width + self.bank.n_parameters
        chunks = head_chunks(self.bank.n_heads, 4 * floats, views.device)
        teachers: Iterator | list = (self._targets(rows, views, fixed_targets) for rows in chunks)
        shared = None
        weighting = self.settings.instance_weight if fixed_targets is None else "none"
        if weighting == "mean":  # needs every teacher before any student
            teachers = list(teachers)
            agreements = torch.cat([t[2] for t in teachers])
            agreements.masked_fill_(self.state.health.retired.unsqueeze(1), torch.nan)
            shared = self.weigh(agreements)

        compare = self.objective.loss if fixed_targets is None else self._cross_entropy
        results = []
        for rows, (targets, marginal, agreements) in zip(chunks, teachers, strict=True):
            weights = shared
            if weighting == "own":
                weights = losses.instance_weights(agreements, "own")
            state = self.state.rows(rows)
            parameters = {
                name: value.detach().requires_grad_()
                for name, value in self.bank.unflatten(state.student).items()
            }
            loss = compare(self._logits(parameters, views, True), targets, marginal, weights)
            gradients = torch.autograd.grad(  # zeros for a parameter that the head does not use
                (loss * state.scale).sum(), list(parameters.values()), materialize_grads=True
            )
            gradient = torch.cat([g.flatten(1) for g in gradients], dim=1)
            loss = loss.detach()
            results.append(self._update(rows, gradient, loss, marginal, learning_rate, step))
        loss, norm, stage = (torch.cat(column) for column in zip(*results, strict=True))
        self.state.health.record_(stage, norm, self.thresholds)
        return HeadsStep(loss, norm, stage, bad, smoothed, before)

    def _logits(self, parameters: dict[str, Tensor], views: Tensor, training: bool) -> Tensor:
        with self.precision.autocast():
            logits = self.bank(parameters, views.flatten(0, 1), training=training)
        return logits.unflatten(1, views.shape[:2])

    @torch.no_grad()
    def _targets(
        self, rows: slice, views: Tensor, fixed_targets: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return targets `[head or 1, view, batch, cluster]`, new marginal, and agreement."""
        marginal = self.state.marginal[rows]
        agreements = marginal.new_empty(0)
        if fixed_targets is not None:
            return fixed_targets.unsqueeze(0), marginal, agreements
        logits = self._logits(self.bank.unflatten(self.state.teacher[rows]), views, False)
        targets, latest = self.objective.targets(logits, marginal)
        if self.settings.instance_weight != "none":
            agreements = losses.agreement(self.objective.log_probabilities(targets))
        return targets, torch.lerp(marginal, latest, 1 - MARGINAL_MOMENTUM), agreements

    def _cross_entropy(
        self, logits: Tensor, targets: Tensor, marginal: Tensor, weights: Tensor | None
    ) -> Tensor:
        return losses.sharpened_cross_entropy(
            logits, targets, weights, student_temperature=self.settings.student_temp
        )

    @torch.no_grad()
    def _update(
        self,
        rows: slice,
        gradient: Tensor,
        loss: Tensor,
        marginal: Tensor,
        learning_rate: float,
        step: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Clip `[head, parameter]` gradients, update healthy heads; return loss, norm and stage."""
        state = self.state.rows(rows)
        norm = part_norms(gradient) / state.scale
        sound = torch.isfinite(marginal).all(1)
        scale = state.scale if self.precision.scale else None
        stage = state.health.judge(loss, norm, self.thresholds, sound, scale)
        healthy = is_healthy(stage)
        if step is not None:
            self._rows.snapshot(rows, healthy, step)
        factors = clip_factors(norm, self.settings.clip_grad) / state.scale
        gradient.mul_(factors.unsqueeze(1))
        owned = state.owned()
        del owned["scale"]  # the only tensor of a head that a fault changes
        with only_healthy(healthy, *owned.values()):
            adamw_(
                state.student,
                gradient,
                state.exp_avg,
                state.exp_avg_sq,
                state.updates,
                learning_rate=learning_rate,
                weight_decay=self.decay,
            )
            state.teacher.lerp_(state.student, 1 - EMA_MOMENTUM)
            state.marginal.copy_(marginal)
            memory = torch.where(state.updates > 1, 0.98, 0.0)
            state.loss.copy_(torch.lerp(loss, state.loss, memory))
        if self.precision.scale:
            rescale_(state.scale, healthy, stage == int(Stage.OVERFLOW), state.updates)
        return loss, norm, stage


def bad_samples(views: Tensor) -> Tensor:
    """Mark the samples of `[view, batch, dim]` that are not finite, boolean `[view, batch]`."""
    if views.device.type == "cpu" and torch.isfinite(views.sum()):  # the usual case, in one pass
        return torch.zeros(views.shape[:2], dtype=torch.bool)
    return ~torch.isfinite(views).all(-1)


def good_samples(bad: Tensor, *, in_place: bool = False) -> Tensor | None:
    """Return the positions of the samples that are good in every view; None if all are good.

    Args:
        bad: boolean `[view, batch]`.
        in_place: replace each bad sample by the first good one, so that the batch keeps its size;
            counting the good samples would wait for the GPU.
    """
    good = ~bad.any(0)
    if bad.device.type == "cpu" and good.all():
        return None
    if not in_place:
        return good.nonzero().flatten()
    return torch.where(good, torch.arange(len(good), device=bad.device), good.byte().argmax())
