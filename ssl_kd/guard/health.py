"""Each part's health: judged by tensors alone, so that a healthy step never waits for the device.

`Health.judge` says what is wrong with each part of a step, `Health.record_` remembers it, and
`Health.escalate` decides, whenever the host looks, what becomes of parts that stay sick:
skip -> restore from the last good state -> re-initialise once -> retire -> stop.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, fields
from enum import IntEnum

import torch
from torch import Tensor

from ssl_kd.guard.parts import TooFewHealthyParts


class Stage(IntEnum):
    """Where a part's fault was found in a step; parts at DEAD are updated, all others skipped."""

    HEALTHY = 0
    TEACHER = 1
    LOSS = 2
    GRADIENT = 3
    SPIKE = 4
    DEAD = 5
    RETIRED = 6
    OVERFLOW = 7


REASONS = {
    Stage.TEACHER: "the EMA teacher's probabilities are not finite",
    Stage.LOSS: "the loss is not finite",
    Stage.GRADIENT: "the gradient's norm is not finite: a NaN, or too large to square",
    Stage.SPIKE: "the gradient's norm is far above its running median",
    Stage.OVERFLOW: "the gradient overflows at this loss scale, which is halved",
    Stage.DEAD: "the gradient has been exactly zero for many steps: the part learns nothing",
}

WARM_UP = 20
_SHORTEST = 0.05


