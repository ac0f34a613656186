"""Which samples are shown together: a sample and one of its neighbours."""

from __future__ import annotations

import torch
from torch import Tensor

from ssl_kd.guard.seeds import seed_of

ROWS_PER_BLOCK = 4096


class PairSampler:
    """Batches of (sample, one of its neighbours), a pure function of seed and step.

    No state to save: epoch `e` is the permutation seeded by (seed, e), the neighbours of step `s`
    are drawn by (seed, s), so a resumed run sees what an uninterrupted one would have.

    Args:
        neighbours: `[n, k]` integer, row `i` the neighbours of sample `i`; may be mapped from a
            file, of which a step reads the rows of its batch.
        allowed: `[n, k]` boolean, which of them may be drawn (`mutual_neighbours`); at least one in
            each row.
        batch_size: samples per batch; at most n.
        seed: any integer.
    """

    def __init__(self, neighbours: Tensor, allowed: Tensor, batch_size: int, seed: int) -> None:
        self.n = len(neighbours)
        self.batch_size = min(batch_size, self.n)
        self.steps_per_epoch = self.n // self.batch_size
        self.seed = seed
        self._neighbours, self._allowed = neighbours, allowed
        self._epoch = -1
        self._order = torch.empty(0)

    def _generator(self, *key: int) -> torch.Generator:
        seed = seed_of(self.seed, *key)
        return torch.Generator().manual_seed(seed)

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """Samples and their neighbours, `[batch]` int64 each."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._order = torch.randperm(self.n, generator=self._generator(0, epoch))
            self._epoch = epoch
        rows = self._order[position * self.batch_size : (position + 1) * self.batch_size]
        draw = torch.rand(len(rows), generator=self._generator(1, step), dtype=torch.float64)
        so_far = self._allowed[rows].cumsum(1)
        counts = so_far[:, -1]
        offset = torch.minimum((draw * counts).long(), counts - 1)
        column = torch.searchsorted(so_far, offset.unsqueeze(1), right=True)
        return rows, self._neighbours[rows].gather(1, column).squeeze(1).long()


def mutual_neighbours(neighbours: Tensor) -> Tensor:
    """Which neighbours have the sample among their own; the nearest stays where none has.

    Args:
        neighbours: `[n, k]` integer, nearest first.

    Returns:
        Boolean `[n, k]`, at least one true per row.
    """
    mutual = torch.empty(neighbours.shape, dtype=torch.bool)
    for rows in torch.arange(len(neighbours)).split(ROWS_PER_BLOCK):
        theirs = neighbours[neighbours[rows].long()]  # [b, k, k]
        mutual[rows] = (theirs == rows.view(-1, 1, 1)).any(2)
    mutual[:, 0] |= ~mutual.any(1)
    return mutual
