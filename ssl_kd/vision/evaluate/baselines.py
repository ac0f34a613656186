"""Baselines for learned clusters: k-means and spectral clustering of the embeddings."""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ssl_kd.vision.evaluate.sample import in_range, random_rows


@dataclass(frozen=True)
class Baseline:
    """Clusters found by a standard method."""

    name: str
    clusters: NDArray[np.int64] | None  # `[n]`, of the training samples; None: it did not run
    test_clusters: NDArray[np.int64] | None = None  # `[m]`, of the held-out samples
    note: str | None = None  # a deviation from the standard method, or why it did not run
    seconds: float = 0.0


def kmeans(
    x: NDArray,
    n_clusters: int,
    seed: int = 0,
    n_init: int = 10,
    *,
    test_x: NDArray | None = None,
    max_rows: int = 200_000,
) -> Baseline:
    """Run scikit-learn's k-means on `x` `[n, d]` and keep the start with the lowest inertia.

    Held-out rows `test_x` `[m, d]` are assigned to the nearest center. With more than `max_rows`
    rows, mini-batch k-means runs instead, and the note says so.
    """
    from sklearn.cluster import KMeans, MiniBatchKMeans
    from sklearn.exceptions import ConvergenceWarning

    start = time.perf_counter()
    x, *test = in_range(x, test_x)
    large = len(x) > max_rows
    method = MiniBatchKMeans if large else KMeans
    model = method(n_clusters, random_state=seed).set_params(n_init=n_init)
    with warnings.catch_warnings():
        # With fewer distinct samples than clusters, some clusters stay empty.
        warnings.filterwarnings("ignore", "Number of distinct clusters", ConvergenceWarning)
        clusters = np.asarray(model.fit_predict(x), np.int64)
    held = np.asarray(model.predict(test[0]), np.int64) if test else None
    note = f"mini-batch k-means, used for more than {max_rows} samples" if large else None
    return Baseline("k-means", clusters, held, note, time.perf_counter() - start)


def spectral(
    x: NDArray,
    n_clusters: int,
    seed: int = 0,
    n_neighbors: int = 20,
    max_rows: int = 20_000,
    *,
    test_x: NDArray | None = None,
) -> Baseline:
    """Run spectral clustering on the symmetrized graph of cosine nearest neighbors of `x` `[n, d]`.

    As in scikit-learn, each sample counts as its own first neighbor. With more than `max_rows`
    rows, a random subset of them is clustered, and the note says so. The other rows, and held-out
    rows `test_x` `[m, d]`, are assigned the majority cluster of their neighbors in the subset.

    References:
        von Luxburg, "A Tutorial on Spectral Clustering", 2007.
    """
    from sklearn.cluster import SpectralClustering
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.preprocessing import normalize

    name = "spectral clustering"
    if n_clusters >= min(len(x), max_rows):
        return Baseline(name, None, note=f"not run: {n_clusters} clusters for {len(x)} samples")
    start = time.perf_counter()
    unit, *test = (np.asarray(normalize(part)) for part in in_range(x, test_x))
    rows = random_rows(len(x), max_rows, seed)
    n_neighbors = min(n_neighbors, len(rows))
    model = SpectralClustering(
        n_clusters, affinity="nearest_neighbors", n_neighbors=n_neighbors, random_state=seed
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        labels = np.asarray(model.fit_predict(unit[rows]), np.int64)
    broken = any("not fully connected" in str(w.message) for w in caught)

    voters = KNeighborsClassifier(n_neighbors, algorithm="brute").fit(unit[rows], labels)
    clusters = labels
    if len(rows) < len(x):
        clusters = np.asarray(voters.predict(unit), np.int64)
        clusters[rows] = labels
    held = np.asarray(voters.predict(test[0]), np.int64) if test else None
    notes = ["the neighbor graph is not connected"] if broken else []
    if len(rows) < len(x):
        notes.append(f"fitted on {len(rows)} random samples; neighbors vote for all others")
    note = "; ".join(notes) or None
    return Baseline(name, clusters, held, note, time.perf_counter() - start)


BASELINES: dict[str, Callable[..., Baseline]] = {
    "k-means": kmeans,
    "spectral clustering": spectral,
}
"""Name in the tables -> method, called with `x`, the number of clusters, a seed, and `test_x=`."""
