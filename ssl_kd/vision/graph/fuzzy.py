"""Build a neighbor graph whose weights adapt to the local density."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

BISECTIONS = 40  # for a neighborhood's scale; then the error is below that of float32
MIN_SCALE = 1e-3  # as a share of the mean distance: among duplicates the scale would be 0


def fuzzy_graph(neighbors: NDArray[np.integer], distances: NDArray[np.floating]) -> sp.csr_matrix:
    """Return UMAP's weighted, symmetric neighbor graph, sparse `[n, n]` float32.

    Weights are `w_ij = exp(-max(d_ij - rho_i, 0) / sigma_i)`, where `rho_i` is the distance to the
    nearest neighbor and `sigma_i` makes each row sum to `log2 k`. Samples in dense and in sparse
    regions are thereby connected equally well. The weights a and b of the two directions of an edge
    are combined to `a + b - a b`. Neighbors `[n, k]` are sorted, nearest first, without the sample.

    References:
        McInnes, Healy & Melville, UMAP, 2018, section 3.1.
    """
    n, k = neighbors.shape
    beyond = np.maximum(distances - distances[:, :1], 0).astype(np.float64)
    goal, mean = np.log2(k), max(float(distances.mean()), np.finfo(np.float32).tiny)
    low, high = np.zeros((n, 1)), np.full((n, 1), np.inf)
    scale = np.full((n, 1), mean)
    for _ in range(BISECTIONS):
        wide = np.exp(-beyond / scale).sum(1, keepdims=True) > goal
        high, low = np.where(wide, scale, high), np.where(wide, low, scale)
        scale = np.where(np.isinf(high), 2 * scale, (low + np.minimum(high, 1e300)) / 2)
    weights = np.exp(-beyond / np.maximum(scale, MIN_SCALE * mean)).astype(np.float32)
    rows = np.arange(0, n * k + 1, k)
    one_way = sp.csr_matrix((weights.ravel(), neighbors.ravel(), rows), shape=(n, n))
    return (one_way + one_way.T - one_way.multiply(one_way.T)).tocsr()
