"""Project embeddings, split clusters, and assign tree levels: the parts of a `ClusterModel`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from typing_extensions import Self

from ssl_kd.core.errors import InputError

LLOYD_STEPS = 20  # maximum iterations of 2-means; it rarely changes after ten

Plane = tuple[Tensor, Tensor]


class Projection(nn.Module):
    """Center and scale embeddings, and reduce wide ones to their principal components.

    The projection is `(x - mean) * scale @ basis`, with no basis if `dim` equals `in_dim`. The same
    scale for all directions makes the heads independent of the teacher's units, but keeps the
    relative variance of the directions. If it is `standardized`, each column has a scale of its
    own, after which all columns vary equally.
    """

    mean: Tensor
    basis: Tensor | None
    scale: Tensor

    def __init__(self, in_dim: int, dim: int, standardized: bool = False) -> None:
        super().__init__()
        self.in_dim, self.dim = in_dim, dim
        self.standardized = standardized
        self.register_buffer("mean", torch.zeros(in_dim))
        self.register_buffer("scale", torch.ones(in_dim if standardized else ()))
        self.register_buffer("basis", torch.eye(in_dim, dim) if dim < in_dim else None)

    @classmethod
    def fit(cls, x: Tensor, max_dim: int | None, standardize: bool = False) -> Projection:
        """Fit a projection after which embeddings `[n, D]` have mean 0 and root mean square 1.

        With `standardize`, columns are divided by their standard deviations first; a constant
        column stays 0.
        """
        x = x.double()  # squares of 1e19 overflow in float32
        in_dim = x.shape[1]
        dim = in_dim if max_dim is None else min(max_dim, in_dim)
        projection = cls(in_dim, dim, standardize)
        mean = x.mean(0)
        centered = x - mean
        deviations = torch.ones(())
        if standardize:
            deviations = centered.square().mean(0).sqrt()
            deviations = torch.where(deviations > 0, deviations, 1.0)
            centered = centered / deviations
        projection.mean.copy_(mean)
        if projection.basis is not None:
            projection.basis.copy_(_principal_directions(centered, dim))
            centered = centered @ projection.basis.double()
        root_mean_square = float(centered.square().mean().sqrt())
        if 0 < root_mean_square < 1 / torch.finfo(torch.float32).max:
            raise InputError(
                f"the centered embeddings have a root mean square of {root_mean_square:.2g}; "
                "expected at least 3e-39, because float32 cannot scale smaller values to 1: "
                "multiply the embeddings by a constant"
            )
        scale = 1 / root_mean_square if root_mean_square > 0 else 1.0
        projection.scale.copy_(scale / deviations)
        return projection

    def columns(self, x: Tensor) -> Tensor:
        """Return embeddings `[batch, D]`, with standardized columns if they are to be."""
        return (x.float() - self.mean) * self.scale if self.standardized else x

    def forward(self, x: Tensor) -> Tensor:
        """Project embeddings `[batch, D]` to `[batch, d]`, float32."""
        x = (x.float() - self.mean) * self.scale
        return x if self.basis is None else x @ self.basis


def _principal_directions(centered: Tensor, dim: int) -> Tensor:
    n, in_dim = centered.shape
    if max(n, dim) >= in_dim:
        return torch.linalg.eigh(centered.T @ centered).eigenvectors[:, -dim:].flip(1)
    # n rows span at most n of the D dimensions.
    more = torch.eye(max(n, dim) - n, in_dim).to(centered)
    within, coordinates = torch.linalg.qr(torch.cat([centered, more]).T)
    return within @ _principal_directions(coordinates[:, :n].T, dim)


class Splits(nn.Module):
    """Fill empty clusters by splitting other clusters with planes.

    The vote of the heads may leave clusters empty. Each empty cluster gets one side of a plane
    through another cluster: through the cluster that holds most of the samples that should be in
    the empty one, or, if they are not known, through the cluster with the largest sum of squares.
    """

    middles: Tensor  # `[n, dim]`, a point on each plane
    directions: Tensor  # `[n, dim]`, normal vectors, which point to the side that changes
    parents: Tensor  # `[n]`, the cluster that each plane splits
    parts: Tensor  # `[n]`, the cluster that gets the changed side

    def __init__(self, dim: int, n: int) -> None:
        super().__init__()
        for name in ("middles", "directions"):  # float64 separates nearly equal rows
            self.register_buffer(name, torch.zeros(n, dim, dtype=torch.float64))
        for name in ("parents", "parts"):
            self.register_buffer(name, torch.zeros(n, dtype=torch.int64))

    @classmethod
    def fit(
        cls, x: Tensor, clusters: Tensor, n_clusters: int, target: Tensor | None = None
    ) -> Self:
        """Return splits after which no cluster of `x` `[n, dim]` is empty, if enough rows differ.

        `target` `[n]` is a partition that the split clusters should follow.
        """
        clusters, planes = clusters.clone(), []
        for child in (clusters.bincount(minlength=n_clusters) == 0).nonzero().flatten():
            members = torch.zeros(len(x), dtype=torch.bool) if target is None else target == child
            split = _plane_around(x, clusters, members) or _plane_through_widest(x, clusters)
            if split is None:  # no cluster has two different rows
                break
            parent, plane = split
            rows = (clusters == parent).nonzero().flatten()
            clusters[rows[_is_beyond(x[rows], *plane)]] = child
            planes.append((*plane, parent, child))
        splits = cls(x.shape[1], len(planes))
        for buffer, *values in zip(splits.buffers(), *planes, strict=True):
            for i, value in enumerate(values):
                buffer[i] = value
        return splits

    def forward(self, x: Tensor, clusters: Tensor) -> Tensor:
        """Return the clusters `[batch]` of rows `[batch, dim]` after all splits."""
        clusters = clusters.clone()
        for middle, direction, parent, child in zip(*self.buffers(), strict=True):
            rows = (clusters == parent).nonzero().flatten()
            clusters[rows[_is_beyond(x[rows], middle, direction)]] = child
        return clusters


def _is_beyond(x: Tensor, middle: Tensor, direction: Tensor) -> Tensor:
    return (x.double() - middle) @ direction > 0


def _plane_between(x: Tensor, side: Tensor) -> Plane | None:
    """Return the plane half-way between the means of two sets of rows; `side` `[n]` marks one.

    If a side of the plane contains no row because of rounding, return None.
    """
    inside, outside = x[side].double().mean(0), x[~side].double().mean(0)
    plane = (inside + outside) / 2, inside - outside
    beyond = _is_beyond(x, *plane)
    return plane if beyond.any() and not beyond.all() else None


def _plane_around(x: Tensor, clusters: Tensor, members: Tensor) -> tuple[Tensor, Plane] | None:
    """Return the cluster that holds most `members` `[n]`, and a plane that separates them in it."""
    if not members.any():
        return None
    parent = clusters[members].mode().values
    rows = clusters == parent
    side = members[rows]
    plane = None if side.all() else _plane_between(x[rows], side)
    return None if plane is None else (parent, plane)


def _plane_through_widest(x: Tensor, clusters: Tensor) -> tuple[Tensor, Plane] | None:
    """Return the cluster with the largest sum of squares, and its 2-means plane."""
    size = clusters.bincount().clamp(min=1).double()
    means = torch.zeros(len(size), x.shape[1], dtype=torch.float64)
    means = means.index_add_(0, clusters, x.double()) / size.unsqueeze(1)
    squares = (x.double() - means[clusters]).square().sum(1)
    sums = torch.zeros_like(size).index_add_(0, clusters, squares)
    for parent in sums.argsort(descending=True, stable=True)[: int((sums > 0).sum())]:
        rows = x[clusters == parent]
        furthest = rows[squares[clusters == parent].argmax()]
        side = (rows == furthest).all(1)  # 2-means starts with this row
        plane = None if side.all() else _plane_between(rows, side)
        for _ in range(LLOYD_STEPS):
            better = None if plane is None else _plane_between(rows, _is_beyond(rows, *plane))
            if better is None:
                break
            plane = better
        if plane is not None:
            return parent, plane
    return None


class Tree(nn.Module):
    """Assign samples to nested levels of clusters, finer and coarser than the model's clusters.

    Each cluster of the model consists of some of the finest clusters. A sample belongs to the one
    among these with the nearest mean, which determines its cluster at every level. Clusters added
    after the training are not part of a coarser one: they get the next free index at every level.
    """

    means: Tensor  # `[finest, dim]`
    owners: Tensor  # `[finest]`, the model's cluster that each finest cluster is a part of
    parents: Tensor  # `[level, finest]`, the cluster of each level, finest level first

    def __init__(self, dim: int, sizes: Sequence[int], n_clusters: int) -> None:
        super().__init__()
        self.sizes, self.n_clusters = list(sizes), n_clusters
        self.register_buffer("means", torch.zeros(sizes[0], dim))
        self.register_buffer("owners", torch.zeros(sizes[0], dtype=torch.int64))
        self.register_buffer("parents", torch.zeros(len(sizes), sizes[0], dtype=torch.int64))

    @classmethod
    def fit(cls, x: Tensor, clusters: Tensor, levels: Tensor, n_clusters: int) -> Self:
        """Build the tree from projected samples `[n, dim]`, their clusters `[n]`, and levels.

        In `levels` `[level, n]`, finest first, clusters are unions of those of the level before.
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
        """Return the cluster at each level, `[batch, level]`, of rows with the given `clusters`."""
        others = self.owners != clusters.unsqueeze(1)
        nearest = torch.cdist(x, self.means).masked_fill(others, torch.inf).argmin(1)
        new = (clusters - self.n_clusters).unsqueeze(1)
        sizes = torch.tensor(self.sizes, device=x.device)
        return torch.where(new >= 0, sizes + new, self.parents[:, nearest].T)
