"""Agreement of clusters with labels, and cluster sizes.

A label of -1 means "unknown": such samples are left out of every score. A cluster of -1 means
"noise": it is paired with no class, so such samples count as wrong in accuracies; NMI, ARI and AMI
treat it as one more cluster, as scikit-learn does.
"""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import linear_sum_assignment
from sklearn.metrics import (
    adjusted_mutual_info_score,
    adjusted_rand_score,
    normalized_mutual_info_score,
)

Ints = NDArray[np.int64]


def contingency(
    labels: ArrayLike,
    clusters: ArrayLike,
    n_classes: int | None = None,
    n_clusters: int | None = None,
) -> Ints:
    """Count how many samples of each class fall into each cluster.

    Args:
        labels: `[n]` integers, -1 where unknown.
        clusters: `[n]` integers in `[0, n_clusters)`, -1 for noise, which is not counted.
        n_classes: Number of rows; None takes the largest label + 1.
        n_clusters: Number of columns; None takes the largest cluster + 1.

    Returns:
        `[n_classes, n_clusters]` int64.

    Raises:
        ValueError: If the two differ in length, a cluster or a label is below -1, or no label is
            known.

    Example:
        >>> contingency([0, 0, 1, -1], [1, 1, 0, 0]).tolist()
        [[0, 2], [1, 0]]
    """
    labels, clusters = _known(labels, clusters)
    rows = int(labels.max()) + 1 if n_classes is None else n_classes
    columns = int(clusters.max()) + 1 if n_clusters is None else n_clusters
    if labels.max() >= rows or clusters.max() >= columns:
        raise ValueError(
            f"labels reach {labels.max()} and clusters {clusters.max()}, but the table has "
            f"{rows} rows and {columns} columns: raise n_classes or n_clusters"
        )
    cells = (labels * columns + clusters)[clusters >= 0]
    return np.bincount(cells, minlength=rows * columns).reshape(rows, columns)


def match(labels: ArrayLike, clusters: ArrayLike) -> dict[int, int]:
    """Pair clusters with classes one to one so that most samples agree (Hungarian method).

    Args:
        labels: `[n]` integers, -1 where unknown.
        clusters: `[n]` integers from 0, -1 for noise.

    Returns:
        Cluster to class. If there are more clusters than classes, unpaired clusters are missing.

    Example:
        >>> match([0, 0, 1], [1, 1, 0])
        {1: 0, 0: 1}
    """
    classes, columns = linear_sum_assignment(contingency(labels, clusters), maximize=True)
    return {int(k): int(c) for c, k in zip(classes, columns, strict=True)}


def accuracy(labels: ArrayLike, clusters: ArrayLike) -> float:
    """Return the share of samples whose cluster is paired with their class, for the best pairing.

    `max_m mean_i [m(cluster_i) = label_i]` over one-to-one pairings `m`; the numbers of classes and
    clusters may differ.

    Args:
        labels: `[n]` integers, -1 where unknown.
        clusters: `[n]` integers from 0, -1 for noise.

    Returns:
        A number in [0, 1].

    References:
        Kuhn, "The Hungarian method for the assignment problem", 1955.

    Example:
        >>> accuracy([0, 0, 1, 1], [1, 1, 0, 1])
        0.75
    """
    table = contingency(labels, clusters)
    paired = table[linear_sum_assignment(table, maximize=True)].sum()
    return float(paired / (np.asarray(labels) >= 0).sum())


def clustering_scores(labels: ArrayLike | None, clusters: ArrayLike) -> dict[str, float | None]:
    """Compute Hungarian accuracy, NMI, ARI and AMI.

    Args:
        labels: `[n]` integers, -1 where unknown, or None.
        clusters: `[n]` integers from 0, -1 for noise.

    Returns:
        Keys `acc`, `nmi`, `ari`, `ami`. All None if no label is known.

    Example:
        >>> clustering_scores([0, 0, 1, 1], [1, 1, 0, 0])
        {'acc': 1.0, 'nmi': 1.0, 'ari': 1.0, 'ami': 1.0}
    """
    if labels is None or not (np.asarray(labels) >= 0).any():
        return dict.fromkeys(("acc", "nmi", "ari", "ami"))
    known = _known(labels, clusters)
    return {
        "acc": accuracy(*known),
        "nmi": float(normalized_mutual_info_score(*known)),
        "ari": float(adjusted_rand_score(*known)),
        "ami": float(adjusted_mutual_info_score(*known)),
    }


