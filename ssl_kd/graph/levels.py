"""Find the number of clusters of a graph, and a hierarchy of partitions.

The score of K clusters is `Q(K) A(K)^(1/3)`. Q is the modularity of a partition into K clusters. A
is the agreement of partitions of two random halves of the samples (prediction strength, measured by
the adjusted Rand index). Modularity alone would find about ten clusters in any neighbor graph,
because it also grows if a homogeneous cluster is divided; but the halves divide it differently.

If clusters are well separated, communities, density peaks and density mass find the same clusters.
Their number is then used instead of the score, because modularity would divide long clusters.

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
MOST = 250  # clusters, at most
MIN_SIZE = 16  # samples of a cluster on average
MIN_SAMPLES = 64  # in all
DIMENSIONS, STEPS = 64, 10
# Of the tree: clusters at its ends, the first as a multiple of K.
FINEST, COARSEST = 3, 5
LEAST_SHARE = 1e-9
PAIRS = 20  # per cluster, those least costly by modularity, whose exact cost is computed
MANY = 60  # from so many clusters on, cheaper approximations are used
APART = 1.25  # two levels closer than this factor are one
WIDENED = 1.5  # factor at either end of the halvings' interval, which alone is too narrow
# Mean adjusted Rand index of unanimous methods, of up to FEW clusters; below HOPELESS in the first
# layout the others are skipped.
UNANIMOUS, FEW, HOPELESS = 0.97, 30, 0.9


def in_order(clusters: Ints) -> Ints:
    """Renumber clusters in the order of their first samples."""
    _, first, number = np.unique(clusters, return_index=True, return_inverse=True)
    return first.argsort().argsort()[number]


Losses = Callable[[Floats, Ints], Floats]
"""Map weights between clusters `[k, k]`, and clusters `[node]`, to costs of merges `[k, k]`."""


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
    """Merge the cheapest pairs of clusters in rounds, until `n_clusters` are left.

    Each round performs 1 / `pace` of the remaining merges and yields the number of clusters and the
    clusters `[node]`. From `refined` clusters on, each round ends with `refine`. Merging ends early
    if all costs are infinite.
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
    """Return costs of merges: loss of modularity above `exact` or 180 clusters, else of value."""

    def losses(table: Floats, clusters: Ints) -> Floats:
        if len(table) <= min(exact, 3 * MANY):
            return merge_losses(table, alpha, PAIRS * len(table))
        return modularity_losses(table)

    return losses


@dataclass(frozen=True)
class Level:
    """Score of a number of clusters."""

    n_clusters: int
    worth: float  # the score, `modularity * agreement ** (1/3)`
    modularity: float
    agreement: float  # adjusted Rand index of partitions of two random halves, mean of 4 halvings


@dataclass(frozen=True)
class Evidence:
    """The number of clusters found in a graph, and alternatives."""

    n_clusters: int  # at which all methods find the same clusters, else that with the highest score
    # From 2/3 of the smallest to 3/2 of the largest number chosen by a single split into halves, or
    # around a unanimous number. On 21 data sets, it contained the number of classes in 55 of 63.
    interval: tuple[int, int]
    ranked: list[Level]  # local maxima of the score, best first


