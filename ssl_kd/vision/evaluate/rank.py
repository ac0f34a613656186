"""Evaluate frozen embeddings without labels, by the effective rank of their matrix."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ssl_kd.vision.evaluate.sample import in_range, random_rows

MAX_ROWS = 25_600  # as in the paper


def rankme(x: NDArray, *, seed: int = 0, max_rows: int = MAX_ROWS) -> float:
    """Compute RankMe: the exponential of the entropy of the normalized singular values.

    Args:
        x: `[n, d]` embeddings, one row at least; they are not centered.
        seed: Seed of the random subset of a large set.
        max_rows: Largest number of rows; a larger set is replaced by a random subset.

    Returns:
        A number from 1 (all embeddings are multiples of one) to `min(n, d)`.

    References:
        Garrido et al., RankMe: Assessing the Downstream Performance of Pretrained Self-Supervised
        Representations by Their Rank, 2023, equation 1. It compares teachers of one kind; those of
        another width or training may differ in rank for other reasons.

    Example:
        >>> rankme(np.eye(4))
        4.0
    """
    if x.ndim != 2 or not x.size:
        raise ValueError(f"x has shape {x.shape}; expected [n, d] with at least one row")
    (rows,) = in_range(x[random_rows(len(x), max_rows, seed)])
    values = np.linalg.svd(rows.astype(np.float64), compute_uv=False)
    if not values[0] > 0:
        return 1.0
    share = values / values.sum()
    entropy = -(share * np.log(np.maximum(share, np.finfo(np.float64).tiny))).sum()
    return float(np.exp(entropy))
