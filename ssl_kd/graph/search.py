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

import warnings
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from sklearn.cluster._spectral import cluster_qr
from sklearn.exceptions import ConvergenceWarning

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
from ssl_kd.graph.spectral import on_sphere, spectral_coordinates

# Eigenvectors that k-means sees, and clusters that are merged down, as multiples of K.
WIDTHS = (1.0, 1.25, 1.5)
DESCENTS = (1.5, 2.0, 2.5, 3.0, 4.0, 5.0)
LEAST_DESCENT = 24  # two clusters that wind around each other are many small ones first
ATOMS = 500
ATOMS_PER_CLUSTER = 4
IMPROVED = 4  # starts that are split and merged
SPLIT, MERGED, ROUNDS = 2, 3, 30
RESTARTS = 2
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
        At least one; different starts may have come to the same end.
    """
    return _Search(graph, n_clusters, seed).run(starts or {})


class _Search:
    def __init__(self, graph: Graph, n_clusters: int, seed: int) -> None:
        self.graph, self.k = graph, n_clusters
        self.random = np.random.default_rng(seed)
        self.n = graph.n
        self.vectors = spectral_coordinates(graph.matrix, max(int(1.5 * n_clusters) + 1, 16))
        self.places = on_sphere(self.vectors)
        self.found: list[Partition] = []

    def run(self, starts: Mapping[str, Ints]) -> list[Partition]:
        for origin, clusters in (dict(starts) | self._starts()).items():
            self._keep(refine(self.graph, clusters, self.k, origin))
        begun = list(self.found)
        self._make_atoms()
        self._improve(self._merge_down(np.arange(self.small.n)), "atoms merged")
        for _ in range(RESTARTS):
            for origin, clusters in self._descents().items():
                self._improve(clusters, origin)
        for part in begun[:IMPROVED]:
            self._improve(self._of_atoms(part.clusters), part.origin)
        for top in CONSENSUS:
            self._improve(self._consensus(top), f"consensus of {top}")
        return self.found

    def _keep(self, part: Partition) -> None:
        self.found.append(part)
        self.found.sort(key=lambda p: -p.value)

    def _kmeans(
        self, x: NDArray, n_clusters: int, weights: NDArray | None = None, n_init: int = 1
    ) -> Ints:
        seed = int(self.random.integers(2**31))
        return _kmeans(x, n_clusters, seed, weights, n_init=n_init)

    def _starts(self) -> dict[str, Ints]:
        starts = {
            f"{width} K eigenvectors": self._kmeans(self.places[:, : int(width * self.k)], self.k)
            for width in WIDTHS
        }
        starts["eigenvectors by QR"] = cluster_qr(self.vectors[:, : self.k]).astype(np.int64)
        return starts

    def _make_atoms(self) -> None:
        """Groups of nodes that are moved together, with their graph and coordinates."""
        most = max(ATOMS, ATOMS_PER_CLUSTER * self.k)
        atoms = np.arange(self.n)
        if self.n > most:
            atoms = _kmeans(self.places, most, 0, max_iter=5, init="random")
            for part in self.found[:4]:
                atoms = np.unique(atoms * self.k + part.clusters, return_inverse=True)[1]
            atoms = np.unique(atoms, return_inverse=True)[1]
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
        sizes = sorted({int(f * self.k) for f in DESCENTS} | {LEAST_DESCENT})
        for size in [s for s in sizes if self.k < s < self.small.n]:
            many = self._kmeans(self.centres[:, :size], size, self.count)
            found[f"{size} merged"] = self._merge_down(many)
        return found

    def _merge_down(self, clusters: Ints) -> Ints:
        """Merge to K clusters: by modularity while they are many, then by the value, refining."""
        k = int(clusters.max()) + 1
        table = joint(self.small, clusters, k)
        losses, early = modularity_losses(table), 3 * self.k
        refine_every = max(1, self.k // 20)
        while k > self.k:
            a, b = divmod(int(losses.argmin()), k)
            clusters = np.where(clusters == b, a, clusters)
            clusters -= clusters > b
            k -= 1
            if k <= early and (k - self.k) % refine_every == 0:
                clusters = refine(self.small, clusters, k, sweeps=10).clusters
                table = joint(self.small, clusters, k)
                losses = merge_losses(table, self.k)
                continue
            table[a] += table[b]
            table[:, a] += table[:, b]
            keep = np.arange(k + 1) != b
            table = table[np.ix_(keep, keep)]
            losses = modularity_losses(table)
        return clusters

    def _improve(self, clusters: Ints, origin: str) -> None:
        """Split and merge atoms while the value grows, then refine the nodes."""
        best = refine(self.small, clusters, self.k)
        for _ in range(ROUNDS):
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
        losses = merge_losses(table, self.k)
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


def _kmeans(
    x: NDArray,
    n_clusters: int,
    seed: int,
    weights: NDArray | None = None,
    *,
    n_init: int = 1,
    max_iter: int = 50,
    init: Literal["k-means++", "random"] = "k-means++",
) -> Ints:
    """Clusters `[n]` without gaps in their numbers; fewer where there are fewer distinct rows."""
    # scikit-learn's declaration knows n_init as a word only
    starts: Any = n_init
    model = KMeans(n_clusters, init=init, n_init=starts, max_iter=max_iter, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = model.fit_predict(x, sample_weight=weights)
    return np.unique(found, return_inverse=True)[1].astype(np.int64)
