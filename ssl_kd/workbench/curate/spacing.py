"""How near the nearest others of each row are: distances of kept neighbours, and what is chance."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssl_kd.errors import InputError
from ssl_kd.store import EmbeddingStore

BLOCK_BYTES = 32 << 20  # of neighbours' embeddings that are compared at once
# Of the distances to the last neighbours: where a row has nothing but copies around it, its own
# says nothing of how far apart different samples are.
DENSEST_SHARE = 0.05
SAME = 1e-6  # rounding of directions of equal rows, and more
Progress = Callable[[int, int], None]
Block = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]


def units(x: Tensor) -> Tensor:
    """Rows `[b, d]` at length 1, float64; a row of zeros stays one."""
    x, tiny = x.double(), torch.finfo(torch.float64).tiny
    x = x / x.abs().amax(1, keepdim=True).clamp(min=tiny)
    return x / x.norm(dim=1, keepdim=True).clamp(min=tiny)


def neighbour_distances(
    store: EmbeddingStore,
    neighbours: Tensor,
    rows: NDArray[np.int64] | None = None,
) -> Iterator[Block]:
    """Go through rows and the distances to their neighbours, nearest first.

    Args:
        store: n embeddings.
        neighbours: `[n, k]` rows of it, as `find_neighbours` gives them; `[m, k]` for some.
        rows: `[m]`, those that the neighbours are of; None: all.

    The difference is taken before its length, so that small distances are no rounding errors.

    Yields:
        rows `[b]`, their neighbours `[b, k]`, and the length of the difference of their directions
        `[b, k]`, 0 ... 2: `sqrt(2 - 2 cos)`.

    Raises:
        InputError: a row is not finite.
    """
    k = neighbours.shape[1]
    size = max(1, BLOCK_BYTES // (4 * store.dim * (k + 1)))
    wanted = np.arange(store.n) if rows is None else rows
    for start in range(0, len(wanted), size):
        own = torch.from_numpy(wanted[start : start + size])
        others = neighbours[start : start + size].long()
        needed, places = torch.cat([own.unsqueeze(1), others], 1).unique(return_inverse=True)
        x = units(store.gather(needed)).float()
        check_finite(x, store, needed)
        distance = (x[places[:, 1:]] - x[places[:, :1]]).norm(dim=2).double()
        distance, order = distance.sort(dim=1, stable=True)
        yield own.numpy(), others.gather(1, order).numpy(), distance.numpy()


def check_finite(x: Tensor, store: EmbeddingStore, rows: Tensor) -> None:
    """Raise InputError where one of some rows of a store, `x` of them, is not finite; name it."""
    if not (finite := x.isfinite().all(1)).all():
        row = int(rows[~finite][0])
        raise InputError(f"row {row} of {store.folder} ({store.split}) is not finite")


def similarity(distance: NDArray[np.float64]) -> NDArray[np.float64]:
    """The cosine of two directions whose difference has this length."""
    return 1 - np.square(distance) / 2


class Spacing:
    """How the rows of a store lie among each other, in 16 bytes of each.

    Args:
        nearest: `[n]`, distance of the nearest other row.
        furthest: `[n]`, distance of the k-th.
        inverse: `[n]`, estimates of the inverse of the dimension.
        k: neighbours that were looked at.

    Attributes:
        nearest: as given.
        scale: `[n]`, `furthest`, from below at its 5 % quantile.
        k: as given.
        dimension: how many dimensions the rows fill locally, estimated from the further half of
            the neighbours: a few copies of a row are among the nearer.

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
        """From distances to the nearest k, `[n, k]`, ascending."""
        inverse = _inverse_dimension(distances)
        return cls(distances[:, 0], distances[:, -1], inverse, distances.shape[1])

    @classmethod
    def measure(
        cls,
        store: EmbeddingStore,
        neighbours: Tensor,
        progress: Progress | None = None,
    ) -> Spacing:
        """From a store and its neighbours `[n, k]`, a block at a time.

        Args:
            store: n embeddings.
            neighbours: `[n, k]`, as `find_neighbours` gives them.
            progress: called with (rows done, n).
        """
        n, k = neighbours.shape
        nearest, furthest, inverse = np.empty(n), np.empty(n), np.empty(n)
        for rows, _, distance in neighbour_distances(store, neighbours):
            nearest[rows], furthest[rows] = distance[:, 0], distance[:, -1]
            inverse[rows] = _inverse_dimension(distance)
            if progress is not None:
                progress(int(rows[-1]) + 1, n)
        return cls(nearest, furthest, inverse, k)

    def closeness(
        self, first: NDArray[np.int64], second: NDArray[np.int64], distance: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Distances in units of the smaller `scale` of the two; 0 of equal rows, however dense."""
        scale = np.minimum(self.scale[first], self.scale[second])
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(distance > 0, distance / scale, 0.0)

    def chance(self, closeness: NDArray[np.float64]) -> NDArray[np.float64]:
        """The share of rows that would have another one that close if none were a copy.

        Each of the k - 1 others within the k-th neighbour is one with probability
        `closeness^dimension`, where they are spread evenly over `dimension` dimensions.
        """
        within = np.minimum(closeness, 1 - 1e-12) ** self.dimension
        return -np.expm1((self.k - 1) * np.log1p(-within))

    def excess(self, closeness: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of the rows at least as close as each `[m]`, the share that is by chance, 0 ... 1.

        References:
            Benjamini and Hochberg, Controlling the false discovery rate, JRSS B 1995; stepping
            down, which is the more careful: once too much is by chance, nothing further is surer.
        """
        ordered = np.sort(closeness)
        share = self.chance(ordered) * len(self.nearest) / np.arange(1, len(ordered) + 1)
        share = np.minimum(np.maximum.accumulate(share), 1.0)
        return share[np.searchsorted(ordered, closeness, "right") - 1]


def _inverse_dimension(distances: NDArray[np.float64]) -> NDArray[np.float64]:
    """An estimate from each row of distances `[b, k]`; 0, NaN or infinite where it has none."""
    k = distances.shape[1]
    places = np.arange(k // 2, k - 1)
    if not len(places):
        return np.zeros(len(distances))
    # Where the density is even: E log(r_k / r_j) = (H_{k-1} - H_{j-1}) / dimension.
    sums = np.concatenate([[0], np.cumsum(1 / np.arange(1, k + 1))])
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.log(distances[:, -1:] / distances[:, places])
    return ratios.mean(1) / (sums[k - 1] - sums[places].mean())
