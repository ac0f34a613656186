"""How good a partition of a graph is, without labels, and the local search that improves it.

Two criteria, each 0 for chance and near 1 at best: the mutual information between the clusters at
the two ends of an edge, which wants clusters of one size, and modularity, which wants few edges
between them. Their sum is neither so keen on even sizes as the first (a long tail is left whole)
nor so keen on the large as the second (weak clusters are kept apart).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Sweeps of the local search; it ends long before, where no sample moves or nothing is gained.
SWEEPS = 40
LEAST_GAIN = 1e-7
# What the two criteria weigh, for ablations.
INFORMATION, MODULARITY = 1.0, 1.0
# Samples times clusters whose preferences are held in memory at once.
CELLS = 2**24
SPARSE = 256  # from this K on a node touches so few of them that a sparse product is faster


class Graph:
    """The edges of an undirected graph, once in each direction, its weights summing to 1.

    Args:
        matrix: in rows (CSR), symmetric `[n, n]`, at least 0.

    Attributes:
        matrix: the same, its weights summing to 1.
        rows: `[edge]`, in order.
        columns: `[edge]`.
        weights: `[edge]` float64.
        degree: `[n]`, each node's weights together.
    """

    def __init__(self, matrix: Any) -> None:
        self.n = matrix.shape[0]
        self.weights = matrix.data.astype(np.float64) / matrix.data.sum(dtype=np.float64)
        self.matrix = sp.csr_matrix((self.weights, matrix.indices, matrix.indptr), matrix.shape)
        self.rows = np.repeat(np.arange(self.n), np.diff(matrix.indptr))
        self.columns = matrix.indices
        self.degree = np.bincount(self.rows, self.weights, self.n)

    def towards(self, clusters: Ints, n_clusters: int, start: int, end: int) -> Floats:
        """Weight from each node from `start` to `end` to each cluster: `[end - start, K]`."""
        some = slice(self.matrix.indptr[start], self.matrix.indptr[end])
        cells = (self.rows[some] - start) * n_clusters + clusters[self.columns[some]]
        n = end - start
        found: Floats = np.bincount(cells, self.weights[some], n * n_clusters)  # pyright: ignore[reportAssignmentType]: weighted, so not whole numbers
        return found.reshape(n, n_clusters)

    def of_groups(self, groups: Ints, n_groups: int) -> Graph:
        """The graph whose nodes are groups of these: a partition of them keeps its value."""
        members = one_hot(groups, n_groups)
        return Graph((members.T @ self.matrix @ members).tocsr())


@dataclass(frozen=True)
class Partition:
    """Clusters of a graph's nodes, and what they are worth.

    Attributes:
        value: `partition_value`, higher is better.
        clusters: `[n]` int64 from 0.
        origin: which method began it.
    """

    value: float
    clusters: Ints
    origin: str


def joint(graph: Graph, clusters: Ints, n_clusters: int) -> Floats:
    """Weight between each two clusters: symmetric `[n_clusters, n_clusters]`, summing to 1."""
    cells = clusters[graph.rows] * n_clusters + clusters[graph.columns]
    table = np.bincount(cells, graph.weights, n_clusters**2).reshape(n_clusters, n_clusters)
    return (table + table.T) / (2 * table.sum())


def partition_value(joint: Floats) -> float:
    """`I(k; k') / log K + Q / (1 - 1/K)` of clusters at the ends of an edge, from 0 to 2.

    `I = sum J log(J / p p')` is the mutual information (also the log-likelihood of a
    degree-corrected block model), `Q = sum_k J_kk - p_k^2` the modularity.

    Args:
        joint: `[K, K]` as `joint` gives it, K at least 2.

    References:
        Karrer & Newman, Stochastic blockmodels and community structure in networks, 2011, eq. 25;
        Newman & Girvan, Finding and evaluating community structure in networks, 2004, eq. 5.
    """
    k, share = len(joint), joint.sum(1)
    information = _xlogx(joint).sum() - 2 * _xlogx(share).sum()
    modularity = np.trace(joint) - (share**2).sum()
    a, b = _weights(k)
    return float(a * information + b * modularity)


def refine(
    graph: Graph, clusters: Ints, n_clusters: int, origin: str = "", sweeps: int = SWEEPS
) -> Partition:
    """Move all samples to the cluster that gains most, again and again while the value grows.

    The gain is the value's derivative, so that a sweep is one sparse product; a sweep that loses is
    not taken.
    """
    best, clusters = Partition(-np.inf, clusters, origin), np.asarray(clusters, np.int64)
    for _ in range(sweeps):
        table = joint(graph, clusters, n_clusters)
        value = partition_value(table)
        if value <= best.value + LEAST_GAIN:
            break
        best = Partition(value, clusters, origin)
        moved = _preferred(graph, clusters, table)
        if (moved == clusters).all():
            break
        clusters = moved
    return best


def merge_losses(joint: Floats, n_clusters: int) -> Floats:
    """What the value loses by merging two clusters: `[k, k]`, infinite on and below the diagonal.

    Args:
        joint: `[k, k]`.
        n_clusters: K of the value, on the way to which k falls.
    """
    k, share = len(joint), joint.sum(1)
    cells = _xlogx(joint)
    rows, own = cells.sum(1), np.diag(cells)
    losses = np.zeros((k, k))
    for a in range(k - 1):
        b = np.arange(a + 1, k)
        merged, each = joint[a] + joint[b], np.arange(len(b))
        both = _xlogx(merged)
        new = 2 * (both.sum(1) - both[:, a] - both[each, b])
        new += _xlogx(merged[:, a] + merged[each, b])
        old = 2 * (rows[a] + rows[b]) - own[a] - own[b] - 2 * cells[a, b]
        sizes = _xlogx(share[a] + share[b]) - _xlogx(share[a]) - _xlogx(share[b])
        losses[a, b] = old - new + 2 * sizes
    information, modularity = _weights(n_clusters)
    return _above_diagonal(information * losses + modularity * _modularity_lost(joint))


def modularity_losses(joint: Floats) -> Floats:
    """What modularity alone loses by merging two clusters, as `merge_losses`."""
    return _above_diagonal(_modularity_lost(joint))


def _modularity_lost(joint: Floats) -> Floats:
    share = joint.sum(1)
    return 2 * (np.outer(share, share) - joint)


def _above_diagonal(losses: Floats) -> Floats:
    return np.where(np.tri(len(losses), dtype=bool), np.inf, losses)


def _weights(n_clusters: int) -> tuple[float, float]:
    """What brings either criterion to 1 at best."""
    return INFORMATION / np.log(n_clusters), MODULARITY / (1 - 1 / n_clusters)


def _xlogx(x: Floats) -> Floats:
    return x * np.log(np.where(x > 0, x, 1))


def one_hot(clusters: Ints, n_clusters: int) -> sp.csr_matrix:
    """`[n, n_clusters]` with a 1 in each row."""
    ones, rows = np.ones(len(clusters)), np.arange(len(clusters) + 1)
    return sp.csr_matrix((ones, clusters, rows), shape=(len(clusters), n_clusters))


def _preferred(graph: Graph, clusters: Ints, joint: Floats) -> Ints:
    """The cluster that each node's move would gain most by: the derivative of the value."""
    k = len(joint)
    share = np.maximum(joint.sum(1), 1e-12)
    logs = np.log(np.maximum(joint, 1e-6 * np.outer(share, share)))
    information, modularity = _weights(k)
    product = information * logs + modularity * np.eye(k)
    size = information * np.log(share) + modularity * share
    step = max(1, CELLS // k)
    blocks = []
    for start in range(0, graph.n, step):
        end = min(start + step, graph.n)
        if k < SPARSE:
            gain = graph.towards(clusters, k, start, end) @ product
        else:
            gain = (graph.matrix[start:end] @ one_hot(clusters, k)) @ product
        gain -= graph.degree[start:end, None] * size
        blocks.append(gain.argmax(1))
    return np.concatenate(blocks)
