"""The training loop of the vision mode: many heads, each its own student, teacher and optimizer."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from ssl_kd import losses
from ssl_kd.guard.events import Event
from ssl_kd.guard.parts import (
    AdamWState,
    TooFewHealthyParts,
    adamw_,
    clip_factors,
    ema_,
    keep_unless_,
    part_norms,
)
from ssl_kd.guard.precision import Precision
from ssl_kd.heads.bank import HeadBank

logger = logging.getLogger(__name__)

Gather = Callable[[Tensor], Tensor]
"""Row numbers `[batch]` -> embeddings `[batch, dim]` float32."""

STAGES = ("healthy", "teacher", "loss", "gradient")
_REASONS = {
    "teacher": "the EMA teacher's probabilities are not finite",
    "loss": "the loss is not finite",
    "gradient": "the gradient's norm is not finite: a NaN, or too large to square",
}


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
        skipped: `[head]`, how many steps the head was left out of.
        streak: `[head]`, how many of those were the last ones in a row.
    """

    student: Tensor
    teacher: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    updates: Tensor
    marginal: Tensor
    loss: Tensor
    scale: Tensor
    skipped: Tensor
    streak: Tensor

    @classmethod
    def fresh(
        cls, bank: HeadBank, n_clusters: int, objective: Objective, precision: Precision
    ) -> HeadsState:
        """A state before the first step."""
        student = bank.initial_weights(objective.seed).to(precision.device)
        heads = torch.zeros(bank.n_heads, device=student.device)
        start = 1 / n_clusters if objective.loss == "temi" else 0.0
        return cls(
            student=student,
            teacher=student.clone(),
            exp_avg=torch.zeros_like(student),
            exp_avg_sq=torch.zeros_like(student),
            updates=heads.clone(),
            marginal=torch.full((bank.n_heads, n_clusters), start, device=student.device),
            loss=heads.clone(),
            scale=torch.full_like(heads, 16.0 if precision.scale else 1.0),
            skipped=heads.clone(),
            streak=heads.clone(),
        )

    def tensors(self) -> dict[str, Tensor]:
        """Name -> tensor, for a checkpoint."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def rows(self, rows: slice) -> HeadsState:
        """Some heads' state, sharing memory with the whole."""
        return HeadsState(**{name: tensor[rows] for name, tensor in self.tensors().items()})


