"""Choose random subsets of large arrays, and rescale arrays to the range of float32."""

import logging

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)


def random_rows(n: int, max_rows: int, seed: int) -> NDArray[np.int64]:
    """Return the row numbers `0` to `n - 1`, or an ascending random subset of size `max_rows`."""
    if n <= max_rows:
        return np.arange(n)
    return np.sort(np.random.default_rng(seed).choice(n, max_rows, replace=False))


def in_range(x: NDArray, *others: NDArray | None) -> list[NDArray]:
    """Convert `x` `[n, d]` and `others` (except None) to float32, rescaled if necessary.

    If squares of `x` would leave the range of float32, all arrays are divided by its largest
    absolute value.
    """
    arrays = [np.asarray(a, np.float32) for a in (x, *others) if a is not None]
    largest = float(np.abs(arrays[0]).max(initial=0))
    if largest == 0 or 1e-6 < largest < 1e6:
        return arrays
    return [(a.astype(np.float64) / largest).astype(np.float32) for a in arrays]


def labeled_sample(x: NDArray, y: NDArray, max_rows: int, seed: int) -> tuple[NDArray, NDArray]:
    """Return embeddings `[m, d]` float32 and labels `[m]` of labeled rows, at most `max_rows`."""
    y = np.asarray(y)
    if len(x) != len(y):
        raise ValueError(
            f"there are {len(x)} embeddings and {len(y)} labels; expected one label per embedding"
        )
    labeled = np.flatnonzero(y >= 0)
    if len(labeled) > max_rows:
        logger.info("using a random %d of %d labeled samples", max_rows, len(labeled))
    rows = labeled[random_rows(len(labeled), max_rows, seed)]
    return np.asarray(x[rows], np.float32), y[rows]
