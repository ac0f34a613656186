"""The partition that the heads learn: the best one of the graph of neighbours.

Three graphs are summed, because none is best on all features: neighbours by the cosine of the
embeddings as they are, by their Euclidean distance, and by that after their principal components
were brought half-way to one length, which lets the weaker ones have a say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssl_kd.graph import Graph, Partition, best_partitions, fuzzy_graph, kmeans
from ssl_kd.graph.levels import Evidence, nested_levels, number_of_clusters
from ssl_kd.guard.finite import safe_normalize
from ssl_kd.store import nearest_neighbours
from ssl_kd.vision.splits import Splits

# Neighbours that a sample is tied to in each graph, as UMAP takes them.
GRAPH_NEIGHBOURS = 15
# The square root of the singular values: half-way between as they are and all alike.
WHITENING = 0.5
LEAST_DIRECTION = 1e-3  # of the strongest: weaker ones are noise that whitening would raise
ROWS = 4096
LEAST_IN_HALF = 4  # samples for each cluster, or nothing can be said of how stable they are

Gather = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class GraphAnswer:
    """What was found in the graph.

    Attributes:
        n_clusters: K.
        clusters: `[n]` int64, the best partition.
        ranked: the partitions that competed, best first.
        levels: `[level, n]` int64, finest first: clusters within those of `clusters`, to 3 K of
            them, and of whole ones, down to 5.
        number: why there are so many clusters; None where that was given.
        repeats: `[repeat, n]` int64, found anew in a random half of the samples, -1 for the other
            half; in one of the three graphs each. None of them where a half is too small.
    """

    n_clusters: int
    clusters: Tensor
    ranked: list[Partition]
    levels: Tensor
    number: Evidence | None
    repeats: Tensor


def partition_of(
    n_clusters: int | None,
    neighbours: Tensor,
    embeddings: Gather,
    projected: Tensor,
    device: torch.device,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> GraphAnswer:
    """The best partition of some samples into `n_clusters`; it depends on nothing but them.

    Args:
        n_clusters: K, at least 2; None: as many as are found.
        neighbours: `[n, k]`, nearest first by cosine of the embeddings as they are.
        embeddings: reads these by row.
        projected: `[n, dim]`, as the heads see them: centred.
        device: where neighbours are searched.
        progress: called with (graphs done, graphs).

    Raises:
        InputError: the number of clusters is to be found among too few samples.
    """
    n = len(projected)
    views, total = [], sp.csr_matrix((n, n), dtype=np.float32)
    for view in graph_views(neighbours, embeddings, projected, device):
        views.append(view)
        total = total + view
        progress(len(views), 3)
    graph, number = Graph(total.tocsr()), None
    if n_clusters is None:
        number = number_of_clusters(graph)
        n_clusters = number.n_clusters
    starts = {"k-means": kmeans(safe_normalize(projected).numpy(), n_clusters, seed=0)}
    ranked = best_partitions(graph, n_clusters, starts=starts)
    best = torch.from_numpy(ranked[0].clusters)
    clusters = Splits.fit(projected, best, n_clusters)(projected, best)  # a search may leave fewer
    levels = np.stack(nested_levels(graph, clusters.numpy()))
    alpha = ranked[0].alpha
    repeats = [_repeated(view, n_clusters, alpha, seed) for seed, view in enumerate(views)]
    found = [torch.from_numpy(clusters) for clusters in repeats if clusters is not None]
    every = torch.stack(found) if found else torch.empty(0, n, dtype=torch.int64)
    return GraphAnswer(n_clusters, clusters, ranked, torch.from_numpy(levels), number, every)


def _repeated(graph: Any, n_clusters: int, alpha: float, seed: int) -> NDArray[np.int64] | None:
    """The best partition of a random half of a graph's nodes, -1 for the others; None: too few."""
    n = graph.shape[0]
    half = np.sort(np.random.default_rng(seed).permutation(n)[: n // 2])
    part = graph[half][:, half].tocsr()
    if len(half) < LEAST_IN_HALF * n_clusters or not part.nnz:
        return None
    clusters = np.full(n, -1)
    clusters[half] = best_partitions(Graph(part), n_clusters, alpha=alpha, restarts=1)[0].clusters
    return clusters


def graph_views(
    neighbours: Tensor, embeddings: Gather, projected: Tensor, device: torch.device
) -> Iterator[sp.csr_matrix]:
    """The three graphs, `[n, n]` each: cosine, Euclidean, half-whitened; as for `partition_of`."""
    k = min(GRAPH_NEIGHBOURS, len(projected) - 1)
    near = neighbours[:, :k]
    if near.shape[1] < k:  # fewer were asked for, to pair samples with
        near = nearest_neighbours(embeddings(torch.arange(len(projected))), k, device=device)
    chords = _distances(near, lambda rows: safe_normalize(embeddings(rows).float()))
    yield fuzzy_graph(near.numpy(), (chords.square() / 2).numpy())  # 1 - cosine
    for x in (projected, _half_whitened(projected)):
        near = nearest_neighbours(x, k, metric="euclidean", device=device)
        yield fuzzy_graph(near.numpy(), _distances(near, x.__getitem__).numpy())


def _distances(near: Tensor, read: Gather) -> Tensor:
    """Euclidean distance from each row to its neighbours, `[n, k]`."""
    n, k = near.shape
    blocks = []
    for rows in torch.arange(n).split(max(1, ROWS // k)):
        others = read(near[rows].flatten()).unflatten(0, (len(rows), k))
        blocks.append((others - read(rows).unsqueeze(1)).norm(dim=-1))
    return torch.cat(blocks)


def _half_whitened(x: Tensor) -> Tensor:
    """Centred rows in their principal components, each divided by the root of its length."""
    spread = (x.T @ x).double() / len(x)
    variances, directions = torch.linalg.eigh(spread)
    lengths = variances.clamp(min=0).sqrt()
    kept = lengths > LEAST_DIRECTION * lengths.max()
    if not kept.any():
        return x
    basis = directions[:, kept] / (lengths[kept] / lengths.max()) ** WHITENING
    return x @ basis.float()
