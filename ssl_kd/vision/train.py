"""The training loop of the vision mode."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ssl_kd.guard.events import Event
from ssl_kd.guard.health import REASONS, Stage, is_healthy
from ssl_kd.guard.parts import (
    TooFewHealthyParts,
)
from ssl_kd.vision.pairs import PairSampler
from ssl_kd.vision.step import HeadTrainer, Objective, StepResult

logger = logging.getLogger(__name__)

Gather = Callable[[Tensor], Tensor]
"""Row numbers `[batch]` -> embeddings `[batch, dim]` float32."""

# Steps between two looks at what the guard found. On a CPU looking is free; elsewhere it waits for
# the device.
LOOK_EVERY = {True: 1, False: 10}
KEEP_GOOD_EVERY = 50


def learning_rate_at(step: int, steps: int, objective: Objective) -> float:
    """Linear warm-up to `learning_rate`, then a cosine down to 0 at the last step."""
    warmup = max(1, round(objective.warmup_fraction * steps))
    if step < warmup:
        return objective.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return objective.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True)
class LogRecord:
    """One line of `metrics.jsonl`; lists hold one value per head."""

    step: int
    time: float
    learning_rate: float
    loss: list[float]
    grad_norm: list[float]
    skipped: list[int]
    streak: list[int]
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
    on_fault: Callable[[HeadFault], None] = lambda fault: None,
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
        log_every: a record is made this often, in steps.
        checkpoint_every: `on_checkpoint(steps done)` is called this often, and at the end.
        on_log: gets each record.
        on_events: gets the guard's events, before each record and each checkpoint.
        on_fault: gets each step that a head was left out of, before anything is done about it.
        on_checkpoint: saves.
        should_stop: asked before every step; true saves and returns.

    Returns:
        The number of steps done; less than `steps` if it was told to stop.

    Raises:
        TooFewHealthyParts: going on would be a waste; a checkpoint of the last good state of every
            head was saved before.
    """
    began, seen, results = time.perf_counter(), 0, []
    watch = _Watch(trainer, on_events, on_fault)

    def look(done: int) -> None:
        try:
            watch.look(done)
        except TooFewHealthyParts:
            on_checkpoint(done)
            raise

    def checkpoint(done: int) -> None:
        look(done)
        on_events(trainer.heal(done - 1))
        on_checkpoint(done)

    for step in range(start, steps):
        if should_stop():
            checkpoint(step)
            return step

        rows, partners = sampler(step)
        views = gather(torch.cat([rows, partners])).unflatten(0, (2, len(rows)))
        learning_rate = learning_rate_at(step, steps, trainer.objective)
        before = None
        if step > 0 and step % KEEP_GOOD_EVERY == 0:
            before = {name: tensor.clone() for name, tensor in trainer.state.owned().items()}
        with trainer.bank.draws_seeded(hash((trainer.objective.seed, step))):
            result = trainer.step(views, learning_rate)
        if before is not None:
            trainer.keep_good(step, before, result.stage)
        results.append(result)
        samples = torch.stack([rows, partners])
        watch.unread.append(_Step(step, samples, views, learning_rate, result))
        seen += len(rows)

        done = step + 1
        if done % LOOK_EVERY[trainer.precision.device.type == "cpu"] == 0:
            look(done)
        if done % log_every == 0 or done == steps:
            now = time.perf_counter()
            healthy = is_healthy(torch.stack([result.stage for result in results]))
            record = LogRecord(
                step=done,
                time=time.time(),
                learning_rate=learning_rate,
                loss=result.loss.tolist(),
                grad_norm=result.grad_norm.tolist(),
                skipped=trainer.state.health.skipped.tolist(),
                streak=trainer.state.health.streak.tolist(),
                healthy=int(healthy[-1].sum()),
                success_rate=float(healthy.float().mean()),
                samples_per_second=seen / max(now - began, 1e-9),
            )
            began, seen, results = now, 0, []
            on_log(record)
        if done % checkpoint_every == 0 or done == steps:
            checkpoint(done)
    return steps


