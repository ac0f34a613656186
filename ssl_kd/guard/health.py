"""Each part's health: judged by tensors alone, so that a healthy step never waits for the device.

`Health.judge` says what is wrong with each part of a step, `Health.record_` remembers it, and
`Health.escalate` decides, whenever the host looks, what becomes of parts that stay sick:
skip -> restore from the last good state -> re-initialise once -> retire -> stop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import astuple, dataclass, fields

import torch
from torch import Tensor

from ssl_kd.guard.faults import (
    FEW,
    FIRST_PATIENCE,
    WARM_UP,
    Observation,
    Stage,
    Thresholds,
    is_healthy,
    judge,
)
from ssl_kd.guard.parts import TooFewHealthyParts

_SHORTEST = 0.05


@dataclass(frozen=True)
class Tally:
    """What decides whether training can go on; the sum of several is that of all their parts.

    Attributes:
        parts: how many there are.
        active: how many of them are not retired.
        late: how many of those were bad for too many steps in a row.
        tried: how many of those that are not retired were restored and not forgiven since.
        left: how many would not be retired after what is to be done now.
    """

    parts: int
    active: int
    late: int
    tried: int
    left: int

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def hopeless(self, thresholds: Thresholds) -> str:
        """Why training cannot continue; empty where it can."""
        if self.late == self.active and (self.tried or not self.active):
            return (
                f"no part had a healthy step in the last {thresholds.restore_after}, although "
                "the last good state was restored"
            )
        if self.left < thresholds.min_parts:
            return (
                f"only {self.left} of {self.parts} parts are left after skipping, restoring and "
                f"re-initialising the others; at least {thresholds.min_parts} are asked for"
            )
        return ""


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

    @classmethod
    def copy_of(cls, tensors: Mapping[str, Tensor]) -> Health:
        """What `tensors` gave, in memory of its own."""
        return cls(**{name: tensor.clone() for name, tensor in tensors.items()})

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
        return judge(Observation(loss, norm, self, thresholds, teacher, scale))

    def record_(
        self, stage: Tensor, norm: Tensor, thresholds: Thresholds, absent: Tensor | None = None
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
        most = self.spikes.new_full((), thresholds.spike_patience)
        patience = torch.where(self.seen <= FEW, most.clamp(max=FIRST_PATIENCE), most)
        jump = (self.seen == 0) | (self.spikes >= patience)
        self.level.copy_(torch.where(counts, torch.where(jump, log, moved), self.level))
        self.seen.copy_(torch.where(jump & counts, 1, self.seen + counts))
        self.zeros.add_(1).mul_(healthy & (norm == 0))
        self.skipped.add_(~healthy & ~self.retired)
        overflow = stage == int(Stage.OVERFLOW)
        self.streak.add_(~overflow).mul_(~healthy & ~self.retired)
        self.run.add_(1).mul_(healthy)
        self.restored.logical_and_(self.run < thresholds.forgive_after)

    def escalate(
        self,
        thresholds: Thresholds,
        beside: Collection[int] = (),
        tell: Callable[[Tally], object] | None = None,
    ) -> dict[int, str]:
        """Decide what becomes of the parts that were bad for too many steps in a row.

        Asks the device for its numbers, so call it as often as waiting for them is acceptable.

        Args:
            thresholds: after how many, and how few parts may be left.
            beside: parts that the others share: restored like them, but never counted as left.
            tell: gets the tally, where these are not all parts there are: whether too few are left
                is then decided elsewhere.

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
        actions = {}
        for part in sick:
            if not restored[part] or part in beside:
                actions[part] = "restore"
            else:
                actions[part] = "retire" if reinitialised[part] else "reinitialise"
        tally = Tally(
            parts=len(late),
            active=len(active),
            late=sum(late[part] for part in active),
            tried=sum(restored[part] for part in active),
            left=len(active) - sum(action == "retire" for action in actions.values()),
        )
        if tell is not None:
            tell(tally)
        elif why := tally.hopeless(thresholds):
            raise TooFewHealthyParts(why)
        for part, action in actions.items():
            self.streak[part] = 0
            self.restored[part] = True
            self.reinitialised[part] |= action == "reinitialise"
            self.retired[part] = action == "retire"
            if action == "reinitialise":  # its gradients have nothing to do with the old ones
                self.seen[part] = self.spikes[part] = self.zeros[part] = 0
        return actions
