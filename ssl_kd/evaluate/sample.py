"""Random subsets of rows that are too many to use all of them."""

import logging

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)


def random_rows(n: int, max_rows: int, seed: int) -> NDArray[np.int64]:
    """Return all of `n` rows, or a random `max_rows` of them, ascending."""
    if n <= max_rows:
        return np.arange(n)
    return np.sort(np.random.default_rng(seed).choice(n, max_rows, replace=False))


def in_range(x: NDArray, *others: NDArray | None) -> list[NDArray]:
    """Return `x` `[n, d]` and the others (None left out) as float32, rescaled if necessary.

    All are divided by the largest absolute value of `x` if its squares would leave float32's range.
    """
    arrays = [np.asarray(a, np.float32) for a in (x, *others) if a is not None]
    largest = float(np.abs(arrays[0]).max(initial=0))
    if largest == 0 or 1e-6 < largest < 1e6:
        return arrays
    return [(a.astype(np.float64) / largest).astype(np.float32) for a in arrays]


def labelled_sample(x: NDArray, y: NDArray, max_rows: int, seed: int) -> tuple[NDArray, NDArray]:
    """Return embeddings `[m, d]` float32 and labels `[m]` of at most `max_rows` labeled rows."""
    y = np.asarray(y)
    if len(x) != len(y):
        raise ValueError(f"got {len(x)} embeddings and {len(y)} labels: one label per embedding")
    labelled = np.flatnonzero(y >= 0)
    if len(labelled) > max_rows:
        logger.info("using a random %d of %d labeled samples", max_rows, len(labelled))
    rows = labelled[random_rows(len(labelled), max_rows, seed)]
    return np.asarray(x[rows], np.float32), y[rows]
