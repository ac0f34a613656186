"""The training of the vision mode: what one step of the loop is for a bank of heads."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from ssl_kd.guard.events import Event
from ssl_kd.guard.faults import SKIPPED, Stage, is_healthy
from ssl_kd.guard.memory import to_device_async
from ssl_kd.guard.parts import TooFewHealthyParts
from ssl_kd.guard.seeds import seed_of
from ssl_kd.training.loop import Pace, run_loop
from ssl_kd.training.schedule import learning_rate_at
from ssl_kd.vision.convergence import Convergence
from ssl_kd.vision.pairs import PairSampler
from ssl_kd.vision.step import HeadsStep, HeadTrainer

logger = logging.getLogger(__name__)

Gather = Callable[[Tensor], Tensor]
"""Row numbers `[batch]` -> embeddings `[batch, dim]` float32."""

WARMUP = 0.1  # share of the steps

# Steps between two looks at what the guard found. On a CPU looking is free; elsewhere it waits for
# the device.
LOOK_EVERY = {True: 1, False: 10}


@dataclass(frozen=True)
class Plan:
    """What is learned from, and for how long.

    Attributes:
        sampler: the pairs of each step.
        steps: the most there are.
        until: what ends the training before; None where the number of steps was given.
    """

    sampler: PairSampler
    steps: int
    until: Convergence | None


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


@dataclass(frozen=True)
class HeadFault:
    """One head in one step that it was left out of.

    Attributes:
        head: which one of the trainer's.
        event: what the guard saw.
        samples: `[view, batch]`, which rows the step was made of.
        views: `[view, batch, dim]`, their embeddings.
        learning_rate: of the step.
        before: name -> `[1, ...]`, the head's tensors before the step, as in `HeadsState.tensors`;
            they share memory with the trainer, so copy what is to last.
        exact: false where the head has been updated since, by steps that were not looked at yet:
            then its weights, moments and marginal are those of now.
        given: `[view, batch, cluster]`, what it was to learn; None: what its EMA teacher said.
    """

    head: int
    event: Event
    samples: Tensor
    views: Tensor
    learning_rate: float
    before: dict[str, Tensor]
    exact: bool
    given: Tensor | None = None


def train(
    trainer: HeadTrainer,
    sampler: PairSampler,
    gather: Gather,
    steps: int,
    *,
    until: Convergence | None = None,
    clusters: Tensor | None = None,
    start: int = 0,
    log_every: int = 20,
    checkpoint_every: int = 200,
    on_log: Callable[[LogRecord], object] = lambda record: None,
    on_events: Callable[[list[Event]], object] = lambda events: None,
    on_fault: Callable[[HeadFault], object] = lambda fault: None,
    on_checkpoint: Callable[[int], object] = lambda step: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> int:
    """Train all heads, as `ssl_kd.training.loop.run_loop` does.

    Args:
        trainer: holds the state; changed in place.
        sampler: the pairs of each step.
        gather: reads embeddings.
        steps: last step, exclusive, where nothing ends it before.
        until: ends it when the heads have converged.
        clusters: `[n]` int64 of the samples, which all heads learn from the neighbours that they
            are paired with; None: each head learns from its EMA teacher, by its objective.
        start: first step, the number of steps already done.
        log_every: a record is made this often, in steps.
        checkpoint_every: `on_checkpoint(steps done)` is called this often, and at the end.
        on_log: gets each record.
        on_events: gets the guard's events, before each record and each checkpoint.
        on_fault: gets each step that a head was left out of, before anything is done about it.
        on_checkpoint: saves.
        should_stop: asked before every step; true saves and returns.

    Returns:
        The number of steps done; fewer than there were to do if it was told to stop.

    Raises:
        TooFewHealthyParts: training cannot continue; a checkpoint of the last good state of every
            head was saved before.
    """
    return run_loop(
        Heads(trainer, Plan(sampler, steps, until), gather, on_events, on_fault, clusters),
        start=start,
        log_every=log_every,
        checkpoint_every=checkpoint_every,
        on_log=on_log,
        on_checkpoint=on_checkpoint,
        should_stop=should_stop,
    )


@dataclass(frozen=True)
class _Step:
    """A step whose result has not been read yet."""

    step: int
    samples: Tensor
    views: Tensor
    given: Tensor | None
    learning_rate: float
    result: HeadsStep


class Heads:
    """A bank of heads as the loop's learner."""

    def __init__(
        self,
        trainer: HeadTrainer,
        plan: Plan,
        gather: Gather,
        on_events: Callable[[list[Event]], object],
        on_fault: Callable[[HeadFault], object],
        clusters: Tensor | None = None,
    ) -> None:
        self.trainer, self.gather = trainer, gather
        self.sampler, self._most, self.until = plan.sampler, plan.steps, plan.until
        device = trainer.precision.device
        self.clusters = None if clusters is None else to_device_async(clusters, device)
        self.on_events, self.on_fault = on_events, on_fault
        self.pace = Pace()
        self._look_every = LOOK_EVERY[trainer.precision.device.type == "cpu"]
        self._unread: list[_Step] = []
        self._results: list[HeadsStep] = []  # since the last record
        self._learning_rate = 0.0
        self._smoothed: set[int] = set()
        self._last = Event(0, "head", "loss", "nothing was seen", "")

    @property
    def steps(self) -> int:
        """Where training ends, as far as it is known."""
        return self._most if self.until is None else self.until.steps

    def _rate_at(self, step: int) -> float:
        settings = self.trainer.settings
        peak = settings.learning_rate
        if self.until is not None:
            return self.until.learning_rate_at(step, peak, WARMUP)
        return learning_rate_at(step, self._most, peak, WARMUP)

    def learn(self, step: int) -> None:
        """One guarded step on a batch of pairs."""
        trainer, settings = self.trainer, self.trainer.settings
        self._learning_rate = rate = self._rate_at(step)
        samples = torch.stack(self.sampler(step))
        views = self.gather(samples.flatten()).unflatten(0, samples.shape)
        given = None
        if self.clusters is not None:
            here = to_device_async(samples, self.clusters.device)
            given = functional.one_hot(self.clusters[here], trainer.n_clusters).float()
        first = trainer.bank.first
        key = (step, first) if first else (step,)  # no two heads draw alike
        with trainer.bank.draws_seeded(seed_of(settings.seed, *key)):
            result = trainer.step(views, rate, step, given)
        self._results.append(result)
        self._unread.append(_Step(step, samples, views, given, rate, result))
        self.pace.add(samples.shape[1])
        if self.until is not None:
            self.until.look(step + 1)

    def seen(self) -> tuple[Tensor, ...]:
        """Since the last record: loss, norm, steps skipped, streak `[head]`, stage `[step, head]`.

        On the CPU.
        """
        health, result = self.trainer.state.health, self._results[-1]
        now = result.loss, result.grad_norm, health.skipped, health.streak
        loss, norm, skipped, streak, *stages = _read(*now, *(r.stage for r in self._results))
        self._results = []
        return loss, norm, skipped, streak, torch.stack(stages)

    def record(self, done: int) -> LogRecord:
        """Loss and norms of the last step, and how many heads were healthy in all of them."""
        loss, norm, skipped, streak, stages = self.seen()
        healthy = is_healthy(stages)
        return LogRecord(
            step=done,
            time=time.time(),
            learning_rate=self._learning_rate,
            loss=loss.tolist(),
            grad_norm=norm.tolist(),
            skipped=skipped.tolist(),
            streak=streak.tolist(),
            healthy=int(healthy[-1].sum()),
            success_rate=float(healthy.float().mean()),
            samples_per_second=self.pace.per_second(),
        )

    def before_checkpoint(self, done: int) -> None:
        """Restore the heads whose weights were hit from outside a step."""
        self.on_events(self.trainer.recovery.restore_what_is_not_finite(done - 1))

    def look(self, done: int, *, at_once: bool = False) -> None:
        """Report the faults of the unread steps, then restore, re-initialise or retire.

        Raises:
            TooFewHealthyParts: with what was seen and what to change.
        """
        if not at_once and done % self._look_every:
            return
        unread, self._unread = _on_cpu(self._unread), []
        events = [event for number in range(len(unread)) for event in self._events(unread, number)]
        if not events:
            return
        self._last = next(event for event in events if event.step == events[-1].step)
        self.on_events(events)
        events, hopeless = self.escalate(done)
        self.on_events(events)
        if hopeless:
            self.stop(done, hopeless)

    def escalate(self, done: int) -> tuple[list[Event], str]:
        """As `Recovery.escalate`."""
        return self.trainer.recovery.escalate(done - 1, self.trainer.thresholds)

    def stop(self, done: int, hopeless: str) -> NoReturn:
        """End the training, with what was seen last and what to change."""
        rate = self.trainer.settings.learning_rate
        raise TooFewHealthyParts(
            f"step {done}: {hopeless}. Last seen, {self._last.part}: {self._last.reason}. Lower"
            f" LEARNING_RATE (now {rate:g}) or look at the embeddings with `python "
            "test_nan_issues.py`; each head's last good state is saved"
        )

    def _events(self, unread: list[_Step], number: int) -> list[Event]:
        """The events of one of some unread steps; faults are handed on."""
        seen, recovery = unread[number], self.trainer.recovery
        result, names = seen.result, recovery.parts.names
        bad = seen.samples[result.bad].unique().tolist() if result.bad.any() else []
        events = [Stage.INPUT.event(seen.step, "batch", float(row), row=row) for row in bad]
        for head, smoothed in enumerate(result.smoothed.tolist()):
            if smoothed and head not in self._smoothed:  # once is enough
                self._smoothed.add(head)
                events.append(Stage.MARGINAL.event(seen.step, names[head], 0.0))
        faults = recovery.report(seen.step, result.stage, result.loss, result.grad_norm)
        for event in faults:
            if event.action == SKIPPED:
                head = names.index(event.part)
                self.on_fault(self._fault(head, event, seen, unread[number + 1 :]))
        return events + faults

    def _fault(self, head: int, event: Event, seen: _Step, later: list[_Step]) -> HeadFault:
        """The fault, with what the head was before it: a skipped head has not changed since."""
        row = slice(head, head + 1)
        now = {name: tensor[row] for name, tensor in self.trainer.state.tensors().items()}
        before = now | {name: tensor[row] for name, tensor in seen.result.before.items()}
        exact = not any(bool(is_healthy(step.result.stage[head])) for step in later)
        given = None if seen.given is None else seen.given.cpu()
        views = seen.views.cpu()
        return HeadFault(head, event, seen.samples, views, seen.learning_rate, before, exact, given)