@dataclass(frozen=True)
class Thresholds:
    """When the guard acts.

    Attributes:
        spike_factor: a gradient norm this many times its running median is a spike.
        spike_patience: spikes in a row before they count as the new normal.
        dead_after: steps of exactly zero gradient before a part is reported as dead.
        restore_after: bad steps in a row before a part is restored; again as many before it is
            re-initialised, and again before it is retired.
        forgive_after: healthy steps in a row after which a restored part counts as recovered.
        min_parts: fewer parts than this that are not retired end the run.
        stop_after: bad steps in a row of every part that end the run, whatever was tried before;
            None: as `restore_after`, once going back was tried.

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

    def __post_init__(self) -> None:
        if not 1 < self.spike_factor < math.inf:
            raise ValueError(f"spike_factor is {self.spike_factor}; expected a finite number > 1")
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value is None and field.name == "stop_after":
                continue
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{field.name} is {value!r}; expected a whole number from 1")


@dataclass
class Health:
    """What is remembered of each part, `[part]` each.

    Attributes:
        level: running median of the logarithm of the gradient norm.
        seen: gradient norms that went into it.
        spikes: spikes in a row.
        zeros: exactly zero gradients in a row.
        skipped: steps the part was left out of.
        streak: how many of those were the last ones in a row.
        run: healthy steps in a row.
        restored: whether it was restored and has not been forgiven since.
        reinitialised: whether it was ever re-initialised.
        retired: whether it is left out for good.
    """

    level: Tensor
    seen: Tensor
    spikes: Tensor
    zeros: Tensor
    skipped: Tensor
    streak: Tensor
    run: Tensor
    restored: Tensor
    reinitialised: Tensor
    retired: Tensor

    @classmethod
    def fresh(cls, parts: int, device: torch.device | str = "cpu") -> Health:
        """Before the first step."""

        def zeros(dtype: torch.dtype) -> Tensor:
            return torch.zeros(parts, dtype=dtype, device=device)

        counts = {
            name: zeros(torch.int32)
            for name in ("seen", "spikes", "zeros", "skipped", "streak", "run")
        }
        flags = {name: zeros(torch.bool) for name in ("restored", "reinitialised", "retired")}
        return cls(level=zeros(torch.float32), **counts, **flags)

    def tensors(self) -> dict[str, Tensor]:
        """Name -> tensor `[part]`, for a checkpoint."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def rows(self, rows: slice) -> Health:
        """Some parts' health, sharing memory with the whole."""
        return Health(**{name: tensor[rows] for name, tensor in self.tensors().items()})

    def judge(
        self,
        loss: Tensor,
        norm: Tensor,
        thresholds: Thresholds,
        teacher: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> Tensor:
        """What is wrong with each part in this step; changes nothing.

        Args:
            loss: `[part]`.
            norm: gradient norm `[part]`, before clipping.
            thresholds: when a norm is a spike, and a part dead.
            teacher: boolean `[part]`: the part's targets are finite.
            scale: `[part]`, the loss scale: above 1 a gradient that is not finite is an overflow
                as scaling expects them, and no reason to restore a part.

        Returns:
            `[part]` int8, values of `Stage`: the earliest stage that was found bad.
        """
        stage = torch.zeros_like(norm, dtype=torch.int8)

        def mark(stage: Tensor, where: Tensor, what: Stage) -> Tensor:
            return stage.masked_fill(where, int(what))

        ceiling = self.level + math.log(thresholds.spike_factor)
        dead = (norm == 0) & (self.zeros + 1 == thresholds.dead_after)
        stage = mark(stage, dead, Stage.DEAD)
        stage = mark(stage, (self.seen >= WARM_UP) & (norm.log() > ceiling), Stage.SPIKE)
        # Later lines overrule earlier ones: the earliest stage that is not finite is the cause.
        stage = mark(stage, ~torch.isfinite(norm), Stage.GRADIENT)
        if scale is not None:
            stage = mark(stage, ~torch.isfinite(norm) & (scale > 1), Stage.OVERFLOW)
        stage = mark(stage, ~torch.isfinite(loss), Stage.LOSS)
        if teacher is not None:
            stage = mark(stage, ~teacher, Stage.TEACHER)
        return mark(stage, self.retired, Stage.RETIRED)

    def record_(
        self,
        stage: Tensor,
        norm: Tensor,
        thresholds: Thresholds,
        absent: Tensor | None = None,
    ) -> None:
        """Remember a step's stages and gradient norms, `[part]` each.

        Parts that are `absent`, boolean `[part]`, had no part in the step: nothing is remembered.

        The median is tracked by strides of a fixed length towards each norm: how far off a spike
        is makes no difference, and what is zero or not finite does not count at all.
        """
        if absent is not None:
            before = [tensor.clone() for tensor in self.tensors().values()]
            self.record_(stage, norm, thresholds)
            for tensor, old in zip(self.tensors().values(), before, strict=True):
                tensor.copy_(torch.where(absent, old, tensor))
            return
        healthy, spike = is_healthy(stage), stage == int(Stage.SPIKE)
        self.spikes.add_(1).mul_(spike)
        counts = (healthy | spike) & (norm > 0)
        log = torch.where(counts, norm, 1).log()
        stride = (WARM_UP / (self.seen + 1)).clamp(_SHORTEST, 1)  # a nat at first, to get there
        moved = self.level + stride * (log - self.level).sign()
        # Spikes that do not end are no spikes: the level has changed.
        jump = (self.seen == 0) | (self.spikes >= thresholds.spike_patience)
        self.level.copy_(torch.where(counts, torch.where(jump, log, moved), self.level))
        self.seen.copy_(torch.where(jump & counts, 1, self.seen + counts))
        self.zeros.add_(1).mul_(healthy & (norm == 0))
        self.skipped.add_(~healthy & ~self.retired)
        overflow = stage == int(Stage.OVERFLOW)
        self.streak.add_(~overflow).mul_(~healthy & ~self.retired)
        self.run.add_(1).mul_(healthy)
        self.restored.logical_and_(self.run < thresholds.forgive_after)

    def escalate(self, thresholds: Thresholds, beside: Collection[int] = ()) -> dict[int, str]:
        """Decide what becomes of the parts that were bad for too many steps in a row.

        Asks the device for its numbers, so call it as often as waiting for them is acceptable.

        Args:
            thresholds: after how many, and how few parts may be left.
            beside: parts that the others share: restored like them, but never counted as left.

        Returns:
            part -> `restore`, `reinitialise` or `retire`, for the caller to carry out; the counters
            are moved on here. Empty as a rule.

        Raises:
            TooFewHealthyParts: no part is healthy although all were restored, or fewer than
                `min_parts` would be left.
        """
        late = (self.streak >= thresholds.restore_after).tolist()
        patience = thresholds.stop_after or thresholds.restore_after
        if not any(late) and not bool((self.streak >= patience).any()):
            return {}
        columns = (self.streak, self.retired, self.restored, self.reinitialised)
        streak, retired, restored, reinitialised = (column.tolist() for column in columns)
        active = [p for p, gone in enumerate(retired) if not gone and p not in beside]
        if thresholds.stop_after and all(streak[part] >= patience for part in active):
            raise TooFewHealthyParts(f"no part had a healthy step in the last {patience}")
        sick = [part for part, gone in enumerate(retired) if late[part] and not gone]
        tried = any(restored[part] for part in active)
        if all(late[part] for part in active) and (tried or not active):
            raise TooFewHealthyParts(
                f"no part had a healthy step in the last {thresholds.restore_after}, although "
                "going back to the last good state was tried"
            )
        actions = {}
        for part in sick:
            if not restored[part] or part in beside:
                actions[part] = "restore"
            else:
                actions[part] = "retire" if reinitialised[part] else "reinitialise"
        left = len(active) - sum(action == "retire" for action in actions.values())
        if left < thresholds.min_parts:
            raise TooFewHealthyParts(
                f"only {left} of {len(late)} parts are left after skipping, restoring and "
                f"re-initialising the others; at least {thresholds.min_parts} are asked for"
            )
        for part, action in actions.items():
            self.streak[part] = 0
            self.restored[part] = True
            self.reinitialised[part] |= action == "reinitialise"
            self.retired[part] = action == "retire"
            if action == "reinitialise":  # its gradients have nothing to do with the old ones
                self.seen[part] = self.spikes[part] = self.zeros[part] = 0
        return actions


def is_healthy(stage: Tensor) -> Tensor:
    """Which parts of a step are updated: boolean `[part]` from `Stage` values `[part]`."""
    # int(): torch.compile takes a comparison with the enum itself for one of Python objects.
    return (stage == int(Stage.HEALTHY)) | (stage == int(Stage.DEAD))
