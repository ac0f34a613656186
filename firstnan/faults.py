"""Define the kinds of faults that a training step can have, with their detectors and actions.

To add a kind of fault, add a detector and a member of `Stage` here, and a row to the fault matrix
(`tests/faults/matrix.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import IntEnum, unique
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from firstnan.events import Event

if TYPE_CHECKING:
    from firstnan.health import Health

WARM_UP, FEW = 20, 5
"""Gradient norms needed for an accurate running median, and for a rough one."""

JUMP, FIRST_JUMP = 1e4, 1e5
"""Smallest ratio to the median that counts as a spike before `WARM_UP` and before `FEW` norms."""

FIRST_PATIENCE = 2
"""Number of spikes in a row, before `FEW` norms, that become the new normal."""

SKIPPED = "skipped"  # the part is not updated in this step


@dataclass(frozen=True)
class Thresholds:
    """Limits at which the guard reports, skips, restores or retires a part, or ends the run.

    Attributes:
        spike_factor: ratio of a gradient norm to its running median above which it is a spike.
            Before the 20th norm, the limit is the square of this factor, but at least 1e4; before
            the fifth norm, at least 1e5. The first norm is never a spike.
        spike_patience: number of spikes in a row after which such norms count as normal; at most 2
            before the fifth norm.
        dead_after: steps with a gradient of exactly zero before a part is reported as dead.
        restore_after: faulty steps in a row before a part is restored; as many again before it is
            re-initialized, and as many again before it is retired.
        forgive_after: healthy steps in a row after which a restored part counts as recovered.
        min_parts: the run ends when fewer parts than this are still trained.
        stop_after: the run ends after this many steps in a row in which every part was faulty, even
            if no part was restored yet; None: `restore_after` steps after a restore.
        max_norm: largest allowed gradient norm, whatever the median; None for no limit.

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
        for field in fields(self):
            value, kind = getattr(self, field.name), str(field.type)
            if not kind.startswith("int") or (value is None and kind.endswith("None")):
                continue
            # NumPy's integers are allowed; booleans are not.
            if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field.name} is {value!r}; expected a whole number >= 1")


def _check_number(name: str, value: Any, above: float, expected: str) -> None:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not above < float(value) < math.inf:
        raise ValueError(f"{name} is {value!r}; expected {expected}")


@dataclass(frozen=True)
class Observation:
    """The measurements of one step, tensors `[part]`, and statistics of earlier steps."""

    health: Health
    loss: Tensor
    norm: Tensor  # of the gradient, before clipping
    thresholds: Thresholds
    teacher: Tensor | None = None  # whether the EMA teacher's probabilities are finite
    scale: Tensor | None = None  # of the loss; above 1, an infinite gradient is an overflow


def _dead(step: Observation) -> Tensor:
    return (step.norm == 0) & (step.health.zeros + 1 == step.thresholds.dead_after)


def _large(step: Observation) -> Tensor | None:
    limit = step.thresholds.max_norm
    return None if limit is None else step.norm > limit


def _spike(step: Observation) -> Tensor:
    factor = math.log(step.thresholds.spike_factor)
    above, n_norms = step.norm.log() - step.health.level, step.health.seen
    first = (n_norms >= 1) & (above > max(math.log(FIRST_JUMP), 2 * factor))
    early = (n_norms >= FEW) & (above > max(math.log(JUMP), 2 * factor))
    return first | early | (n_norms >= WARM_UP) & (above > factor)


def _gradient(step: Observation) -> Tensor:
    return ~torch.isfinite(step.norm)


def _overflow(step: Observation) -> Tensor | None:
    # With loss scaling, an occasional infinite gradient is normal: no reason to restore a part.
    return None if step.scale is None else ~torch.isfinite(step.norm) & (step.scale > 1)


def _loss(step: Observation) -> Tensor:
    return ~torch.isfinite(step.loss)


def _teacher(step: Observation) -> Tensor | None:
    return None if step.teacher is None else ~step.teacher


def _retired(step: Observation) -> Tensor:
    return step.health.retired


@dataclass(frozen=True)
class Kind:
    """The properties of one kind of fault."""

    number: int  # stored in checkpoints
    reason: str = ""  # format string for the event; empty for no fault
    # Returns boolean `[part]`, or None if the fault cannot occur; None: other code detects it.
    detect: Callable[[Observation], Tensor | None] | None = None
    value: Literal["loss", "norm"] = "norm"  # the measurement that the event reports
    action: str = SKIPPED
    updates: bool = False  # whether the part is updated despite the fault
    not_finite: bool = False  # whether a replay can locate the operation
    advice: str = ""  # what the user should change


