"""A random part of the rows, where all of them would take too long."""

import logging

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)


def random_rows(n: int, max_rows: int, seed: int) -> NDArray[np.int64]:
    """All of `n` rows, or a random `max_rows` of them; ascending."""
    if n <= max_rows:
        return np.arange(n)
    return np.sort(np.random.default_rng(seed).choice(n, max_rows, replace=False))


def in_range(x: NDArray, *others: NDArray | None) -> list[NDArray]:
    """Embeddings `[n, d]` as float32, and others in the same unit, None left out.

    The unit is changed only where squares of `x` would leave float32, which reaches from 1e-38 to
    1e38: then the largest absolute value of `x` becomes 1.
    """
    arrays = [np.asarray(a, np.float32) for a in (x, *others) if a is not None]
    largest = float(np.abs(arrays[0]).max(initial=0))
    if largest == 0 or 1e-6 < largest < 1e6:
        return arrays
    return [(a.astype(np.float64) / largest).astype(np.float32) for a in arrays]


def labelled_sample(x: NDArray, y: NDArray, max_rows: int, seed: int) -> tuple[NDArray, NDArray]:
    """The rows with a known label as float32, at random at most `max_rows` of them, in order.

    Args:
        x: `[n, d]` embeddings.
        y: `[n]` integer labels, -1 where unknown.
        max_rows: Largest number of rows kept.
        seed: Draws them.

    Returns:
        Embeddings `[m, d]` float32 and labels `[m]`.
    """
    y = np.asarray(y)
    if len(x) != len(y):
        raise ValueError(f"got {len(x)} embeddings and {len(y)} labels: one label per embedding")
    labelled = np.flatnonzero(y >= 0)
    if len(labelled) > max_rows:
        logger.info("judging on a random %d of %d labelled samples", max_rows, len(labelled))
    rows = labelled[random_rows(len(labelled), max_rows, seed)]
    return np.asarray(x[rows], np.float32), y[rows]
