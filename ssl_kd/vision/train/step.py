"""Train many independent heads at once, and skip the update of a head whose step is faulty."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional

from firstnan.faults import Observation, Stage, Thresholds
from firstnan.health import Health, is_healthy, rescale_
from firstnan.parts import SNAPSHOT_EVERY
from firstnan.recovery import Recovery, with_all_kinds
from ssl_kd.core.faults import REMEDIES, OwnStage
from ssl_kd.core.memory import to_device_async
from ssl_kd.core.precision import Precision
from ssl_kd.core.seeds import seed_of
from ssl_kd.vision.settings import HeadSettings
from ssl_kd.vision.train import losses
from ssl_kd.vision.train.heads.bank import HeadBank
from ssl_kd.vision.train.objectives import make_objective
from ssl_kd.vision.train.rows import (
    RowParts,
    adamw_,
    clip_factors,
    keep_unless_,
    only_healthy,
    part_norms,
)

WEIGHT_DECAY = 1e-4  # of AdamW, of matrices
EMA_MOMENTUM = 0.9  # of the teachers
MARGINAL_MOMENTUM = 0.9  # of the running marginal of the clusters


@dataclass
class HeadsState:
    """The state of all heads, one row per head, so that a skipped head stays bit-identical."""

    student: Tensor  # `[head, parameter]` float32
    teacher: Tensor  # `[head, parameter]`, exponential moving average of `student`
    exp_avg: Tensor  # `[head, parameter]`, first moment
    exp_avg_sq: Tensor  # `[head, parameter]`, second moment
    updates: Tensor  # `[head]`, count of updates
    marginal: Tensor  # `[head, cluster]`, running mean of the objective's marginal
    loss: Tensor  # `[head]`, running mean over healthy steps
    scale: Tensor  # `[head]`, factor of the loss (1 unless matrix products are in float16)
    health: Health  # the guard's record of each head

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

    def judged(self) -> dict[str, Tensor]:
        """Return name -> tensor of what a skipped step changes: the loss scale and the record."""
        health = {f"health.{name}": value for name, value in self.health.tensors().items()}
        return {"scale": self.scale} | health

    def tensors(self) -> dict[str, Tensor]:
        """Return name -> tensor, for a checkpoint."""
        return self.owned() | self.judged()

    def rows(self, rows: slice) -> HeadsState:
        """Return the state of some heads; its tensors share memory with this state."""
        owned = {name: tensor[rows] for name, tensor in self.owned().items()}
        return HeadsState(**owned, health=self.health.rows(rows))


def head_chunks(n_heads: int, bytes_per_head: int, device: torch.device) -> list[slice]:
    """Split the heads into chunks whose tensors fit into the CPU's cache or the GPU's memory.

    On a CPU, fifty full-size heads in one batch are a third slower than two at a time and need 25
    times the memory. A batched product gives each thread whole heads, so the chunk size is a
    multiple of the number of threads.
    """
    if device.type == "cuda":
        size = max(1, 2**31 // bytes_per_head)
    else:
        size = torch.get_num_threads() * max(1, 6 * 2**20 // bytes_per_head)
    return [slice(start, min(start + size, n_heads)) for start in range(0, n_heads, size)]


def runs_of(by_loss: Tensor) -> list[tuple[slice, bool]]:
    """Return the runs of consecutive heads with one value in `by_loss` `[head]`, and this value."""
    changes = (by_loss[1:] != by_loss[:-1]).nonzero().flatten().add(1).tolist()
    bounds = itertools.pairwise([0, *changes, len(by_loss)])
    return [(slice(start, stop), bool(by_loss[start])) for start, stop in bounds]


def keep_freed_memory() -> None:
    """Make glibc keep the memory that a step frees, so that the next step need not map it again.

    glibc returns free memory beyond twice the largest block (up to 32 MiB) that was ever freed.
    Mapping it again takes a tenth of a step with many clusters.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8, device="cpu")  # freed at once, never touched


@dataclass
class Targets:
    """What the students of some heads learn from a batch."""

    of_runs: list[Tensor]  # `[head or 1, view, batch, cluster]`, one for each of `runs_of`
    marginal: Tensor  # `[head, cluster]`, the running marginal including this batch
    agreement: Tensor  # `[head, batch]`, of the teacher's views; NaN where targets are fixed


