"""The one table of faults: what a step may find wrong with a part, how, and what comes of it.

A new kind of fault is one detector and one member of `Stage` here, and one row of the fault matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import IntEnum, unique
from numbers import Integral, Real
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from ssl_kd.guard.events import Event

WARM_UP, FEW = 20, 5
"""Gradient norms after which a part's running median is trusted, and trusted by its magnitude."""

JUMP, FIRST_JUMP, FIRST_PATIENCE = 1e4, 1e5, 2
"""How many times a running median of a few norms no first steps of training come to; how many times
that of fewer; and after how many of those in a row it was their beginning that was small."""


@dataclass(frozen=True)
class Thresholds:
    """When the guard acts.

    Attributes:
        spike_factor: a gradient norm this many times its running median is a spike; before the
            20th norm its square is, or 1e4 where that is more, and before the fifth 1e5 where that
            is more. The first norm has nothing to be judged by, and a fall is never a spike.
        spike_patience: spikes in a row before they count as the new normal; before the fifth norm
            2 are enough.
        dead_after: steps of exactly zero gradient before a part is reported as dead.
        restore_after: bad steps in a row before a part is restored; again as many before it is
            re-initialised, and again before it is retired.
        forgive_after: healthy steps in a row after which a restored part counts as recovered.
        min_parts: fewer parts than this that are not retired end the run.
        stop_after: bad steps in a row of every part that end the run, whatever was tried before;
            None: as `restore_after`, once going back was tried.
        max_norm: a part's gradient norm above this is too large, whatever it was before; None: any
            size will do.

    Raises:
        ValueError: a threshold is out of range.
    """

    spike_factor: float = 100.0
    spike_patience: int = 5
    dead_after: int = 100
    restore_after: int = 10
    forgive_after: int = 100
    min_parts: int = 1
    stop_after: int | None = None
    max_norm: float | None = None

    def __post_init__(self) -> None:
        _check_number("spike_factor", self.spike_factor, 1, "a finite number > 1")
        if self.max_norm is not None:
            _check_number("max_norm", self.max_norm, 0, "a finite number > 0, or None")
        for field in fields(self)[1:-1]:
            value = getattr(self, field.name)
            if value is None and field.name == "stop_after":
                continue
            # NumPy's whole numbers are as good as Python's; a truth value is none.
            if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field.name} is {value!r}; expected a whole number from 1")


def _check_number(name: str, value: Any, above: float, expected: str) -> None:
    known = isinstance(value, Real) and not isinstance(value, bool)
    if not known or not above < float(value) < math.inf:
        raise ValueError(f"{name} is {value!r}; expected {expected}")


SKIPPED = "skipped"
"""What is done at once with most parts that are sick: the step leaves them out."""


class Memory(Protocol):
    """What detectors may ask of the past, `[part]` each; see `ssl_kd.guard.health.Health`."""

    level: Tensor
    seen: Tensor
    zeros: Tensor
    retired: Tensor


@dataclass(frozen=True)
class Observation:
    """What a step shows of each part, `[part]` each.

    Attributes:
        loss: the loss.
        norm: gradient norm, before clipping.
        memory: of the steps before.
        thresholds: when the guard acts.
        teacher: boolean, the part's targets are finite; None where there are none.
        scale: the loss scale; None where there is none.
    """

    loss: Tensor
    norm: Tensor
    memory: Memory
    thresholds: Thresholds
    teacher: Tensor | None = None
    scale: Tensor | None = None


def _dead(seen: Observation) -> Tensor:
    return (seen.norm == 0) & (seen.memory.zeros + 1 == seen.thresholds.dead_after)


def _large(seen: Observation) -> Tensor | None:
    limit = seen.thresholds.max_norm
    return None if limit is None else seen.norm > limit


def _spike(seen: Observation) -> Tensor:
    factor = math.log(seen.thresholds.spike_factor)
    above = seen.norm.log() - seen.memory.level
    first = (seen.memory.seen >= 1) & (above > max(math.log(FIRST_JUMP), 2 * factor))
    early = (seen.memory.seen >= FEW) & (above > max(math.log(JUMP), 2 * factor))
    return first | early | (seen.memory.seen >= WARM_UP) & (above > factor)


def _gradient(seen: Observation) -> Tensor:
    return ~torch.isfinite(seen.norm)


def _overflow(seen: Observation) -> Tensor | None:
    # Above a scale of 1 this is what scaling expects, and no reason to restore a part.
    return None if seen.scale is None else ~torch.isfinite(seen.norm) & (seen.scale > 1)


def _loss(seen: Observation) -> Tensor:
    return ~torch.isfinite(seen.loss)


def _teacher(seen: Observation) -> Tensor | None:
    return None if seen.teacher is None else ~seen.teacher


def _retired(seen: Observation) -> Tensor:
    return seen.memory.retired


@dataclass(frozen=True)
class Kind:
    """What is to know of one kind of fault.

    Attributes:
        reason: what was seen, in words; empty for what is no fault. It may have fields to fill in.
        detect: finds it in a step, boolean `[part]` or None where it cannot be there; None for a
            kind that is found elsewhere.
        value: which number of the step belongs to it.
        action: what is done at once.
        updates: whether the part is updated all the same.
        not_finite: whether some operation made a NaN or an infinity, which a replay can find.
        advice: what to change in any loop.
        remedy: what to change in this project's settings.
    """

    reason: str = ""
    detect: Callable[[Observation], Tensor | None] | None = None
    value: Literal["loss", "norm", ""] = ""
    action: str = SKIPPED
    updates: bool = False
    not_finite: bool = False
    advice: str = ""
    remedy: str = ""

    def change(self, in_run: bool) -> str:
        """What to change: in a run its setting, save where only a replay knows which."""
        return self.remedy if in_run and not self.not_finite else self.advice


