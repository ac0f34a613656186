"""Combine partitions from many clustering methods into a consensus.

No method is best on all data. k-means works best on directions, spectral clustering on manifolds,
community detection on embeddings of photos, and the leaves of a density tree on pixels. Elsewhere,
each of them can be twenty points less accurate than the best one; the consensus rarely is.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any, Literal

import numpy as np
import scipy  # its modules are imported on first use
import scipy.sparse as sp
from numpy.typing import NDArray
from scipy.sparse.linalg import ArpackError, eigsh
from threadpoolctl import threadpool_limits

from ssl_kd.vision.graph.cells import kmeans_by_cells
from ssl_kd.vision.graph.criterion import (
    Graph,
    Ints,
    adjusted_rand_index,
    one_hot,
    refine,
    row_blocks,
)
from ssl_kd.vision.graph.kmeans import kmeans
from ssl_kd.vision.graph.layout import Density, low_dimensional
from ssl_kd.vision.graph.levels import MANY, communities, in_order
from ssl_kd.vision.graph.spectral import on_sphere, spectral_coordinates

Sizes = Literal["even", "any"]
COSINE, EUCLIDEAN = "cosine", "euclidean"

# Powers of the entropy in the value that communities maximize.
POWERS, MIDDLE_POWER = (0.0, 0.3, 0.5), (0.3,)
WIDER = 1.25  # times K eigenvectors, for k-means
DIMENSIONS = (8, 4)
VERY_MANY = 200  # clusters, beyond which the cost of spectral methods is prohibitive
STARTS = 3  # of k-means on coordinates
OWN_STARTS, OWN_ITERATIONS = 10, 300  # of k-means as a family of its own
TIE = 1e-6  # vote for the present cluster of a sample
VOTES = 5  # rounds at most
DENSE = 400  # up to so many joint clusters a dense eigensolver is faster
PEAKS = "density peaks"
MASS = "density mass"
HEADS = "heads"
MIN_DISTANCE = 1e-9  # between clusters that some partition separates
# If neighbors by direction are so many times as far as those by distance (mean square), and
# families by direction agree so much less among themselves (adjusted Rand index), they lose their
# vote (docs/results.md, "Where lengths matter").
FARTHER, LESS_AGREED = 1.5, 0.1
OF_GRAPHS = "spectral", "communities", "layout", "density leaves"
COMPARED = ("k-means", *OF_GRAPHS)
# In a small table, whose largest size this is, a cluster has hardly more rows than a neighborhood:
# graphs are trusted only if their families agree so much (adjusted Rand index).
FEW_ROWS = 200
FEW_COLUMNS = 32
TRUSTED = 0.87
LEAST_VARIANCE = 0.01  # added to the variances of a mixture; the data have 1 on average
EDGES = 2**18  # of which the lengths are in memory at once
LINKED = 2000  # samples, at most, of which all pairs are compared


@dataclass(frozen=True)
class View:
    """Features of the samples under one metric, and their neighbor graphs."""

    rows: NDArray[np.float32]  # `[n, d]`, input of k-means
    graphs: Mapping[int, sp.csr_matrix]  # by number of neighbors

    @cached_property
    def densities(self) -> list[Density]:
        """Densities of two layouts of the 15-neighbor graph, in 8 and in 4 dimensions."""
        with threadpool_limits(1):
            return [Density(low_dimensional(self.graphs[15], dim, seed=dim)) for dim in DIMENSIONS]


@dataclass(frozen=True)
class Candidate:
    """A partition of the samples that may vote in the consensus."""

    family: str  # name of the clustering method
    clusters: Ints  # `[n]`, numbered in the order of their first samples
    metric: str | None = None  # of the distances it was found by; None: of several
    any_size: bool = False  # whether the method finds clusters of any size; if not, it prefers even


@dataclass(frozen=True)
class Ensemble:
    """A consensus partition, and the partitions it was formed from."""

    clusters: Ints  # `[n]`, at most K, numbered in the order of their first samples
    candidates: list[Candidate]  # all partitions, including those that did not vote
    voters: list[Candidate]
    sizes: Sizes = "even"  # setting CLUSTER_SIZES, which says who votes and how votes are counted
    metrics: tuple[str, ...] = (COSINE, EUCLIDEAN)  # by which the candidates were found

    @classmethod
    def vote(
        cls, candidates: list[Candidate], n_clusters: int, sizes: Sizes = "even", **more: Any
    ) -> Ensemble:
        """Form the consensus of those candidates that vote for clusters of these sizes."""
        clusters = vote(candidates, sizes, n_clusters)
        return cls(clusters, candidates, voters(candidates, sizes), sizes, **more)

    def joined_by(self, heads: list[Candidate], n_clusters: int, *, alone: bool) -> Ensemble:
        """Return the consensus in which the partitions of heads vote as well, or `alone`."""
        everyone = [*self.candidates, *heads]
        if not alone:
            return Ensemble.vote(everyone, n_clusters, self.sizes, metrics=self.metrics)
        return replace(Ensemble.vote(heads, n_clusters), candidates=everyone, metrics=self.metrics)

    @property
    def by_all_methods(self) -> list[Candidate]:
        """The candidates of all methods that suit CLUSTER_SIZES, also if only the heads voted."""
        return voters(self.candidates, self.sizes)

    def other(self, n_clusters: int) -> Ensemble:
        """Return the consensus of the same candidates with the other choice of CLUSTER_SIZES."""
        sizes: Sizes = "any" if self.sizes == "even" else "even"
        return Ensemble.vote(self.candidates, n_clusters, sizes, metrics=self.metrics)

    @property
    def by_graphs(self) -> bool:
        """Whether partitions of neighbor graphs are among the candidates."""
        return any(candidate.family in OF_GRAPHS for candidate in self.candidates)


def agreement(candidates: Iterable[Candidate], answer: Ints) -> dict[str, float]:
    """Return each family's mean share of samples whose cluster agrees with `answer` `[n]`."""
    shares: dict[str, list[float]] = {}
    for candidate in candidates:
        same = float(np.mean(aligned(candidate.clusters, answer) == answer))
        shares.setdefault(candidate.family, []).append(same)
    return {family: float(np.mean(of_family)) for family, of_family in shares.items()}


