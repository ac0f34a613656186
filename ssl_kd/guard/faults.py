"""The table of faults: what can be wrong with a part in a step, its detector, and the reaction.

To add a kind of fault, write one detector and one member of `Stage` here, and one row of the fault
matrix.
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

from ssl_kd.guard.events import Event

if TYPE_CHECKING:
    from ssl_kd.guard.health import Health

WARM_UP, FEW = 20, 5
"""Number of gradient norms after which their median is exact, and after which it is rough."""

JUMP, FIRST_JUMP = 1e4, 1e5
"""Smallest ratio to the median that is a spike before `WARM_UP` norms, and before `FEW` norms."""

FIRST_PATIENCE = 2
"""Spikes in a row before `FEW` norms after which the first norms count as too small."""

SKIPPED = "skipped"
"""Action for most faults: the part is left out of the step."""


@dataclass(frozen=True)
class Thresholds:
    """When the guard acts.

    Attributes:
        spike_factor: a gradient norm this many times its running median is a spike. Before the
            20th norm the limit is the square of this factor, and at least 1e4; before the fifth
            norm, at least 1e5. The first norm is never a spike.
        spike_patience: spikes in a row after which they count as the new normal; at most 2 before
            the fifth norm.
        dead_after: number of steps with an exactly zero gradient before a part is reported as dead.
        restore_after: bad steps in a row before a part is restored; the same number again before it
            is re-initialized, and again before it is retired.
        forgive_after: healthy steps in a row after which a restored part counts as recovered.
        min_parts: the run ends when fewer parts than this are left.
        stop_after: the run ends after this many steps in a row in which every part was bad, even if
            nothing was restored yet; None: `restore_after` steps after a restore.
        max_norm: a gradient norm above this is too large, whatever the median; None for no limit.

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
            # NumPy's integers are allowed; booleans are not.
            if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field.name} is {value!r}; expected a whole number >= 1")


def _check_number(name: str, value: Any, above: float, expected: str) -> None:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not above < float(value) < math.inf:
        raise ValueError(f"{name} is {value!r}; expected {expected}")


@dataclass(frozen=True)
class Observation:
    """The numbers of one step and the memory of earlier steps, from which detectors find faults.

    All tensors are `[part]`. `teacher` is true where the EMA teacher's probabilities are finite;
    `scale` is the loss scale. A loop without EMA teacher or loss scale leaves them None.
    """

    health: Health
    loss: Tensor
    norm: Tensor
    thresholds: Thresholds
    teacher: Tensor | None = None
    scale: Tensor | None = None


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
    # At a scale above 1 an infinite gradient is expected now and then: no reason to restore a part.
    return None if step.scale is None else ~torch.isfinite(step.norm) & (step.scale > 1)


def _loss(step: Observation) -> Tensor:
    return ~torch.isfinite(step.loss)


def _teacher(step: Observation) -> Tensor | None:
    return None if step.teacher is None else ~step.teacher


def _retired(step: Observation) -> Tensor:
    return step.health.retired


@dataclass(frozen=True)
class Kind:
    """One row of the table of faults.

    Attributes:
        number: the value of the `Stage`; checkpoints hold it.
        reason: what an event says was seen, a format string; empty for no fault.
        detect: finds the fault in a step, boolean `[part]`, or returns None where it cannot occur;
            None for a fault that other code finds.
        value: which number of the step the event reports.
        action: what the event says was done at once.
        updates: whether the part is updated in spite of the fault.
        not_finite: whether an operation made a NaN or an infinity, which a replay can find.
        advice: what the user should change.
    """

    number: int
    reason: str = ""
    detect: Callable[[Observation], Tensor | None] | None = None
    value: Literal["loss", "norm"] = "norm"
    action: str = SKIPPED
    updates: bool = False
    not_finite: bool = False
    advice: str = ""


@unique  # a repeated number would be a second name of the same kind
class Stage(IntEnum):
    """Kinds of faults, by where in a step they are found; events hold the names.

    Listed from the end of a step to its beginning: where several kinds apply, the last one listed
    is the earliest in the step and counts as the cause.
    """

    kind: Kind

    def __new__(cls, kind: Kind) -> Stage:
        """Make a member whose value is the number of `kind`."""
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
        advice="look for NaN in the inputs and for log or division of 0 in the loss; lower the "
        "learning rate, or raise the student's temperature",
    )
    TEACHER = Kind(
        1,
        "the EMA teacher's probabilities are not finite",
        _teacher,
        value="loss",
        not_finite=True,
        advice="raise the teacher's temperature; in a custom head look for log or division of 0",
    )
    RETIRED = Kind(6, detect=_retired)

    # Found outside a part's own step.
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
        """Return an `Event` that reports this fault.

        `action` replaces the table's action, `detail` is appended to the reason, and `fill` holds
        the values for the reason's format fields.
        """
        reason = self.kind.reason.format(**fill) + detail
        return Event(step, part, self.name.lower(), reason, action or self.kind.action, value)

    @classmethod
    def of(cls, event: Event) -> Stage | None:
        """Return the kind of fault that an event reports; None if it reports an action."""
        return cls.__members__.get(event.stage.upper())


_DETECTORS = [(int(stage), stage.kind.detect) for stage in Stage if stage.kind.detect is not None]
_UPDATED = [int(stage) for stage in Stage if stage.kind.updates]


def judge(step: Observation) -> Tensor:
    """Return the `Stage` of each part in a step, `[part]` int8."""
    stage = torch.zeros_like(step.norm, dtype=torch.int8)
    for number, detect in _DETECTORS:
        where = detect(step)
        if where is not None:
            stage = stage.masked_fill(where, number)
    return stage


def is_healthy(stage: Tensor) -> Tensor:
    """Return whether each part is updated, boolean `[part]`, from its `Stage`, `[part]`."""
    healthy = stage == _UPDATED[0]
    for number in _UPDATED[1:]:
        healthy = healthy | (stage == number)
    return healthy