class DeviceEmbeddings:
    """Embeddings on a device, where rows are gathered as well.

    Args:
        embeddings: `[n, dim]` float32, on the device.
    """

    def __init__(self, embeddings: Tensor) -> None:
        self._embeddings = embeddings

    def __call__(self, rows: Tensor) -> Tensor:
        """As `Gather`, on the device."""
        return self._embeddings[to_device_async(rows, self._embeddings.device)]


def _on_cpu(steps: list[_Step]) -> list[_Step]:
    """The steps, with what a look asks of their results on the CPU."""
    names = ("stage", "loss", "grad_norm", "smoothed", "bad")
    read = iter(_read(*(getattr(step.result, name) for step in steps for name in names)))
    return [
        replace(step, result=replace(step.result, **{name: next(read) for name in names}))
        for step in steps
    ]


def _read(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors on the CPU, to the bit; a device is waited for once for all of them."""
    there = [tensor.flatten().view(torch.uint8) for tensor in tensors if not _is_here(tensor)]
    if not there:
        return tensors
    pieces = iter(torch.cat(there).cpu().split([len(piece) for piece in there]))
    return tuple(
        tensor if _is_here(tensor) else next(pieces).clone().view(tensor.dtype).view(tensor.shape)
        for tensor in tensors
    )


def _is_here(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"