def confusion(
    labels: ArrayLike, clusters: ArrayLike, n_classes: int, n_clusters: int
) -> tuple[Ints, Ints]:
    """Return the contingency table with matched pairs on the diagonal, and its column order.

    The order `[n_clusters]` holds the cluster of each column; unpaired clusters come last, the
    largest first. For the arguments see `contingency`.

    Example:
        >>> table, order = confusion([0, 0, 1], [1, 1, 0], 2, 2)
        >>> table.tolist(), order.tolist()
        ([[2, 0], [0, 1]], [1, 0])
    """
    table = contingency(labels, clusters, n_classes, n_clusters)
    _, matched = linear_sum_assignment(table, maximize=True)
    rest = np.setdiff1d(np.arange(table.shape[1]), matched)
    order = np.concatenate([matched, rest[np.argsort(-table[:, rest].sum(0), kind="stable")]])
    return table[:, order], order


def cluster_sizes(clusters: ArrayLike, n_clusters: int) -> Ints:
    """Count the samples in each cluster.

    Args:
        clusters: `[..., n]` integers in `[0, n_clusters)`; leading axes (heads) are kept.
        n_clusters: Number of clusters.

    Returns:
        `[..., n_clusters]` int64.

    Example:
        >>> cluster_sizes([[0, 0, 2], [1, 1, 1]], 3).tolist()
        [[2, 0, 1], [0, 3, 0]]
    """
    clusters = np.asarray(clusters, np.int64)
    if clusters.size and not 0 <= clusters.min() <= clusters.max() < n_clusters:
        raise ValueError(
            f"clusters run from {clusters.min()} to {clusters.max()}, "
            f"expected 0 to {n_clusters - 1}"
        )
    flat = clusters.reshape(math.prod(clusters.shape[:-1]), clusters.shape[-1])  # n may be 0
    offsets = np.arange(len(flat))[:, None] * n_clusters
    counts = np.bincount((flat + offsets).ravel(), minlength=len(flat) * n_clusters)
    return counts.reshape(*clusters.shape[:-1], n_clusters)


def effective_clusters(sizes: ArrayLike) -> NDArray[np.float64]:
    """Return the effective number of clusters, `exp(entropy(sizes))`.

    Args:
        sizes: `[..., n_clusters]` counts.

    Returns:
        `[...]` float64, from 1 (one cluster holds everything; 0 if all are empty) to `n_clusters`
        (all equal).

    Example:
        >>> effective_clusters([5, 5, 0, 0]).item()
        2.0
    """
    sizes = np.asarray(sizes, np.float64)
    total = sizes.sum(-1, keepdims=True)
    share = sizes / np.maximum(total, 1)
    entropy = -(share * np.log(np.where(share > 0, share, 1))).sum(-1)
    return np.where(total[..., 0] > 0, np.exp(entropy), 0.0).round(12)


def collapsed(sizes: ArrayLike) -> NDArray[np.bool_]:
    """Return whether fewer than half of the clusters are in use, by `effective_clusters`.

    A natural imbalance (a largest class twenty times the smallest, evenly graded) stays well above
    this line; a head that gives most samples to a few clusters falls below.

    Args:
        sizes: `[..., n_clusters]` counts.

    Example:
        >>> collapsed([[10, 10, 10, 10], [40, 0, 0, 0]]).tolist()
        [False, True]
    """
    return effective_clusters(sizes) < 0.5 * np.asarray(sizes).shape[-1]


def _known(labels: ArrayLike, clusters: ArrayLike) -> tuple[Ints, Ints]:
    """Check both, and return them as int64 without the samples whose label is unknown."""
    labels, clusters = np.asarray(labels), np.asarray(clusters)
    for name, values in (("labels", labels), ("clusters", clusters)):
        if values.dtype.kind not in "iu":
            raise TypeError(f"{name} must be integers, got {values.dtype}: number the names")
    if labels.ndim != 1 or labels.shape != clusters.shape:
        raise ValueError(
            f"labels and clusters must be vectors of one length, got shapes {labels.shape} and "
            f"{clusters.shape}"
        )
    if not (labels >= 0).any():
        raise ValueError("no label is known (all are -1): a clustering score needs some")
    if labels.min() < -1 or clusters.min() < -1:
        raise ValueError(
            f"labels start at -1 (unknown) and clusters at -1 (noise), "
            f"got {labels.min()} and {clusters.min()}"
        )
    known = labels >= 0
    return labels[known].astype(np.int64), clusters[known].astype(np.int64)
