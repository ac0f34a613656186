"""Which samples are shown together: a sample and one of its neighbours."""

from __future__ import annotations

import torch
from torch import Tensor

from ssl_kd.seeds import seed_of


class PairSampler:
    """Batches of (sample, one of its neighbours), a pure function of seed and step.

    No state to save: epoch `e` is the permutation seeded by (seed, e), the neighbours of step `s`
    are drawn by (seed, s), so a resumed run sees what an uninterrupted one would have.

    Args:
        neighbours: `[n, k]` integer, row `i` the neighbours of sample `i`.
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
        self._counts = allowed.sum(1)
        self._starts = self._counts.cumsum(0) - self._counts
        self._flat = neighbours[allowed]  # the allowed ones only, row after row
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
        counts = self._counts[rows]
        offset = torch.minimum((draw * counts).long(), counts - 1)
        return rows, self._flat[self._starts[rows] + offset].long()


def mutual_neighbours(neighbours: Tensor) -> Tensor:
    """Which neighbours have the sample among their own; the nearest stays where none has.

    Args:
        neighbours: `[n, k]` integer, nearest first.

    Returns:
        Boolean `[n, k]`, at least one true per row.
    """
    n, k = neighbours.shape
    source = torch.arange(n).repeat_interleave(k)
    target = neighbours.long().flatten()
    forward = source * n + target
    mutual = torch.isin(forward, target * n + source).view(n, k)
    mutual[:, 0] |= ~mutual.any(1)
    return mutual
