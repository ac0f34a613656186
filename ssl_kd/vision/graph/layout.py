"""Lay out a neighbor graph in few dimensions, and cluster the layout by density."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ssl_kd.vision.graph.spectral import spectral_coordinates

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

STEPS = 50
LEARNING_RATE = 0.1
NEAREST_REPELLED = 1e-2  # squared distance; below it the repulsion has no bound
LARGEST_PUSH = 4.0
NEIGHBORS = 15
MIN_SIZE = 5  # samples of a cluster of the tree
CORE_NEIGHBORS = 5  # whose last distance is a sample's core distance
VOTERS = 5


def low_dimensional(graph: Any, dim: int, seed: int) -> Floats:
    """Return UMAP's layout `[n, dim]` float32 of a graph, optimized on all edges in each step.

    The layout starts from the leading eigenvectors. In each step, each edge pulls its two nodes
    together and pushes the first node away from a random node, with the forces of EVoC.

    References:
        McInnes, Healy & Melville, UMAP, 2018, section 3.2; Healy & McInnes, EVoC, 2025.
    """
    n, random = graph.shape[0], np.random.default_rng(seed)
    vectors = spectral_coordinates(graph, dim + 1)[:, 1:]
    vectors = vectors / np.sqrt(np.maximum(np.asarray(graph.sum(1)), 1e-9)).reshape(-1, 1)
    places = np.zeros((n, dim), np.float32)
    places[:, : vectors.shape[1]] = 5 * vectors / np.maximum(np.abs(vectors).max(0), 1e-12)
    places += random.normal(scale=0.05, size=(n, dim)).astype(np.float32)
    edges: Any = sp.triu(graph, 1).tocoo()
    head = edges.row
    tail = edges.col
    m = edges.nnz
    weights = (edges.data / max(edges.data.max(initial=0), 1e-12)).astype(np.float32)
    ones, columns = np.ones(m, np.float32), np.arange(m)
    to_head = sp.csr_matrix((ones, (head, columns)), shape=(n, m))
    to_tail = sp.csr_matrix((ones, (tail, columns)), shape=(n, m))
    for step in range(STEPS):
        difference = places[head] - places[tail]
        squares = np.einsum("ed,ed->e", difference, difference)
        lengths = np.sqrt(squares)
        pull = difference * (-weights * (lengths + 2) / (2 * squares - lengths / 2 + 1))[:, None]
        away = places[head] - places[random.integers(n, size=m)]
        squares = np.einsum("ed,ed->e", away, away)
        push = 4 * weights / ((1 + squares / 4) * np.maximum(squares, NEAREST_REPELLED))
        push[squares <= NEAREST_REPELLED] = 0
        away = np.clip(away * push[:, None], -LARGEST_PUSH, LARGEST_PUSH)
        rate = np.float32(LEARNING_RATE * (1 - step / STEPS))
        places = places + rate * (to_head @ (pull + away) - to_tail @ pull)
    return places


class Density:
    """Cluster points `[n, dim]` by their density, in three ways."""

    def __init__(self, places: Floats) -> None:
        from sklearn.neighbors import NearestNeighbors

        self.places, k = places, min(NEIGHBORS, len(places) - 1)
        # `[n, k]` each, nearest first, without the sample itself.
        self._distances, self._near = NearestNeighbors(n_neighbors=k).fit(places).kneighbors()

    def leaves(self, n_clusters: int) -> Ints:
        """Return the leaves of HDBSCAN's tree, with the minimum cluster size that gives K leaves.

        A merge in the single-linkage tree separates two clusters if both sides have at least the
        minimum size. Therefore the minimum size is the (K - 1)-th largest smaller side of a merge;
        if several merges tie there, the number of leaves may differ from K.

        References:
            Campello et al., Density-based clustering based on hierarchical density estimates, 2013.
        """
        children, size, _ = self._tree
        smaller = size[children].min(1)
        least = np.sort(smaller)[-(min(n_clusters, len(self.places)) - 1)]
        if 2 * n_clusters < 2 + (smaller >= least).sum() + (smaller > least).sum():
            least += 1  # of tied sizes: rather too few leaves than too many
        divided = [False] * len(self.places)  # whether a node holds several leaves
        for (a, b), smallest in zip(children.tolist(), smaller.tolist(), strict=True):
            divided.append(smallest >= least or divided[a] or divided[b])
        inside = children[divided[len(self.places) :]].ravel().tolist()
        return self._members(c for c in inside if not divided[c] and size[c] >= least)

    def heaviest(self, n_clusters: int) -> Ints:
        """Return the K clusters of HDBSCAN's tree with the largest total excess of mass.

        The excess of mass measures over which range of densities a cluster persists. HDBSCAN also
        maximizes it, but with any number of clusters; here dynamic programming over the tree finds
        the best K (fewer if the tree has fewer leaves of five samples). A dense cluster of half of
        all samples can stay whole beside clusters of five samples.

        References:
            Campello et al., Hierarchical density estimates for data clustering, 2015, section 5.
        """
        children, size, lengths = self._tree
        n, density = len(self.places), 1 / lengths
        mass, below = np.zeros(2 * n - 1), [-1] * (2 * n - 1)  # below: where a cluster divides
        best, left = dict[int, Any](), dict[int, Any]()  # by number of clusters within a node
        for node, (a, b) in enumerate(children.tolist(), n):
            rises = density[node - n]
            clusters = [child for child in (a, b) if size[child] >= MIN_SIZE]
            mass[node] = size[node] * rises
            if len(clusters) == 1:
                (child,) = clusters
                mass[node] += mass[child] - size[child] * rises
                below[node] = below[child]
            elif clusters:
                below[node] = node
                parts = []
                for child in clusters:
                    values = best.get(below[child], np.full(2, -np.inf)).copy()
                    values[1] = mass[child] - size[child] * rises
                    parts.append(values)
                best[node], left[node] = _best_sums(parts[0], parts[1], n_clusters)
        root = 2 * n - 2
        most = len(best[below[root]]) - 1 if below[root] >= 0 else 1
        open_nodes, chosen = [(root, min(n_clusters, most))], []
        while open_nodes:
            node, k = open_nodes.pop()
            if k == 1:
                chosen.append(node)
                continue
            a, b = children[below[node] - n]
            of_a = left[below[node]][k]
            open_nodes += [(a, of_a), (b, k - of_a)]
        return self._members(chosen)

    def peaks(self, n_clusters: int) -> Ints:
        """Return the basins of attraction of the K most prominent density peaks.

        Each sample belongs to the basin of its densest neighbor, up to a peak. The prominence of a
        peak is the difference in log density between it and the highest saddle towards a higher
        peak. There are more than K clusters if the neighbor graph has more components, and fewer if
        there are fewer peaks.

        References:
            Chazal et al., Persistence-based clustering in Riemannian manifolds (ToMATo), 2013.
        """
        n = len(self.places)
        distances = self._distances
        near = self._near
        density = -0.5 * np.log(np.square(distances).mean(1) + 1e-18)
        order = np.argsort(-density, kind="stable")
        rank = np.empty(n, np.int64)
        rank[order] = np.arange(n)
        head, tail = np.repeat(np.arange(n), near.shape[1]), near.ravel()
        ends = np.concatenate([np.stack([head, tail]), np.stack([tail, head])], 1)
        upward = rank.copy()  # of the densest neighbor, or of the sample itself
        np.minimum.at(upward, ends[0], rank[ends[1]])
        basin = order[upward]
        while (above := basin[basin] != basin).any():
            basin[above] = basin[basin[above]]
        crossing = ends[:, basin[ends[0]] != basin[ends[1]]]
        saddles = density[crossing].min(0)
        highest_first = np.argsort(-saddles, kind="stable")
        parent, died = {int(p): int(p) for p in np.unique(basin)}, {}
        for edge in highest_first:
            a, b = (_root(parent, int(basin[node])) for node in crossing[:, edge])
            if a != b:
                low, high = (a, b) if rank[a] > rank[b] else (b, a)
                parent[low] = high
                died[low] = (density[low] - saddles[edge], high)
        wanted = max(0, n_clusters - (len(parent) - len(died)))
        lasting = set(sorted(died, key=lambda peak: -died[peak][0])[:wanted])
        into = {peak: peak for peak in parent}
        for peak in sorted(died, key=lambda peak: rank[peak]):  # higher ones are settled already
            if peak not in lasting:
                into[peak] = into[died[peak][1]]
        return np.unique([into[int(peak)] for peak in basin], return_inverse=True)[1]

    @cached_property
    def _tree(self) -> tuple[Ints, Ints, NDArray[np.float64]]:
        """The single-linkage tree: nodes of each merge, sizes of nodes, distances of merges."""
        n = len(self.places)
        heads, tails, lengths = self._spanning_tree()
        parent = list(range(2 * n - 1))
        size = np.ones(2 * n - 1, np.int64)
        children = []
        for new, (a, b) in enumerate(zip(heads.tolist(), tails.tolist(), strict=True), n):
            pair = _root(parent, a), _root(parent, b)
            for child in pair:
                parent[child] = new
            size[new] = size[list(pair)].sum()
            children.append(pair)
        return np.array(children), size, lengths

    def _members(self, chosen: Iterable[int]) -> Ints:
        """Return clusters `[n]`: the position in `chosen` of the tree node above each sample."""
        children, n = self._tree[0], len(self.places)
        clusters = np.full(2 * n - 1, -1)
        for number, node in enumerate(chosen):
            clusters[node] = number
        for node in range(2 * n - 2, n - 1, -1):
            if clusters[node] >= 0:
                clusters[children[node - n]] = clusters[node]
        return _without_noise(self.places, clusters[:n])

    def _spanning_tree(self) -> tuple[Ints, Ints, NDArray[np.float64]]:
        """Return nodes and lengths of the edges of a minimum spanning tree, shortest first.

        Lengths are mutual reachability distances. Edges between components of the neighbor graph
        are longer than all others, by the distance of the components' means.
        """
        n = len(self.places)
        distances = self._distances
        near = self._near
        core = distances[:, min(CORE_NEIGHBORS, near.shape[1]) - 1]
        rows = np.repeat(np.arange(n), near.shape[1])
        reach = np.maximum(np.maximum(distances.ravel(), core[rows]), core[near.ravel()]) + 1e-12
        graph = sp.csr_matrix((reach, (rows, near.ravel())), shape=(n, n))
        graph = graph.maximum(graph.T)
        tree = sp.csgraph.minimum_spanning_tree(graph).tocoo()
        heads = tree.row
        tails = tree.col
        lengths = tree.data
        n_pieces, piece = sp.csgraph.connected_components(graph, directed=False)
        if n_pieces > 1:
            means = np.stack([self.places[piece == p].mean(0) for p in range(n_pieces)])
            apart = np.linalg.norm(means[:, None] - means, axis=-1) + 1e-12
            joins = sp.csgraph.minimum_spanning_tree(apart).tocoo()
            first = np.unique(piece, return_index=True)[1]
            heads, tails = np.r_[heads, first[joins.row]], np.r_[tails, first[joins.col]]
            lengths = np.r_[lengths, lengths.max(initial=0) + joins.data]
        order = np.argsort(lengths, kind="stable")
        return heads[order], tails[order], lengths[order]


def _best_sums(a: Any, b: Any, most: int) -> tuple[Any, Ints]:
    """Return for each k up to `most` the largest sum `a[i] + b[k - i]`, and its index i."""
    top = min(most, len(a) + len(b) - 2)
    best, left = np.full(top + 1, -np.inf), np.zeros(top + 1, np.int64)
    for k in range(2, top + 1):
        of_a = np.arange(max(1, k - len(b) + 1), min(len(a) - 1, k - 1) + 1)
        sums = a[of_a] + b[k - of_a]
        best[k], left[k] = sums.max(), of_a[sums.argmax()]
    return best, left


def _root(parent: Any, node: int) -> int:
    while parent[node] != node:
        parent[node] = parent[parent[node]]
        node = parent[node]
    return node


def _without_noise(places: Floats, clusters: Ints) -> Ints:
    from sklearn.neighbors import KNeighborsClassifier

    noise = clusters < 0
    if not noise.any() or noise.all():
        return np.maximum(clusters, 0)
    voters = KNeighborsClassifier(min(VOTERS, int((~noise).sum())))
    clusters[noise] = voters.fit(places[~noise], clusters[~noise]).predict(places[noise])
    return clusters
