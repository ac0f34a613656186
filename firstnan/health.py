"""Keep the health of each part in tensors, so that a healthy step never waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from firstnan.faults import (
    FEW,
    FIRST_PATIENCE,
    PATIENCE,
    WARM_UP,
    Stage,
    Thresholds,
    is_healthy,
)

_GROW_EVERY = 500  # updates between two doublings of the loss scale
_SHORTEST = 0.05  # nats by which the running median moves per step once it has settled


class Tally(NamedTuple):
    """Counts of parts, summed over processes, that decide whether training can continue."""

    parts: int
    active: int  # not retired
    late: int  # active, and bad for too many steps in a row
    tried: int  # active, restored, and not recovered since
    left: int  # active, and not about to be retired

    def hopeless(self, thresholds: Thresholds) -> str:
        """Return why training cannot continue, or an empty string if it can."""
        if self.late == self.active and (self.tried or not self.active):
            return f"no part had a healthy step in the last {thresholds.restore_after} steps"
        if self.left < thresholds.min_parts:
            return (
                f"only {self.left} of {self.parts} parts are left after skipping, restoring and "
                f"re-initializing the others; at least {thresholds.min_parts} are required"
            )
        return ""


@dataclass
class Health:
    """Memory of each part's earlier steps, tensors `[part]`."""

    level: Tensor  # running median of the logarithm of the gradient norm
    seen: Tensor  # count of gradient norms in that median
    spikes: Tensor  # in a row
    zeros: Tensor  # exactly zero gradients in a row
    skipped: Tensor  # count of all steps that left the part out
    streak: Tensor  # latest steps in a row that left the part out
    run: Tensor  # healthy steps in a row
    restored: Tensor  # whether the part was restored and has not recovered since
    reinitialized: Tensor  # whether the part was ever re-initialized
    retired: Tensor  # whether the part is left out for good

    @classmethod
    def fresh(cls, parts: int, device: torch.device | str = "cpu") -> Health:
        """Return the state before the first step."""
        dtypes = dict.fromkeys((field.name for field in fields(cls)), torch.int32)
        dtypes |= {"level": torch.float32}
        dtypes |= dict.fromkeys(("restored", "reinitialized", "retired"), torch.bool)
        zeros = {n: torch.zeros(parts, dtype=dtype, device=device) for n, dtype in dtypes.items()}
        return cls(**zeros)

    def tensors(self) -> dict[str, Tensor]:
        """Return name -> tensor `[part]`, for a checkpoint."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def rows(self, rows: slice) -> Health:
        """Return a view of some parts' health, which shares memory with this one."""
        return Health(**{name: tensor[rows] for name, tensor in self.tensors().items()})

    def record_(
        self, stage: Tensor, norm: Tensor, thresholds: Thresholds, absent: Tensor | None = None
    ) -> None:
        """Remember a step's stages and gradient norms, `[part]`, except those of `absent` parts.

        The median moves towards each norm by a fixed stride, whatever the size of a spike; norms
        that are zero or not finite do not count.
        """
        before = [] if absent is None else [x.clone() for x in self.tensors().values()]
        healthy, spike = is_healthy(stage), stage == int(Stage.SPIKE)
        self.spikes.add_(1).mul_(spike)
        counts = (healthy | spike) & (norm > 0)
        log = norm.log()
        stride = (WARM_UP / (self.seen + 1)).clamp(_SHORTEST, 1)  # one nat at first
        moved = self.level + stride * (log - self.level).sign()
        # Spikes that do not end become the new level.
        patience = torch.where(self.seen <= FEW, FIRST_PATIENCE, PATIENCE)
        jump = (self.seen == 0) | (self.spikes >= patience)
        self.level.copy_(torch.where(counts, torch.where(jump, log, moved), self.level))
        self.seen.add_(counts).masked_fill_(jump & counts, 1)
        self.zeros.add_(1).mul_(healthy & (norm == 0))
        left_out = ~(healthy | self.retired)
        self.skipped.add_(left_out)
        self.streak.add_(stage != int(Stage.OVERFLOW)).mul_(left_out)
        self.run.add_(1).mul_(healthy)
        self.restored.logical_and_(self.run < thresholds.forgive_after)
        for tensor, old in zip(self.tensors().values(), before, strict=False):
            tensor[absent] = old[absent]

    def escalate(
        self,
        thresholds: Thresholds,
        shared: Collection[int] = (),
        judge: Callable[[Tally, Thresholds], str] = Tally.hopeless,
    ) -> tuple[dict[int, str], str]:
        """Decide what to do with parts that were bad for too many steps in a row.

        Waits for the device. Returns part -> "restore", "reinitialize" or "retire", for the caller
        to carry out, and why training cannot continue, or "". `shared` parts, which the others
        depend on, are only ever restored, and not counted. `judge` returns this reason, or "" if
        other processes hold more parts.
        """
        patience = thresholds.stop_after or thresholds.restore_after
        if int(self.streak.max()) < min(patience, thresholds.restore_after):
            return {}, ""
        columns = (self.streak, self.retired, self.restored, self.reinitialized)
        streak, retired, restored, reinitialized = (column.tolist() for column in columns)
        late = [n >= thresholds.restore_after for n in streak]
        active = [p for p, gone in enumerate(retired) if not gone and p not in shared]
        if thresholds.stop_after and all(streak[part] >= patience for part in active):
            return {}, f"no part had a healthy step in the last {patience} steps"
        actions = {}
        for part in (part for part, gone in enumerate(retired) if late[part] and not gone):
            further = "retire" if reinitialized[part] else "reinitialize"
            actions[part] = further if restored[part] and part not in shared else "restore"
        tally = Tally(
            parts=len(late),
            active=len(active),
            late=sum(late[part] for part in active),
            tried=sum(restored[part] for part in active),
            left=len(active) - sum(action == "retire" for action in actions.values()),
        )
        if why := judge(tally, thresholds):
            return {}, why
        for part, action in actions.items():
            self.streak[part] = 0
            self.restored[part] = True
            self.reinitialized[part] |= action == "reinitialize"
            self.retired[part] = action == "retire"
            if action == "reinitialize":  # its new gradients are unrelated to the old ones
                self.seen[part] = self.spikes[part] = self.zeros[part] = 0
        return actions, ""


def rescale_(scale: Tensor, healthy: Tensor, overflow: Tensor, steps: Tensor) -> None:
    """Halve the loss scale of parts that overflowed; double it after many updates (`steps`).

    It stays >= 1: a part that is always NaN cannot lower it until healthy gradients underflow.
    """
    grown = torch.where(steps % _GROW_EVERY == _GROW_EVERY - 1, scale * 2, scale)
    kept = torch.where(healthy, grown, scale)
    scale.copy_(torch.where(overflow, scale / 2, kept).clamp(1.0, 2.0**16))
