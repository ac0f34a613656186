"""K that is given is the K that is returned: an empty cluster takes a part of another one.

A vote of heads, or a search, may leave clusters empty: two small ones share the samples of one
answer. Each empty cluster then gets one side of a plane through the cluster that holds its samples;
where none holds them, through the cluster of the largest sum of squares.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import Self

LLOYD_STEPS = 20  # of 2-means; halves rarely move after ten

Plane = tuple[Tensor, Tensor]


class Splits(nn.Module):
    """Planes that divide clusters, one after the other.

    Args:
        dim: width of the rows.
        n: number of planes.

    Attributes:
        middles: `[n, dim]`, a point of each plane.
        directions: `[n, dim]`, at right angles to it, towards the part.
        parents: `[n]`, the cluster that is divided.
        parts: `[n]`, the cluster that takes what lies beyond the plane.
    """

    middles: Tensor
    directions: Tensor
    parents: Tensor
    parts: Tensor

    def __init__(self, dim: int, n: int) -> None:
        super().__init__()
        for name in ("middles", "directions"):  # float64 tells rows apart that hardly differ
            self.register_buffer(name, torch.zeros(n, dim, dtype=torch.float64))
        for name in ("parents", "parts"):
            self.register_buffer(name, torch.zeros(n, dtype=torch.int64))

    @classmethod
    def fit(
        cls, x: Tensor, clusters: Tensor, n_clusters: int, target: Tensor | None = None
    ) -> Self:
        """Return the splits after which every cluster has a row, as far as rows differ.

        Args:
            x: `[n, dim]`.
            clusters: `[n]` int64, from which numbers below `n_clusters` may be missing.
            n_clusters: K.
            target: `[n]` int64, a partition that `clusters` should follow, where there is one.
        """
        clusters, found = clusters.clone(), []
        for child in (clusters.bincount(minlength=n_clusters) == 0).nonzero().flatten():
            members = torch.zeros(len(x), dtype=torch.bool) if target is None else target == child
            split = _plane_around(x, clusters, members) or _plane_through_widest(x, clusters)
            if split is None:  # no cluster holds two rows that differ
                break
            parent, plane = split
            rows = (clusters == parent).nonzero().flatten()
            clusters[rows[_beyond(x[rows], *plane)]] = child
            found.append((*plane, parent, child))
        splits = cls(x.shape[1], len(found))
        for buffer, *values in zip(splits.buffers(), *found, strict=True):
            for i, value in enumerate(values):
                buffer[i] = value
        return splits

    def forward(self, x: Tensor, clusters: Tensor) -> Tensor:
        """Rows `[batch, dim]` and their clusters `[batch]` -> clusters `[batch]`, as divided."""
        clusters = clusters.clone()
        for middle, direction, parent, child in zip(*self.buffers(), strict=True):
            rows = (clusters == parent).nonzero().flatten()
            clusters[rows[_beyond(x[rows], middle, direction)]] = child
        return clusters


def _beyond(x: Tensor, middle: Tensor, direction: Tensor) -> Tensor:
    return (x.double() - middle) @ direction > 0


def _between(x: Tensor, side: Tensor) -> Plane | None:
    """The plane half-way between the means of the rows of a side `[n]` bool and of the others.

    Where the means differ, each of the two sets has a row on its own side of that plane, for the
    distances of its rows from there add up to half its size times that of the means. None where
    rounding has it otherwise.
    """
    inside, outside = x[side].double().mean(0), x[~side].double().mean(0)
    plane = (inside + outside) / 2, inside - outside
    beyond = _beyond(x, *plane)
    return plane if beyond.any() and not beyond.all() else None


def _plane_around(x: Tensor, clusters: Tensor, members: Tensor) -> tuple[Tensor, Plane] | None:
    """The cluster that holds most of the members `[n]` bool, and the plane that parts them."""
    if not members.any():
        return None
    parent = clusters[members].mode().values
    rows = clusters == parent
    side = members[rows]
    plane = None if side.all() else _between(x[rows], side)
    return None if plane is None else (parent, plane)


def _plane_through_widest(x: Tensor, clusters: Tensor) -> tuple[Tensor, Plane] | None:
    """The cluster of the largest sum of squares that can be divided, and the plane of 2-means."""
    size = clusters.bincount().clamp(min=1).double()
    means = torch.zeros(len(size), x.shape[1], dtype=torch.float64)
    means = means.index_add_(0, clusters, x.double()) / size.unsqueeze(1)
    squares = (x.double() - means[clusters]).square().sum(1)
    sums = torch.zeros_like(size).index_add_(0, clusters, squares)
    for parent in sums.argsort(descending=True, stable=True)[: int((sums > 0).sum())]:
        rows = x[clusters == parent]
        furthest = rows[squares[clusters == parent].argmax()]
        side = (rows == furthest).all(1)  # 2-means begins with the row that is furthest out
        plane = None if side.all() else _between(rows, side)
        for _ in range(LLOYD_STEPS):
            better = None if plane is None else _between(rows, _beyond(rows, *plane))
            if better is None:
                break
            plane = better
        if plane is not None:
            return parent, plane
    return None
