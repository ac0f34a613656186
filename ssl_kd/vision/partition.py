"""The partition that the heads learn: what the crowd agrees on, among graphs of neighbours.

Samples are looked at in three ways, because none is best on all features: by the cosine of the
embeddings as they are, by their Euclidean distance, and by that after their principal components
were brought half-way to one length, which lets the weaker ones have a say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from ssl_kd.graph import Crowd, Graph, View, ask_crowd, fuzzy_graph
from ssl_kd.graph.levels import Evidence, nested_levels, number_of_clusters
from ssl_kd.guard.finite import safe_normalize
from ssl_kd.store import nearest_neighbours
from ssl_kd.vision.splits import Splits

# Neighbours that a sample is tied to; 15 as UMAP takes them.
COSINE_GRAPHS = (10, 15, 20)
GRAPH_NEIGHBOURS = 15
# The square root of the singular values: half-way between as they are and all alike.
WHITENING = 0.5
LEAST_DIRECTION = 1e-3  # of the strongest: weaker ones are noise that whitening would raise
ROWS = 4096

Gather = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class GraphAnswer:
    """What was found in the graphs.

    Attributes:
        n_clusters: K.
        clusters: `[n]` int64, the consensus.
        crowd: what agreed on it.
        levels: `[level, n]` int64, finest first: clusters within those of `clusters`, to 3 K of
            them, and of whole ones, down to 5.
        number: why there are so many clusters; None where that was given.
    """

    n_clusters: int
    clusters: Tensor
    crowd: Crowd
    levels: Tensor
    number: Evidence | None


def partition_of(
    n_clusters: int | None,
    neighbours: Tensor,
    embeddings: Gather,
    projected: Tensor,
    device: torch.device,
    progress: Callable[[int, int], object] = lambda done, total: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> GraphAnswer:
    """The best partition of some samples into `n_clusters`; it depends on nothing but them.

    Args:
        n_clusters: K, at least 2; None: as many as are found.
        neighbours: `[n, k]`, nearest first by cosine of the embeddings as they are.
        embeddings: reads these by row.
        projected: `[n, dim]`, as the heads see them: centred.
        device: where neighbours are searched.
        progress: called with (partitions done, partitions).
        should_stop: called after each of them; true takes the consensus of those there are.

    Raises:
        InputError: the number of clusters is to be found among too few samples.
    """
    cosine, euclidean, whitened = views(neighbours, embeddings, projected, device)
    together = summed(cosine, euclidean, whitened)
    graph, number = Graph(together), None
    if n_clusters is None:
        number = number_of_clusters(graph, [*cosine.densities, *euclidean.densities])
        n_clusters = number.n_clusters
    crowd = ask_crowd(cosine, euclidean, together, n_clusters, progress, should_stop)
    agreed = torch.from_numpy(crowd.clusters)
    clusters = Splits.fit(projected, agreed, n_clusters)(projected, agreed)  # there may be fewer
    levels = np.stack(nested_levels(graph, clusters.numpy()))
    return GraphAnswer(n_clusters, clusters, crowd, torch.from_numpy(levels), number)


def views(
    neighbours: Tensor, embeddings: Gather, projected: Tensor, device: torch.device
) -> tuple[View, View, View]:
    """By cosine, Euclidean distance and half-whitened components; as for `partition_of`."""
    n = len(projected)
    unit = safe_normalize(embeddings(torch.arange(n)).float())
    k = min(max(COSINE_GRAPHS), n - 1)
    near = neighbours[:, :k]
    if near.shape[1] < k:  # fewer were asked for, to pair samples with
        near = nearest_neighbours(unit, k, device=device)
    distances = _distances(near, unit).square() / 2  # 1 - cosine
    graphs = {
        size: fuzzy_graph(near[:, :size].numpy(), distances[:, :size].numpy())
        for size in COSINE_GRAPHS
    }
    euclidean, whitened = (_euclidean(x, device) for x in (projected, _half_whitened(projected)))
    return View(unit.numpy(), graphs), euclidean, whitened


def _euclidean(x: Tensor, device: torch.device) -> View:
    k = min(GRAPH_NEIGHBOURS, len(x) - 1)
    near = nearest_neighbours(x, k, metric="euclidean", device=device)
    graph = fuzzy_graph(near.numpy(), _distances(near, x).numpy())
    return View(x.numpy(), {GRAPH_NEIGHBOURS: graph})


def summed(*looks: View) -> sp.csr_matrix:
    """The graphs of 15 neighbours of several views as one, `[n, n]`."""
    first, *others = (view.graphs[GRAPH_NEIGHBOURS] for view in looks)
    return sum(others, first).tocsr()


def _distances(near: Tensor, x: Tensor) -> Tensor:
    """Euclidean distance from each row to its neighbours, `[n, k]`."""
    blocks = torch.arange(len(near)).split(max(1, ROWS // near.shape[1]))
    return torch.cat([(x[near[rows]] - x[rows].unsqueeze(1)).norm(dim=-1) for rows in blocks])


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