class PairSampler:
    """Batches of (sample, one of its neighbours), a pure function of seed and step.

    No state to save: epoch `e` is the permutation seeded by (seed, e), the neighbours of step `s`
    are drawn by (seed, s), so a resumed run sees what an uninterrupted one would have.

    Args:
        neighbours: `[n, k]` integer, row `i` the neighbours of sample `i`.
        allowed: `[n, k]` boolean, which of them may be drawn (`mutual_neighbours`); at least one in
            each row.
        batch_size: samples per batch; at most n.
        seed: any integer.
    """

    def __init__(self, neighbours: Tensor, allowed: Tensor, batch_size: int, seed: int) -> None:
        self.n = len(neighbours)
        self.batch_size = min(batch_size, self.n)
        self.steps_per_epoch = self.n // self.batch_size
        self.seed = seed
        self._counts = allowed.sum(1)
        self._starts = self._counts.cumsum(0) - self._counts
        self._flat = neighbours[allowed]  # the allowed ones only, row after row
        self._epoch = -1
        self._order = torch.empty(0)

    def _generator(self, *key: int) -> torch.Generator:
        seed = hash((self.seed, *key)) & (2**63 - 1)
        return torch.Generator().manual_seed(seed)

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """Samples and their neighbours, `[batch]` int64 each."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._order = torch.randperm(self.n, generator=self._generator(0, epoch))
            self._epoch = epoch
        rows = self._order[position * self.batch_size : (position + 1) * self.batch_size]
        draw = torch.rand(len(rows), generator=self._generator(1, step), dtype=torch.float64)
        counts = self._counts[rows]
        offset = torch.minimum((draw * counts).long(), counts - 1)
        return rows, self._flat[self._starts[rows] + offset].long()


def mutual_neighbours(neighbours: Tensor) -> Tensor:
    """Which neighbours have the sample among their own; the nearest stays where none has.

    Args:
        neighbours: `[n, k]` integer, nearest first.

    Returns:
        Boolean `[n, k]`, at least one true per row.
    """
    n, k = neighbours.shape
    source = torch.arange(n).repeat_interleave(k)
    target = neighbours.long().flatten()
    forward = source * n + target
    mutual = torch.isin(forward, target * n + source).view(n, k)
    mutual[:, 0] |= ~mutual.any(1)
    return mutual


def learning_rate_at(step: int, steps: int, objective: Objective) -> float:
    """Linear warm-up to `learning_rate`, then a cosine down to 0 at the last step."""
    warmup = max(1, round(objective.warmup_fraction * steps))
    if step < warmup:
        return objective.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return objective.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def head_chunks(n_heads: int, bytes_per_head: int, device: torch.device) -> list[slice]:
    """Split the heads so that one chunk's tensors stay in the cache (CPU) or in memory (GPU).

    Fifty full-size heads as one batch are a third slower on a CPU than two at a time, and need 25
    times the memory; tiny heads are best run by the dozen.
    """
    budget = 2**31 if device.type == "cuda" else 12 * 2**20
    chunks = min(n_heads, math.ceil(n_heads * bytes_per_head / budget))
    edges = [round(i * n_heads / chunks) for i in range(chunks + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


@dataclass
class StepResult:
    """What a step saw, per head: loss, gradient norm, and the index into STAGES of its fault."""

    loss: Tensor
    grad_norm: Tensor
    stage: Tensor
    bad_rows: Tensor


class HeadTrainer:
    """The guarded step over a bank of heads.

    Args:
        bank: how a row of weights is run as a head.
        objective: what is trained for.
        precision: dtypes and device.
        n_clusters: K.
    """

    def __init__(
        self, bank: HeadBank, objective: Objective, precision: Precision, n_clusters: int
    ) -> None:
        self.bank, self.objective, self.precision = bank, objective, precision
        self.n_clusters = n_clusters
        self.decay = bank.decay_mask().to(precision.device) * objective.weight_decay
        self.state = HeadsState.fresh(bank, n_clusters, objective, precision)

    def step(self, views: Tensor, learning_rate: float) -> StepResult:
        """One guarded step of every head.

        forward -> vector of losses -> gradient of each head -> its norm, check and clip -> masked
        update -> masked EMA. Heads share no weight, so a sick one needs no cutting out before the
        backward pass; its row is simply not written.

        Args:
            views: `[view, batch, dim]`, two views or more of the same samples.
            learning_rate: of this step.
        """
        # A sample that is not finite is taken out of every view before any product sees it.
        views = views.to(self.precision.device, non_blocking=True)
        bad_rows = ~torch.isfinite(views).all(-1).all(0)
        views = torch.where(bad_rows.unsqueeze(-1), 0, views)

        n_views, batch, _ = views.shape
        floats = n_views * batch * self.bank.width + self.bank.n_parameters
        chunks = head_chunks(self.bank.n_heads, 4 * floats, views.device)
        teachers: Iterator | list = (self._teach(rows, views) for rows in chunks)
        shared = None
        if self.objective.instance_weight == "mean":  # needs every teacher before any student
            teachers = list(teachers)
            shared = losses.instance_weights(torch.cat([t[2] for t in teachers]), "mean")

        results = []
        for rows, (targets, marginal, agreements) in zip(chunks, teachers, strict=True):
            weights = shared
            if self.objective.instance_weight == "own":
                weights = losses.instance_weights(agreements, "own")
            weights = _without(bad_rows, weights)
            results.append(self._learn(rows, views, targets, marginal, weights, learning_rate))
        loss, norm, stage = (torch.cat(column) for column in zip(*results, strict=True))
        return StepResult(loss, norm, stage, bad_rows)

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
            stage = torch.zeros_like(norm, dtype=torch.int8)
            # Later lines overrule earlier ones: the earliest stage that is not finite is the cause.
            stage[~torch.isfinite(norm)] = STAGES.index("gradient")
            stage[~torch.isfinite(loss)] = STAGES.index("loss")
            stage[~torch.isfinite(marginal).all(1)] = STAGES.index("teacher")
            healthy = stage == 0

            gradient.mul_((clip_factors(norm, o.clip_grad) / state.scale).unsqueeze(1))
            adamw_(
                state.student,
                gradient,
                AdamWState(state.exp_avg, state.exp_avg_sq, state.updates),
                healthy,
                learning_rate=learning_rate,
                weight_decay=self.decay,
            )
            ema_(state.teacher, state.student, healthy, o.ema_momentum)
            keep_unless_(healthy, state.marginal, marginal)
            memory = torch.where(state.updates > 1, 0.98, 0.0)
            keep_unless_(healthy, state.loss, memory * state.loss + (1 - memory) * loss)
            state.skipped.add_(~healthy)
            state.streak.add_(1).mul_(~healthy)
            if self.precision.scale:
                overflow = stage == STAGES.index("gradient")
                grown = torch.where(state.updates % 500 == 499, state.scale * 2, state.scale)
                kept = torch.where(healthy, grown, state.scale)
                scale = torch.where(overflow, state.scale / 2, kept)
                state.scale.copy_(scale.clamp(1.0, 2.0**16))
        return loss.detach(), norm, stage


def _without(bad_rows: Tensor, weights: Tensor | None) -> Tensor | None:
    """Instance weights `[1 or head, batch]` with the bad samples' set to 0."""
    if weights is None:
        good = (~bad_rows).float().unsqueeze(0)
        # A plain mean is a pass cheaper and the usual case; on a GPU the check would wait for it.
        if bad_rows.device.type == "cpu" and not bad_rows.any():
            return None
        return losses.safe_normalize_weights(good)
    return losses.safe_normalize_weights(torch.where(bad_rows, 0, weights))


