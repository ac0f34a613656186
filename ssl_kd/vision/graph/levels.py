"""Partition a graph into any number of communities, and into a hierarchy around a partition."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ssl_kd.vision.graph.criterion import (
    ALPHA,
    Floats,
    Graph,
    Ints,
    joint,
    merge_losses,
    modularity_losses,
    refine,
)
from ssl_kd.vision.graph.kmeans import kmeans
from ssl_kd.vision.graph.spectral import on_sphere

ATOMS = 400
ATOMS_PER_CLUSTER = 6
DIMENSIONS, STEPS = 64, 10
# Of the tree: clusters at its ends, the first as a multiple of K.
FINEST, COARSEST = 3, 5
LEAST_SHARE = 1e-9
PAIRS = 20  # per cluster, those least costly by modularity, whose exact cost is computed
MANY = 60  # from so many clusters on, cheaper approximations are used


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

    labels = np.arange(m)
    partitions = []
    sizes = level_sizes(k)
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
