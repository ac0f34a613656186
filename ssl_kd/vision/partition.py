"""The partition that the heads learn: a consensus of partitions of neighbor graphs.

There are three views of the samples, because none is best on all features: cosine, Euclidean
distance, and Euclidean distance after half-whitening, which gives weaker components more weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from ssl_kd.graph import Ensemble, Graph, View, form_ensemble, fuzzy_graph
from ssl_kd.graph.levels import Evidence, nested_levels, number_of_clusters
from ssl_kd.guard.finite import safe_normalize
from ssl_kd.store import nearest_neighbors
from ssl_kd.vision.model_parts import Splits

# Neighbors of a sample in the graphs; 15 as in UMAP.
COSINE_GRAPHS = (10, 15, 20)
GRAPH_NEIGHBORS = 15
# Power of the singular values: half-way between unchanged and all equal.
WHITENING = 0.5
MIN_DIRECTION = 1e-3  # of the strongest: weaker ones are noise that whitening would amplify
ROWS = 4096

Gather = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class GraphAnswer:
    """The partition of a graph into K clusters, and the tree of levels around it."""

    n_clusters: int
    clusters: Tensor  # `[n]` int64, the consensus
    ensemble: Ensemble  # the partitions that it was formed from
    levels: (
        Tensor  # `[level, n]` int64, finest first: 3 K parts of `clusters`, ... 5 unions of them
    )
    number: Evidence | None  # for K; None where it was given


def partition_of(
    n_clusters: int | None,
    neighbors: Tensor,
    embeddings: Gather,
    projected: Tensor,
    device: torch.device,
    progress: Callable[[int, int], object] = lambda done, total: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> GraphAnswer:
    """Return the best partition of samples into `n_clusters`; for None their number is found.

    It depends on the samples alone. `neighbors` `[n, k]` are nearest first by cosine, `embeddings`
    returns those of given rows, and `projected` are the centered ones. `should_stop` is called
    after each of the partitions; true forms the consensus of those so far.

    Raises:
        InputError: there are too few samples to find the number of clusters.
    """
    cosine, euclidean, whitened = views(neighbors, embeddings, projected, device)
    together = summed(cosine, euclidean, whitened)
    graph, number = Graph(together), None
    if n_clusters is None:
        number = number_of_clusters(graph, [*cosine.densities, *euclidean.densities])
        n_clusters = number.n_clusters
    ensemble = form_ensemble(cosine, euclidean, together, n_clusters, progress, should_stop)
    agreed = torch.from_numpy(ensemble.clusters)
    clusters = Splits.fit(projected, agreed, n_clusters)(projected, agreed)  # there may be fewer
    levels = np.stack(nested_levels(graph, clusters.numpy()))
    return GraphAnswer(n_clusters, clusters, ensemble, torch.from_numpy(levels), number)


def views(
    neighbors: Tensor, embeddings: Gather, projected: Tensor, device: torch.device
) -> tuple[View, View, View]:
    """Return the views by cosine, Euclidean distance and half-whitened Euclidean distance."""
    n = len(projected)
    unit = safe_normalize(embeddings(torch.arange(n)).float())
    k = min(max(COSINE_GRAPHS), n - 1)
    near = neighbors[:, :k]
    if near.shape[1] < k:  # NEIGHBOURS is smaller
        near = nearest_neighbors(unit, k, device=device)
    distances = _distances(near, unit).square() / 2  # 1 - cosine
    graphs = {
        size: fuzzy_graph(near[:, :size].numpy(), distances[:, :size].numpy())
        for size in COSINE_GRAPHS
    }
    euclidean, whitened = (_euclidean(x, device) for x in (projected, _half_whitened(projected)))
    return View(unit.numpy(), graphs), euclidean, whitened


def _euclidean(x: Tensor, device: torch.device) -> View:
    k = min(GRAPH_NEIGHBORS, len(x) - 1)
    near = nearest_neighbors(x, k, metric="euclidean", device=device)
    graph = fuzzy_graph(near.numpy(), _distances(near, x).numpy())
    return View(x.numpy(), {GRAPH_NEIGHBORS: graph})


def summed(*views: View) -> sp.csr_matrix:
    """Return the sum of the graphs of 15 neighbors of several views, `[n, n]`."""
    first, *others = (view.graphs[GRAPH_NEIGHBORS] for view in views)
    return sum(others, first).tocsr()


def _distances(near: Tensor, x: Tensor) -> Tensor:
    """Return the Euclidean distance from each row to its neighbors, `[n, k]`."""
    blocks = torch.arange(len(near)).split(max(1, ROWS // near.shape[1]))
    return torch.cat([(x[near[rows]] - x[rows].unsqueeze(1)).norm(dim=-1) for rows in blocks])


def _half_whitened(x: Tensor) -> Tensor:
    """Return centered rows in principal components, each divided by the root of its length."""
    spread = (x.T @ x).double() / len(x)
    variances, directions = torch.linalg.eigh(spread)
    lengths = variances.clamp(min=0).sqrt()
    strong = lengths > MIN_DIRECTION * lengths.max()
    if not strong.any():
        return x
    basis = directions[:, strong] / (lengths[strong] / lengths.max()) ** WHITENING
    return x @ basis.float()
