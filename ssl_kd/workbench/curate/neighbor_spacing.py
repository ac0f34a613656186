"""Distances of each row to its nearest neighbors, and how many of them chance explains."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssl_kd.errors import InputError
from ssl_kd.store import EmbeddingStore

BLOCK_BYTES = 32 << 20  # of neighbors' embeddings that are compared at once
# Quantile of the distances to the last neighbors that bounds them from below: a row that has only
# copies around it does not show how far apart different samples are.
DENSEST_SHARE = 0.05
SAME = 1e-6  # above the rounding of directions of equal rows
Progress = Callable[[int, int], None]
Block = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]


def units(x: Tensor) -> Tensor:
    """Return rows `[b, d]` with length 1, float64; a row of zeros stays zero."""
    x, tiny = x.double(), torch.finfo(torch.float64).tiny
    x = x / x.abs().amax(1, keepdim=True).clamp(min=tiny)
    return x / x.norm(dim=1, keepdim=True).clamp(min=tiny)


def neighbor_distances(
    store: EmbeddingStore, neighbors: Tensor, rows: NDArray[np.int64] | None = None
) -> Iterator[Block]:
    """Yield blocks of rows with their neighbors, nearest first.

    Directions are subtracted before the length is taken, so that small distances are exact.

    Args:
        store: n embeddings.
        neighbors: rows of it `[n, k]`, as `find_neighbors` returns them; `[m, k]` with `rows`.
        rows: the rows that `neighbors` belong to `[m]`; None: all.

    Yields:
        Rows `[b]`, their neighbors `[b, k]`, and the length of the difference of their directions
        `[b, k]`, 0 to 2: `sqrt(2 - 2 cos)`.

    Raises:
        InputError: a row is not finite.
    """
    k = neighbors.shape[1]
    size = max(1, BLOCK_BYTES // (4 * store.dim * (k + 1)))
    rows = np.arange(store.n) if rows is None else rows
    for start in range(0, len(rows), size):
        block = torch.from_numpy(rows[start : start + size])
        others = neighbors[start : start + size].long()
        needed, places = torch.cat([block.unsqueeze(1), others], 1).unique(return_inverse=True)
        x = units(store.gather(needed)).float()
        check_finite(x, store, needed)
        distance = (x[places[:, 1:]] - x[places[:, :1]]).norm(dim=2).double()
        distance, order = distance.sort(dim=1, stable=True)
        yield block.numpy(), others.gather(1, order).numpy(), distance.numpy()


def check_finite(x: Tensor, store: EmbeddingStore, rows: Tensor) -> None:
    """Raise InputError if one of the `rows` of a store, with values `x`, is not finite."""
    if not (finite := x.isfinite().all(1)).all():
        row = int(rows[~finite][0])
        raise InputError(f"row {row} of {store.folder} ({store.split}) is not finite")


def similarity(distance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the cosine of directions whose difference has this length."""
    return 1 - np.square(distance) / 2


class Spacing:
    """Distances among the rows of a store, and the number of dimensions that they fill.

    Args:
        nearest: distance of each row to the nearest other `[n]`.
        furthest: distance to the k-th nearest `[n]`.
        inverse: estimates of the inverse of the dimension `[n]`.
        k: number of neighbors.

    Attributes:
        nearest: as given.
        scale: `furthest`, but at least its 5 % quantile `[n]`.
        k: as given.
        dimension: the local dimension, estimated from the further half of the neighbors, because
            copies of a row are among the nearer.

    References:
        Levina and Bickel, Maximum likelihood estimation of intrinsic dimension, NeurIPS 2004; and
        MacKay and Ghahramani's comment on it, 2005 (the mean of the inverse).
    """

    def __init__(
        self,
        nearest: NDArray[np.float64],
        furthest: NDArray[np.float64],
        inverse: NDArray[np.float64],
        k: int,
    ) -> None:
        known = inverse[np.isfinite(inverse) & (inverse > 0)]
        self.dimension = 1 / float(known.mean()) if len(known) else 1.0
        self.nearest, self.scale, self.k = nearest, furthest, k
        if (apart := furthest > SAME).any():
            self.scale = np.maximum(furthest, np.quantile(furthest[apart], DENSEST_SHARE))

    @classmethod
    def of(cls, distances: NDArray[np.float64]) -> Spacing:
        """Create it from distances to the nearest k `[n, k]`, ascending."""
        inverse = _inverse_dimension(distances)
        return cls(distances[:, 0], distances[:, -1], inverse, distances.shape[1])

    @classmethod
    def measure(
        cls, store: EmbeddingStore, neighbors: Tensor, progress: Progress | None = None
    ) -> Spacing:
        """Create it from a store and its neighbors `[n, k]`, a block at a time."""
        n, k = neighbors.shape
        nearest, furthest, inverse = np.empty(n), np.empty(n), np.empty(n)
        for rows, _, distance in neighbor_distances(store, neighbors):
            nearest[rows], furthest[rows] = distance[:, 0], distance[:, -1]
            inverse[rows] = _inverse_dimension(distance)
            if progress is not None:
                progress(int(rows[-1]) + 1, n)
        return cls(nearest, furthest, inverse, k)

    def closeness(
        self, first: NDArray[np.int64], second: NDArray[np.int64], distance: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return distances in units of the smaller `scale` of the two rows; 0 for equal rows."""
        scale = np.minimum(self.scale[first], self.scale[second])
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(distance > 0, distance / scale, 0.0)

    def chance(self, closeness: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the share of rows with another one as close if there were no copies.

        Each of the k - 1 others within the k-th neighbor is as close with probability
        `closeness^dimension` if they are spread evenly over `dimension` dimensions.
        """
        within = np.minimum(closeness, 1 - 1e-12) ** self.dimension
        return -np.expm1((self.k - 1) * np.log1p(-within))

    def excess(self, closeness: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the share by chance among the rows at least as close as each `[m]`, 0 to 1.

        References:
            Benjamini and Hochberg, Controlling the false discovery rate, JRSS B 1995, but stepping
            down, which is more conservative: once the share is too high, it stays so.
        """
        ordered = np.sort(closeness)
        share = self.chance(ordered) * len(self.nearest) / np.arange(1, len(ordered) + 1)
        share = np.minimum(np.maximum.accumulate(share), 1.0)
        return share[np.searchsorted(ordered, closeness, "right") - 1]


def _inverse_dimension(distances: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return an estimate for each row of distances `[b, k]`; 0, NaN or infinite if undefined."""
    k = distances.shape[1]
    places = np.arange(k // 2, k - 1)
    if not len(places):
        return np.zeros(len(distances))
    # With even density: E log(r_k / r_j) = (H_{k-1} - H_{j-1}) / dimension.
    sums = np.concatenate([[0], np.cumsum(1 / np.arange(1, k + 1))])
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.log(distances[:, -1:] / distances[:, places])
    return ratios.mean(1) / (sums[k - 1] - sums[places].mean())
