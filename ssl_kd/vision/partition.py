"""Find the partition that the heads learn: a consensus of partitions of neighbor graphs.

The graphs use three distances, because none is best for all embeddings: cosine, Euclidean, and
Euclidean after half-whitening, which gives weak principal components more weight.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from firstnan.finite import safe_normalize
from ssl_kd.vision.cache import neighbors_in_memory
from ssl_kd.vision.graph import Ensemble, Graph, View, form_ensemble, fuzzy_graph, summed
from ssl_kd.vision.graph.ensemble import COSINE, Candidate, Sizes
from ssl_kd.vision.graph.levels import modularity, nested_levels
from ssl_kd.vision.graph.number import Evidence, number_of_clusters
from ssl_kd.vision.graph.spectral import on_sphere
from ssl_kd.vision.model_parts import Splits
from ssl_kd.vision.train.learner import Gather

logger = logging.getLogger(__name__)

# Numbers of neighbors per sample in the graphs; 15 is the default of UMAP.
COSINE_GRAPHS = (10, 15, 20)
GRAPH_NEIGHBORS = 15
# Exponent of the singular values to divide by: 0 changes nothing, 1 makes all equal.
WHITENING = 0.5
MIN_DIRECTION = 1e-3  # relative to the strongest; whitening would amplify noise in weaker ones
ROWS = 4096


@dataclass(frozen=True)
class GraphAnswer:
    """The consensus partition into K clusters, and coarser and finer levels of it."""

    n_clusters: int
    clusters: Tensor  # int64 `[n]`, the consensus
    neighbors: Tensor  # int64 `[n, k]`, nearest first by a metric of the partitions
    ensemble: Ensemble  # the partitions that the consensus was formed from
    levels: Tensor  # int64 `[level, n]`, finest (3 K parts) to coarsest (5 unions of clusters)
    number: Evidence | None  # evidence for the chosen K; None if K was given


@dataclass(frozen=True)
class Partitions:
    """The partitions of the samples by methods on the neighbor graph, before heads vote."""

    n_clusters: int
    ensemble: Ensemble
    neighbors: Tensor  # int64 `[n, k]`, nearest first by a metric of the partitions
    projected: Tensor  # `[n, dim]`
    graph: Graph  # the summed graphs by the metrics of the partitions
    number: Evidence | None

    def answer(self, heads: Sequence[Candidate] = (), *, alone: bool = False) -> GraphAnswer:
        """Return the consensus, in which the partitions of `heads` vote as well, or `alone`."""
        k, ensemble = self.n_clusters, self.ensemble
        if heads:
            ensemble = ensemble.joined_by(list(heads), k, alone=alone)
        agreed = torch.from_numpy(ensemble.clusters)
        clusters = Splits.fit(self.projected, agreed, k)(self.projected, agreed)  # if fewer
        levels = torch.from_numpy(np.stack(nested_levels(self.graph, clusters.numpy())))
        return GraphAnswer(k, clusters, self.neighbors, ensemble, levels, self.number)


def partitions_of(
    n_clusters: int | None,
    neighbors: Tensor,
    embeddings: Gather,
    projected: Tensor,
    device: torch.device,
    sizes: Sizes = "even",
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Partitions:
    """Partition the samples into `n_clusters` by all methods; if None, choose their number.

    `neighbors` `[n, k]` are sorted by cosine, nearest first.
    """
    by_metric = voting = views(neighbors, embeddings, projected, device)
    number = None
    if n_clusters is None:
        cosine, euclidean, _ = by_metric
        number = _number(voting, [cosine.rows, on_sphere(euclidean.rows)], by_metric[:2])
        n_clusters = number.n_clusters
    ensemble = form_ensemble(*by_metric, n_clusters, sizes, progress)
    if COSINE not in ensemble.metrics:
        why = (
            "the lengths of the embeddings matter: clusters are searched by Euclidean distance "
            "alone, because partitions by cosine agree much less with each other"
        )
        if not ensemble.by_graphs:
            why = (
                f"{projected.shape[0]} rows of {projected.shape[1]} columns are a small table: "
                "clusters are searched by Euclidean distance, without neighbor graphs"
            )
        logger.info(why)
        voting = by_metric[1:]
        k = neighbors.shape[1]
        neighbors = neighbors_in_memory(projected, k, metric="euclidean", device=device)[0]
        if number is not None:
            number = _number(voting, [view.rows for view in voting], by_metric[1:2])
            n_clusters = number.n_clusters
            ensemble = form_ensemble(*by_metric, n_clusters, sizes, progress)
    if number is not None:
        logger.info(
            "the number of clusters is likely %d to %d; %d are used (N_CLUSTERS sets another)",
            *number.interval,
            n_clusters,
        )
    graph = Graph(summed(*voting))
    return Partitions(n_clusters, ensemble, neighbors, projected, graph, number)


def _number(
    voting: Sequence[View], points: Sequence[NDArray], laid_out: Sequence[View]
) -> Evidence:
    """Choose the number of clusters from graphs, points for k-means, and layouts of views."""
    densities = [density for view in laid_out for density in view.densities]
    return number_of_clusters(Graph(summed(*voting)), points, densities)


def modularity_of(clusters: Tensor, embeddings: Tensor, projected: Tensor) -> float:
    """Return the modularity of clusters `[n]` in the neighbor graph of `embeddings` `[n, dim]`.

    The graph is the one by which the number of clusters is found; `projected` are their principal
    components.
    """
    k = min(max(COSINE_GRAPHS), len(embeddings) - 1)
    near = neighbors_in_memory(embeddings, k)[0]
    by_metric = views(near, embeddings.__getitem__, projected, embeddings.device)
    graph = Graph(summed(*by_metric))
    return modularity(graph, clusters.numpy(), int(clusters.max()) + 1)


def views(
    neighbors: Tensor, embeddings: Gather, projected: Tensor, device: torch.device
) -> tuple[View, View, View]:
    """Return graphs by cosine, Euclidean distance, and half-whitened Euclidean distance."""
    n = len(projected)
    unit = safe_normalize(embeddings(torch.arange(n)).float())
    k = min(max(COSINE_GRAPHS), n - 1)
    near = neighbors[:, :k]
    if near.shape[1] < k:  # N_NEIGHBORS is smaller than k
        near = neighbors_in_memory(unit, k, device=device)[0]
    distances = _distances(near, unit).square() / 2  # 1 - cosine
    graphs = {
        size: fuzzy_graph(near[:, :size].numpy(), distances[:, :size].numpy())
        for size in COSINE_GRAPHS
    }
    euclidean, whitened = (_euclidean(x, device) for x in (projected, _half_whitened(projected)))
    return View(unit.numpy(), graphs), euclidean, whitened


def _euclidean(x: Tensor, device: torch.device) -> View:
    k = min(GRAPH_NEIGHBORS, len(x) - 1)
    near = neighbors_in_memory(x, k, metric="euclidean", device=device)[0]
    graph = fuzzy_graph(near.numpy(), _distances(near, x).numpy())
    return View(x.numpy(), {GRAPH_NEIGHBORS: graph})


def _distances(near: Tensor, x: Tensor) -> Tensor:
    """Return the Euclidean distance from each row to its neighbors, `[n, k]`."""
    blocks = torch.arange(len(near)).split(max(1, ROWS // near.shape[1]))
    return torch.cat([(x[near[rows]] - x[rows].unsqueeze(1)).norm(dim=-1) for rows in blocks])


def _half_whitened(x: Tensor) -> Tensor:
    """Return principal components, each divided by the square root of its standard deviation."""
    spread = (x.T @ x).double() / len(x)
    variances, directions = torch.linalg.eigh(spread)
    lengths = variances.clamp(min=0).sqrt()
    strong = lengths > MIN_DIRECTION * lengths.max()
    if not strong.any():
        return x
    basis = directions[:, strong] / (lengths[strong] / lengths.max()) ** WHITENING
    return x @ basis.float()
