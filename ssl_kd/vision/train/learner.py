"""Define how a bank of heads learns, reports and recovers in the training loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NoReturn, Protocol

import torch
from einops import rearrange
from torch import Tensor

from firstnan.events import Event
from firstnan.faults import SKIPPED, is_healthy
from firstnan.parts import TooFewHealthyParts
from ssl_kd.core.memory import to_device_async
from ssl_kd.core.runs.loop import Pace
from ssl_kd.core.runs.schedule import learning_rate_at
from ssl_kd.core.seeds import seed_of
from ssl_kd.vision.train.convergence import LOOKS, Convergence
from ssl_kd.vision.train.pairs import PairSampler
from ssl_kd.vision.train.step import HeadsStep, HeadTrainer

logger = logging.getLogger(__name__)

Gather = Callable[[Tensor], Tensor]  # rows `[batch]` -> embeddings `[batch, dim]` float32

WARMUP = 0.1  # share of the steps

# Steps between two reads of the guard's results: on a GPU a read waits for the device.
LOOK_EVERY_ON_CPU, LOOK_EVERY_ON_GPU = 1, 10


@dataclass(frozen=True)
class Plan:
    """The pairs to train on in a stage, and its number of steps."""

    sampler: PairSampler
    max_steps: int
    convergence: Convergence | None  # ends the stage earlier; None: train `max_steps`
    imitation: Imitation | None = None  # where heads begin with partitions

    @property
    def steps(self) -> int:
        """Number of steps, as far as it is known."""
        return self.max_steps if self.convergence is None else self.convergence.steps

    def learning_rate_at(self, step: int, peak: float) -> float:
        """Return the learning rate at a step of the stage, counted from 0."""
        if self.convergence is not None:
            return self.convergence.learning_rate_at(step, peak, WARMUP)
        return learning_rate_at(step, self.max_steps, peak, WARMUP)


@dataclass
class Imitation:
    """Let heads learn partitions by cross-entropy until they know them, and by LOSS from then on.

    `judge` returns the neighbor information of each head of this process, `goals` `[head]` is what
    a head must reach.
    """

    judge: Callable[[], Tensor]
    goals: Tensor

    def look(self, trainer: HeadTrainer, done: int) -> None:
        """After `done` steps, if a look is due, let the heads that have reached their goals go."""
        if done in LOOKS and not trainer.by_loss.all():
            reached = ~trainer.by_loss & (self.judge() >= self.goals)
            trainer.begin_again(reached, done)
            trainer.by_loss |= reached


class AnswerStage(Protocol):
    """Form the answer from what the heads have found, and plan how they learn it."""

    def __call__(self, found: Tensor | None) -> tuple[Plan, Tensor, Tensor]:
        """Return the plan, the clusters `[n]` to learn, and the partitions of heads that voted.

        `found` are those partitions, `[voter, n]`, from a checkpoint; None: ask the heads. All
        processes call this together.
        """
        ...


@dataclass(frozen=True)
class LogRecord:
    """One line of `metrics.jsonl`; each list holds one value per head."""

    step: int
    stage: str  # "find": heads find clusters by LOSS; "answer": they learn the answer
    time: float
    learning_rate: float
    loss: list[float]
    by_loss: list[bool]  # whether `loss` is LOSS; else cross-entropy to given clusters
    grad_norm: list[float]
    skipped: list[int]
    streak: list[int]
    healthy: int
    success_rate: float
    samples_per_second: float


@dataclass(frozen=True)
class HeadFault:
    """A step in which the guard skipped one head.

    `before` shares memory with the trainer. It is not `exact` if the head was updated again before
    the fault was read; it then holds the current weights, moments and marginal.
    """

    head: int  # index within the trainer
    event: Event
    samples: Tensor  # `[view, batch]`, rows of the data
    views: Tensor  # `[view, batch, dim]`, their embeddings
    learning_rate: float
    before: dict[str, Tensor]  # `[1, ...]`, the head's `HeadsState.tensors` before the step
    exact: bool
    targets: Tensor | None = None  # int64 `[1, view, batch]`; None: from the EMA teacher


@dataclass(frozen=True)
class _UnreadStep:
    """A step whose result has not been copied from the device yet."""

    step: int
    samples: Tensor
    views: Tensor
    targets: Tensor | None
    by_loss: Tensor
    learning_rate: float
    result: HeadsStep


class HeadsLearner:
    """Train a bank of heads step by step, for `ssl_kd.core.runs.loop.run_loop`.

    With `clusters` `[n]`, the target of a sample is the cluster of its paired neighbor; without,
    each head learns from its EMA teacher. With `[head, n]`, each head has clusters of its own, and
    learns from its EMA teacher where `trainer.by_loss` is True. With `answer`, a second stage
    follows, in which all heads learn one partition. `on_events` is called before each record and
    checkpoint, and `on_fault` before a skipped head is recovered.
    """

    def __init__(
        self,
        trainer: HeadTrainer,
        plan: Plan,
        gather: Gather,
        *,
        clusters: Tensor | None = None,
        answer: AnswerStage | None = None,
        on_events: Callable[[list[Event]], object] = lambda events: None,
        on_fault: Callable[[HeadFault], object] = lambda fault: None,
    ) -> None:
        self.trainer = trainer
        self.plan = plan
        self.gather = gather
        self._device = device = trainer.precision.device
        self._set_clusters(clusters)
        self.began, self._answer = 0, answer  # the first step of this stage, and what follows it
        self.found = torch.empty(0)  # `[voter, n]`, the partitions of heads that voted
        self._looks: dict[int, float] = {}  # of the stage before
        self.on_events, self.on_fault = on_events, on_fault
        self.pace = Pace()
        self._look_every = LOOK_EVERY_ON_CPU if device.type == "cpu" else LOOK_EVERY_ON_GPU
        self._unread: list[_UnreadStep] = []
        self._results: list[HeadsStep] = []  # since the last record
        self._by_loss = trainer.by_loss.clone()  # of the last step
        self._learning_rate = 0.0
        self._smoothed: set[int] = set()
        self._last_event = Event(0, "head", "loss", "no fault", "")

    def _set_clusters(self, clusters: Tensor | None) -> None:
        if clusters is not None and clusters.ndim == 1:
            self.trainer.by_loss.fill_(False)
            clusters = clusters.unsqueeze(0)
        self.clusters = None if clusters is None else to_device_async(clusters, self._device)

    @property
    def steps(self) -> int:
        """Number of steps, as far as it is known."""
        return self.began + self.plan.steps + (self._answer is not None)

    @property
    def stage(self) -> str:
        """What the heads do: `find` clusters by LOSS, or learn the `answer`."""
        return "answer" if self._answer is None and self.clusters is not None else "find"

    def looks(self) -> dict[int, float]:
        """Return number of steps -> neighbor information (median over heads), for all looks."""
        convergence = self.plan.convergence
        now = {} if convergence is None else convergence.history()
        return self._looks | {self.began + step: value for step, value in now.items()}

    def _begin_answer(self, step: int, found: Tensor | None = None) -> None:
        """Begin the second stage at `step`; with `found`, it began before a checkpoint."""
        assert self._answer is not None
        if found is None:
            self.look(step, at_once=True)
        self._looks = self.looks()
        self.plan, clusters, self.found = self._answer(found)
        self.began, self._answer = step, None
        if found is None:
            self.trainer.begin_again(torch.ones_like(self.trainer.by_loss), step)
        self._set_clusters(clusters)

    def tensors(self) -> dict[str, Tensor]:
        """Return the state of the stages to save in a checkpoint, as name -> tensor."""
        looks = torch.tensor(list(self._looks.items()), dtype=torch.float64)
        stage = {"stage.began": torch.tensor(self.began), "stage.looks": looks}
        stage["stage.found"] = self.found
        convergence = self.plan.convergence
        return stage | ({} if convergence is None else convergence.tensors())

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore the state that `tensors` returned, after that of the trainer."""
        if self._answer is not None and (began := int(tensors["stage.began"])):
            self._begin_answer(began, tensors["stage.found"])
            self._looks = {int(step): value for step, value in tensors["stage.looks"].tolist()}
        if self.plan.convergence is not None:
            self.plan.convergence.load(tensors)

    def learn(self, step: int) -> None:
        """Do one guarded step on a batch of pairs."""
        if self._answer is not None and step >= self.plan.steps:
            self._begin_answer(step)
        trainer, of_stage = self.trainer, step - self.began
        rate = self.plan.learning_rate_at(of_stage, trainer.settings.learning_rate)
        self._learning_rate = rate
        samples = torch.stack(self.plan.sampler(step))
        embeddings = self.gather(rearrange(samples, "view batch -> (view batch)"))
        views = rearrange(embeddings, "(view batch) dim -> view batch dim", view=len(samples))
        targets = None
        if self.clusters is not None:
            targets = self.clusters[:, to_device_async(samples, self.clusters.device)].long()
        first = trainer.bank.first
        key = (step, first) if first else (step,)  # no two heads draw alike
        with trainer.bank.draws_seeded(seed_of(trainer.settings.seed, *key)):
            result = trainer.step(views, rate, step, targets)
        self._results.append(result)
        self._by_loss = by_loss = trainer.by_loss.clone()
        self._unread.append(_UnreadStep(step, samples, views, targets, by_loss, rate, result))
        self.pace.add(samples.shape[1])
        if self.plan.imitation is not None:
            self.plan.imitation.look(trainer, of_stage + 1)
        if self.plan.convergence is not None:
            self.plan.convergence.look(of_stage + 1)

    def read_results(self) -> tuple[Tensor, ...]:
        """Copy the guard's results since the last record to the CPU.

        These are the last loss and gradient norm, the skipped steps and the streak, whether the
        last loss is LOSS, `[head]` each, and the stage of every step, `[step, head]`.
        """
        health, result = self.trainer.state.health, self._results[-1]
        now = result.loss, result.grad_norm, health.skipped, health.streak
        loss, norm, skipped, streak, *stages = _read(*now, *(r.stage for r in self._results))
        self._results = []
        return loss, norm, skipped, streak, self._by_loss, torch.stack(stages)

    def record(self, done: int) -> LogRecord:
        """Return the log record of the steps since the last record."""
        loss, norm, skipped, streak, by_loss, stages = self.read_results()
        healthy = is_healthy(stages)
        return LogRecord(
            step=done,
            stage=self.stage,
            time=time.time(),
            learning_rate=self._learning_rate,
            loss=loss.tolist(),
            by_loss=by_loss.tolist(),
            grad_norm=norm.tolist(),
            skipped=skipped.tolist(),
            streak=streak.tolist(),
            healthy=int(healthy[-1].sum()),
            success_rate=float(healthy.float().mean()),
            samples_per_second=self.pace.per_second(),
        )

    def before_checkpoint(self, done: int) -> None:
        """Restore heads whose weights became non-finite outside a step."""
        self.on_events(self.trainer.recovery.restore_what_is_not_finite(done - 1))

    def look(self, done: int, *, at_once: bool = False) -> None:
        """Report the faults of the unread steps, then restore, re-initialize or retire heads."""
        if not at_once and done % self._look_every:
            return
        unread, self._unread = _on_cpu(self._unread), []
        events = [event for number in range(len(unread)) for event in self._events(unread, number)]
        if not events:
            return
        self._last_event = next(event for event in events if event.step == events[-1].step)
        self.on_events(events)
        events, reason = self.escalate(done)
        self.on_events(events)
        if reason:
            self.stop(done, reason)

    def escalate(self, done: int) -> tuple[list[Event], str]:
        """Restore, re-initialize or retire heads; return events and a reason to stop, if any."""
        return self.trainer.recovery.escalate(done - 1, self.trainer.thresholds)

    def stop(self, done: int, reason: str) -> NoReturn:
        """Raise TooFewHealthyParts with the last fault and the setting to change."""
        rate = self.trainer.settings.learning_rate
        raise TooFewHealthyParts(
            f"step {done}: {reason}. Last fault, {self._last_event.part}: "
            f"{self._last_event.reason}. Lower LEARNING_RATE (now {rate:g}) or check the "
            "embeddings with `python test_nan_issues.py`. Each head's last good state is saved"
        )

    def _events(self, unread: list[_UnreadStep], number: int) -> list[Event]:
        """Return the events of one of the unread steps; call `on_fault` for each skipped head."""
        step, recovery = unread[number], self.trainer.recovery
        counted = step.step + 1  # from 1, as in the log
        result, names = step.result, recovery.parts.names
        bad = step.samples[result.bad].unique().tolist() if result.bad.any() else []
        reasons = [(row, f"the embedding of row {row} is not finite") for row in bad]
        left_out = "left out of the batch"
        events = [Event(counted, "batch", "input", why, left_out, row) for row, why in reasons]
        for head, has_zero in enumerate(result.has_zero.tolist()):
            if has_zero and head not in self._smoothed:  # once is enough
                self._smoothed.add(head)
                why = "a cluster's running marginal is exactly 0"
                events.append(Event(counted, names[head], "marginal", why, "smoothed", 0.0))
        faults = recovery.report(step.step, result.stage, result.loss, result.grad_norm)
        for event in faults:
            if event.action == SKIPPED:
                head = names.index(event.part)
                self.on_fault(self._fault(head, event, step, unread[number + 1 :]))
        return events + faults

    def _fault(
        self, head: int, event: Event, step: _UnreadStep, later: list[_UnreadStep]
    ) -> HeadFault:
        row = slice(head, head + 1)  # a skipped head has not changed since
        now = {name: tensor[row] for name, tensor in self.trainer.state.tensors().items()}
        before = now | {name: tensor[row] for name, tensor in step.result.before.items()}
        targets = step.targets
        if targets is not None:
            targets = None if step.by_loss[head] else targets[row if len(targets) > 1 else slice(1)]
        return HeadFault(
            head=head,
            event=event,
            samples=step.samples,
            views=step.views.cpu(),
            learning_rate=step.learning_rate,
            before=before,
            exact=not any(bool(is_healthy(other.result.stage[head])) for other in later),
            targets=None if targets is None else targets.cpu(),
        )


def _on_cpu(steps: list[_UnreadStep]) -> list[_UnreadStep]:
    names = ("stage", "loss", "grad_norm", "has_zero", "bad")
    values = iter(_read(*(getattr(step.result, name) for step in steps for name in names)))
    return [
        replace(step, result=replace(step.result, **{name: next(values) for name in names}))
        for step in steps
    ]


def _read(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Copy tensors to the CPU exactly, waiting for the device once for all of them."""
    on_device = [t.flatten().view(torch.uint8) for t in tensors if t.device.type != "cpu"]
    if not on_device:
        return tensors
    pieces = iter(torch.cat(on_device).cpu().split([len(piece) for piece in on_device]))
    return tuple(
        t if t.device.type == "cpu" else next(pieces).clone().view(t.dtype).view(t.shape)
        for t in tensors
    )
