"""Define the kinds of faults that a training step can have, with their detectors and actions.

To add one, add a member of `Stage` here, and a row to the fault matrix (`tests/faults/matrix.md`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import IntEnum, unique
from functools import reduce
from numbers import Integral, Real
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from firstnan.events import Event

if TYPE_CHECKING:
    from firstnan.health import Health

WARM_UP, FEW = 20, 5  # gradient norms for an accurate running median, and for a rough one
JUMP, FIRST_JUMP = 1e4, 1e5  # least ratio of a spike to it before `WARM_UP` and `FEW` norms
PATIENCE, FIRST_PATIENCE = 5, 2  # spikes in a row that become normal, and before `FEW` norms
SKIPPED = "skipped"  # the part is not updated in this step


@dataclass(frozen=True)
class Thresholds:
    """Limits at which the guard reports, skips, restores or retires a part, or ends the run.

    Attributes:
        spike_factor: ratio of a gradient norm to its running median above which it is a spike.
            Before the 20th norm, the limit is the square of this factor, but at least 1e4; before
            the fifth norm, at least 1e5. The first norm is never a spike. After five spikes in a
            row (two before the fifth norm) such norms count as normal.
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
    dead_after: int = 100
    restore_after: int = 10
    forgive_after: int = 100
    min_parts: int = 1
    stop_after: int | None = None
    max_norm: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if value is None and field.default is None:
                continue
            is_count = name not in ("spike_factor", "max_norm")
            above = 1 if name == "spike_factor" else 0
            kind = Integral if is_count else Real  # NumPy's are, too; booleans are not allowed
            is_number = isinstance(value, kind) and not isinstance(value, bool)
            if not is_number or not above < float(value) < math.inf:  # pyright: ignore
                expected = "whole" if is_count else "finite"
                raise ValueError(f"{name} is {value!r}; expected a {expected} number > {above}")


@dataclass(frozen=True)
class Observation:
    """The measurements of one step, tensors `[part]`, and statistics of earlier steps."""

    health: Health
    loss: Tensor
    norm: Tensor  # of the gradient, before clipping
    thresholds: Thresholds
    scale: Tensor | None = None  # of the loss; above 1, an infinite gradient is an overflow

    def stage(self) -> Tensor:
        """Return the fault of each part in this step, `Stage` values `[part]` int8."""
        stage = torch.zeros_like(self.norm, dtype=torch.int8)
        for fault in Stage:
            if fault.kind.detect is not None and (where := fault.kind.detect(self)) is not None:
                stage = stage.masked_fill(where, int(fault))
        return stage


def _spike(step: Observation) -> Tensor:
    factor = math.log(step.thresholds.spike_factor)
    above, n_norms = step.norm.log() - step.health.level, step.health.seen
    first = (n_norms >= 1) & (above > max(math.log(FIRST_JUMP), 2 * factor))
    early = (n_norms >= FEW) & (above > max(math.log(JUMP), 2 * factor))
    return first | early | (n_norms >= WARM_UP) & (above > factor)


@dataclass(frozen=True)
class Kind:
    """The properties of one kind of fault."""

    number: int  # stored in checkpoints
    reason: str = ""  # empty for no fault
    # Returns boolean `[part]`, or None for no fault; without it, other code detects the fault.
    detect: Callable[[Observation], Tensor | None] | None = None
    value: Literal["loss", "norm"] = "norm"  # the measurement that the event reports
    action: str = SKIPPED
    updates: bool = False  # whether the part is updated despite the fault
    not_finite: bool = False  # whether a replay can locate the operation
    advice: str = ""  # what the user should change


class Kinds(IntEnum):
    """Base of `Stage`, and of an enumeration of the kinds that a caller of `Recovery` detects."""

    kind: Kind

    def __new__(cls, kind: Kind) -> Kinds:
        """Create a member with the number of `kind` as its value."""
        member = int.__new__(cls, kind.number)
        member._value_, member.kind = kind.number, kind
        return member

    def event(
        self, step: int, part: str, value: float | None = None, action: str = "", detail: str = ""
    ) -> Event:
        """Return the event that reports this fault."""
        action = action or self.kind.action
        return Event(step, part, self.name.lower(), self.kind.reason + detail, action, value)

    @classmethod
    def of(cls, event: Event) -> Kinds | None:
        """Return the kind of fault that an event reports; None for an event that is not a fault."""
        return cls.__members__.get(event.stage.upper())


@unique  # a repeated number would be an alias of another kind
class Stage(Kinds):
    """Kinds of faults; events store their names.

    The members are in reverse order of where they occur in a step: if several apply, the last one
    listed occurred first and counts as the cause.
    """

    HEALTHY = Kind(0, updates=True)
    DEAD = Kind(
        5,
        "the gradient has been exactly zero for many steps: the part learns nothing",
        lambda step: (step.norm == 0) & (step.health.zeros == step.thresholds.dead_after - 1),
        action="reported",
        updates=True,
    )
    LARGE = Kind(
        12,
        "the gradient's norm is above the fixed threshold, or too large for the optimizer to "
        "square",
        lambda step: None if (most := step.thresholds.max_norm) is None else step.norm > most,
        advice="lower the learning rate or set clip_grad; if such norms are normal, raise max_norm",
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
        lambda step: ~step.norm.isfinite(),
        not_finite=True,
        advice="if the loss had been growing, lower the learning rate; otherwise look for sqrt, "
        "log or a norm at 0 (Guard(..., locate=True) names the operation and its line); under "
        "float16 autocast scale the loss",
    )
    # With loss scaling, an occasional infinite gradient is normal: no reason to restore a part.
    OVERFLOW = Kind(
        7,
        "the gradient overflows at this loss scale, which is halved",
        lambda step: None if step.scale is None else ~step.norm.isfinite() & (step.scale > 1),
        action="loss scale halved",
    )
    LOSS = Kind(
        2,
        "the loss is not finite",
        lambda step: ~step.loss.isfinite(),
        value="loss",
        not_finite=True,
        advice="look for NaN in the inputs and for log(0) or x / 0; or lower the learning rate",
    )
    RETIRED = Kind(6, detect=lambda step: step.health.retired)
    # Other code finds these two.
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


_UPDATED = [int(kind) for kind in Stage if kind.kind.updates]
N_KINDS = max(Stage) + 1  # 8, 9 and 11 are of former kinds; 1 is for a caller's own


def is_healthy(stage: Tensor) -> Tensor:
    """Return a boolean `[part]`: whether each part is updated, given its `Stage` `[part]`."""
    return reduce(operator.or_, [stage == number for number in _UPDATED])
