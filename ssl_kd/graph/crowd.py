"""The answer: what partitions of many families agree on, none of which is safe alone.

k-means is at home on directions, spectral clustering on manifolds, communities on features of
photographs, leaves of a density tree on pixels: on any other features each of them can be twenty
points behind the best one. Their consensus rarely is.
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

# Families without a preference for even clusters say how even they are: the entropy of their
# answer, as a share of log K. From EVEN on all others vote with them; below UNEVEN their answer is
# formed by a method without such a preference, too. Chosen with families of sets left out, as
# `benchmarks.regret` does it; that for K = 2, in place of both, was not fitted: a quarter.
EVEN, UNEVEN, OF_TWO = 0.95, 0.9, 0.8
POWERS, MIDDLE_POWER = (0.0, 0.3, 0.5), (0.3,)  # of the entropy in what communities maximise
WIDER = 1.25  # times K eigenvectors, for k-means
DIMENSIONS = (8, 4)
STARTS = 3
VOTES = 5  # rounds at most
DENSE = 400  # joint clusters whose eigenvectors a dense solver finds sooner
PEAKS, MASS = "density peaks", "density mass"
LEAST_DISTANCE = 1e-9  # between clusters that some partition tells apart
LINKED = 2000  # samples at most of which each pair is compared


@dataclass(frozen=True)
class View:
    """One way to look at the samples.

    Attributes:
        rows: `[n, d]` float32, for k-means.
        graphs: of neighbors, by their number.
    """

    rows: Rows
    graphs: Mapping[int, sp.csr_matrix]

    @cached_property
    def densities(self) -> list[Density]:
        """Of the graph of 15 neighbors, laid out in 8 and in 4 dimensions."""
        with threadpool_limits(1):
            return [Density(low_dimensional(self.graphs[15], dim, seed=dim)) for dim in DIMENSIONS]


@dataclass(frozen=True)
class Candidate:
    """A partition that may vote.

    Attributes:
        family: the kind of method that found it.
        clusters: `[n]` int64, numbered in the order of their first samples.
        any_size: whether the method has no preference for clusters of one size.
    """

    family: str
    clusters: Ints
    any_size: bool = False


@dataclass(frozen=True)
class Crowd:
    """An answer, and the partitions that it was formed from.

    Attributes:
        clusters: `[n]` int64, at most K clusters, numbered in the order of their first samples.
        candidates: all partitions, whether they voted or not.
        evenness: entropy of the clusters that peaks and communities agree on, as a share of log K.
        kind: which candidates voted, and how.
    """

    clusters: Ints
    candidates: list[Candidate]
    evenness: float
    kind: Kind

    @property
    def voters(self) -> list[Candidate]:
        """The partitions that voted for the answer."""
        return voters(self.candidates, self.kind)


def agreement(candidates: Iterable[Candidate], answer: Ints) -> dict[str, float]:
    """By family: mean share of samples that its partitions put where the answer `[n]` does."""
    shares: dict[str, list[float]] = {}
    for candidate in candidates:
        same = float(np.mean(aligned(candidate.clusters, answer) == answer))
        shares.setdefault(candidate.family, []).append(same)
    return {family: float(np.mean(of_family)) for family, of_family in shares.items()}


def n_partitions(n_clusters: int) -> int:
    """Number of partitions that `ask_crowd` forms: 34, or 26 from 60 clusters on."""
    return 26 if n_clusters >= MANY else 34


def ask_crowd(
    cosine: View,
    euclidean: View,
    together: sp.csr_matrix,
    n_clusters: int,
    progress: Callable[[int, int], object] = lambda done, total: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Crowd:
    """Partitions of all families, and their consensus; it draws from fixed seeds only.

    Args:
        cosine: rows of length 1; graphs of 10, 15 and 20 neighbors.
        euclidean: centred rows; the graph of 15 neighbors.
        together: the sum of the graphs of 15 neighbors in all views.
        n_clusters: K, at least 2.
        progress: called with (partitions done, partitions).
        should_stop: called after each partition; true takes the consensus of those there are.
    """
    found, total = list[Candidate](), n_partitions(n_clusters)
    # Small products, which several threads would only wait for each other in.
    with threadpool_limits(1):
        for candidate in _candidates(cosine, euclidean, together, n_clusters):
            found.append(replace(candidate, clusters=in_order(candidate.clusters)))
            progress(len(found), total)
            if should_stop():
                break
        clusters, evenness = found[0].clusters, 1.0
        if voters(found, "between"):
            clusters = vote(found, "between", n_clusters)
            shares = np.bincount(clusters) / len(clusters)
            evenness = float(entr(shares).sum() / np.log(n_clusters))
        if (kind := kind_of(evenness, n_clusters)) != "between":
            clusters = vote(found, kind, n_clusters)
        return Crowd(in_order(clusters), found, evenness, kind)


def kind_of(evenness: float, n_clusters: int, uneven: float = UNEVEN, even: float = EVEN) -> Kind:
    """Which candidates are to vote, and how, where peaks and communities are as even as that."""
    if n_clusters == 2:
        uneven = even = OF_TWO
    return "uneven" if evenness < uneven else "between" if evenness < even else "even"


def vote(candidates: Sequence[Candidate], kind: Kind, n_clusters: int) -> Ints:
    """The answer `[n]` of the candidates that vote."""
    form = uneven_consensus if kind == "uneven" else consensus
    return form(voters(candidates, kind), n_clusters)


def voters(candidates: Iterable[Candidate], kind: Kind) -> list[Candidate]:
    """All but peaks and mass if `even`; otherwise those of any size, mass only if `uneven`."""
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
    """The partition that others agree on most: spectral clustering of their joint assignments.

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
        with contextlib.suppress(ArpackError):  # such as for an eigenvalue of many vectors
            vectors = eigsh(products, width, v0=np.random.default_rng(0).random(columns))[1]
    if vectors is None:
        vectors = np.linalg.eigh(products.toarray()).eigenvectors[:, -width:]
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