@unique  # a number twice would be a second name of the same kind
class Stage(IntEnum):
    """Where in a step a part's fault was found; checkpoints hold the numbers, events the names.

    In the order of a step from its end to its beginning: where several kinds apply, the one that is
    earliest in the step, here the last, is the cause.
    """

    kind: Kind

    def __new__(cls, number: int, kind: Kind = Kind()) -> Stage:  # noqa: B008
        """A number that knows its row of the table."""
        member = int.__new__(cls, number)
        member._value_, member.kind = number, kind
        return member

    HEALTHY = 0, Kind(updates=True)
    DEAD = (
        5,
        Kind(
            "the gradient has been exactly zero for many steps: the part learns nothing",
            _dead,
            value="norm",
            action="reported",
            updates=True,
        ),
    )
    LARGE = (
        12,
        Kind(
            "the gradient's norm is above the fixed threshold, or too large for the optimizer to "
            "square",
            _large,
            value="norm",
            advice="lower the learning rate; if norms of this size are normal, raise "
            "Thresholds.max_norm or leave it out, or set clip_grad",
            remedy="lower LEARNING_RATE; where norms of this size are normal, raise "
            "GRAD_NORM_THRESHOLD",
        ),
    )
    SPIKE = (
        4,
        Kind(
            "the gradient's norm is far above its running median",
            _spike,
            value="norm",
            advice="lower the learning rate or set clip_grad; if such jumps are normal, raise "
            "Thresholds.spike_factor",
            remedy="lower LEARNING_RATE",
        ),
    )
    GRADIENT = (
        3,
        Kind(
            "the gradient's norm is not finite: a NaN, or too large to square",
            _gradient,
            value="norm",
            not_finite=True,
            advice="if the loss had been growing, lower the learning rate; otherwise look for "
            "sqrt, log or a norm at 0 (torch.autograd.set_detect_anomaly(True) names the "
            "operation); under float16 autocast pass scaler=True",
            remedy="with a HEAD of your own, look for a square root, norm or log in it that reaches"
            " zero",
        ),
    )
    OVERFLOW = (
        7,
        Kind(
            "the gradient overflows at this loss scale, which is halved",
            _overflow,
            value="norm",
            action="loss scale halved",
        ),
    )
    LOSS = (
        2,
        Kind(
            "the loss is not finite",
            _loss,
            value="loss",
            not_finite=True,
            advice="look for NaN in the inputs and for log or division of 0 in the loss; lower the "
            "learning rate",
            remedy="raise STUDENT_TEMP; with a HEAD of your own, look for a division or log in it",
        ),
    )
    TEACHER = (
        1,
        Kind(
            "the EMA teacher's probabilities are not finite",
            _teacher,
            value="loss",
            not_finite=True,
            remedy="raise TEACHER_TEMP; with a HEAD of your own, look for a division or log in it",
        ),
    )
    RETIRED = 6, Kind(detect=_retired)

    # Found outside a part's own step.
    INPUT = (
        8,
        Kind(
            "the embedding of row {row} is not finite",
            action="left out of the batch",
            remedy="python train.py --rebuild_damaged, or take that sample out of the data",
        ),
    )
    MARGINAL = 9, Kind("a cluster's running marginal is exactly 0", action="smoothed")
    WEIGHT = 10, Kind("its weights or moments are not finite", action="restored")
    BUFFER = (
        13,
        Kind(
            "a forward pass left buffers not finite",
            action="put back",
            updates=True,
            advice="look at every batch that runs through these modules in training mode, also on "
            "the way to another part's or model's loss: for NaN, and for values above 1e18, whose "
            "squares overflow",
        ),
    )
    DRIFT = (
        11,
        Kind(
            "KL(original gate || now) is {drift:.3g} nats, above {limit}: the router may be "
            "imitating the student",
            action="stopped",
        ),
    )

    def event(
        self,
        step: int,
        part: str,
        value: float | None = None,
        action: str = "",
        detail: str = "",
        **fill: object,
    ) -> Event:
        """The guard's event of such a fault.

        Args:
            step: optimizer step, from 0.
            part: which part.
            value: the number that was seen.
            action: what was done, where that is not the table's.
            detail: is added to the reason.
            **fill: fields of the reason.
        """
        reason = self.kind.reason.format(**fill) + detail
        return Event(step, part, self.name.lower(), reason, action or self.kind.action, value)

    @classmethod
    def of(cls, event: Event) -> Stage | None:
        """The kind of an event; None for what the guard did, which is no fault."""
        return cls.__members__.get(event.stage.upper())


_DETECTORS = [(int(stage), stage.kind.detect) for stage in Stage if stage.kind.detect is not None]
_UPDATED = [int(stage) for stage in Stage if stage.kind.updates]


def judge(seen: Observation) -> Tensor:
    """What is wrong with each part in a step: `[part]` int8, values of `Stage`."""
    found = torch.zeros_like(seen.norm, dtype=torch.int8)
    for number, detect in _DETECTORS:
        where = detect(seen)
        if where is not None:
            found = found.masked_fill(where, number)
    return found


def is_healthy(stage: Tensor) -> Tensor:
    """Which parts of a step are updated: boolean `[part]` from `Stage` values `[part]`."""
    healthy = stage == _UPDATED[0]
    for number in _UPDATED[1:]:
        healthy = healthy | (stage == number)
    return healthy
