"""Baselines for learned clusters: k-means and spectral clustering of the embeddings."""

import time
import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ssl_kd.evaluate.sample import in_range, random_rows


@dataclass(frozen=True)
class Baseline:
    """Clusters found by a standard method.

    Args:
        name: Name of the method in tables.
        clusters: `[n]` int64, cluster of each training sample; None if the method did not run.
        test_clusters: `[m]` int64, cluster of each held-out sample; None without held-out samples.
        note: One sentence on deviations from the standard method, or the reason why the method did
            not run; None if there is nothing to report.
        seconds: Running time.
    """

    name: str
    clusters: NDArray[np.int64] | None
    test_clusters: NDArray[np.int64] | None = None
    note: str | None = None
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
    """Run scikit-learn's k-means and keep the start with the lowest inertia.

    Args:
        x: `[n, d]` embeddings.
        n_clusters: Number of clusters, at most n.
        seed: Seed of the starts.
        n_init: Number of starts.
        test_x: `[m, d]` held-out embeddings, assigned to the nearest center.
        max_rows: With more rows than this, mini-batch k-means runs instead, and the note says so.
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
    """Run spectral clustering on the symmetrized graph of cosine nearest neighbors.

    Args:
        x: `[n, d]` embeddings.
        n_clusters: Number of clusters, below n.
        seed: Seed of the eigensolver and of k-means on the eigenvectors.
        n_neighbors: Neighbors per sample in the graph; as in scikit-learn, each sample counts as
            its own first neighbor.
        max_rows: With more rows than this, a random subset of `max_rows` rows is clustered, and the
            note says so. The other rows, and held-out rows, are assigned the majority cluster of
            their neighbors in the subset.
        test_x: `[m, d]` held-out embeddings.

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