def uneven_consensus(candidates: Sequence[Candidate], n_clusters: int) -> Ints:
    """The partition that others agree on most, whose clusters may be of any size.

    Average linkage, where two samples are as far apart as the share of partitions that separate
    them. Of more than 2,000 samples, one of each cluster of each partition and random others are
    linked; the rest join the clusters that they are nearest to.

    Args:
        candidates: as in `consensus`.
        n_clusters: K of the answer; there are fewer where the partitions tell fewer apart.

    References:
        Fred & Jain, Combining multiple clusterings using evidence accumulation, 2005.
    """
    joint = _joint(candidates)
    n = joint.shape[0]
    order = np.random.default_rng(0).permutation(n)
    firsts = [order[np.unique(c.clusters[order], return_index=True)[1]] for c in candidates]
    every = dict.fromkeys(np.concatenate([*firsts, order]).tolist())
    some = np.sort([*every][:LINKED])
    here = joint[some]
    shared = (here @ here.T).toarray() / len(candidates)
    tree = linkage(squareform(1 - shared, checks=False), "average")
    k = min(n_clusters, 1 + int((tree[:, 2] > LEAST_DISTANCE).sum()))
    clusters = cut_tree(tree, k).ravel()
    if n == len(some):
        return clusters
    members = one_hot(clusters, k)
    nearest = joint @ (here.T @ members @ sp.diags_array(1 / np.bincount(clusters)))
    answer = nearest.toarray().argmax(1)
    answer[some] = clusters
    return answer


def _joint(candidates: Sequence[Candidate]) -> Any:
    """The clusters of all partitions side by side, `[n, clusters]`: a 1 for each partition."""
    return sp.hstack([one_hot(c.clusters, int(c.clusters.max()) + 1) for c in candidates]).tocsr()


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
