"""The search for the best partition of a graph into a given number of clusters.

1. Starts: k-means and the pivoted QR on the leading eigenvectors, in several widths; k-means with
   more clusters than asked for, merged one by one where the value loses least.
2. Each is refined (`refine`). Nodes that the best of them and a fine k-means keep together become
   one atom: on the graph of a few hundred atoms a whole search costs milliseconds.
3. Split and merge: the cluster whose halves gain most is split, the pair that loses least merged,
   the atoms refined; again while the value grows.
4. Consensus: k-means on the joint assignments of the best 3, 5 and 8, improved likewise.
5. The partition of the largest value is the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster._spectral import cluster_qr

from ssl_kd.graph.criterion import (
    Floats,
    Graph,
    Ints,
    Partition,
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
RESTARTS = 2
# From this K on everything is done once only: eigenvectors and merging cost the square of K, and
# where clusters are so many the first descent finds them.
MANY = 60
MOST_VECTORS = 256  # a thousand clusters lie apart in fewer directions than they are
DIRECTIONS = 2400  # of the joint assignments, whose eigenvectors are looked for
HALVED = 16  # clusters whose halves are tried in a round, the largest first
CONSENSUS = (3, 5, 8)


def best_partitions(
    graph: Graph, n_clusters: int, seed: int = 0, starts: Mapping[str, Ints] | None = None
) -> list[Partition]:
    """Partitions of a graph into `n_clusters`, the best first.

    Args:
        graph: of the samples.
        n_clusters: K, from 2 to n.
        seed: of every k-means.
        starts: partitions `[n]` from elsewhere that compete, by name.

    Returns:
        At least one; different starts may have come to the same end. Clusters are numbered in the
        order of their first samples.
    """
    found = _Search(graph, n_clusters, seed).run(starts or {})
    return [replace(part, clusters=_in_order(part.clusters)) for part in found]


def _in_order(clusters: Ints) -> Ints:
    """The same clusters, numbered as they come: whatever way found them."""
    _, first, number = np.unique(clusters, return_index=True, return_inverse=True)
    return first.argsort().argsort()[number]


class _Search:
    def __init__(self, graph: Graph, n_clusters: int, seed: int) -> None:
        self.graph, self.k = graph, n_clusters
        self.random = np.random.default_rng(seed)
        self.n = graph.n
        self.widths = WIDTHS if n_clusters < MANY else WIDTHS[:1]
        self.descents = DESCENTS if n_clusters < MANY else DESCENTS[:1]
        n_vectors = min(max(int(max(self.widths) * n_clusters) + 1, 16), MOST_VECTORS)
        self.vectors = spectral_coordinates(graph.matrix, n_vectors)
        self.places = on_sphere(self.vectors)
        self.found: list[Partition] = []

    def run(self, starts: Mapping[str, Ints]) -> list[Partition]:
        for origin, clusters in (dict(starts) | self._starts()).items():
            self._keep(refine(self.graph, clusters, self.k, origin))
        begun = list(self.found)
        self._make_atoms()
        if self.k < MANY:
            self._improve(self._merge_down(np.arange(self.small.n)), "atoms merged")
        for _ in range(RESTARTS if self.k < MANY else 1):
            for origin, clusters in self._descents().items():
                self._improve(clusters, origin)
        for part in begun[: IMPROVED if self.k < MANY else 1]:
            self._improve(self._of_atoms(part.clusters), part.origin)
        for top in [top for top in CONSENSUS if top * self.k <= DIRECTIONS]:
            self._improve(self._consensus(top), f"consensus of {top}")
        return self.found

    def _keep(self, part: Partition) -> None:
        self.found.append(part)
        self.found.sort(key=lambda p: -p.value)

    def _kmeans(
        self, x: NDArray, n_clusters: int, weights: NDArray | None = None, n_init: int = 1
    ) -> Ints:
        seed = int(self.random.integers(2**31))
        return kmeans(x, n_clusters, seed, weights, n_init=n_init)

    def _starts(self) -> dict[str, Ints]:
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
        """Merge the cheapest pairs to K clusters, a tenth of the way at a time, refining late."""
        k = int(clusters.max()) + 1
        while k > self.k:
            losses = self._losses(joint(self.small, clusters, k))
            merged, used = np.arange(k), set()
            for pair in losses.argsort(axis=None):
                a, b = divmod(int(pair), k)
                if len(used) >= 2 * max(1, (k - self.k) // 10) or np.isinf(losses[a, b]):
                    break
                if a not in used and b not in used:
                    used |= {a, b}
                    merged[b] = a
            clusters = np.unique(merged[clusters], return_inverse=True)[1]
            k -= len(used) // 2
            if k <= 3 * self.k:
                clusters = refine(self.small, clusters, k, sweeps=10).clusters
        return clusters

    def _losses(self, table: Floats) -> Floats:
        """What merging a pair costs; by modularity alone where the clusters are very many."""
        exact = len(table) <= 3 * self.k and self.k < MANY
        return merge_losses(table, self.k) if exact else modularity_losses(table)

    def _improve(self, clusters: Ints, origin: str) -> None:
        """Split and merge atoms while the value grows, then refine the nodes."""
        best = refine(self.small, clusters, self.k)
        for _ in range(-(-ROUNDS // self.k)):
            better = self._exchange(best)
            if better is None:
                break
            best = better
        self._keep(refine(self.graph, best.clusters[self.atoms], self.k, origin))

    def _exchange(self, best: Partition) -> Partition | None:
        """The best of a few exchanges of a split for a merge, None if none gains."""
        if self.k < 3:
            return None
        table = joint(self.small, best.clusters, self.k)
        losses = self._losses(table)
        pairs = [divmod(int(o), self.k) for o in losses.argsort(axis=None)[:MERGED]]
        tried = []
        for cluster in table.sum(1).argsort()[::-1][:HALVED]:
            rows = np.flatnonzero(best.clusters == cluster)
            if len(rows) < 2:
                continue
            half = rows[self._kmeans(self.centres[rows], 2, self.count[rows]) == 1]
            split = best.clusters.copy()
            split[half] = self.k
            tried.append((partition_value(joint(self.small, split, self.k + 1)), cluster, half))
        tried.sort(key=lambda t: -t[0])
        found = None
        for _, cluster, half in tried[:SPLIT]:
            for a, b in pairs:
                if cluster in (a, b):
                    continue
                clusters = np.where(best.clusters == b, a, best.clusters)
                clusters[half] = b
                part = refine(self.small, clusters, self.k, sweeps=15)
                if part.value > max(best.value, found.value if found else 0) + 1e-5:
                    found = part
        return found

    def _consensus(self, top: int) -> Ints:
        """k-means on what the best partitions say together of each atom."""
        said = np.concatenate(
            [np.eye(self.k)[self._of_atoms(p.clusters)] for p in self.found[:top]], axis=1
        )
        said -= np.average(said, axis=0, weights=self.count)
        spread: Floats = (said * self.count[:, None]).T @ said
        directions = np.linalg.eigh(spread).eigenvectors[:, -self.k :]
        return self._kmeans(said @ directions, self.k, self.count, n_init=2)
