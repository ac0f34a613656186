"""Snapshot, restore and re-initialize parts that are rows of matrices, such as a bank of heads.

A part is a unit that may fail alone: some weights and their optimizer state. For parts that are
modules see `firstnan.modules`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from firstnan.errors import GUARD_STOPPED, UserError
from firstnan.update import keep_unless_

SNAPSHOT_EVERY = 100
"""Default number of steps between two snapshots of a part's state."""


class TooFewHealthyParts(UserError, RuntimeError):
    """Too few parts are healthy to continue training; the message says what was wrong with them."""

    exit_code = GUARD_STOPPED


class RowParts:
    """Parts that are rows: row `i` of every `live` tensor `[part, ...]` belongs to part `i`.

    Training changes `live` in place. `fresh(part, seed)` returns name -> re-initialized row.
    """

    note = ""  # for the event of a restored part

    def __init__(
        self,
        names: Sequence[str],
        live: Mapping[str, Tensor],
        fresh: Callable[[int, int], Mapping[str, Tensor]],
    ) -> None:
        self.names, self._live, self._fresh = names, live, fresh
        self.good = {name: tensor.clone() for name, tensor in live.items()}
        device = next(iter(live.values())).device
        self.good_step = torch.zeros(len(names), dtype=torch.int32, device=device)

    def snapshot(self, rows: slice, healthy: Tensor, step: int) -> None:
        """Save the state of the `healthy` parts in `rows` if it is finite; does not wait.

        Call this before `step` is applied: its finite gradient showed that the state is good.
        """
        live = {name: tensor[rows] for name, tensor in self._live.items()}
        good = healthy & finite_rows(live)
        for name, tensor in live.items():
            keep_unless_(good, self.good[name][rows], tensor)
        before = self.good_step[rows]
        keep_unless_(good, before, torch.full_like(before, step))

    def finite(self) -> list[bool]:
        """Return whether the state of each part is finite; waits for the device."""
        return finite_rows(self._live).tolist()

    def restore(self, part: int) -> int:
        """Restore a part's last good state; return the step before which it was taken."""
        for name, tensor in self._live.items():
            tensor[part].copy_(self.good[name][part])
        return int(self.good_step[part])

    def reinitialise(self, part: int, seed: int, step: int) -> None:
        """Re-initialize a part from `seed` before `step`; the new state counts as good."""
        self.good_step[part] = step
        for name, row in self._fresh(part, seed).items():
            self._live[name][part].copy_(row)
            self.good[name][part].copy_(row)


def finite_rows(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return whether the sum of each row is finite in every tensor, boolean `[part]`."""
    sums = [tensor.view(len(tensor), -1).sum(1) for tensor in tensors.values()]  # one pass each
    return torch.isfinite(torch.stack(sums)).all(0)
