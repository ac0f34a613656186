"""What a part is: the unit that may fail alone, and how it goes back to where it was well.

A part owns whatever training changes of it: weights, optimizer state, buffers. Here parts are rows
of matrices, as in a bank of heads; `ssl_kd.guard.modules` has parts that are modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ssl_kd.errors import GUARD_STOPPED, UserError
from ssl_kd.guard.update import keep_unless_

SNAPSHOT_EVERY = 100
"""Steps between two snapshots of a part's state."""


class TooFewHealthyParts(UserError, RuntimeError):
    """So few parts are healthy that training cannot continue; the message says what was seen."""

    exit_code = GUARD_STOPPED


class Parts(Protocol):
    """What recovery asks of parts; they are numbered from 0."""

    @property
    def names(self) -> Sequence[str]:
        """What each is called in events, `head 3`."""
        ...

    @property
    def note(self) -> str:
        """A text that the event of a restored part ends with."""
        ...

    def finite(self) -> Sequence[bool]:
        """Whether each holds only finite numbers; waits for the device."""
        ...

    def restore(self, part: int) -> int | None:
        """Put one part back to its last good state.

        Returns:
            The step before which it was in that state; None where there is none, and nothing was
            done.
        """
        ...

    def reinitialise(self, part: int, seed: int, step: int) -> None:
        """Give one part new weights, drawn by `seed`, and forget what its optimizer knew.

        Args:
            part: which one.
            seed: of the draw.
            step: the step before which this happens.
        """
        ...


class RowParts:
    """Parts that are rows: row `i` of every tensor `[part, ...]` belongs to part `i`.

    Args:
        names: of the parts.
        live: name -> tensor that training changes in place.
        fresh: part, seed -> name -> that part's row, re-initialised.

    Attributes:
        good: name -> the last good state of every part; where training began to begin with.
        good_step: `[part]`, the step before which each part was in it.
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
        """Keep some parts' state as good where it is finite; waits for no device.

        Args:
            rows: which parts.
            healthy: boolean, one for each of `rows`: the step has shown the state to be good.
            step: number of the step, which is not applied yet.
        """
        live = {name: tensor[rows] for name, tensor in self._live.items()}
        good = healthy & finite_rows(live)
        for name, tensor in live.items():
            keep_unless_(good, self.good[name][rows], tensor)
        before = self.good_step[rows]
        keep_unless_(good, before, torch.full_like(before, step))

    def finite(self) -> list[bool]:
        """As `Parts`."""
        return finite_rows(self._live).tolist()

    def restore(self, part: int) -> int:
        """As `Parts`."""
        for name, tensor in self._live.items():
            tensor[part].copy_(self.good[name][part])
        return int(self.good_step[part])

    def reinitialise(self, part: int, seed: int, step: int) -> None:
        """As `Parts`; what it begins with counts as good."""
        self.good_step[part] = step
        for name, row in self._fresh(part, seed).items():
            self._live[name][part].copy_(row)
            self.good[name][part].copy_(row)


def finite_rows(tensors: Mapping[str, Tensor]) -> Tensor:
    """Which rows hold only finite numbers, and none so large that their sum is not: `[part]`."""
    sums = [tensor.view(len(tensor), -1).sum(1) for tensor in tensors.values()]  # one pass each
    return torch.isfinite(torch.stack(sums)).all(0)
