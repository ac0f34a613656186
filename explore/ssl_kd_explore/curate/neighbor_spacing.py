"""Measure distances to nearest neighbors, and estimate how many of them chance explains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssl_kd.core.errors import InputError
from ssl_kd.vision.cache import EmbeddingStore

BLOCK_BYTES = 32 << 20  # memory of the neighbors' embeddings that are compared at once
# Distances to the last neighbor are raised to this quantile of them: a row that is surrounded by
# copies does not show how far apart different samples are.
DENSEST_SHARE = 0.05
SAME = 1e-6  # distance of equal rows at most, because directions are rounded
Progress = Callable[[int, int], None]
Block = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]


def units(x: Tensor) -> Tensor:
    """Scale rows `[b, d]` to length 1, in float64; a row of zeros stays zero."""
    x, tiny = x.double(), torch.finfo(torch.float64).tiny
    x = x / x.abs().amax(1, keepdim=True).clamp(min=tiny)
    return x / x.norm(dim=1, keepdim=True).clamp(min=tiny)


def neighbor_distances(
    store: EmbeddingStore,
    neighbors: Tensor,
    rows: NDArray[np.int64] | None = None,
    progress: Progress | None = None,
) -> Iterator[Block]:
    """Yield blocks of rows `[b]`, their neighbors `[b, k]` and distances `[b, k]`, nearest first.

    `neighbors` `[m, k]` belong to `rows` `[m]`, or to all rows. The distance `sqrt(2 - 2 cos)` is
    the length of the difference of the rows' directions, which is exact for small distances, too.
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
        if progress is not None:
            progress(start + len(block), len(rows))


def check_finite(x: Tensor, store: EmbeddingStore, rows: Tensor) -> None:
    """Raise InputError if an embedding in `x` is not finite; `rows` are their row numbers."""
    if not (finite := x.isfinite().all(1)).all():
        row = int(rows[~finite][0])
        raise InputError(
            f"row {row} of {store.folder} ({store.split}) is not finite: extract the embeddings "
            "again with --force_recompute"
        )


def similarity(distance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Convert distances `sqrt(2 - 2 cos)` to cosines."""
    return 1 - np.square(distance) / 2


class Spacing:
    """Distances of rows to their k neighbors, and the probability of such distances by chance.

    `blocks` yields ascending distances `[b, k]`. The dimension is estimated from the further half
    of the neighbors, because copies of a row are among the nearer half.

    References:
        Levina and Bickel, Maximum likelihood estimation of intrinsic dimension, NeurIPS 2004; and
        MacKay and Ghahramani's comment on that paper, 2005 (the mean of the inverse).
    """

    def __init__(self, blocks: Iterable[NDArray[np.float64]], k: int) -> None:
        measured = [np.c_[x[:, 0], x[:, -1], _inverse_dimension(x)] for x in blocks]
        self.nearest, self.scale, inverse = np.concatenate(measured).T.copy()
        self.k = k
        known = inverse[np.isfinite(inverse) & (inverse > 0)]
        self.dimension = 1 / float(known.mean()) if len(known) else 1.0
        if (apart := self.scale > SAME).any():
            self.scale = np.maximum(self.scale, np.quantile(self.scale[apart], DENSEST_SHARE))

    def closeness(
        self, first: NDArray[np.int64], second: NDArray[np.int64], distance: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the distance of each pair, divided by the smaller `scale` of its two rows."""
        scale = np.minimum(self.scale[first], self.scale[second])
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(distance > 0, distance / scale, 0.0)

    def chance(self, closeness: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the probability that a row has so close a neighbor if no row is a copy.

        If neighbors are spread evenly over `dimension` dimensions, each of the k - 1 neighbors that
        are nearer than the k-th is within `closeness` with probability `closeness^dimension`.
        """
        within = np.minimum(closeness, 1 - 1e-12) ** self.dimension
        return -np.expm1((self.k - 1) * np.log1p(-within))

    def excess(
        self, of_rows: NDArray[np.float64], closeness: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the false discovery rate at each closeness, `[m]`, 0 to 1.

        It is the number of rows that chance brings so close, divided by the number that are so
        close (Benjamini and Hochberg, JRSS B 1995), stepping down from the closest pair. `of_rows`
        is the closeness of each row to the nearest other one.
        """
        ordered = np.sort(of_rows)
        share = self.chance(ordered) * len(self.nearest) / np.arange(1, len(ordered) + 1)
        share = np.minimum(np.maximum.accumulate(share), 1.0)
        return share[np.searchsorted(ordered, closeness, "right") - 1]


def _inverse_dimension(distances: NDArray[np.float64]) -> NDArray[np.float64]:
    """Estimate 1 / dimension from each row of distances `[b, k]`; 0, NaN or inf if undefined."""
    k = distances.shape[1]
    places = np.arange(k // 2, k - 1)
    if not len(places):
        return np.zeros(len(distances))
    # With even density: E log(r_k / r_j) = (H_{k-1} - H_{j-1}) / dimension.
    sums = np.concatenate([[0], np.cumsum(1 / np.arange(1, k + 1))])
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.log(distances[:, -1:] / distances[:, places])
    return ratios.mean(1) / (sums[k - 1] - sums[places].mean())
