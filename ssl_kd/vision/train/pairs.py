"""Draw batches of neighboring samples for training, and rows and pairs for scoring."""

from __future__ import annotations

import torch
from einops import rearrange, repeat
from torch import Tensor

from ssl_kd.core.seeds import seed_of

ROWS_PER_BLOCK = 4096


class PairSampler:
    """Draw batches of pairs (sample, neighbor) that depend only on the seed and the step.

    No state has to be saved: the order in epoch `e` is seeded by (seed, e), and the neighbors of
    step `s` by (seed, s), so a resumed run draws the same pairs as an uninterrupted one.
    `neighbors` `[n, k]` may be mapped from a file, because a step reads only the rows of its batch;
    `allowed` `[n, k]` marks those that may be drawn, at least one in each row.
    """

    def __init__(self, neighbors: Tensor, allowed: Tensor, batch_size: int, seed: int) -> None:
        self.n = len(neighbors)
        self.batch_size = min(batch_size, self.n)
        self.steps_per_epoch = self.n // self.batch_size
        self.seed = seed
        self._neighbors, self._allowed = neighbors, allowed
        self._epoch = -1
        self._order = torch.empty(0)

    def _generator(self, *key: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed_of(self.seed, *key))

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """Return samples and their neighbors, `[batch]` int64 each."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._order = torch.randperm(self.n, generator=self._generator(0, epoch))
            self._epoch = epoch
        rows = self._order[position * self.batch_size : (position + 1) * self.batch_size]
        draw = torch.rand(len(rows), generator=self._generator(1, step), dtype=torch.float64)
        n_allowed = self._allowed[rows].cumsum(1)
        counts = n_allowed[:, -1]
        offset = torch.minimum((draw * counts).long(), counts - 1)
        column = torch.searchsorted(n_allowed, offset.unsqueeze(1), right=True)
        return rows, self._neighbors[rows].gather(1, column).squeeze(1).long()


def mutual_neighbors(neighbors: Tensor) -> Tensor:
    """Mark the neighbors of each sample that have this sample among their own neighbors.

    A sample without such a neighbor keeps its nearest one, so each row has at least one mark.
    """
    mutual = torch.empty(neighbors.shape, dtype=torch.bool)
    for rows in torch.arange(len(neighbors)).split(ROWS_PER_BLOCK):
        of_neighbors = neighbors[neighbors[rows].long()]  # [b, k, k]
        mutual[rows] = (of_neighbors == rearrange(rows, "row -> row 1 1")).any(2)
    mutual[:, 0] |= ~mutual.any(1)
    return mutual


def judging_pairs(neighbors: Tensor, seed: int, max_pairs: int) -> Tensor:
    """Return the pairs by which heads are ranked, `[2, pair]`: samples and near neighbors.

    At most `max_pairs` random ones with the nearest quarter of `neighbors` `[n, k]` are returned.
    They need not be mutual, because a wrong partition shows in the doubtful pairs.
    """
    n = len(neighbors)
    near = neighbors[:, : -(-neighbors.shape[1] // 4)]
    if near.numel() <= max_pairs:
        rows = repeat(torch.arange(n), "row -> (row neighbor)", neighbor=near.shape[1])
        return torch.stack([rows, rearrange(near.long(), "row neighbor -> (row neighbor)")])
    g = torch.Generator().manual_seed(seed)
    rows = torch.randint(n, (max_pairs,), generator=g)
    columns = torch.randint(near.shape[1], (max_pairs,), generator=g)
    return torch.stack([rows, near[rows, columns].long()])


def sample_rows(n: int, seed: int, max_rows: int) -> Tensor:
    """Return the numbers 0 to n - 1, or a random sample of `max_rows` of them, in order."""
    if n <= max_rows:
        return torch.arange(n)
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:max_rows].sort().values
