"""Build a neighbor graph whose weights adapt to the local density."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

# Bisection steps for a neighborhood's scale; after 40 the error is below that of float32.
BISECTIONS = 40
# Smallest scale as a share of the mean distance: among duplicates it would be 0.
MIN_SCALE = 1e-3


def fuzzy_graph(neighbors: NDArray[np.integer], distances: NDArray[np.floating]) -> sp.csr_matrix:
    """Return UMAP's weighted, symmetric neighbor graph.

    Weights are `w_ij = exp(-max(d_ij - rho_i, 0) / sigma_i)`, where `rho_i` is the distance to the
    nearest neighbor and `sigma_i` makes each row sum to `log2 k`. Samples in dense and in sparse
    regions are thereby connected equally well. The weights a and b of the two directions of an edge
    are combined to `a + b - a b`.

    Args:
        neighbors: `[n, k]`, row numbers of each sample's neighbors, nearest first, without itself.
        distances: `[n, k]`, distances to these neighbors, at least 0.

    Returns:
        The weights, sparse `[n, n]` float32.

    References:
        McInnes, Healy & Melville, UMAP, 2018, section 3.1.

    Example:
        >>> import numpy as np
        >>> fuzzy_graph(np.array([[1], [0]]), np.array([[0.5], [0.5]])).toarray().tolist()
        [[0.0, 1.0], [1.0, 0.0]]
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
