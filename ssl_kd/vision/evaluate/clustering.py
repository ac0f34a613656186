"""Agreement of clusters with labels, and cluster sizes.

Samples with label -1 (unknown) are left out of every score. Cluster -1 (noise) is never paired with
a class, so its samples lower the accuracy; NMI, ARI and AMI treat noise as one more cluster, as
scikit-learn does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import scipy  # its modules are imported on first use
from einops import rearrange
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int64]


def contingency(
    labels: ArrayLike,
    clusters: ArrayLike,
    n_classes: int | None = None,
    n_clusters: int | None = None,
) -> Ints:
    """Count how many samples of each class fall into each cluster, `[n_classes, n_clusters]` int64.

    None for the number of classes or clusters means the largest label or cluster plus 1. Unknown
    labels (-1) and noise (cluster -1) are not counted.

    Example:
        >>> contingency([0, 0, 1, -1], [1, 1, 0, 0]).tolist()
        [[0, 2], [1, 0]]
    """
    labels, clusters = _known(labels, clusters)
    rows = int(labels.max()) + 1 if n_classes is None else n_classes
    columns = int(clusters.max()) + 1 if n_clusters is None else n_clusters
    if labels.max() >= rows or clusters.max() >= columns:
        raise ValueError(
            f"labels go up to {labels.max()} and clusters up to {clusters.max()}; expected less "
            f"than n_classes = {rows} and n_clusters = {columns}: raise n_classes or n_clusters"
        )
    cells = (labels * columns + clusters)[clusters >= 0]
    return np.bincount(cells, minlength=rows * columns).reshape(rows, columns)


def match(labels: ArrayLike, clusters: ArrayLike) -> dict[int, int]:
    """Pair clusters with classes one to one so that most samples agree (Hungarian method).

    The result maps clusters to classes. With more clusters than classes, it lacks unpaired
    clusters.

    Example:
        >>> match([0, 0, 1], [1, 1, 0])
        {1: 0, 0: 1}
    """
    classes, columns = scipy.optimize.linear_sum_assignment(
        contingency(labels, clusters), maximize=True
    )
    return {int(k): int(c) for c, k in zip(classes, columns, strict=True)}


def accuracy(labels: ArrayLike, clusters: ArrayLike) -> float:
    """Compute the clustering accuracy under the best one-to-one pairing of clusters and classes.

    The accuracy is the largest `mean_i [m(cluster_i) = label_i]` over all one-to-one pairings `m`.
    The numbers of classes and clusters may differ.

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
    paired = table[scipy.optimize.linear_sum_assignment(table, maximize=True)].sum()
    return float(paired / (np.asarray(labels) >= 0).sum())


@dataclass(frozen=True)
class Metric:
    """A score of clusters by labels; higher is better, and 1 is a perfect match."""

    name: str  # the heading of its column
    description: str
    compute: Callable[[Ints, Ints], float]  # from known labels and clusters, `[n]` each


def _from_sklearn(function: str) -> Callable[[Ints, Ints], float]:
    def compute(labels: Ints, clusters: Ints) -> float:
        from sklearn import metrics

        return float(getattr(metrics, function)(labels, clusters))

    return compute


METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "acc": Metric("ACC", "accuracy (Hungarian)", accuracy),
        "nmi": Metric(
            "NMI", "normalized mutual information", _from_sklearn("normalized_mutual_info_score")
        ),
        "ari": Metric("ARI", "adjusted Rand index", _from_sklearn("adjusted_rand_score")),
        "ami": Metric(
            "AMI", "adjusted mutual information", _from_sklearn("adjusted_mutual_info_score")
        ),
    }
)
"""Key in `metrics.json` -> metric, in the order of the columns of every table of scores."""


def clustering_scores(labels: ArrayLike | None, clusters: ArrayLike) -> dict[str, float | None]:
    """Compute every score in `METRICS`: Hungarian accuracy, NMI, ARI and AMI.

    Args:
        labels: `[n]` integers, -1 where unknown; None if all are unknown.
        clusters: `[n]` integers from 0, -1 for noise.

    Returns:
        A dict with the keys of `METRICS`; all values are None if no label is known.

    Example:
        >>> scores = clustering_scores([0, 0, 1, 1], [1, 1, 0, 0])
        >>> scores["acc"], scores["ari"]
        (1.0, 1.0)
    """
    if labels is None or not (np.asarray(labels) >= 0).any():
        return dict.fromkeys(METRICS)
    known = _known(labels, clusters)
    return {key: metric.compute(*known) for key, metric in METRICS.items()}


