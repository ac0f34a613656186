"""The answer: what partitions of many families agree on, none of which is safe alone.

k-means is at home on directions, spectral clustering on manifolds, communities on features of
photographs, leaves of a density tree on pixels: on any other features each of them can be twenty
points behind the best one. Their consensus rarely is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.sparse.linalg import eigsh
from threadpoolctl import threadpool_limits

from ssl_kd.graph.criterion import Graph, Ints, one_hot
from ssl_kd.graph.kmeans import kmeans
from ssl_kd.graph.layout import density_leaves, density_peaks, low_dimensional
from ssl_kd.graph.levels import MANY, communities, in_order
from ssl_kd.graph.spectral import on_sphere, spectral_coordinates

Rows = NDArray[np.float32]

# An answer whose entropy is below this share of log K is of uneven clusters, and families that
# prefer even ones still cut the large: then others vote. Chosen with families of sets left out, as
# `benchmarks.regret` does it.
EVEN = 0.98
POWERS, MIDDLE_POWER = (0.0, 0.3, 0.5), (0.3,)  # of the entropy in what communities maximise
WIDER = 1.25  # times K eigenvectors, for a second k-means
DIMENSIONS = (8, 4)
DIFFUSION_STEPS = 10
STARTS = 3
VOTES = 5  # rounds at most
DENSE = 400  # joint clusters whose eigenvectors a dense solver finds sooner
PEAKS = "density peaks"


@dataclass(frozen=True)
class View:
    """One way to look at the samples.

    Attributes:
        rows: `[n, d]` float32, for k-means; None: only the graphs are looked at.
        graphs: of neighbors, by their number.
    """

    rows: Rows | None
    graphs: Mapping[int, sp.csr_matrix]


@dataclass(frozen=True)
class Crowd:
    """An answer, and the partitions that voted for it.

    Attributes:
        clusters: `[n]` int64, at most K clusters, numbered in the order of their first samples.
        voters: partitions `[n]` by name, each "family: what it saw".
        others: those that did not vote, likewise.
        evenness: entropy of the consensus of those that vote where clusters are even, as a share of
            log K.
    """

    clusters: Ints
    voters: dict[str, Ints]
    others: dict[str, Ints]
    evenness: float

    def agreement(self) -> dict[str, float]:
        """Mean share of samples that a family's partitions put where the answer does."""
        found: dict[str, list[float]] = {}
        for name, clusters in {**self.voters, **self.others}.items():
            same = float(np.mean(aligned(clusters, self.clusters) == self.clusters))
            found.setdefault(name.split(":")[0], []).append(same)
        return {family: float(np.mean(shares)) for family, shares in found.items()}


def n_partitions(n_clusters: int) -> int:
    """How many partitions there are: fewer where each of them takes long."""
    return 25 if n_clusters >= MANY else 37