@dataclass(frozen=True)
class HeadFault:
    """One head in one step that it was left out of.

    Attributes:
        head: which one.
        event: what the guard saw.
        samples: `[view, batch]`, which rows the step was made of.
        views: `[view, batch, dim]`, their embeddings.
        learning_rate: of the step.
        before: name -> `[1, ...]`, the head's tensors before the step, as in `HeadsState.tensors`;
            they share memory with the trainer, so copy what is to last.
        exact: false where the head has been updated since, by steps that were not looked at yet:
            then its weights, moments and marginal are those of now.
    """

    head: int
    event: Event
    samples: Tensor
    views: Tensor
    learning_rate: float
    before: dict[str, Tensor]
    exact: bool


@dataclass(frozen=True)
class _Step:
    """A step whose result nobody has looked at yet."""

    step: int
    samples: Tensor
    views: Tensor
    learning_rate: float
    result: StepResult


class _Watch:
    """Reads the guard's findings back from the device and acts on heads that stay sick."""

    def __init__(
        self,
        trainer: HeadTrainer,
        on_events: Callable[[list[Event]], None],
        on_fault: Callable[[HeadFault], None],
    ) -> None:
        self.trainer, self.on_events, self.on_fault = trainer, on_events, on_fault
        self.unread: list[_Step] = []
        self._smoothed: set[int | None] = set()
        self._last = Event(0, "head", "loss", "nothing was seen", "")

    def _fault(self, head: int, event: Event, step: _Step, later: list[_Step]) -> HeadFault:
        """The fault, with what the head was before it: a skipped head has not changed since."""
        row = slice(head, head + 1)
        now = {name: tensor[row] for name, tensor in self.trainer.state.tensors().items()}
        before = now | {name: tensor[row] for name, tensor in step.result.before.items()}
        exact = not any(bool(is_healthy(after.result.stage[head])) for after in later)
        seen = (step.samples, step.views, step.learning_rate)
        return HeadFault(head, event, *seen, before, exact)

    def look(self, done: int) -> None:
        """Report the faults of the unread steps, then restore, re-initialise or retire.

        Raises:
            TooFewHealthyParts: with what was seen and what to change.
        """
        events = []
        for number, step in enumerate(self.unread):
            for head, event in _events(step.step, step.samples, step.result):
                if event.action == "smoothed":  # once is enough
                    if head in self._smoothed:
                        continue
                    self._smoothed.add(head)
                events.append(event)
                if head is not None and event.action == "skipped":
                    self.on_fault(self._fault(head, event, step, self.unread[number + 1 :]))
        self.unread.clear()
        if not events:
            return
        self._last = next(event for event in events if event.step == events[-1].step)
        self.on_events(events)
        try:
            self.on_events(self.trainer.escalate(done - 1))
        except TooFewHealthyParts as error:
            rate = self.trainer.objective.learning_rate
            reason = f"{error}. Last seen, {self._last.part}: {self._last.reason}"
            stopped = Event(done - 1, "run", "escalation", reason, "stopped")
            self.on_events([*self.trainer.give_up(done - 1), stopped])
            raise TooFewHealthyParts(
                f"step {done}: {reason}. Lower LEARNING_RATE (now {rate:g}) or look at the "
                "embeddings with `python test_nan_issues.py`; each head's last good state is saved"
            ) from error


def _events(step: int, samples: Tensor, result: StepResult) -> Iterator[tuple[int | None, Event]]:
    """The guard's events of one step, read back from the device, each with its head."""
    for row in samples[result.bad].unique().tolist():
        reason = f"the embedding of row {row} is not finite"
        yield None, Event(step, "batch", "input", reason, "left out of the batch", float(row))
    for head in result.smoothed.nonzero().flatten().tolist():
        reason = "a cluster's running marginal is exactly 0"
        yield head, Event(step, f"head {head}", "marginal", reason, "smoothed", 0.0)
    for head, stage in enumerate(map(Stage, result.stage.tolist())):
        if stage in (Stage.HEALTHY, Stage.RETIRED):
            continue
        seen = result.loss if stage in (Stage.LOSS, Stage.TEACHER) else result.grad_norm
        done = {Stage.DEAD: "reported", Stage.OVERFLOW: "loss scale halved"}.get(stage, "skipped")
        name = stage.name.lower()
        yield head, Event(step, f"head {head}", name, REASONS[stage], done, float(seen[head]))