@unique  # a repeated number would be an alias of another kind
class Stage(IntEnum):
    """Kinds of faults; events store their names.

    The members are in reverse order of where they occur in a step: if several apply, the last one
    listed occurred first and counts as the cause.
    """

    kind: Kind

    def __new__(cls, kind: Kind) -> Stage:
        """Create a member with the number of `kind` as its value."""
        member = int.__new__(cls, kind.number)
        member._value_, member.kind = kind.number, kind
        return member

    HEALTHY = Kind(0, updates=True)
    DEAD = Kind(
        5,
        "the gradient has been exactly zero for many steps: the part learns nothing",
        _dead,
        action="reported",
        updates=True,
    )
    LARGE = Kind(
        12,
        "the gradient's norm is above the fixed threshold, or too large for the optimizer to "
        "square",
        _large,
        advice="lower the learning rate; if norms of this size are normal, raise the threshold "
        "(max_norm, in a run GRAD_NORM_THRESHOLD) or set clip_grad",
    )
    SPIKE = Kind(
        4,
        "the gradient's norm is far above its running median",
        _spike,
        advice="lower the learning rate or set clip_grad; if such jumps are normal, raise "
        "spike_factor",
    )
    GRADIENT = Kind(
        3,
        "the gradient's norm is not finite: a NaN, or too large to square",
        _gradient,
        not_finite=True,
        advice="if the loss had been growing, lower the learning rate; otherwise look for sqrt, "
        "log or a norm at 0 (torch.autograd.set_detect_anomaly(True) names the operation); under "
        "float16 autocast scale the loss",
    )
    OVERFLOW = Kind(
        7,
        "the gradient overflows at this loss scale, which is halved",
        _overflow,
        action="loss scale halved",
    )
    LOSS = Kind(
        2,
        "the loss is not finite",
        _loss,
        value="loss",
        not_finite=True,
        advice="look for NaN in the inputs and for log(0) or x / 0 in the loss; lower the "
        "learning rate, or raise the student's temperature",
    )
    TEACHER = Kind(
        1,
        "the EMA teacher's probabilities are not finite",
        _teacher,
        value="loss",
        not_finite=True,
        advice="raise the teacher's temperature; in a custom head look for log(0) or x / 0",
    )
    RETIRED = Kind(6, detect=_retired)

    # The kinds below have no detector here: other code finds them.
    INPUT = Kind(
        8,
        "the embedding of row {row} is not finite",
        action="left out of the batch",
        advice="rebuild the cached embeddings (--rebuild_damaged), or remove the sample",
    )
    MARGINAL = Kind(9, "a cluster's running marginal is exactly 0", action="smoothed")
    WEIGHT = Kind(10, "its weights or moments are not finite", action="restored")
    BUFFER = Kind(
        13,
        "a forward pass left buffers not finite",
        action="put back",
        updates=True,
        advice="check every batch that runs through these modules in training mode, also on the "
        "way to another part's or model's loss: for NaN, and for values above 1e18, whose squares "
        "overflow",
    )
    DRIFT = Kind(
        11,
        "KL(original gate || now) is {drift:.3g} nats, above {limit}: the router may be imitating "
        "the student",
        action="stopped",
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
        """Return the event that reports this fault; `fill` has the reason's format fields."""
        reason = self.kind.reason.format(**fill) + detail
        return Event(step, part, self.name.lower(), reason, action or self.kind.action, value)

    @classmethod
    def of(cls, event: Event) -> Stage | None:
        """Return the kind of fault that an event reports; None for an event that is not a fault."""
        return cls.__members__.get(event.stage.upper())


DETECTORS = [(int(stage), stage.kind.detect) for stage in Stage if stage.kind.detect is not None]
_UPDATED = [int(stage) for stage in Stage if stage.kind.updates]


def is_healthy(stage: Tensor) -> Tensor:
    """Return a boolean `[part]`: whether each part is updated, given its `Stage` `[part]`."""
    healthy = stage == _UPDATED[0]
    for number in _UPDATED[1:]:
        healthy = healthy | (stage == number)
    return healthy
