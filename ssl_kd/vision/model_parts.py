"""Parts of a `ClusterModel`: projection of embeddings, split clusters, and the tree of levels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from typing_extensions import Self

from ssl_kd.errors import InputError

LLOYD_STEPS = 20  # of 2-means; halves rarely move after ten

Plane = tuple[Tensor, Tensor]


class Projection(nn.Module):
    """Center embeddings, rotate wide ones to fewer directions, and scale them.

    `(x - mean) * scale @ basis`, without `basis` where embeddings are narrow. One scale for all
    directions: heads do not depend on the teacher's units, and directions keep their weight. The
    rotation to the leading principal components costs the heads no accuracy and makes wide
    embeddings several times cheaper to train on.

    Args:
        in_dim: width D of the embeddings.
        dim: width d of the result, at most D; equal to it for no rotation.
    """

    mean: Tensor
    basis: Tensor | None
    scale: Tensor

    def __init__(self, in_dim: int, dim: int) -> None:
        super().__init__()
        self.in_dim, self.dim = in_dim, dim
        self.register_buffer("mean", torch.zeros(in_dim))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("basis", torch.eye(in_dim, dim) if dim < in_dim else None)

    @classmethod
    def fit(cls, x: Tensor, max_dim: int | None) -> Projection:
        """Return the projection that gives embeddings `[n, D]` mean 0 and root mean square 1.

        Those wider than `max_dim` are rotated to so many principal components.

        Raises:
            ValueError: they are too small for float32 to scale them.
        """
        x = x.double()  # squares of 1e19 overflow in float32
        in_dim = x.shape[1]
        dim = in_dim if max_dim is None else min(max_dim, in_dim)
        projection = cls(in_dim, dim)
        mean = x.mean(0)
        centered = x - mean
        projection.mean.copy_(mean)
        if projection.basis is not None:
            projection.basis.copy_(_principal_directions(centered, dim))
            centered = centered @ projection.basis.double()
        root_mean_square = float(centered.square().mean().sqrt())
        if 0 < root_mean_square < 1 / torch.finfo(torch.float32).max:
            raise InputError(
                f"the embeddings differ by {root_mean_square:.2g} only, which float32 cannot scale "
                "to 1: multiply them before they are saved"
            )
        projection.scale.fill_(1 / root_mean_square if root_mean_square > 0 else 1.0)
        return projection

    def forward(self, x: Tensor) -> Tensor:
        """Embeddings `[batch, D]` -> `[batch, d]`, float32."""
        x = (x.float() - self.mean) * self.scale
        return x if self.basis is None else x @ self.basis


def _principal_directions(centered: Tensor, dim: int) -> Tensor:
    """Rows `[n, D]` -> their `dim` leading principal directions, orthonormal columns `[D, dim]`."""
    n, in_dim = centered.shape
    if max(n, dim) >= in_dim:
        return torch.linalg.eigh(centered.T @ centered).eigenvectors[:, -dim:].flip(1)
    more = torch.eye(max(n, dim) - n, in_dim).to(centered)  # rows span few of all D directions
    within, coordinates = torch.linalg.qr(torch.cat([centered, more]).T)
    return within @ _principal_directions(coordinates[:, :n].T, dim)


class Splits(nn.Module):
    """Planes that divide clusters, one after the other, so that K requested clusters are K.

    A vote of heads, or a search, may leave clusters empty. Each empty cluster then takes one side
    of a plane through the cluster that holds its samples, or, where none holds them, through the
    cluster of the largest sum of squares.

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
        for name in ("middles", "directions"):  # float64 separates rows that hardly differ
            self.register_buffer(name, torch.zeros(n, dim, dtype=torch.float64))
        for name in ("parents", "parts"):
            self.register_buffer(name, torch.zeros(n, dtype=torch.int64))

    @classmethod
    def fit(
        cls, x: Tensor, clusters: Tensor, n_clusters: int, target: Tensor | None = None
    ) -> Self:
        """Return splits after which every cluster has a row of x, as far as rows differ.

        `clusters` `[n]` may lack numbers below `n_clusters`; they should follow the partition
        `target` `[n]`, if there is one.
        """
        clusters, planes = clusters.clone(), []
        for child in (clusters.bincount(minlength=n_clusters) == 0).nonzero().flatten():
            members = torch.zeros(len(x), dtype=torch.bool) if target is None else target == child
            split = _plane_around(x, clusters, members) or _plane_through_widest(x, clusters)
            if split is None:  # no cluster holds two rows that differ
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
        """Rows `[batch, dim]` and their clusters `[batch]` -> clusters `[batch]`, as divided."""
        clusters = clusters.clone()
        for middle, direction, parent, child in zip(*self.buffers(), strict=True):
            rows = (clusters == parent).nonzero().flatten()
            clusters[rows[_is_beyond(x[rows], middle, direction)]] = child
        return clusters


def _is_beyond(x: Tensor, middle: Tensor, direction: Tensor) -> Tensor:
    return (x.double() - middle) @ direction > 0


def _plane_between(x: Tensor, side: Tensor) -> Plane | None:
    """Return the plane half-way between the means of a side `[n]` bool and of the other rows.

    Where the means differ, each of the two sets has a row on its own side of that plane, because
    the distances of its rows from the plane add up to half its size times that of the means. None
    where rounding violates that.
    """
    inside, outside = x[side].double().mean(0), x[~side].double().mean(0)
    plane = (inside + outside) / 2, inside - outside
    beyond = _is_beyond(x, *plane)
    return plane if beyond.any() and not beyond.all() else None


def _plane_around(x: Tensor, clusters: Tensor, members: Tensor) -> tuple[Tensor, Plane] | None:
    """Return the cluster that holds most of the members `[n]`, and the plane that splits it."""
    if not members.any():
        return None
    parent = clusters[members].mode().values
    rows = clusters == parent
    side = members[rows]
    plane = None if side.all() else _plane_between(x[rows], side)
    return None if plane is None else (parent, plane)


def _plane_through_widest(x: Tensor, clusters: Tensor) -> tuple[Tensor, Plane] | None:
    """Return the divisible cluster of the largest sum of squares, and the plane of 2-means."""
    size = clusters.bincount().clamp(min=1).double()
    means = torch.zeros(len(size), x.shape[1], dtype=torch.float64)
    means = means.index_add_(0, clusters, x.double()) / size.unsqueeze(1)
    squares = (x.double() - means[clusters]).square().sum(1)
    sums = torch.zeros_like(size).index_add_(0, clusters, squares)
    for parent in sums.argsort(descending=True, stable=True)[: int((sums > 0).sum())]:
        rows = x[clusters == parent]
        furthest = rows[squares[clusters == parent].argmax()]
        side = (rows == furthest).all(1)  # 2-means begins with the row that is furthest out
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
    """Nested levels around a model's clusters: fewer and larger ones, more and smaller ones.

    A sample belongs to the nearest mean among the finest clusters that its own cluster consists of;
    all levels follow from that one. A cluster that was added later is a branch of its own, with the
    number after the last at every level.

    Args:
        dim: width of the rows.
        sizes: number of clusters of each level, finest first.
        n_clusters: K of the model when it was trained.

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
        """Return the tree of projected samples x `[n, dim]` with their `clusters` `[n]`.

        `levels` `[level, n]` are finest first, each made of whole clusters of the one before it;
        the finest of parts of `clusters`.
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
