"""The levels around a model's clusters: fewer and larger ones, more and smaller ones, nested."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from typing_extensions import Self


class Tree(nn.Module):
    """Each sample's cluster at every level.

    A sample belongs to the nearest mean among the finest clusters that its own cluster is made of;
    all levels follow from that one. What was offered later is a branch by itself, which has the
    number after the last at every level.

    Args:
        dim: width of the rows.
        sizes: clusters of each level, finest first.
        n_clusters: K, of the model when it was trained.

    Attributes:
        means: `[finest, dim]`.
        owners: `[finest]`, the model's cluster that each is a part of.
        parents: `[level, finest]`, the cluster that each is a part of.
    """

    means: Tensor
    owners: Tensor
    parents: Tensor

    def __init__(self, dim: int, sizes: Sequence[int], n_clusters: int) -> None:
        super().__init__()
        self.sizes, self.n_clusters = list(sizes), n_clusters
        self.register_buffer("means", torch.zeros(sizes[0], dim))
        self.register_buffer("owners", torch.zeros(sizes[0], dtype=torch.int64))
        self.register_buffer("parents", torch.zeros(len(sizes), sizes[0], dtype=torch.int64))

    @classmethod
    def fit(cls, x: Tensor, clusters: Tensor, levels: Tensor, n_clusters: int) -> Self:
        """The tree of these samples.

        Args:
            x: `[n, dim]`, as the heads see them.
            clusters: `[n]` int64, the clusters that they were given.
            levels: `[level, n]` int64, finest first, each made of whole clusters of the one before
                it; the finest of parts of `clusters`.
            n_clusters: K, of which some may be empty.
        """
        sizes, finest = [int(level.max()) + 1 for level in levels], levels[0]
        tree = cls(x.shape[1], sizes, n_clusters)
        sums = torch.zeros(sizes[0], x.shape[1], dtype=torch.float64)
        count = torch.bincount(finest, minlength=sizes[0]).clamp(min=1)
        tree.means.copy_(sums.index_add_(0, finest, x.double()) / count.unsqueeze(1))
        tree.owners[finest] = clusters
        tree.parents[:, finest] = levels
        return tree

    def forward(self, x: Tensor, clusters: Tensor) -> Tensor:
        """Rows `[batch, dim]`, their clusters `[batch]` -> those of each level `[batch, level]`."""
        others = self.owners != clusters.unsqueeze(1)
        nearest = torch.cdist(x, self.means).masked_fill(others, torch.inf).argmin(1)
        new = (clusters - self.n_clusters).unsqueeze(1)
        sizes = torch.tensor(self.sizes, device=x.device)
        return torch.where(new >= 0, sizes + new, self.parents[:, nearest].T)