def cluster_sizes(clusters: ArrayLike, n_clusters: int) -> Ints:
    """Count the samples in each cluster, `[..., n_clusters]` int64.

    The samples of `clusters` `[..., n]` are on the last axis, and each entry of the leading axes
    (such as heads) is counted separately.

    Example:
        >>> cluster_sizes([[0, 0, 2], [1, 1, 1]], 3).tolist()
        [[2, 0, 1], [0, 3, 0]]
    """
    clusters = np.asarray(clusters, np.int64)
    if clusters.size and not 0 <= clusters.min() <= clusters.max() < n_clusters:
        raise ValueError(
            f"clusters go from {clusters.min()} to {clusters.max()}; expected 0 to "
            f"{n_clusters - 1} because n_clusters is {n_clusters}: renumber the clusters or raise "
            "n_clusters"
        )
    flat = rearrange(clusters, "... sample -> (...) sample")
    offsets = np.arange(len(flat))[:, None] * n_clusters
    counts = np.bincount((flat + offsets).ravel(), minlength=len(flat) * n_clusters)
    return counts.reshape(*clusters.shape[:-1], n_clusters)


def effective_clusters(sizes: ArrayLike) -> NDArray[np.float64]:
    """Return `exp(entropy(sizes))` of sizes `[..., n_clusters]`, the effective number of clusters.

    It is 1 if all samples are in one cluster, `n_clusters` if all clusters have the same size, and
    0 if there are no samples.

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
    """Return whether the effective number of clusters is below half of all clusters.

    Naturally imbalanced data does not count as collapsed: with sizes in geometric progression, the
    largest cluster may be 20 times the smallest. A head that assigns most samples to a few clusters
    counts as collapsed.

    Example:
        >>> collapsed([[10, 10, 10, 10], [40, 0, 0, 0]]).tolist()
        [False, True]
    """
    return effective_clusters(sizes) < 0.5 * np.asarray(sizes).shape[-1]


def _known(labels: ArrayLike, clusters: ArrayLike) -> tuple[Ints, Ints]:
    """Check labels and clusters; return the samples with a known label as int64."""
    labels, clusters = np.asarray(labels), np.asarray(clusters)
    for name, values in (("labels", labels), ("clusters", clusters)):
        if values.dtype.kind not in "iu":
            raise TypeError(
                f"{name} have dtype {values.dtype}; expected integers: replace names by numbers, "
                "for example with np.unique(..., return_inverse=True)"
            )
    if labels.ndim != 1 or labels.shape != clusters.shape:
        raise ValueError(
            f"labels have shape {labels.shape} and clusters {clusters.shape}; expected two vectors "
            "of equal length"
        )
    if not (labels >= 0).any():
        raise ValueError("no label is known (all are negative); expected a label of 0 or more")
    if labels.min() < -1 or clusters.min() < -1:
        raise ValueError(
            f"the smallest label is {labels.min()} and the smallest cluster {clusters.min()}; "
            "expected at least -1 (an unknown label, a cluster of noise)"
        )
    known = labels >= 0
    return labels[known].astype(np.int64), clusters[known].astype(np.int64)


def rightly_placed(labels: ArrayLike, clusters: ArrayLike) -> NDArray[np.bool_]:
    """Return whether each sample's cluster is paired with its class by `match`.

    The result `[n]` is False for unknown labels (-1), for noise (-1), and in clusters without a
    class.

    Example:
        >>> rightly_placed([0, 0, 1, 1], [1, 1, 0, 1]).tolist()
        [True, True, True, False]
    """
    labels, clusters = np.asarray(labels), np.asarray(clusters)
    partner = np.full(clusters.max() + 2, -2)  # of each cluster; noise (-1) uses the last entry
    for cluster, label in match(labels, clusters).items():
        partner[cluster] = label
    return partner[clusters] == labels
