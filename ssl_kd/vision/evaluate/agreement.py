"""Count the neighbors that several embeddings of the same samples share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ssl_kd.vision.cache import nearest_neighbors
from ssl_kd.vision.evaluate.sample import random_rows

NEIGHBORS = 15
MAX_ROWS = 2000


def neighbor_agreement(
    embeddings: Sequence[NDArray], *, seed: int = 0, max_rows: int = MAX_ROWS
) -> list[float | None]:
    """Compute the share of neighbors that each embedding has in common with the others.

    For every other embedding, it is the number of pairs of samples that are among each other's 15
    nearest neighbors (cosine) in both embeddings, over the 15 n that there could be; the mean over
    the other embeddings is returned. An embedding of a different kind than the rest agrees less,
    whether it is better or worse.

    Args:
        embeddings: Arrays `[n, d]` of the same n samples in the same order; d may differ.
        seed: Seed of the random subset of a large set.
        max_rows: Largest number of rows; a larger set is replaced by a random subset.

    Returns:
        A number in [0, 1] for each embedding; None if there is only one, or fewer than two samples.

    Example:
        >>> x = np.random.default_rng(0).normal(size=(16, 3))
        >>> neighbor_agreement([x, 2 * x])
        [1.0, 1.0]
    """
    sizes = {len(x) for x in embeddings}
    if len(sizes) > 1:
        raise ValueError(
            f"the embeddings have {sorted(sizes)} rows; expected the same samples in each"
        )
    if len(embeddings) < 2 or min(sizes) < 2:
        return [None] * len(embeddings)
    rows = random_rows(min(sizes), max_rows, seed)
    pairs = [mutual_neighbors(x[rows]) for x in embeddings]
    most = min(NEIGHBORS, len(rows) - 1) * len(rows)
    shared = np.array([[len(np.intersect1d(a, b)) / most for b in pairs] for a in pairs])
    np.fill_diagonal(shared, 0)
    return (shared.sum(1) / (len(pairs) - 1)).tolist()


def mutual_neighbors(x: NDArray) -> NDArray[np.int64]:
    """Return the pairs of samples that are among each other's nearest neighbors, ascending.

    Args:
        x: `[n, d]` embeddings.

    Returns:
        `[pair]` the numbers `i n + j` of the pairs, with both orders of each pair.
    """
    n = len(x)
    k = min(NEIGHBORS, n - 1)
    if k < 1:
        return np.empty(0, np.int64)
    near = nearest_neighbors(torch.from_numpy(np.ascontiguousarray(x, np.float32)), k).numpy()
    rows = np.repeat(np.arange(n), k)
    return np.intersect1d(rows * n + near.ravel(), near.ravel() * n + rows)