@dataclass(frozen=True)
class LogRecord:
    """One line of `metrics.jsonl`; lists hold one value per head."""

    step: int
    time: float
    learning_rate: float
    loss: list[float]
    grad_norm: list[float]
    healthy: int
    success_rate: float
    samples_per_second: float


def train(
    trainer: HeadTrainer,
    sampler: PairSampler,
    gather: Gather,
    steps: int,
    *,
    start: int = 0,
    log_every: int = 20,
    checkpoint_every: int = 200,
    on_log: Callable[[LogRecord], None] = lambda record: None,
    on_events: Callable[[list[Event]], None] = lambda events: None,
    on_checkpoint: Callable[[int], None] = lambda step: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> int:
    """Train from step `start` to `steps`.

    Args:
        trainer: holds the state; changed in place.
        sampler: the pairs of each step.
        gather: reads embeddings.
        steps: last step, exclusive.
        start: first step, the number of steps already done.
        log_every: the device is asked for its numbers this often, in steps.
        checkpoint_every: `on_checkpoint(steps done)` is called this often, and at the end.
        on_log: gets each record.
        on_events: gets the guard's events, before each record and each checkpoint.
        on_checkpoint: saves.
        should_stop: asked before every step; true saves and returns.

    Returns:
        The number of steps done; less than `steps` if it was told to stop.

    Raises:
        TooFewHealthyParts: no head was healthy in a whole interval of `log_every` steps.
    """
    began, seen, results, unread = time.perf_counter(), 0, [], []
    last_reason = "unknown"

    def read_events() -> None:
        nonlocal last_reason
        events = [event for entry in unread for event in _events(*entry)]
        unread.clear()
        if events:
            last_reason = events[-1].reason
            on_events(events)

    for step in range(start, steps):
        if should_stop():
            read_events()
            on_checkpoint(step)
            return step

        rows, partners = sampler(step)
        views = gather(torch.cat([rows, partners])).unflatten(0, (2, len(rows)))
        learning_rate = learning_rate_at(step, steps, trainer.objective)
        result = trainer.step(views, learning_rate)
        results.append(result)
        unread.append((step, rows, result))
        seen += len(rows)

        done = step + 1
        if done % log_every == 0 or done == steps:
            read_events()
            now = time.perf_counter()
            healthy = torch.stack([result.stage == 0 for result in results])
            record = LogRecord(
                step=done,
                time=time.time(),
                learning_rate=learning_rate,
                loss=result.loss.tolist(),
                grad_norm=result.grad_norm.tolist(),
                healthy=int(healthy[-1].sum()),
                success_rate=float(healthy.float().mean()),
                samples_per_second=seen / max(now - began, 1e-9),
            )
            began, seen, results = now, 0, []
            on_log(record)
            if not healthy.any():
                raise TooFewHealthyParts(
                    f"no head was healthy in the {len(healthy)} steps up to {done}: "
                    f"{last_reason}. Lower LEARNING_RATE (now "
                    f"{trainer.objective.learning_rate:g}) or look at the embeddings with "
                    "`python test_nan_issues.py`; the last good checkpoint is kept"
                )
        if done % checkpoint_every == 0 or done == steps:
            read_events()
            on_checkpoint(done)
    return steps


def _events(step: int, rows: Tensor, result: StepResult) -> Iterator[Event]:
    """The guard's events of one step, read back from the device."""
    for position in result.bad_rows.nonzero().flatten().tolist():
        reason = f"the embedding of row {int(rows[position])} or of its neighbour is not finite"
        yield Event(step, "batch", "input", reason, "left out of the batch", float(rows[position]))
    for head in result.stage.nonzero().flatten().tolist():
        stage = STAGES[int(result.stage[head])]
        value = float((result.grad_norm if stage == "gradient" else result.loss)[head])
        yield Event(step, f"head {head}", stage, _REASONS[stage], "skipped", value)
