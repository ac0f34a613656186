"""The search for the best partition of a graph into a given number of clusters.

1. Starts: k-means and the pivoted QR on the leading eigenvectors, in several widths; k-means with
   more clusters than asked for, merged one by one where the value loses least.
2. Each is refined (`refine`). Nodes that the best of them and a fine k-means keep together become
   one atom: on the graph of a few hundred atoms a whole search costs milliseconds.
3. Split and merge: the cluster whose halves gain most is split, the pair that loses least merged,
   the atoms refined; again while the value grows.
4. Consensus: k-means on the joint assignments of the best 3, 5 and 8, improved likewise.
5. All again with the power of the entropy that suits what was found: `alpha_of` it.
6. The partition of the largest value is the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster._spectral import cluster_qr
from threadpoolctl import threadpool_limits

from ssl_kd.graph.criterion import (
    ALPHA,
    SWEEPS,
    Floats,
    Graph,
    Ints,
    Partition,
    entropy,
    joint,
    merge_losses,
    modularity_losses,
    one_hot,
    partition_value,
    refine,
)
from ssl_kd.graph.kmeans import kmeans
from ssl_kd.graph.spectral import on_sphere, spectral_coordinates

# Eigenvectors that k-means sees, and clusters that are merged down, as multiples of K.
WIDTHS = (1.0, 1.25, 1.5)
DESCENTS = (1.5, 2.0, 2.5, 3.0, 4.0, 5.0)
LEAST_DESCENT = 24  # two clusters that wind around each other are many small ones first
ATOMS = 500
ATOMS_PER_CLUSTER = 4
IMPROVED = 4  # starts that are split and merged
SPLIT, MERGED = 2, 3
ROUNDS = 300  # of exchanges, divided by K: each costs K times as much
RESTARTS, PATIENCE = 16, 8  # at most so often; until nothing better was found so often in a row
AGAIN = 8  # partitions that the second search begins with
# From this K on everything is done once only: eigenvectors and merging cost the square of K, and
# where clusters are so many the first descent finds them.
MANY = 60
MOST_VECTORS = 256  # a thousand clusters lie apart in fewer directions than they are
DIRECTIONS = 2400  # of the joint assignments, whose eigenvectors are looked for
HALVED = 16  # clusters whose halves are tried in a round, the largest first
CONSENSUS = (3, 5, 8)
# The power of the entropy by how even the clusters are that the middle one, ALPHA, finds: an even
# division counts by itself where there is one, and little where there is a long tail.
LEAST_ALPHA, MOST_ALPHA, SLOPE = 0.3, 0.7, 7.0
SAME_ALPHA = 0.05  # so near to the first it is not worth a second search


def best_partitions(
    graph: Graph,
    n_clusters: int,
    seed: int = 0,
    starts: Mapping[str, Ints] | None = None,
    alpha: float | None = None,
    restarts: int = RESTARTS,
) -> list[Partition]:
    """Partitions of a graph into `n_clusters`, the best first.

    Args:
        graph: of the samples.
        n_clusters: K, from 2 to n.
        seed: of every k-means.
        starts: partitions `[n]` from elsewhere that compete, by name.
        alpha: the power of the entropy; None: the one that suits what a first search finds.
        restarts: how often merging down begins anew, at most.

    Returns:
        At least one, no two alike. Clusters are numbered in the order of their first samples. Those
        with fewer than K come last.
    """
    search = _Search(graph, n_clusters, seed, ALPHA if alpha is None else alpha, restarts)
    given = dict(starts or {})
    search.run(given | search.starts())
    if alpha is None:
        _search_again(search, given)
    return search.found


def _search_again(search: _Search, given: dict[str, Ints]) -> None:
    """With the power that suits what was found."""
    graph, n_clusters, top = search.graph, search.k, search.found[:AGAIN]
    alpha = alpha_of(joint(graph, top[0].clusters, n_clusters))
    if abs(alpha - search.alpha) > SAME_ALPHA:
        best = {part.origin: part.clusters for part in reversed(top)}
        search.alpha = alpha
        search.run(best | given)


def alpha_of(joint: Floats) -> float:
    """The power of the entropy that suits clusters `[K, K]`: 0.3 for even ones, to 0.7 for a tail.

    Not above `I / H`, what an edge tells of a cluster: where clusters overlap, uneven ones come of
    merging, which costs little there.
    """
    evenness = entropy(joint) / np.log(len(joint))
    most = max(LEAST_ALPHA, min(MOST_ALPHA, partition_value(joint, 1)))
    return float(np.clip(LEAST_ALPHA + SLOPE * (1 - evenness), LEAST_ALPHA, most))


def in_order(clusters: Ints) -> Ints:
    """The same clusters, numbered as they come: whatever way found them."""
    _, first, number = np.unique(clusters, return_index=True, return_inverse=True)
    return first.argsort().argsort()[number]


def descend(
    graph: Graph, clusters: Ints, n_clusters: int, *, alpha: float = ALPHA, pace: int, refined: int
) -> Iterator[tuple[int, Ints]]:
    """Merge the pairs of clusters that cost least, down to `n_clusters`.

    Args:
        graph: of few nodes.
        clusters: `[node]`, without gaps in their numbers.
        n_clusters: where it ends.
        alpha: of the value.
        pace: one part in so many of the way left is gone at a time.
        refined: from so many clusters on the nodes are moved after each time.

    Yields:
        The number of clusters, fewer each time, and the clusters `[node]`.
    """
    k = int(clusters.max()) + 1
    while k > n_clusters:
        losses = pair_losses(joint(graph, clusters, k), refined, alpha)
        merged, used = np.arange(k), set()
        for pair in losses.argsort(axis=None):
            a, b = divmod(int(pair), k)
            if len(used) >= 2 * max(1, (k - n_clusters) // pace) or np.isinf(losses[a, b]):
                break
            if a not in used and b not in used:
                used |= {a, b}
                merged[b] = a
        clusters = np.unique(merged[clusters], return_inverse=True)[1]
        k -= len(used) // 2
        if k <= refined:
            clusters = refine(graph, clusters, k, alpha, sweeps=10).clusters
        yield k, clusters


def pair_losses(table: Floats, exact: int, alpha: float) -> Floats:
    """What merging a pair costs; by modularity alone where there are more clusters than `exact`."""
    few = len(table) <= min(exact, 3 * MANY)
    return merge_losses(table, alpha) if few else modularity_losses(table)


class _Search:
    def __init__(
        self, graph: Graph, n_clusters: int, seed: int, alpha: float, restarts: int
    ) -> None:
        self.restarts = restarts if n_clusters < MANY else 1
        self.graph, self.k, self.alpha = graph, n_clusters, alpha
        self.random = np.random.default_rng(seed)
        self.n = graph.n
        self.widths = WIDTHS if n_clusters < MANY else WIDTHS[:1]
        self.descents = DESCENTS if n_clusters < MANY else DESCENTS[:1]
        n_vectors = min(max(int(max(self.widths) * n_clusters) + 1, 16), MOST_VECTORS)
        self.vectors = spectral_coordinates(graph.matrix, n_vectors)
        self.places = on_sphere(self.vectors)
        self.found: list[Partition] = []

    def run(self, starts: Mapping[str, Ints]) -> None:
        """Fill `found`, best first, from these starts."""
        self.found = []
        for origin, clusters in starts.items():
            self._keep(self._refined(self.graph, clusters, origin))
        begun = list(self.found)
        self._make_atoms()
        # A k-means of some hundred atoms takes a millisecond, and longer by several threads.
        with threadpool_limits(1, "openmp"):
            self._search_atoms(begun)

    def _search_atoms(self, begun: list[Partition]) -> None:
        if self.k < MANY:
            self._improve(self._merge_down(np.arange(self.small.n)), "atoms merged")
        idle = 0
        for _ in range(self.restarts):
            best = self.found[0]
            for origin, clusters in self._descents().items():
                self._improve(clusters, origin)
            idle = idle + 1 if self.found[0] is best else 0
            if idle == PATIENCE:
                break
        for part in begun[: IMPROVED if self.k < MANY else 1]:
            self._improve(self._of_atoms(part.clusters), part.origin)
        for top in [top for top in CONSENSUS if top * self.k <= DIRECTIONS]:
            self._improve(self._consensus(top), f"consensus of {top}")

    def _refined(
        self, graph: Graph, clusters: Ints, origin: str = "", sweeps: int = SWEEPS
    ) -> Partition:
        return refine(graph, clusters, self.k, self.alpha, origin, sweeps)

    def _keep(self, part: Partition) -> None:
        """If new, in its place: first those with K clusters, which a high power may leave empty."""
        part = replace(part, clusters=in_order(part.clusters))
        if any((part.clusters == other.clusters).all() for other in self.found):
            return
        self.found.append(part)
        self.found.sort(key=lambda p: (-len(np.unique(p.clusters)), -p.value))

    def _kmeans(
        self, x: NDArray, n_clusters: int, weights: NDArray | None = None, n_init: int = 1
    ) -> Ints:
        seed = int(self.random.integers(2**31))
        return kmeans(x, n_clusters, seed, weights, n_init=n_init)

    def starts(self) -> dict[str, Ints]:
        """Partitions `[n]` by the leading eigenvectors."""
        starts = {
            f"{width} K eigenvectors": self._kmeans(self.places[:, : int(width * self.k)], self.k)
            for width in self.widths
        }
        if self.k <= self.vectors.shape[1]:
            starts["eigenvectors by QR"] = cluster_qr(self.vectors[:, : self.k]).astype(np.int64)
        return starts

    def _make_atoms(self) -> None:
        """Groups of nodes that are moved together, with their graph and coordinates."""
        most = max(ATOMS, ATOMS_PER_CLUSTER * self.k)
        atoms = np.arange(self.n)
        if self.n > most:
            atoms = kmeans(self.places, most, 0, max_iter=5, init="random")
            for part in self.found[:4]:
                atoms = np.unique(atoms * self.k + part.clusters, return_inverse=True)[1]
        m = int(atoms.max()) + 1
        members = one_hot(atoms, m)
        self.atoms, self.count = atoms, np.bincount(atoms, minlength=m)
        self.first = np.zeros(m, np.int64)
        self.first[atoms] = np.arange(self.n)
        self.small = self.graph.of_groups(atoms, m)
        self.centres = np.asarray(members.T @ self.places) / self.count[:, None]

    def _of_atoms(self, clusters: Ints) -> Ints:
        return clusters[self.first]

    def _descents(self) -> dict[str, Ints]:
        """K clusters of atoms by merging from more of them."""
        found = {}
        sizes = sorted({int(f * self.k) for f in self.descents} | {LEAST_DESCENT})
        for size in [s for s in sizes if self.k < s < self.small.n]:
            many = self._kmeans(self.centres[:, :size], size, self.count)
            found[f"{size} merged"] = self._merge_down(many)
        return found

    def _merge_down(self, clusters: Ints) -> Ints:
        """K clusters by merging from more of them."""
        steps = descend(self.small, clusters, self.k, alpha=self.alpha, pace=10, refined=3 * self.k)
        for _, merged in steps:
            clusters = merged
        return clusters

    def _improve(self, clusters: Ints, origin: str) -> None:
        """Split and merge atoms while the value grows, then refine the nodes."""
        best = self._refined(self.small, clusters)
        for _ in range(-(-ROUNDS // self.k)):
            better = self._exchange(best)
            if better is None:
                break
            best = better
        self._keep(self._refined(self.graph, best.clusters[self.atoms], origin))

    def _exchange(self, best: Partition) -> Partition | None:
        """The best of a few exchanges of a split for a merge, None if none gains."""
        if self.k < 3:
            return None
        table = joint(self.small, best.clusters, self.k)
        losses = pair_losses(table, 3 * self.k, self.alpha)
        pairs = [divmod(int(o), self.k) for o in losses.argsort(axis=None)[:MERGED]]
        tried = []
        for cluster in table.sum(1).argsort()[::-1][:HALVED]:
            rows = np.flatnonzero(best.clusters == cluster)
            if len(rows) < 2:
                continue
            half = self._half(rows)
            split = best.clusters.copy()
            split[half] = self.k
            value = partition_value(joint(self.small, split, self.k + 1), self.alpha)
            tried.append((value, cluster, half))
        tried.sort(key=lambda t: -t[0])
        found = None
        for _, cluster, half in tried[:SPLIT]:
            for a, b in pairs:
                if cluster in (a, b):
                    continue
                clusters = np.where(best.clusters == b, a, best.clusters)
                clusters[half] = b
                part = self._refined(self.small, clusters, sweeps=15)
                if part.value > max(best.value, found.value if found else 0) + 1e-5:
                    found = part
        return found

    def _half(self, rows: Ints) -> Ints:
        """Those of some atoms that lie on one side of their middle, along where they spread."""
        count = self.count[rows, None]
        x = self.centres[rows] - (self.centres[rows] * count).sum(0) / count.sum()
        return rows[x @ np.linalg.eigh((x * count).T @ x).eigenvectors[:, -1] > 0]

    def _consensus(self, top: int) -> Ints:
        """k-means on what the best partitions say together of each atom."""
        said = np.concatenate(
            [np.eye(self.k)[self._of_atoms(p.clusters)] for p in self.found[:top]], axis=1
        )
        said -= np.average(said, axis=0, weights=self.count)
        spread: Floats = (said * self.count[:, None]).T @ said
        directions = np.linalg.eigh(spread).eigenvectors[:, -self.k :]
        return self._kmeans(said @ directions, self.k, self.count, n_init=2)
