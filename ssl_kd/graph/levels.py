"""How many clusters a graph has where the number is not given, and the tree of its levels.

A level of K clusters is worth `Q(K) A(K)^(1/3)`: Q is the modularity of a partition into K, and A
how far two random halves of the samples agree on theirs (prediction strength, as adjusted Rand
index). Modularity alone finds about ten clusters in any graph of neighbours, since to cut a
homogeneous cluster still gains by it; but such a cut falls elsewhere in each half.

Where clusters lie apart, communities, density peaks and density mass find the same ones. That
settles the number: two long clusters, whose pieces modularity prefers, are two.

References:
    Tibshirani & Walther, Cluster validation by prediction strength, 2005.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from sklearn.metrics import adjusted_rand_score

from ssl_kd.errors import InputError
from ssl_kd.graph.criterion import (
    ALPHA,
    Floats,
    Graph,
    Ints,
    joint,
    merge_losses,
    modularity_losses,
    one_hot,
    refine,
)
from ssl_kd.graph.kmeans import kmeans
from ssl_kd.graph.layout import Density
from ssl_kd.graph.spectral import on_sphere

EXPONENT = 1 / 3
HALVINGS = 4
ATOMS = 400
ATOMS_PER_CLUSTER = 6
MOST = 250  # clusters that are looked for
LEAST_SIZE = 16  # samples that a cluster has on average
LEAST_SAMPLES = 64  # in all
DIMENSIONS, STEPS = 64, 10
# Of the tree: clusters at its ends, the first as a multiple of K.
FINEST, COARSEST = 3, 5
LEAST_SHARE = 1e-9
PAIRS = 20  # for each cluster, those least costly by modularity, of which the exact cost is known
MANY = 60  # clusters from which on the square of their number is felt
APART = 1.25  # two levels closer than this factor are one
WIDENED = 1.5  # the halvings' interval at either end: alone it held one number of classes in three
# Mean adjusted Rand index that settles the number, of up to so many clusters; that of the first
# layout below which the others are not looked at.
UNANIMOUS, FEW, HOPELESS = 0.97, 30, 0.9


def in_order(clusters: Ints) -> Ints:
    """The same clusters, numbered as they come: whatever way found them."""
    _, first, number = np.unique(clusters, return_index=True, return_inverse=True)
    return first.argsort().argsort()[number]


Losses = Callable[[Floats, Ints], Floats]
"""From weights between clusters `[k, k]` and the clusters `[node]` to what merging pairs costs."""


def descend(
    graph: Graph,
    clusters: Ints,
    n_clusters: int,
    losses: Losses,
    *,
    pace: int,
    refined: int = 0,
    alpha: float = ALPHA,
) -> Iterator[tuple[int, Ints]]:
    """Merge the pairs of clusters that cost least, down to `n_clusters`.

    Args:
        graph: of few nodes.
        clusters: `[node]`, without gaps in their numbers.
        n_clusters: where it ends; before, where only merges at an infinite cost are left.
        losses: of all pairs `[k, k]`, above the diagonal, else infinite.
        pace: one part in so many of the way left is gone at a time.
        refined: from so many clusters on the nodes are moved after each time.
        alpha: of the value by which they are moved.

    Yields:
        The number of clusters, fewer each time, and the clusters `[node]`.
    """
    k = int(clusters.max()) + 1
    while k > n_clusters:
        costs = losses(joint(graph, clusters, k), clusters)
        merged, used = np.arange(k), set()
        for pair in costs.argsort(axis=None):
            a, b = divmod(int(pair), k)
            if len(used) >= 2 * max(1, (k - n_clusters) // pace) or np.isinf(costs[a, b]):
                break
            if a not in used and b not in used:
                used |= {a, b}
                merged[b] = a
        if not used:
            return
        clusters = np.unique(merged[clusters], return_inverse=True)[1]
        k -= len(used) // 2
        if k <= refined:
            clusters = refine(graph, clusters, k, alpha, sweeps=10)
        yield k, clusters


def pair_losses(exact: int, alpha: float = ALPHA) -> Losses:
    """What a merge costs: of more clusters than `exact`, or 180, by modularity alone.

    Of fewer, only the pairs that lose least modularity, 20 for each cluster, are considered.
    """

    def losses(table: Floats, clusters: Ints) -> Floats:
        if len(table) <= min(exact, 3 * MANY):
            return merge_losses(table, alpha, PAIRS * len(table))
        return modularity_losses(table)

    return losses


@dataclass(frozen=True)
class Level:
    """A number of clusters, and what speaks for it.

    Attributes:
        n_clusters: K.
        worth: `modularity * agreement ** (1/3)`.
        modularity: of the partition into K.
        agreement: adjusted Rand index of two halves' partitions, mean over the halvings.
    """

    n_clusters: int
    worth: float
    modularity: float
    agreement: float


@dataclass(frozen=True)
class Evidence:
    """What was found of the number of clusters.

    Attributes:
        n_clusters: that of which all methods find the same clusters, or else of the level worth
            most.
        interval: 2/3 of the least to 3/2 of the greatest that one halving alone would choose; of
            `n_clusters`, where all methods find the same clusters. It held the number of classes
            in 55 of 63 draws of 21 sets.
        ranked: levels that are worth more than those near them, best first.
    """

    n_clusters: int
    interval: tuple[int, int]
    ranked: list[Level]


def number_of_clusters(graph: Graph, densities: Sequence[Density] = (), seed: int = 0) -> Evidence:
    """The number of clusters of a graph of neighbours, from 2 to 250, at least 16 samples each.

    Args:
        graph: of the samples.
        densities: of the samples in layouts, whose clusters are compared with the graph's.
        seed: of the halvings and of every k-means.

    Raises:
        InputError: fewer than 64 samples.
    """
    check_enough(graph.n)
    most = max(2, min(MOST, graph.n // LEAST_SIZE))
    found = levels(graph, most, seed)
    agreed = [_agreement(graph, most, np.random.default_rng([seed, h])) for h in range(HALVINGS)]
    known = [k for k in sorted(found) if all(k in halving for halving in agreed)] or [2]
    quality = np.array([_modularity(graph, found[k], k) if k in found else 0.0 for k in known])
    agree = np.array([[halving.get(k, 0.0) for k in known] for halving in agreed]).clip(0)
    worth, single = quality * agree.mean(0) ** EXPONENT, quality * agree**EXPONENT
    all_levels = [
        Level(k, float(w), float(q), float(a))
        for k, w, q, a in zip(known, worth, quality, agree.mean(0), strict=True)
    ]
    ranked = [
        level
        for level in sorted(all_levels, key=lambda level: -level.worth)
        if level.worth >= max(o.worth for o in all_levels if _near(o, level))
    ]
    if (number := unanimous(found, densities)) is not None:
        choices = [number]
    else:
        choices = [known[int(i)] for i in single.argmax(1)] + [number := ranked[0].n_clusters]
    low, high = math.floor(min(choices) / WIDENED), math.ceil(max(choices) * WIDENED)
    return Evidence(number, (max(2, low), min(high, graph.n)), ranked)


def unanimous(partitions: Mapping[int, Ints], densities: Sequence[Density]) -> int | None:
    """The number of at most 30 clusters that peaks and mass of all densities find, too.

    Args:
        partitions: of the graph, by their number of clusters.
        densities: of the same samples in layouts.

    Returns:
        That at which all agree most; None where they never have a mean adjusted Rand index of 0.97.
    """
    best, number = UNANIMOUS, None
    for k, clusters in sorted(partitions.items()):
        if k > FEW:
            break
        found, scores = [clusters], [0.0]
        for density in densities:
            for partition in (density.peaks(k), density.heaviest(k)):
                found.append(partition)
            scores = [adjusted_rand_score(a, b) for a, b in combinations(found, 2)]
            if np.mean(scores) < HOPELESS:
                break
        if np.mean(scores) >= best:
            best, number = float(np.mean(scores)), k
    return number


def check_enough(n: int) -> None:
    """Refuse to look for the number of clusters among too few samples.

    Raises:
        InputError: fewer than 64.
    """
    if n < LEAST_SAMPLES:
        raise InputError(
            f"the number of clusters is to be found, but there are {n} samples, expected at least "
            f"{LEAST_SAMPLES}: give the number (N_CLUSTERS, n_clusters)"
        )


def _near(a: Level, b: Level) -> bool:
    return 1 / APART < a.n_clusters / b.n_clusters < APART


def levels(graph: Graph, most: int, seed: int) -> dict[int, Ints]:
    """Partitions `[n]` by their number of clusters, from `most` down to 2; not every number."""
    atoms = _atoms(graph, 2 * most, seed)
    m = int(atoms.max()) + 1
    small = graph.of_groups(atoms, m)
    found = {}
    start, losses = np.arange(m), pair_losses(most)
    for _, clusters in descend(small, start, 2, losses, pace=20, refined=most):
        whole = np.unique(clusters[atoms], return_inverse=True)[1]  # refining may empty some
        if 1 < (k := int(whole.max()) + 1) <= most:
            found[k] = whole
    return found


def _atoms(graph: Graph, least: int, seed: int) -> Ints:
    """Groups `[n]` of samples few steps apart, at least `least` of them where there are as many."""
    wanted = max(ATOMS, least)
    if graph.n <= wanted:
        return np.arange(graph.n)
    places = _diffused(graph, np.random.default_rng(seed))
    return kmeans(places, wanted, seed, max_iter=5, init="random")


def communities(graph: Graph, n_clusters: int, powers: Sequence[float]) -> list[Ints]:
    """Groups of nodes few steps apart, merged pair by pair down to K, then refined node by node.

    Args:
        graph: of the samples.
        n_clusters: K; fewer where refining leaves some empty.
        powers: of the entropy in what is maximised, one for each partition: with 0 clusters come
            out even, with 0.5 those of a long tail are kept apart.

    Returns:
        Of each power `[n]` int64 from 0 without gaps.
    """
    atoms = _atoms(graph, ATOMS_PER_CLUSTER * n_clusters, seed=0)
    m = int(atoms.max()) + 1
    small, found = graph.of_groups(atoms, m), []
    for alpha in powers:
        clusters, few = np.arange(m), 3 * n_clusters
        losses = pair_losses(few, alpha)
        for _, merged in descend(
            small, clusters, n_clusters, losses, pace=10, refined=few, alpha=alpha
        ):
            clusters = merged
        refined = refine(graph, clusters[atoms], int(clusters.max()) + 1, alpha)
        found.append(np.unique(refined, return_inverse=True)[1])
    return found


def _modularity(graph: Graph, clusters: Ints, k: int) -> float:
    table = joint(graph, clusters, k)
    return float(np.trace(table) - (table.sum(1) ** 2).sum())


def _agreement(graph: Graph, most: int, random: np.random.Generator) -> dict[int, float]:
    """By K: how far clusters of one half, carried over the edges to the other, are those there."""
    order = random.permutation(graph.n)
    halves = [np.sort(order[: graph.n // 2]), np.sort(order[graph.n // 2 :])]
    seed = int(random.integers(2**31))
    graphs = [Graph(graph.matrix[rows][:, rows].tocsr()) for rows in halves]
    found = [levels(half, most, seed) for half in graphs]
    across = graph.matrix[halves[0]][:, halves[1]].tocsr()
    agreed = {}
    for k in set(found[0]) & set(found[1]):
        scores = []
        for here, there, edges in ((0, 1, across.T), (1, 0, across)):
            carried = (edges @ one_hot(found[here][k], k)).toarray()
            tied = carried.any(1)
            pair = found[there][k][tied], carried[tied].argmax(1)
            scores.append(adjusted_rand_score(*pair))
        agreed[k] = float(np.mean(scores))
    return agreed


def _diffused(graph: Graph, random: np.random.Generator) -> NDArray[np.float32]:
    """Places `[n, 64]` in which near means few steps apart: smoothed random vectors."""
    degree = np.maximum(graph.degree, 1e-12)
    walk = sp.diags_array(0.5 / degree) @ graph.matrix + sp.eye_array(graph.n) * 0.5
    places = random.standard_normal((graph.n, DIMENSIONS)) / np.sqrt(degree)[:, None]
    for _ in range(STEPS):
        places = walk @ places
    return on_sphere((places - places.mean(0)).astype(np.float32))


def nested_levels(graph: Graph, clusters: Ints, seed: int = 0) -> list[Ints]:
    """A tree of partitions around one: from 3 K clusters, within those of `clusters`, down to 5.

    Args:
        graph: of the samples.
        clusters: `[n]`, K of them, numbered without gaps.
        seed: of the atoms that the finest clusters are made of.

    Returns:
        Partitions `[n]`, finest first, each made of the next finer one's clusters; K itself is
        not among them, unless there is no finer one. They are numbered in the order of their first
        samples.
    """
    k = int(clusters.max()) + 1
    finest = min(FINEST * k, graph.n)
    groups = np.unique(_atoms(graph, finest, seed) * k + clusters, return_inverse=True)[1]
    m = int(groups.max()) + 1
    small, owner = graph.of_groups(groups, m), np.zeros(m, np.int64)
    owner[groups] = clusters

    def losses(table: Floats, labels: Ints) -> Floats:
        now = len(table)
        costs = _crumbs_first(table) if now > min(k, MANY) else merge_losses(table)
        if now > k:
            mine = np.zeros(now, np.int64)
            mine[labels] = owner
            costs[mine[:, None] != mine] = np.inf
        return costs

    labels, found, wanted = np.arange(m), [], level_sizes(k)
    for size in sorted({*wanted, k}, reverse=True):
        for _, merged in descend(small, labels, size, losses, pace=10):
            labels = merged
        if labels.max() + 1 == size and (size in wanted or not found):
            found.append(in_order(labels[groups]))
    return found or [clusters]


def _crumbs_first(joint: Floats) -> Floats:
    """What merging costs parts of one cluster, or very many: `[k, k]`, above the diagonal.

    Ward's cost, with how closely two are tied in the place of their distance: by the value alone
    crumbs would stay apart for ever, for it hardly counts them. Elsewhere infinite.
    """
    share = np.maximum(joint.sum(1), LEAST_SHARE)
    both = np.outer(share, share)
    cost = both**2 / (share[:, None] + share) / np.maximum(joint, LEAST_SHARE * both)
    return np.where(np.tri(len(joint), dtype=bool), np.inf, cost)


def level_sizes(n_clusters: int) -> list[int]:
    """The numbers of clusters of a tree around K, largest first: 3 K, then each 2/3 of the last."""
    least = min(COARSEST, n_clusters)
    near = {round(n_clusters * 1.5**step) for step in range(-20, 3)} | {FINEST * n_clusters, least}
    others = sorted((size for size in near - {n_clusters} if least <= size), reverse=True)
    return others or [n_clusters]