@dataclass
class HeadsStep:
    """The result of a step."""

    loss: Tensor  # `[head]`
    grad_norm: Tensor  # `[head]`, before clipping
    stage: Tensor  # `[head]` int8, the `Stage` of the head's fault
    bad: Tensor  # `[view, batch]`, samples that are not finite, left out of every view
    has_zero: Tensor  # `[head]`, whether a cluster's running marginal was exactly 0
    before: dict[str, Tensor]  # `[head]`, scale and health before, as in `HeadsState.judged`


class HeadTrainer:
    """Hold the state of a bank of heads, and update it by guarded steps.

    Attributes:
        by_loss: `[head]`, on the CPU: True for a head that learns from its EMA teacher by LOSS, as
            all do at first; False for one that learns fixed targets by cross-entropy.
    """

    def __init__(
        self,
        bank: HeadBank,
        heads: HeadSettings,
        precision: Precision,
        n_clusters: int,
        thresholds: Thresholds | None = None,
    ) -> None:
        # With INSTANCE_WEIGHT `mean`: agreements `[head, batch]` -> weights `[1, batch]`
        self.weigh_together: Callable[[Tensor], Tensor | None]
        self.weigh_together = functools.partial(losses.instance_weights, how="mean")
        self.bank = bank
        self.settings = heads
        self.precision = precision
        self.n_clusters, self.thresholds = n_clusters, thresholds or Thresholds()
        self.objective = make_objective(heads.loss, vars(heads))
        self._fixed = make_objective("fixed", vars(heads))
        keep_freed_memory()
        self.decay = bank.decay_mask().to(precision.device) * WEIGHT_DECAY
        self.state = self._fresh(bank.initial_weights(heads.seed))
        self.by_loss = torch.ones(bank.n_heads, dtype=torch.bool, device="cpu")
        names = [f"head {bank.first + i}" for i in range(bank.n_heads)]
        self._rows = RowParts(names, self.state.owned(), self._new_row)
        self.recovery = Recovery(self._rows, self.state.health, REMEDIES)

    def _fresh(self, students: Tensor) -> HeadsState:
        marginal = self.objective.initial_marginal(self.n_clusters)
        return HeadsState.fresh(students, self.n_clusters, marginal, self.precision)

    def _new_row(self, head: int, step: int) -> dict[str, Tensor]:
        """Return an initial state of one head, to replace a head that failed before `step`."""
        seed = seed_of(self.settings.seed, step, self.bank.first + head)
        fresh = self._fresh(self.bank.new_row(seed).unsqueeze(0))
        return {name: tensor[0] for name, tensor in fresh.owned().items()}

    def begin_again(self, heads: Tensor, step: int) -> None:
        """Before `step`, let some heads, boolean `[head]`, learn something else from now on.

        Their students take the weights of the EMA teachers. Moments, marginal and running loss
        start afresh, as does the median gradient norm by which the guard recognizes spikes; its
        counts of faults stay.
        """
        state, heads = self.state, heads.to(self.precision.device)
        fresh = self._fresh(state.teacher)
        for name, tensor in state.owned().items():
            keep_unless_(heads, tensor, getattr(fresh, name))
        for name in ("level", "seen", "spikes", "zeros", "run"):
            getattr(state.health, name).mul_(~heads)
        self._rows.snapshot(slice(None), heads, step)

    def tensors(self) -> dict[str, Tensor]:
        """Return name -> tensor of everything that a resumed run needs, without copying."""
        good = {f"good.{name}": tensor for name, tensor in self._rows.good.items()}
        memory = {"good_step": self._rows.good_step, "recovery.counts": self.recovery.counts}
        memory["by_loss"] = self.by_loss
        return self.state.tensors() | good | memory

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore a state that `tensors` returned; raise ValueError if a tensor does not fit."""
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
        """Do one guarded step of every head on `views` `[view, batch, dim]` of the same samples.

        Heads share no weights, so a faulty head cannot affect the gradients of others, and its row
        is not written. The last good state is saved at some values of `step`. Heads that are not
        `by_loss` need `fixed_targets`, int64 `[head or 1, view, batch]`: they learn the cluster of
        each view from the other views. Those of other heads are not read.

        References:
            Adaloglou et al., Exploring the Limits of Deep Image Clustering using Pretrained Models,
            BMVC 2023, section 3.
        """
        if fixed_targets is None and not self.by_loss.all():
            number = int((~self.by_loss).sum())
            raise ValueError(
                f"fixed_targets is None, but {number} of {len(self.by_loss)} heads learn fixed "
                "targets: pass int64 [head or 1, view, batch], or set by_loss to True"
            )
        # A sample that is not finite is taken out of every view before any product sees it.
        bad = bad_samples(views)
        views, fixed_targets = self._on_device(bad, views, fixed_targets)
        has_zero = self.objective.has_zero(self.state.marginal)
        before = {name: tensor.clone() for name, tensor in self.state.judged().items()}
        takes_snapshot = step is not None and step % SNAPSHOT_EVERY == 0

        def targets_of(chunk: slice) -> Targets:
            return self._targets(chunk, views, fixed_targets)

        def learn(chunk: slice, targets: Targets, weights: Tensor | None) -> tuple[Tensor, ...]:
            gradient, loss = self._gradient(chunk, views, targets, weights)
            snapshot_at = step if takes_snapshot else None
            return self._update(chunk, gradient, loss, targets.marginal, learning_rate, snapshot_at)

        results = []
        chunks = self._chunks(views)
        weighting = self.settings.instance_weight
        if weighting == "mean":  # of all heads, so every teacher answers before a student learns
            targets = [targets_of(chunk) for chunk in chunks]
            weights = self._shared_weights(targets)
            for chunk, of_chunk in zip(chunks, targets, strict=True):
                results.append(learn(chunk, of_chunk, weights))
        else:
            for chunk in chunks:
                of_chunk, weights = targets_of(chunk), None
                if weighting == "own":
                    weights = losses.instance_weights(of_chunk.agreement, "own")
                results.append(learn(chunk, of_chunk, weights))
        loss, norm, stage = (torch.cat(column) for column in zip(*results, strict=True))
        self.state.health.record_(stage, norm, self.thresholds)
        return HeadsStep(loss, norm, stage, bad, has_zero, before)

    def _on_device(
        self, bad: Tensor, views: Tensor, fixed_targets: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Move views and targets of the samples that are good in every view to the device."""
        device = self.precision.device
        good = good_samples(bad, in_place=device.type == "cuda")
        if good is not None:
            views = views[:, good.to(views.device)]
        if fixed_targets is not None:
            if good is not None:
                fixed_targets = fixed_targets[..., good.to(fixed_targets.device)]
            fixed_targets = to_device_async(fixed_targets, device)
        return to_device_async(views, device), fixed_targets

    def _chunks(self, views: Tensor) -> list[slice]:
        """Split the heads into chunks that fit into the cache or the GPU's memory together."""
        n_views, batch, _ = views.shape
        floats = n_views * batch * self.bank.width + self.bank.n_parameters
        return head_chunks(self.bank.n_heads, 4 * floats, views.device)

    def _logits(self, parameters: dict[str, Tensor], views: Tensor, training: bool) -> Tensor:
        with self.precision.autocast():
            rows = rearrange(views, "view batch dim -> (view batch) dim")
            logits = self.bank(parameters, rows, training=training)
        return rearrange(
            logits, "head (view batch) cluster -> head view batch cluster", view=len(views)
        )

    @torch.no_grad()
    def _targets(self, chunk: slice, views: Tensor, fixed_targets: Tensor | None) -> Targets:
        """Return what the students of a chunk of heads learn from a batch."""
        runs = runs_of(self.by_loss[chunk])
        marginal = self.state.marginal[chunk].clone()
        agreement = marginal.new_full((len(marginal), views.shape[1]), torch.nan)
        teacher_logits = None
        if any(by_loss for _, by_loss in runs):
            teachers = self.bank.unflatten(self.state.teacher[chunk])
            teacher_logits = self._logits(teachers, views, training=False)
        of_runs = []
        for run, by_loss in runs:
            if by_loss:
                assert teacher_logits is not None
                # q_t(c | x), and its mean over the batch, towards which the marginal pi moves
                targets, of_batch = self.objective.targets(teacher_logits[run], marginal[run])
                marginal[run] = torch.lerp(marginal[run], of_batch, 1 - MARGINAL_MOMENTUM)
                if self.settings.instance_weight != "none":
                    log_probs = self.objective.log_probabilities(targets)
                    agreement[run] = losses.agreement(log_probs)  # equation 8
            else:
                assert fixed_targets is not None
                clusters = fixed_targets if len(fixed_targets) == 1 else fixed_targets[chunk][run]
                targets = functional.one_hot(clusters, self.n_clusters).float()
            of_runs.append(targets)
        return Targets(of_runs, marginal, agreement)

    def _shared_weights(self, targets: list[Targets]) -> Tensor | None:
        """Return weights `[1, batch]` by the mean agreement of all heads that are not retired."""
        agreement = torch.cat([of_chunk.agreement for of_chunk in targets])
        agreement.masked_fill_(self.state.health.retired.unsqueeze(1), torch.nan)
        return self.weigh_together(agreement)

    def _gradient(
        self, chunk: slice, views: Tensor, targets: Targets, weights: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient `[head, parameter]` of the scaled losses, and the losses `[head]`."""
        students = {
            name: value.detach().requires_grad_()
            for name, value in self.bank.unflatten(self.state.student[chunk]).items()
        }
        logits = self._logits(students, views, training=True)
        # Sums depend on the memory layout, which must not depend on what other heads learn.
        logits.register_hook(functools.partial(with_strides, strides=logits.stride()))
        loss = self._loss(chunk, logits, targets, weights)
        gradients = torch.autograd.grad(  # zeros for a parameter that the head does not use
            (loss * self.state.scale[chunk]).sum(), list(students.values()), materialize_grads=True
        )
        return torch.cat([g.flatten(1) for g in gradients], dim=1), loss.detach()

    def _loss(
        self, chunk: slice, logits: Tensor, targets: Targets, weights: Tensor | None
    ) -> Tensor:
        """Return the loss `[head]` of students' logits, by LOSS or by cross-entropy."""
        runs = runs_of(self.by_loss[chunk])
        pieces = logits.split([run.stop - run.start for run, _ in runs])
        of_runs = []
        for (run, by_loss), piece, wanted in zip(runs, pieces, targets.of_runs, strict=True):
            marginal = targets.marginal[run]
            if by_loss:
                own = weights if weights is None or len(weights) == 1 else weights[run]
                of_runs.append(self.objective.loss(piece, wanted, marginal, own))
            else:
                of_runs.append(self._fixed.loss(piece, wanted, marginal, None))
        return torch.cat(of_runs)

    @torch.no_grad()
    def _update(
        self,
        chunk: slice,
        gradient: Tensor,
        loss: Tensor,
        marginal: Tensor,
        learning_rate: float,
        snapshot_at: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Clip `[head, parameter]` gradients, update healthy heads; return loss, norm and stage."""
        state = self.state.rows(chunk)
        norm = part_norms(gradient) / state.scale
        scale = state.scale if self.precision.scale else None
        stage = Observation(state.health, loss, norm, self.thresholds, scale).stage()
        unsound = ~torch.isfinite(marginal).all(1) & ~state.health.retired
        stage = stage.masked_fill(unsound, int(OwnStage.TEACHER))
        healthy = is_healthy(stage)
        if snapshot_at is not None:
            self._rows.snapshot(chunk, healthy, snapshot_at)
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
            state.teacher.lerp_(state.student, 1 - EMA_MOMENTUM)  # the teacher follows the student
            state.marginal.copy_(marginal)
            memory = torch.where(state.updates > 1, 0.98, 0.0)
            state.loss.copy_(torch.lerp(loss, state.loss, memory))
        if self.precision.scale:
            rescale_(state.scale, healthy, stage == int(Stage.OVERFLOW), state.updates)
        return loss, norm, stage


def with_strides(gradient: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return a gradient with these strides, copied if it has others."""
    if gradient.stride() == strides:
        return gradient
    empty = gradient.new_empty_strided(gradient.shape, strides)
    return empty.copy_(gradient)


def bad_samples(views: Tensor) -> Tensor:
    """Mark the samples of `[view, batch, dim]` that are not finite, boolean `[view, batch]`."""
    if views.device.type == "cpu" and torch.isfinite(views.sum()):  # the usual case, in one pass
        return torch.zeros(views.shape[:2], dtype=torch.bool)
    return ~torch.isfinite(views).all(-1)


def good_samples(bad: Tensor, *, in_place: bool = False) -> Tensor | None:
    """Return the positions of the samples that are good in every view; None if all are good.

    With `in_place`, the first good sample replaces each bad one, so that the batch keeps its size:
    counting the good samples would wait for the GPU.
    """
    good = ~bad.any(0)
    if bad.device.type == "cpu" and good.all():
        return None
    if not in_place:
        return good.nonzero().flatten()
    return torch.where(good, torch.arange(len(good), device=bad.device), good.byte().argmax())