def ask_crowd(
    cosine: View,
    euclidean: View,
    whitened: View,
    n_clusters: int,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Crowd:
    """Partitions of all families, and their consensus; it draws from fixed seeds only.

    Args:
        cosine: rows of length 1; graphs of 10, 15 and 20 neighbors.
        euclidean: centred rows; the graph of 15 neighbors.
        whitened: the graph of 15 neighbors by half-whitened components.
        n_clusters: K, at least 2.
        progress: called with (partitions done, partitions).
    """
    found, total = dict[str, Ints](), n_partitions(n_clusters)
    # Small products, which several threads would only wait for each other in.
    with threadpool_limits(1):
        for name, clusters in _candidates(cosine, euclidean, whitened, n_clusters):
            found[name] = in_order(clusters)
            progress(len(found), total)
        even = voters(found, even=True)
        clusters = consensus([*even.values()], n_clusters)
        share = np.bincount(clusters) / len(clusters)
        evenness = float(-(share * np.log(np.maximum(share, 1e-12))).sum() / np.log(n_clusters))
        if evenness < EVEN:
            even = voters(found, even=False)
            clusters = consensus([*even.values()], n_clusters)
        others = {name: c for name, c in found.items() if name not in even}
        return Crowd(in_order(clusters), even, others, evenness)


def voters(found: Mapping[str, Ints], even: bool) -> dict[str, Ints]:
    """Those of all partitions that vote where clusters are even, or where they are not.

    All but the peaks; or the peaks and the communities at the highest power of the entropy, which
    have no preference for clusters of one size.
    """
    if even:
        return {name: c for name, c in found.items() if not name.startswith(PEAKS)}
    highest = max(power for power in POWERS if any(name.endswith(f", {power}") for name in found))
    return {
        name: c
        for name, c in found.items()
        if name.startswith(PEAKS) or name.endswith(f", {highest}")
    }


def _candidates(
    cosine: View, euclidean: View, whitened: View, n_clusters: int
) -> Iterator[tuple[str, Ints]]:
    k = n_clusters
    many = k >= MANY
    starts, powers = (1, MIDDLE_POWER) if many else (STARTS, POWERS)
    assert cosine.rows is not None and euclidean.rows is not None
    directions = euclidean.rows / np.maximum(
        np.linalg.norm(euclidean.rows, axis=1, keepdims=True), 1e-12
    )
    together = (cosine.graphs[15] + euclidean.graphs[15] + whitened.graphs[15]).tocsr()
    graphs = {
        "cosine, 10": cosine.graphs[10],
        "cosine, 20": cosine.graphs[20],
        "euclidean": euclidean.graphs[15],
        "all views": together,
    }
    rows = {"cosine": cosine.rows, "centred": directions, "euclidean": euclidean.rows}
    for name, x in rows.items():
        yield f"k-means: {name}", kmeans(x, k, 0, n_init=starts)
    for name, graph in graphs.items():
        vectors = spectral_coordinates(graph, int(WIDER * k) + 1)
        yield f"spectral: {name}", kmeans(on_sphere(vectors[:, :k]), k, 0, n_init=starts)
        if not many:
            yield f"spectral: {name}, wider", kmeans(on_sphere(vectors), k, 0, n_init=starts)
        for power, clusters in zip(powers, communities(Graph(graph), k, powers), strict=True):
            yield f"communities: {name}, {power}", clusters
    for name, graph in {"cosine": cosine.graphs[15], "all views": together}.items():
        yield f"diffused k-means: {name}", kmeans(_diffused(graph, directions), k, 0, n_init=starts)
    for name, view in {"cosine": cosine, "euclidean": euclidean}.items():
        for dim in DIMENSIONS:
            places = low_dimensional(view.graphs[15], dim, seed=dim)
            yield f"layout: {name}, {dim}", kmeans(places, k, 0, n_init=starts)
            yield f"density leaves: {name}, {dim}", density_leaves(places, k)
            yield f"{PEAKS}: {name}, {dim}", density_peaks(places, k)


def _diffused(graph: Any, rows: Rows) -> Rows:
    """Rows after some steps of the lazy random walk: each becomes more like its neighbors."""
    degree = np.maximum(np.asarray(graph.sum(1)).reshape(-1, 1), 1e-12)
    for _ in range(DIFFUSION_STEPS):
        rows = (rows + (graph @ rows) / degree) / 2
    return rows


def consensus(partitions: Sequence[Ints], n_clusters: int) -> Ints:
    """The partition that others agree on most: spectral clustering of their joint assignments.

    Each partition is then matched to it one to one, and the majority decides, until nothing moves.

    Args:
        partitions: `[n]` int64 each, from 0 without gaps; any numbers of clusters.
        n_clusters: K of the answer, at most n.

    References:
        Strehl & Ghosh, Cluster ensembles, 2002; Fern & Brodley, Solving cluster ensemble problems
        by bipartite graph partitioning, 2004.
    """
    n = len(partitions[0])
    joint: Any = sp.hstack([one_hot(c, int(c.max()) + 1) for c in partitions]).tocsr()
    joint = joint @ sp.diags_array(1 / np.sqrt(np.asarray(joint.sum(0)).ravel()))
    columns = joint.shape[1]
    width = min(n_clusters, columns)
    products = (joint.T @ joint).astype(np.float64)
    if columns <= max(DENSE, 2 * width):
        vectors = np.linalg.eigh(products.toarray()).eigenvectors[:, -width:]
    else:
        vectors = eigsh(products, width, v0=np.random.default_rng(0).random(columns))[1]
    places = on_sphere(np.asarray(joint @ vectors, np.float32))
    answer = kmeans(places, n_clusters, 0, n_init=STARTS)
    k = int(answer.max()) + 1
    for _ in range(VOTES):
        votes = np.zeros((n, k))
        for clusters in partitions:
            votes[np.arange(n), aligned(clusters, answer)] += 1
        votes[np.arange(n), answer] += 0.5  # what is undecided stays
        better = votes.argmax(1)
        if (better == answer).all() or len(np.unique(better)) < k:
            break
        answer = better
    return answer


def aligned(clusters: Ints, answer: Ints) -> Ints:
    """Clusters `[n]` renamed after those of the answer `[n]` that they share most samples with.

    One to one by the Hungarian method; clusters that are left over go where most of theirs are.
    """
    k, size = int(answer.max()) + 1, int(clusters.max()) + 1
    shared = np.bincount(clusters * k + answer, minlength=size * k).reshape(size, k)
    names = shared.argmax(1)
    rows, columns = linear_sum_assignment(shared, maximize=True)
    names[rows] = columns
    return names[clusters]
