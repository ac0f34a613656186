"""Define the methods that `benchmarks.regret` compares: ours, and those of other packages.

    pip install evoc igraph leidenalg umap-learn

No method is tuned. k-means has ten starts. The graphs of Leiden (15 neighbors) and of spectral
clustering (20) are unweighted and by Euclidean distance, which orders rows of unit length like
cosine. Leiden's resolution is found by bisection if K is given, and is 1 (modularity) otherwise.
UMAP compares rows of unit length by cosine, and others by Euclidean distance. HDBSCAN gets 50
principal components.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import HDBSCAN, AgglomerativeClustering, KMeans, SpectralClustering
from sklearn.datasets import make_blobs
from sklearn.decomposition import PCA
from sklearn.neighbors import KNeighborsClassifier, NearestNeighbors
from sklearn.preprocessing import normalize

from ssl_kd import MultiHeadClusterer
from ssl_kd.vision import evaluate

OURS = "ssl_kd"
STARTS: Any = 10  # scikit-learn declares n_init as a string only


def _kmeans(x: NDArray, n_clusters: Any, seed: int) -> Any:
    return evaluate.kmeans(x, n_clusters, seed).clusters


def _spectral(x: NDArray, n_clusters: Any, seed: int) -> NDArray:
    model = SpectralClustering(
        n_clusters,
        affinity="nearest_neighbors",
        n_neighbors=min(20, len(x)),
        random_state=seed,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Graph is not fully connected")
        return model.fit_predict(x)


def _evoc(x: NDArray, n_clusters: Any, seed: int) -> NDArray:
    from evoc import EVoC  # pyright: ignore[reportMissingImports]

    return EVoC(approx_n_clusters=n_clusters, random_state=seed).fit_predict(x)


def _leiden(x: NDArray, n_clusters: Any, seed: int) -> NDArray:
    import igraph  # pyright: ignore[reportMissingImports]
    import leidenalg  # pyright: ignore[reportMissingImports]

    model = NearestNeighbors(n_neighbors=min(15, len(x) - 1)).fit(x)
    near = model.kneighbors(return_distance=False)
    edges = np.stack([np.repeat(np.arange(len(x)), near.shape[1]), near.ravel()], 1)
    graph = igraph.Graph(len(x), np.unique(np.sort(edges, 1), axis=0).tolist())

    def communities(resolution: float) -> NDArray:
        kind = leidenalg.RBConfigurationVertexPartition
        best = leidenalg.find_partition(graph, kind, resolution_parameter=resolution, seed=seed)
        return np.array(best.membership)

    if n_clusters is None:
        return communities(1.0)
    low, high, partitions = -3.0, 3.0, []
    for _ in range(20):
        exponent = (low + high) / 2
        partitions.append(communities(10**exponent))
        k = partitions[-1].max() + 1
        if k == n_clusters:
            break
        low, high = (exponent, high) if k < n_clusters else (low, exponent)
    return min(partitions, key=lambda clusters: abs(clusters.max() + 1 - n_clusters))


def _hdbscan(x: NDArray, n_clusters: Any, seed: int) -> NDArray:
    if min(x.shape) > 50:
        x = PCA(50, random_state=seed).fit_transform(x)
    return HDBSCAN(copy=True).fit_predict(x)  # pyright: ignore[reportArgumentType]


def _umap(x: NDArray, seed: int) -> NDArray:
    from umap import UMAP  # pyright: ignore[reportMissingImports]

    options = {"n_neighbors": min(15, len(x) - 1), "n_components": min(10, len(x) - 2)}
    metric = "cosine" if np.allclose(np.linalg.norm(x, axis=1), 1, atol=1e-3) else "euclidean"
    return UMAP(metric=metric, min_dist=0.0, random_state=seed, **options).fit_transform(x)


def _umap_kmeans(x: NDArray, n_clusters: Any, seed: int) -> NDArray:
    return KMeans(n_clusters, n_init=STARTS, random_state=seed).fit_predict(_umap(x, seed))


def _umap_hdbscan(x: NDArray, n_clusters: Any, seed: int) -> NDArray:
    size = max(5, len(x) // 100)
    return HDBSCAN(size, copy=True).fit_predict(_umap(x, seed))  # pyright: ignore[reportArgumentType]


def _ward(x: NDArray, n_clusters: Any, seed: int) -> NDArray:
    return AgglomerativeClustering(n_clusters).fit_predict(x)


def _ours(x: NDArray, n_clusters: Any, seed: int) -> NDArray:
    return MultiHeadClusterer(n_clusters, random_state=seed).fit(x).labels_


@dataclass(frozen=True)
class Method:
    """A clustering method."""

    title: str
    run: Callable[[NDArray, int | None, int], NDArray]  # embeddings, K, seed -> clusters, -1: noise
    takes_k: bool = True
    finds_k: bool = True  # whether K can be None
    packages: tuple[str, ...] = ()


METHODS = {
    "kmeans": Method("k-means", _kmeans, finds_k=False),
    "spectral": Method("spectral clustering", _spectral, finds_k=False),
    "evoc": Method("EVoC", _evoc, packages=("evoc",)),
    "leiden": Method("Leiden", _leiden, packages=("igraph", "leidenalg")),
    "hdbscan": Method("HDBSCAN", _hdbscan, takes_k=False),
    "umap_kmeans": Method("UMAP + k-means", _umap_kmeans, finds_k=False, packages=("umap",)),
    "umap_hdbscan": Method("UMAP + HDBSCAN", _umap_hdbscan, takes_k=False, packages=("umap",)),
    "ward": Method("Ward", _ward, finds_k=False),
    OURS: Method("**ssl_kd**", _ours),
}


def variant(settings: str) -> Method:
    """Return our method with other settings, such as `method=heads,n_heads=9`.

    Raises:
        ValueError: If a part of `settings` is not NAME=VALUE.
    """
    pairs = [part.partition("=") for part in settings.split(",")]
    if not all(name and value for name, _, value in pairs):
        raise ValueError(f"the settings {settings!r} are not NAME=VALUE,NAME=VALUE")
    values: dict[str, Any] = {name: number_or_text(value) for name, _, value in pairs}

    def run(x: NDArray, n_clusters: Any, seed: int) -> NDArray:
        return MultiHeadClusterer(n_clusters, random_state=seed, **values).fit(x).labels_

    return Method(f"**{OURS}**, {settings}", run, finds_k=False)


def number_or_text(text: str) -> int | float | str:
    """Return a number if the text is one, else the text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def installed(methods: Mapping[str, Method]) -> dict[str, Method]:
    """Return the installed methods; print the others to stderr."""
    missing = {name: [p for p in m.packages if not find_spec(p)] for name, m in methods.items()}
    for name, packages in missing.items():
        if packages:
            print(f"{name} is skipped: pip install {' '.join(packages)}", file=sys.stderr)
    return {name: method for name, method in methods.items() if not missing[name]}


def warm_up(method: Method) -> None:
    """Run a method once on little data, so that imports and compilation are not timed."""
    x = normalize(make_blobs(1000, 32, centers=5, random_state=0)[0])
    method.run(np.asarray(x, np.float32), 5, 0)


def without_noise(x: NDArray, clusters: NDArray) -> NDArray[np.int64]:
    """Assign noise (-1) to the majority of its five nearest clustered samples by cosine.

    Returns int64 `[n]`, all 0 if everything is noise.
    """
    clusters = np.asarray(clusters, np.int64)
    noise = clusters < 0
    if noise.all():
        return np.zeros_like(clusters)
    if noise.any():
        k = min(5, int((~noise).sum()))
        voters = KNeighborsClassifier(k, metric="cosine").fit(x[~noise], clusters[~noise])
        clusters = clusters.copy()
        clusters[noise] = voters.predict(x[noise])
    return clusters