def number_of_clusters(graph: Graph, densities: Sequence[Density] = ()) -> Evidence:
    """Find the number of clusters of a neighbor graph, between 2 and 250.

    Clusters have at least 16 samples on average. The clusters of `densities`, of layouts of the
    graph, are compared with those of the graph to detect well-separated clusters.
    """
    check_enough(graph.n)
    most = min(MOST, graph.n // MIN_SIZE)
    partitions = levels(graph, most, seed=0)
    agreed = [_agreement(graph, most, np.random.default_rng([0, h])) for h in range(HALVINGS)]
    known = [k for k in sorted(partitions) if all(k in halving for halving in agreed)] or [2]
    quality = np.array(
        [modularity(graph, partitions[k], k) if k in partitions else 0.0 for k in known]
    )
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
    if (number := unanimous(partitions, densities)) is not None:
        choices = [number]
    else:
        choices = [known[int(i)] for i in single.argmax(1)] + [number := ranked[0].n_clusters]
    low, high = math.floor(min(choices) / WIDENED), math.ceil(max(choices) * WIDENED)
    return Evidence(number, (max(2, low), min(high, graph.n)), ranked)


def unanimous(partitions: Mapping[int, Ints], densities: Sequence[Density]) -> int | None:
    """Return the number of clusters, up to 30, at which all methods agree best, or None."""
    from sklearn.metrics import adjusted_rand_score

    best, number = UNANIMOUS, None
    for k, clusters in sorted(partitions.items()):
        if k > FEW:
            break
        similar, scores = [clusters], [0.0]
        for density in densities:
            for partition in (density.peaks(k), density.heaviest(k)):
                similar.append(partition)
            scores = [adjusted_rand_score(a, b) for a, b in combinations(similar, 2)]
            if np.mean(scores) < HOPELESS:
                break
        if np.mean(scores) >= best:
            best, number = float(np.mean(scores)), k
    return number


def check_enough(n: int) -> None:
    """Raise InputError if there are too few samples to find the number of clusters."""
    if n < MIN_SAMPLES:
        raise InputError(
            f"there are {n} samples, expected at least {MIN_SAMPLES} to find the number of "
            "clusters: set it (setting N_CLUSTERS, argument n_clusters)"
        )


def _near(a: Level, b: Level) -> bool:
    return 1 / APART < a.n_clusters / b.n_clusters < APART


def levels(graph: Graph, most: int, seed: int) -> dict[int, Ints]:
    """Return partitions `[n]`, by number of clusters, for some numbers from 2 to `most`."""
    atoms = _atoms(graph, 2 * most, seed)
    m = int(atoms.max()) + 1
    small = graph.of_groups(atoms, m)
    partitions = {}
    start, losses = np.arange(m), pair_losses(most)
    for _, clusters in descend(small, start, 2, losses, pace=20, refined=most):
        # Refining may leave some clusters empty.
        by_sample = np.unique(clusters[atoms], return_inverse=True)[1]
        if 1 < (k := int(by_sample.max()) + 1) <= most:
            partitions[k] = by_sample
    return partitions


def _atoms(graph: Graph, least: int, seed: int) -> Ints:
    """Return small groups `[n]` of close nodes; there are at least `least` groups if possible."""
    wanted = max(ATOMS, least)
    if graph.n <= wanted:
        return np.arange(graph.n)
    places = _diffused(graph, np.random.default_rng(seed))
    return kmeans(places, wanted, seed, max_iter=5, init="random")


def communities(graph: Graph, n_clusters: int, powers: Sequence[float]) -> list[Ints]:
    """Find communities: merge groups of close nodes to K clusters, then refine them.

    Returns a partition `[n]` for each power of the entropy in the value: 0 prefers clusters of
    equal size, 0.5 keeps small clusters separate. Refinement may leave some clusters empty.
    """
    atoms = _atoms(graph, ATOMS_PER_CLUSTER * n_clusters, seed=0)
    m = int(atoms.max()) + 1
    small, partitions = graph.of_groups(atoms, m), []
    for alpha in powers:
        clusters, few = np.arange(m), 3 * n_clusters
        losses = pair_losses(few, alpha)
        for _, merged in descend(
            small, clusters, n_clusters, losses, pace=10, refined=few, alpha=alpha
        ):
            clusters = merged
        refined = refine(graph, clusters[atoms], int(clusters.max()) + 1, alpha)
        partitions.append(np.unique(refined, return_inverse=True)[1])
    return partitions


def modularity(graph: Graph, clusters: Ints, k: int) -> float:
    """Return the modularity of a partition `[n]` into `k` clusters, from -1/2 to below 1."""
    table = joint(graph, clusters, k)
    return float(np.trace(table) - (table.sum(1) ** 2).sum())


def _agreement(graph: Graph, most: int, random: np.random.Generator) -> dict[int, float]:
    """Return how well partitions of random halves of the samples agree, for each K up to `most`.

    Clusters of one half are carried along the edges to the other half and compared there.
    """
    from sklearn.metrics import adjusted_rand_score

    order = random.permutation(graph.n)
    halves = [np.sort(order[: graph.n // 2]), np.sort(order[graph.n // 2 :])]
    seed = int(random.integers(2**31))
    graphs = [Graph(graph.matrix[rows][:, rows].tocsr()) for rows in halves]
    partitions = [levels(half, most, seed) for half in graphs]
    across = graph.matrix[halves[0]][:, halves[1]].tocsr()
    agreed = {}
    for k in set(partitions[0]) & set(partitions[1]):
        scores = []
        for source, target, edges in ((0, 1, across.T), (1, 0, across)):
            carried = (edges @ one_hot(partitions[source][k], k)).toarray()
            tied = carried.any(1)
            pair = partitions[target][k][tied], carried[tied].argmax(1)
            scores.append(adjusted_rand_score(*pair))
        agreed[k] = float(np.mean(scores))
    return agreed


def _diffused(graph: Graph, random: np.random.Generator) -> NDArray[np.float32]:
    """Return random vectors smoothed along the edges, `[n, 64]`; those of close nodes are close."""
    degree = np.maximum(graph.degree, 1e-12)
    walk = sp.diags_array(0.5 / degree) @ graph.matrix + sp.eye_array(graph.n) * 0.5
    places = random.standard_normal((graph.n, DIMENSIONS)) / np.sqrt(degree)[:, None]
    for _ in range(STEPS):
        places = walk @ places
    return on_sphere((places - places.mean(0)).astype(np.float32))


def nested_levels(graph: Graph, clusters: Ints) -> list[Ints]:
    """Return a hierarchy of partitions `[n]` around the K `clusters`, from 3 K down to 5 clusters.

    The finest comes first; each is formed by merging clusters of the previous one. The finer ones
    divide the given clusters, which are themselves included only if there is no finer partition.
    """
    k = int(clusters.max()) + 1
    finest = min(FINEST * k, graph.n)
    groups = np.unique(_atoms(graph, finest, seed=0) * k + clusters, return_inverse=True)[1]
    m = int(groups.max()) + 1
    small, owner = graph.of_groups(groups, m), np.zeros(m, np.int64)
    owner[groups] = clusters

    def losses(table: Floats, labels: Ints) -> Floats:
        size = len(table)
        costs = _ward_costs(table) if size > min(k, MANY) else merge_losses(table)
        if size > k:
            owners = np.zeros(size, np.int64)
            owners[labels] = owner
            costs[owners[:, None] != owners] = np.inf
        return costs

    labels, partitions, sizes = np.arange(m), [], level_sizes(k)
    for size in sorted({*sizes, k}, reverse=True):
        for _, merged in descend(small, labels, size, losses, pace=10):
            labels = merged
        if labels.max() + 1 == size and (size in sizes or not partitions):
            partitions.append(in_order(labels[groups]))
    return partitions or [clusters]


def _ward_costs(joint: Floats) -> Floats:
    """Return Ward's costs of merging two clusters, `[k, k]`, infinite on and below the diagonal.

    The inverse edge weight replaces the distance. The loss in the value of the partition is no
    criterion: it is nearly 0 for tiny clusters, so they would merge with any cluster.
    """
    share = np.maximum(joint.sum(1), LEAST_SHARE)
    both = np.outer(share, share)
    cost = both**2 / (share[:, None] + share) / np.maximum(joint, LEAST_SHARE * both)
    return np.where(np.tri(len(joint), dtype=bool), np.inf, cost)


def level_sizes(n_clusters: int) -> list[int]:
    """Return the sizes of a hierarchy around K clusters: 3 K, then each about 2/3, down to 5."""
    least = min(COARSEST, n_clusters)
    near = {round(n_clusters * 1.5**step) for step in range(-20, 3)} | {FINEST * n_clusters, least}
    others = sorted((size for size in near - {n_clusters} if least <= size), reverse=True)
    return others or [n_clusters]
