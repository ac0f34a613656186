"""A part is the unit that may fail alone: weights, optimizer state and buffers.

Here parts are rows of matrices, as in a bank of heads; `ssl_kd.guard.modules` has parts that are
modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ssl_kd.errors import GUARD_STOPPED, UserError
from ssl_kd.guard.update import keep_unless_

SNAPSHOT_EVERY = 100
"""Steps between two snapshots of a part's state."""


class TooFewHealthyParts(UserError, RuntimeError):
    """So few parts are healthy that training cannot continue; the message says what was seen."""

    exit_code = GUARD_STOPPED


class RowParts:
    """Parts that are rows: row `i` of every tensor `[part, ...]` belongs to part `i`.

    Args:
        names: of the parts, `head 3`.
        live: name -> tensor that training changes in place.
        fresh: part, seed -> name -> that part's row, re-initialized.

    Attributes:
        good: name -> the last good state of every part; before any snapshot, the initial state.
        good_step: `[part]`, the step before which each part was in it.
        note: appended to the event of a restored part.
    """

    note = ""

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
        """Save the state of the `healthy` parts in `rows` where it is finite; does not wait.

        `step`, which is not applied yet, has shown the state to be good.
        """
        live = {name: tensor[rows] for name, tensor in self._live.items()}
        good = healthy & finite_rows(live)
        for name, tensor in live.items():
            keep_unless_(good, self.good[name][rows], tensor)
        before = self.good_step[rows]
        keep_unless_(good, before, torch.full_like(before, step))

    def finite(self) -> list[bool]:
        """Return whether each part is finite; waits for the device."""
        return finite_rows(self._live).tolist()

    def restore(self, part: int) -> int:
        """Restore a part's last good state; return the step before which it was in it."""
        for name, tensor in self._live.items():
            tensor[part].copy_(self.good[name][part])
        return int(self.good_step[part])

    def reinitialise(self, part: int, seed: int, step: int) -> None:
        """Draw a part anew by `seed` before `step`; the new state counts as good."""
        self.good_step[part] = step
        for name, row in self._fresh(part, seed).items():
            self._live[name][part].copy_(row)
            self.good[name][part].copy_(row)


def finite_rows(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return which rows are finite, with sums that do not overflow: boolean `[part]`."""
    sums = [tensor.view(len(tensor), -1).sum(1) for tensor in tensors.values()]  # one pass each
    return torch.isfinite(torch.stack(sums)).all(0)
