"""The consensus of partitions by many methods, none of which is reliable alone.

k-means is good on directions, spectral clustering on manifolds, communities on features of
photographs, leaves of a density tree on pixels: on other features each of them can be twenty points
behind the best one. Their consensus rarely is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from scipy.cluster.hierarchy import cut_tree, linkage
from scipy.optimize import linear_sum_assignment
from scipy.sparse.linalg import ArpackError, eigsh
from scipy.spatial.distance import squareform
from scipy.special import entr
from threadpoolctl import threadpool_limits

from ssl_kd.graph.criterion import Graph, Ints, one_hot
from ssl_kd.graph.kmeans import kmeans
from ssl_kd.graph.layout import Density, low_dimensional
from ssl_kd.graph.levels import MANY, communities, in_order
from ssl_kd.graph.spectral import on_sphere, spectral_coordinates

Rows = NDArray[np.float32]
Kind = Literal["even", "between", "uneven"]

# Methods without a preference for even clusters tell how even the clusters are: the entropy of
# their answer, as a share of log K. From EVEN on all others vote with them; below UNEVEN the
# consensus has no such preference, either. Chosen by `benchmarks.regret` with families of sets left
# out; OF_TWO, in place of both for K = 2, was not fitted.
EVEN, UNEVEN, OF_TWO = 0.95, 0.9, 0.8
POWERS, MIDDLE_POWER = (
    (0.0, 0.3, 0.5),
    (0.3,),
)  # of the entropy in the value that communities maximize
WIDER = 1.25  # times K eigenvectors, for k-means
DIMENSIONS = (8, 4)
STARTS = 3
VOTES = 5  # rounds at most
DENSE = 400  # up to so many joint clusters a dense eigensolver is faster
PEAKS, MASS = "density peaks", "density mass"
MIN_DISTANCE = 1e-9  # between clusters that some partition separates
LINKED = 2000  # samples, at most, of which all pairs are compared


@dataclass(frozen=True)
class View:
    """A representation of the samples.

    Attributes:
        rows: `[n, d]` float32, for k-means.
        graphs: neighbor graphs by the number of neighbors.
    """

    rows: Rows
    graphs: Mapping[int, sp.csr_matrix]

    @cached_property
    def densities(self) -> list[Density]:
        """Densities of the graph of 15 neighbors, laid out in 8 and in 4 dimensions."""
        with threadpool_limits(1):
            return [Density(low_dimensional(self.graphs[15], dim, seed=dim)) for dim in DIMENSIONS]


@dataclass(frozen=True)
class Candidate:
    """A partition that may vote.

    Attributes:
        family: the kind of method.
        clusters: `[n]` int64, numbered in the order of their first samples.
        any_size: whether the method has no preference for clusters of one size.
    """

    family: str
    clusters: Ints
    any_size: bool = False


@dataclass(frozen=True)
class Ensemble:
    """A consensus, and the partitions that it was formed from.

    Attributes:
        clusters: `[n]` int64, at most K clusters, numbered in the order of their first samples.
        candidates: all partitions, including those that did not vote.
        evenness: entropy of the clusters that peaks and communities agree on, as a share of log K.
        kind: decides which candidates voted, and how.
    """

    clusters: Ints
    candidates: list[Candidate]
    evenness: float
    kind: Kind

    @property
    def voters(self) -> list[Candidate]:
        """The partitions that voted."""
        return voters(self.candidates, self.kind)


def agreement(candidates: Iterable[Candidate], answer: Ints) -> dict[str, float]:
    """Return by family the mean share of samples in the cluster of the answer `[n]`."""
    shares: dict[str, list[float]] = {}
    for candidate in candidates:
        same = float(np.mean(aligned(candidate.clusters, answer) == answer))
        shares.setdefault(candidate.family, []).append(same)
    return {family: float(np.mean(of_family)) for family, of_family in shares.items()}


def n_partitions(n_clusters: int) -> int:
    """Return the number of partitions of an ensemble: 34, or 26 from 60 clusters on."""
    return 26 if n_clusters >= MANY else 34


def form_ensemble(
    cosine: View,
    euclidean: View,
    together: sp.csr_matrix,
    n_clusters: int,
    progress: Callable[[int, int], object] = lambda done, total: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Ensemble:
    """Form partitions of all families, and their consensus, from fixed seeds.

    Args:
        cosine: rows of length 1; graphs of 10, 15 and 20 neighbors.
        euclidean: centred rows; the graph of 15 neighbors.
        together: the sum of the graphs of 15 neighbors in all views.
        n_clusters: K, at least 2.
        progress: called with (partitions done, partitions).
        should_stop: called after each partition; true forms the consensus of those so far.
    """
    candidates, total = list[Candidate](), n_partitions(n_clusters)
    # Small products are faster with one thread.
    with threadpool_limits(1):
        for candidate in _candidates(cosine, euclidean, together, n_clusters):
            candidates.append(replace(candidate, clusters=in_order(candidate.clusters)))
            progress(len(candidates), total)
            if should_stop():
                break
        clusters, evenness = candidates[0].clusters, 1.0
        if voters(candidates, "between"):
            clusters = vote(candidates, "between", n_clusters)
            shares = np.bincount(clusters) / len(clusters)
            evenness = float(entr(shares).sum() / np.log(n_clusters))
        if (kind := kind_of(evenness, n_clusters)) != "between":
            clusters = vote(candidates, kind, n_clusters)
        return Ensemble(in_order(clusters), candidates, evenness, kind)


def kind_of(evenness: float, n_clusters: int, uneven: float = UNEVEN, even: float = EVEN) -> Kind:
    """Return which candidates vote, and how, from the evenness of peaks and communities."""
    if n_clusters == 2:
        uneven = even = OF_TWO
    return "uneven" if evenness < uneven else "between" if evenness < even else "even"


def vote(candidates: Sequence[Candidate], kind: Kind, n_clusters: int) -> Ints:
    """Return the consensus `[n]` of the candidates that vote."""
    form = uneven_consensus if kind == "uneven" else consensus
    return form(voters(candidates, kind), n_clusters)


def voters(candidates: Iterable[Candidate], kind: Kind) -> list[Candidate]:
    """Return all but peaks and mass if `even`; else those of any size, mass only if `uneven`."""
    left_out = {"even": (PEAKS, MASS), "between": (MASS,), "uneven": ()}[kind]
    return [c for c in candidates if c.family not in left_out and (kind == "even" or c.any_size)]


def _candidates(
    cosine: View, euclidean: View, together: sp.csr_matrix, n_clusters: int
) -> Iterator[Candidate]:
    k = n_clusters
    starts, powers = (1, MIDDLE_POWER) if k >= MANY else (STARTS, POWERS)
    for rows in (cosine.rows, on_sphere(euclidean.rows)):
        yield Candidate("k-means", kmeans(rows, k, 0, n_init=starts))
    for graph in (cosine.graphs[10], cosine.graphs[20], euclidean.graphs[15], together):
        vectors = on_sphere(spectral_coordinates(graph, int(WIDER * k) + 1))
        yield Candidate("spectral", kmeans(vectors, k, 0, n_init=starts))
        for power, clusters in zip(powers, communities(Graph(graph), k, powers), strict=True):
            yield Candidate("communities", clusters, any_size=power == max(powers))
    for view in (cosine, euclidean):
        for density in view.densities:
            yield Candidate("layout", kmeans(density.places, k, 0, n_init=starts))
            yield Candidate("density leaves", density.leaves(k))
            yield Candidate(PEAKS, density.peaks(k), any_size=True)
            yield Candidate(MASS, density.heaviest(k), any_size=True)


def consensus(candidates: Sequence[Candidate], n_clusters: int) -> Ints:
    """Return the consensus of partitions: spectral clustering of their joint assignments.

    Each partition is then matched to it one to one, and the majority decides, until nothing moves.

    Args:
        candidates: partitions from 0 without gaps, into any numbers of clusters.
        n_clusters: K of the answer, at most n.

    References:
        Strehl & Ghosh, Cluster ensembles, 2002; Fern & Brodley, Solving cluster ensemble problems
        by bipartite graph partitioning, 2004.
    """
    partitions = [candidate.clusters for candidate in candidates]
    n = len(partitions[0])
    joint = _joint(candidates)
    joint = joint @ sp.diags_array(1 / np.sqrt(np.asarray(joint.sum(0)).ravel()))
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
    answer = kmeans(points, n_clusters, 0, n_init=STARTS)
    k = int(answer.max()) + 1
    for _ in range(VOTES):
        votes = np.zeros((n, k))
        for clusters in partitions:
            votes[np.arange(n), aligned(clusters, answer)] += 1
        votes[np.arange(n), answer] += 0.5  # ties stay
        better = votes.argmax(1)
        if (better == answer).all() or len(np.unique(better)) < k:
            break
        answer = better
    return answer


def uneven_consensus(candidates: Sequence[Candidate], n_clusters: int) -> Ints:
    """Return the consensus of partitions whose clusters may be of any size.

    It is average linkage; the distance of two samples is the share of partitions that separate
    them. Of more than 2,000 samples, one of each cluster of each partition and random others are
    linked; the rest join the nearest clusters.

    Args:
        candidates: as in `consensus`.
        n_clusters: K of the answer; fewer where the partitions separate fewer.

    References:
        Fred & Jain, Combining multiple clusterings using evidence accumulation, 2005.
    """
    joint = _joint(candidates)
    n = joint.shape[0]
    order = np.random.default_rng(0).permutation(n)
    firsts = [order[np.unique(c.clusters[order], return_index=True)[1]] for c in candidates]
    every = dict.fromkeys(np.concatenate([*firsts, order]).tolist())
    linked = np.sort([*every][:LINKED])
    rows = joint[linked]
    shared = (rows @ rows.T).toarray() / len(candidates)
    tree = linkage(squareform(1 - shared, checks=False), "average")
    k = min(n_clusters, 1 + int((tree[:, 2] > MIN_DISTANCE).sum()))
    clusters = cut_tree(tree, k).ravel()
    if n == len(linked):
        return clusters
    members = one_hot(clusters, k)
    nearest = joint @ (rows.T @ members @ sp.diags_array(1 / np.bincount(clusters)))
    answer = nearest.toarray().argmax(1)
    answer[linked] = clusters
    return answer


def _joint(candidates: Sequence[Candidate]) -> Any:
    """Return the one-hot clusters of all partitions side by side, `[n, clusters]`."""
    return sp.hstack([one_hot(c.clusters, int(c.clusters.max()) + 1) for c in candidates]).tocsr()


def aligned(clusters: Ints, answer: Ints) -> Ints:
    """Renumber clusters `[n]` by those of the answer `[n]` that they share most samples with.

    One to one by the Hungarian method; remaining clusters take that of most of their samples.
    """
    k, size = int(answer.max()) + 1, int(clusters.max()) + 1
    shared = np.bincount(clusters * k + answer, minlength=size * k).reshape(size, k)
    names = shared.argmax(1)
    rows, columns = linear_sum_assignment(shared, maximize=True)
    names[rows] = columns
    return names[clusters]