def cluster_agreement(
    candidates: Iterable[Candidate], answer: Ints, n_clusters: int
) -> NDArray[np.float64]:
    """Return how well families agree with each cluster of `answer` `[n]`, 0 to 1, `[n_clusters]`.

    It is the best Jaccard overlap with a cluster of the family, averaged over families.
    """
    sizes = np.bincount(answer, minlength=n_clusters)
    best: dict[str, NDArray[np.float64]] = {}
    for candidate in candidates:
        of_candidate = np.bincount(candidate.clusters)
        cells = candidate.clusters * n_clusters + answer
        shared = np.bincount(cells, minlength=len(of_candidate) * n_clusters)
        shared = shared.reshape(-1, n_clusters)
        overlap = (shared / (of_candidate[:, None] + sizes - shared)).max(0)
        best[candidate.family] = np.maximum(best.get(candidate.family, 0.0), overlap)
    return np.mean(list(best.values()), axis=0)


def form_ensemble(
    cosine: View,
    euclidean: View,
    whitened: View,
    n_clusters: int,
    sizes: Sizes = "even",
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Ensemble:
    """Cluster samples into `n_clusters` (2 or more) with all methods, and form the consensus.

    With `sizes` `even`, methods vote that prefer clusters of similar sizes; with `any`, those that
    do not.

    `cosine` has rows of length 1 and graphs of 10, 15 and 20 neighbors; `euclidean` and `whitened`
    have centered rows and a graph of 15 neighbors. If the lengths of the rows matter, partitions by
    direction are replaced by others by distance; those of a small table are replaced by partitions
    without a graph, unless the graphs are trusted. `progress` is called with the numbers of
    finished and of all partitions.

    More than 200 clusters are searched by k-means, by communities that start from its clusters, and
    in one layout; lengths are not considered.
    """
    together = summed(cosine, euclidean, whitened)
    graphs = [(COSINE, cosine.graphs[10]), (COSINE, cosine.graphs[20])]
    graphs += [(EUCLIDEAN, euclidean.graphs[15]), (None, together)]
    directions = [(COSINE, cosine.rows), (None, on_sphere(euclidean.rows))]
    layouts = {COSINE: cosine, EUCLIDEAN: euclidean}
    metrics = COSINE, EUCLIDEAN
    with threadpool_limits(_threads(n_clusters)):
        if n_clusters > VERY_MANY:
            total = 6
            found = _of_very_many(directions, together, cosine, n_clusters)
        else:
            total = 26 if n_clusters >= MANY else 34
            found = _candidates(directions, graphs, layouts, n_clusters)
        candidates = list[Candidate]()
        for candidate in found:
            candidates.append(replace(candidate, clusters=in_order(candidate.clusters)))
            progress(len(candidates), total)
        if is_small(euclidean.rows) and not graphs_agree(candidates):
            metrics = (EUCLIDEAN,)
            candidates = _without_graph(euclidean.rows, n_clusters)
        elif n_clusters <= VERY_MANY and lengths_matter(candidates, cosine, euclidean):
            metrics = (EUCLIDEAN,)
            candidates = _by_distance(euclidean, whitened, n_clusters)
    return Ensemble.vote(candidates, n_clusters, sizes, metrics=metrics)


def summed(*views: View) -> sp.csr_matrix:
    """Return the sum of the 15-nearest-neighbor graphs of several views, `[n, n]`."""
    first, *others = (view.graphs[15] for view in views)
    return sum(others, first).tocsr()


def _threads(n_clusters: int) -> int | None:
    """Return the number of threads; None: all. Small products are faster with one."""
    return None if n_clusters > VERY_MANY else 1


def is_small(rows: NDArray) -> bool:
    """Return whether rows `[n, d]` are a small table: at most 200 rows and 32 columns."""
    return rows.shape[0] <= FEW_ROWS and rows.shape[1] <= FEW_COLUMNS


def graphs_agree(candidates: Iterable[Candidate]) -> bool:
    """Return whether the families of partitions of graphs find nearly the same clusters."""
    return mutual_agreement(c for c in candidates if c.family in OF_GRAPHS) >= TRUSTED


def lengths_matter(candidates: Iterable[Candidate], cosine: View, euclidean: View) -> bool:
    """Return whether partitions by direction are much less certain than those by distance.

    A direction lacks the length of a row. If groups differ in it, as on a map, neighbors by
    direction are far from each other, and each method cuts the directions elsewhere.
    """
    lengths = [_edge_length(view.graphs[15], euclidean.rows) for view in (cosine, euclidean)]
    if lengths[0] < FARTHER * lengths[1]:
        return False
    n_clusters = 1 + max(int(candidate.clusters.max()) for candidate in candidates)
    by_distance = Candidate("k-means", kmeans(euclidean.rows, n_clusters, 0), EUCLIDEAN)
    compared = [c for c in (*candidates, by_distance) if c.family in COMPARED]
    of_metric = {
        metric: mutual_agreement(c for c in compared if c.metric == metric)
        for metric in (COSINE, EUCLIDEAN)
    }
    return of_metric[EUCLIDEAN] - of_metric[COSINE] > LESS_AGREED


def _edge_length(graph: sp.csr_matrix, rows: NDArray[np.float32]) -> float:
    """Return the mean squared distance of samples that an edge joins."""
    edges = graph.tocoo()
    blocks = zip(
        *(np.array_split(nodes, 1 + edges.nnz // EDGES) for nodes in (edges.row, edges.col)),
        strict=True,
    )
    squares = [np.square(rows[a] - rows[b], dtype=np.float64).sum() for a, b in blocks]
    return sum(squares) / max(edges.nnz, 1)


def mutual_agreement(candidates: Iterable[Candidate]) -> float:
    """Return the adjusted Rand index of partitions of two families, averaged over all pairs."""
    scores: dict[tuple[str, str], list[float]] = {}
    for a, b in itertools.combinations(candidates, 2):
        if a.family != b.family:
            score = adjusted_rand_index(a.clusters, b.clusters)
            scores.setdefault((a.family, b.family), []).append(score)
    return fmean(fmean(of_pair) for of_pair in scores.values())


def vote(candidates: Iterable[Candidate], sizes: Sizes, n_clusters: int) -> Ints:
    """Return the consensus `[n]` of the candidates that vote for clusters of these sizes."""
    form = consensus if sizes == "even" else any_size_consensus
    with threadpool_limits(_threads(n_clusters)):
        return in_order(form(voters(candidates, sizes), n_clusters))


def voters(candidates: Iterable[Candidate], sizes: Sizes) -> list[Candidate]:
    """Return the candidates that vote for clusters of these sizes."""
    if sizes == "any":
        return [candidate for candidate in candidates if candidate.any_size]
    return [candidate for candidate in candidates if candidate.family not in (PEAKS, MASS)]


def _candidates(
    points: Sequence[tuple[str | None, NDArray]],
    graphs: Sequence[tuple[str | None, sp.csr_matrix]],
    layouts: Mapping[str, View],
    n_clusters: int,
    powers: Sequence[float] = POWERS,
) -> Iterator[Candidate]:
    """Yield partitions of points `[n, d]`, of graphs and of the layouts of views, by metric."""
    k = n_clusters
    starts, powers = (1, MIDDLE_POWER) if k >= MANY else (STARTS, powers)
    for metric, rows in points:
        yield Candidate("k-means", _own_kmeans(rows, k), metric)
    for metric, graph in graphs:
        vectors = on_sphere(spectral_coordinates(graph, int(WIDER * k) + 1))
        yield Candidate("spectral", kmeans(vectors, k, 0, n_init=starts), metric)
        for power, clusters in zip(powers, communities(Graph(graph), k, powers), strict=True):
            yield Candidate("communities", clusters, metric, any_size=power == max(powers))
    for metric, view in layouts.items():
        for density in view.densities:
            yield Candidate("layout", _layout_kmeans(density.places, k), metric)
            yield Candidate("density leaves", density.leaves(k), metric)
            yield Candidate(PEAKS, density.peaks(k), metric, any_size=True)
            yield Candidate(MASS, density.heaviest(k), metric, any_size=True)


def _own_kmeans(rows: NDArray, n_clusters: int) -> Ints:
    """Return the clusters of k-means as a family: the best of ten starts, or from merged cells."""
    if n_clusters >= MANY:
        return kmeans_by_cells(rows, n_clusters, 0)
    return kmeans(rows, n_clusters, 0, n_init=OWN_STARTS, max_iter=OWN_ITERATIONS)


def _layout_kmeans(places: NDArray, n_clusters: int) -> Ints:
    if n_clusters >= MANY:
        return kmeans_by_cells(places, n_clusters, 0)
    return kmeans(places, n_clusters, 0, n_init=STARTS)


def _of_very_many(
    points: Sequence[tuple[str | None, NDArray]],
    together: sp.csr_matrix,
    cosine: View,
    n_clusters: int,
) -> Iterator[Candidate]:
    """Yield partitions whose cost is low for hundreds of clusters."""
    graph = Graph(together)
    for metric, rows in points:
        clusters = _own_kmeans(rows, n_clusters)
        yield Candidate("k-means", clusters, metric)
        refined = refine(graph, clusters, n_clusters, *MIDDLE_POWER)
        yield Candidate("communities", refined, metric, any_size=True)
    density = Density(low_dimensional(cosine.graphs[15], DIMENSIONS[0], seed=0))
    yield Candidate("layout", _layout_kmeans(density.places, n_clusters), COSINE)
    yield Candidate("density leaves", density.leaves(n_clusters), COSINE, any_size=True)


def _by_distance(euclidean: View, whitened: View, n_clusters: int) -> list[Candidate]:
    """Return two or three partitions of each family, all by Euclidean distance."""
    views = euclidean, whitened
    points = [(EUCLIDEAN, view.rows) for view in views]
    graphs = [(EUCLIDEAN, graph) for graph in (*(v.graphs[15] for v in views), summed(*views))]
    layouts = {EUCLIDEAN: euclidean}
    found = _candidates(points, graphs, layouts, n_clusters, MIDDLE_POWER)
    return [replace(candidate, clusters=in_order(candidate.clusters)) for candidate in found]


def _without_graph(rows: NDArray[np.float32], n_clusters: int) -> list[Candidate]:
    """Return partitions of centered rows `[n, d]` by k-means, by Ward's method and by a mixture.

    None of them needs a neighbor graph, and in few rows all three find clusters of any size.
    """
    from sklearn.cluster import AgglomerativeClustering
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture

    mixture = GaussianMixture(
        n_clusters,
        covariance_type="diag",
        reg_covar=LEAST_VARIANCE,
        n_init=STARTS,
        random_state=0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        of_mixture = mixture.fit_predict(rows.astype(np.float64))
    partitions = {
        "k-means": kmeans(rows, n_clusters, 0, n_init=OWN_STARTS, max_iter=OWN_ITERATIONS),
        "Ward": AgglomerativeClustering(n_clusters).fit_predict(rows),
        "mixture": of_mixture,
    }
    return [
        Candidate(family, in_order(clusters), EUCLIDEAN, any_size=True)
        for family, clusters in partitions.items()
    ]


def consensus(candidates: Sequence[Candidate], n_clusters: int) -> Ints:
    """Return the consensus `[n]` of partitions from spectral clustering and majority votes.

    Each family has one vote, which its partitions share. The first consensus is a spectral
    clustering of the joint cluster assignments. Then the clusters of each partition are paired with
    those of the consensus, and each sample moves to the cluster with most votes. Clusters of each
    partition must be numbered without gaps. For more than 200 clusters the votes start from the
    partition that agrees most with the others.

    References:
        Strehl & Ghosh, Cluster ensembles, 2002; Fern & Brodley, Solving cluster ensemble problems
        by bipartite graph partitioning, 2004.
    """
    weights = weights_of(candidates)
    if n_clusters > VERY_MANY:
        answer = _most_agreed(candidates, weights)
    else:
        answer = _of_joint_clusters(candidates, weights, n_clusters)
    k = int(answer.max()) + 1
    for _ in range(VOTES):
        ballots = [aligned(candidate.clusters, answer) for candidate in candidates]
        better = _majority([*ballots, answer], [*weights, TIE], k)
        if (better == answer).all() or len(np.unique(better)) < k:
            break
        answer = better
    return answer


def _majority(ballots: Sequence[Ints], weights: Sequence[float], n_clusters: int) -> Ints:
    """Return the cluster with the largest total weight, `[n]`, of ballots `[n]` with weights."""
    blocks = []
    for rows in row_blocks(len(ballots[0]), n_clusters):
        votes = np.zeros((rows.stop - rows.start, n_clusters))
        for ballot, weight in zip(ballots, weights, strict=True):
            votes[np.arange(len(votes)), ballot[rows]] += weight
        blocks.append(votes.argmax(1))
    return np.concatenate(blocks)


def _of_joint_clusters(
    candidates: Sequence[Candidate], weights: NDArray[np.float64], n_clusters: int
) -> Ints:
    """Return a spectral clustering `[n]` of the clusters that samples share."""
    joint = _joint(candidates)
    of_columns = np.repeat(weights, [int(c.clusters.max()) + 1 for c in candidates])
    joint = joint @ sp.diags_array(np.sqrt(of_columns / np.asarray(joint.sum(0)).ravel()))
    columns = joint.shape[1]
    width = min(n_clusters, columns)
    products = (joint.T @ joint).astype(np.float64)
    vectors = None
    if columns > max(DENSE, 2 * width):
        with contextlib.suppress(ArpackError):  # for instance with repeated eigenvalues
            vectors = eigsh(products, width, v0=np.random.default_rng(0).random(columns))[1]
    if vectors is None:
        vectors = np.linalg.eigh(products.toarray()).eigenvectors[:, -width:]
    points = on_sphere(np.asarray(joint @ vectors, np.float32))
    return kmeans(points, n_clusters, 0, n_init=STARTS)


def _most_agreed(candidates: Sequence[Candidate], weights: NDArray[np.float64]) -> Ints:
    """Return the partition `[n]` with the largest adjusted Rand index with the others."""
    m = len(candidates)
    scores = np.zeros((m, m))
    for a, b in itertools.combinations(range(m), 2):
        score = adjusted_rand_index(candidates[a].clusters, candidates[b].clusters)
        scores[a, b] = scores[b, a] = score
    return candidates[int((scores @ weights).argmax())].clusters


def weights_of(candidates: Sequence[Candidate]) -> NDArray[np.float64]:
    """Return the weight of each candidate, so that those of each family sum to 1."""
    counts = Counter(candidate.family for candidate in candidates)
    return np.array([1 / counts[candidate.family] for candidate in candidates])


def any_size_consensus(candidates: Sequence[Candidate], n_clusters: int) -> Ints:
    """Return the consensus `[n]` of partitions from average linkage, with clusters of any size.

    The distance of two samples is the share of partitions that separate them. With more than 2,000
    samples, linkage uses 2,000 of them, including one of each cluster of each partition; the other
    samples then join the nearest clusters. There are fewer than K clusters if the partitions
    separate fewer groups of samples.

    References:
        Fred & Jain, Combining multiple clusterings using evidence accumulation, 2005.
    """
    joint = _joint(candidates)
    n = joint.shape[0]
    order = np.random.default_rng(0).permutation(n)
    firsts = [order[np.unique(c.clusters[order], return_index=True)[1]] for c in candidates]
    every = dict.fromkeys(np.concatenate([*firsts, order]).tolist())
    linked = np.sort(list(every)[:LINKED])
    rows = joint[linked]
    shared = (rows @ rows.T).toarray() / len(candidates)
    distances = scipy.spatial.distance.squareform(1 - shared, checks=False)
    tree = scipy.cluster.hierarchy.linkage(distances, "average")
    k = min(n_clusters, 1 + int((tree[:, 2] > MIN_DISTANCE).sum()))
    clusters = scipy.cluster.hierarchy.cut_tree(tree, k).ravel()
    if n == len(linked):
        return clusters
    members = one_hot(clusters, k)
    means = rows.T @ members @ sp.diags_array(1 / np.bincount(clusters))
    blocks = [(joint[block] @ means).toarray().argmax(1) for block in row_blocks(n, k)]
    answer = np.concatenate(blocks)
    answer[linked] = clusters
    return answer


def _joint(candidates: Sequence[Candidate]) -> Any:
    """Return the one-hot matrices of all partitions, concatenated to `[n, clusters]`."""
    return sp.hstack([one_hot(c.clusters, int(c.clusters.max()) + 1) for c in candidates]).tocsr()


def aligned(clusters: Ints, answer: Ints) -> Ints:
    """Renumber the clusters `[n]` to match those of `answer` `[n]`, paired to share most samples.

    An unpaired cluster gets the number of the `answer` cluster that shares most samples with it.
    """
    k, size = int(answer.max()) + 1, int(clusters.max()) + 1
    shared = np.bincount(clusters * k + answer, minlength=size * k).reshape(size, k)
    names = shared.argmax(1)
    rows, columns = scipy.optimize.linear_sum_assignment(shared, maximize=True)
    names[rows] = columns
    return names[clusters]
