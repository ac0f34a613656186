"""Find many clusters: divide the samples into more cells than clusters, then merge cells.

k-means for K clusters starts from K random samples. Of many clusters, about a third get none and a
fifth several, and Lloyd's iterations rarely repair that: means do not travel through other
clusters. Of 4 K cells, nearly every cluster gets at least one, and Ward's method joins those of one
cluster.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ssl_kd.vision.graph.criterion import one_hot
from ssl_kd.vision.graph.kmeans import kmeans

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

CELLS_PER_CLUSTER = 4
MOST_CELLS = 8192  # of which all pairs are compared
LLOYD_STEPS = 5  # for cells, whose exact borders do not matter


def kmeans_by_cells(x: Floats, n_clusters: int, seed: int) -> Ints:
    """Return at most `n_clusters` clusters `[n]` of rows `[n, d]`, numbered without gaps.

    k-means starts from the means of 4 K cells that are merged to K clusters.
    """
    n_cells = min(CELLS_PER_CLUSTER * n_clusters, MOST_CELLS, len(x))
    if n_cells <= n_clusters:
        return kmeans(x, n_clusters, seed)
    cells = kmeans(x, n_cells, seed, init="random", max_iter=LLOYD_STEPS)
    means, sizes = _means(x, cells)
    if len(means) <= n_clusters:  # fewer rows are distinct
        return cells
    clusters = merge_cells(means, sizes, n_clusters)[cells]
    return kmeans(x, n_clusters, seed, init=_means(x, clusters)[0])


def _means(x: Floats, clusters: Ints) -> tuple[Floats, Ints]:
    """Return the means `[k, d]` and the sizes `[k]` of clusters without gaps."""
    sizes = np.bincount(clusters)
    return np.asarray(one_hot(clusters, len(sizes)).T @ x / sizes[:, None], np.float32), sizes


def merge_cells(means: Floats, sizes: Ints, n_clusters: int) -> Ints:
    """Merge cells by Ward's method until `n_clusters` are left; return their clusters `[m]`.

    A merge of cells a and b of `sizes` `[m]` and `means` `[m, d]` costs
    `n_a n_b / (n_a + n_b) |mean_a - mean_b|^2`, the growth of the sum of squares within clusters.
    The pairs are found by following nearest neighbors until two are each other's, which takes
    O(m^2) time and memory.

    References:
        Ward, Hierarchical grouping to optimize an objective function, 1963; Murtagh, A survey of
        recent advances in hierarchical clustering algorithms, 1983 (nearest-neighbor chains).
    """
    m, weight = len(means), sizes.astype(np.float64)
    squares = np.einsum("md,md->m", means, means, dtype=np.float64)
    costs = np.maximum(squares[:, None] + squares - 2 * (means @ means.T), 0)
    costs *= weight[:, None] * weight / (weight[:, None] + weight)
    np.fill_diagonal(costs, np.inf)
    left = np.ones(m, bool)
    merges = list[tuple[float, int, int]]()
    chain = list[int]()
    while len(merges) < m - 1:
        if not chain:
            chain.append(int(left.argmax()))
        a = chain[-1]
        b = int(costs[a].argmin())
        if len(chain) == 1 or costs[a, chain[-2]] > costs[a, b]:
            chain.append(b)
            continue
        b = chain[-2]
        del chain[-2:]
        merges.append((float(costs[a, b]), a, b))
        # Lance & Williams: the cost of merging a third cell with the union.
        both = (weight + weight[a]) * costs[a] + (weight + weight[b]) * costs[b]
        union = (both - weight * costs[a, b]) / (weight + weight[a] + weight[b])
        left[b] = False
        union[~left], union[a] = np.inf, np.inf
        costs[a] = union
        costs[:, a] = union
        costs[b] = np.inf
        costs[:, b] = np.inf
        weight[a] += weight[b]
    owner = np.arange(m)
    for _, a, b in sorted(merges)[: m - n_clusters]:
        owner[owner == owner[b]] = owner[a]
    return np.unique(owner, return_inverse=True)[1]
