"""Choose the rows of a store that the heads are trained on, and read their projections.

Of many samples, a random part forms the neighbor graph and is clustered. The others take the
clusters of the nearest samples in the graph, so that heads learn the answer from all samples.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from torch import Tensor

from ssl_kd.core.memory import free_memory, to_device_async
from ssl_kd.vision.cache import EmbeddingStore
from ssl_kd.vision.cache.neighbors import METRICS, nearest_among, search_on
from ssl_kd.vision.graph.ensemble import FEW_COLUMNS
from ssl_kd.vision.model import ROWS_PER_BLOCK
from ssl_kd.vision.model_parts import Projection
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.train.learner import Gather
from ssl_kd.vision.train.pairs import sample_rows

# Samples in the neighbor graph: as many per cluster, within these limits.
GRAPH_ROWS = 10_000
ROWS_PER_CLUSTER = 50
MOST_GRAPH_ROWS = 100_000
MOST_OTHER_ROWS = 1_000_000  # beyond the graph, from which heads learn
CARRIERS = 10  # nearest samples in the graph whose clusters vote on a sample beyond it
MAX_BYTES_IN_MEMORY = 2 * 2**30  # larger ones are read from disk and projected on demand
UNEQUAL = 10  # ratio of the standard deviations of two columns that calls for standardizing
COPY = 1e-5  # rows this close are copies, relative to the RMS distance from the mean
MIN_DISTINCT = 64  # with fewer distinct rows, copies are kept


def training_rows(n: int, read: Gather, seed: int, n_clusters: int | None) -> Tensor:
    """Return the distinct samples, or a random subset of many, in the order of training.

    Of more than 10,000 samples, 50 per cluster are drawn, 10,000 to 100,000.

    They are sorted by the distance from their mean and then shuffled, so neither the input order
    nor copies change the result. Copies are kept if fewer than `n_clusters` samples are distinct.
    """
    rows = sample_rows(n, seed, _graph_size(n_clusters))
    x = (read(rows) + 0.0).contiguous().numpy()  # -0.0 is 0.0
    order = x.view(f"V{x.itemsize * x.shape[1]}").ravel().argsort(kind="stable")
    order, apart = _by_distance(x, order)
    distinct = np.r_[True, apart > COPY]
    if distinct.sum() >= max(MIN_DISTINCT, n_clusters or 0):
        order, _ = _by_distance(x, order[distinct])  # by a mean without copies
    return rows[np.random.default_rng(0).permutation(order)]


def _graph_size(n_clusters: int | None) -> int:
    """Return how many samples are in the neighbor graph, if there are so many."""
    return min(max(GRAPH_ROWS, ROWS_PER_CLUSTER * (n_clusters or 0)), MOST_GRAPH_ROWS)


def other_rows(n: int, rows: Tensor, seed: int, n_clusters: int | None) -> Tensor:
    """Return the samples beyond the `rows` that `training_rows` chose, at most 1,000,000 at random.

    There are none where the graph did not have to leave samples out, except copies.
    """
    if n <= _graph_size(n_clusters):
        return rows[:0]
    beyond = torch.ones(n, dtype=torch.bool)
    beyond[rows] = False
    others = beyond.nonzero().flatten()
    return others[sample_rows(len(others), seed, MOST_OTHER_ROWS)]


def nearest_in_graph(
    read: Gather, n_graph: int, n: int, k: int, device: torch.device
) -> Tensor | None:
    """Find the k nearest samples in the graph of each sample beyond it, int32 `[n - n_graph, k]`.

    `read` returns projected embeddings by row, of which the first `n_graph` are in the graph. The
    nearest by Euclidean distance comes first. Return None if all `n` samples are in the graph.
    """
    if n == n_graph:
        return None
    as_query, as_candidate = METRICS["euclidean"]
    search = search_on(device)
    candidates = [(0, as_candidate(read(torch.arange(n_graph))).to(device))]
    nearest = []
    for rows in torch.arange(n_graph, n).split(ROWS_PER_BLOCK):
        queries, itself = as_query(read(rows)).to(device), rows.to(device)
        nearest.append(nearest_among(queries, itself, candidates, k, search).int().cpu())
    return torch.cat(nearest)


def carried(clusters: Tensor, nearest: Tensor) -> Tensor:
    """Return clusters of samples beyond the graph, `[m]`, by those `[n]` of the graph's samples.

    A sample joins the most frequent cluster of the first ten of `nearest` `[m, k]`; of equally
    frequent ones, that of the nearest sample.
    """
    joined = []
    for near in nearest[:, :CARRIERS].split(ROWS_PER_BLOCK):
        votes = clusters[near.long()]
        voters = rearrange(votes, "row voter -> row 1 voter")
        counts = (rearrange(votes, "row vote -> row vote 1") == voters).sum(2)
        joined.append(votes.gather(1, counts.argmax(1, keepdim=True)).squeeze(1))
    return torch.cat(joined)


def _by_distance(x: NDArray, order: NDArray) -> tuple[NDArray, NDArray]:
    """Sort rows by distance from their mean; also return the distances between consecutive rows."""
    centered = x[order].astype(np.float64)
    centered -= centered.mean(0)
    from_mean = np.square(centered).sum(1)
    by_distance = from_mean.argsort(kind="stable")
    steps = np.diff(centered[by_distance], axis=0)
    # Distances are in units of the root mean square distance from the mean.
    scale = max(from_mean.mean(), np.finfo(np.float64).tiny)
    return order[by_distance], np.sqrt(np.square(steps).sum(1) / scale)


def unequal_columns(x: Tensor, standardized: bool) -> str:
    """Describe columns of a table `[n, d]` that are not standardized but need it, or return ""."""
    deviations = x.double().std(0, correction=0)
    deviations = deviations[deviations > 0]
    if standardized or x.shape[1] > FEW_COLUMNS or not len(deviations):
        return ""
    ratio = float(deviations.max() / deviations.min())
    if ratio < UNEQUAL:
        return ""
    return (
        f"the {x.shape[1]} columns were not standardized; the largest standard deviation is "
        f"{ratio:.3g} times the smallest, so few columns decide. If their units differ, set "
        "STANDARDIZE (--standardize, standardize=True)"
    )


class TrainingRows:
    """Read the projected embeddings of the training rows, from memory if they fit, else from disk.

    `rows` are the rows of the store to train on, in this order; the first `n` are in the neighbor
    graph.
    """

    def __init__(self, store: EmbeddingStore, projection: Projection, rows: Tensor, n: int) -> None:
        self.store = store
        self.projection = projection
        self.rows = rows
        self.unequal = ""  # what `unequal_columns` says of the rows that fit the projection
        self.n = n

    @classmethod
    def fit(
        cls, store: EmbeddingStore, settings: VisionSettings, n_clusters: int | None
    ) -> TrainingRows:
        """Choose the training rows, and fit the projection to those in the graph."""
        graph = training_rows(store.n, store.gather, settings.seed, n_clusters)
        x = store.gather(graph)
        rows = torch.cat([graph, other_rows(store.n, graph, settings.seed, n_clusters)])
        projection = Projection.fit(x, settings.pca_dim, settings.standardize)
        training = cls(store, projection, rows, len(graph))
        training.unequal = unequal_columns(x, settings.standardize)
        return training

    @cached_property
    def _in_memory(self) -> Tensor | None:
        # Computed when the first row is read: before that, the neighbor search needs the memory.
        n = len(self.rows)
        if n * self.projection.dim * 4 > MAX_BYTES_IN_MEMORY:
            return None
        projected = torch.empty(n, self.projection.dim)
        for rows in torch.arange(n).split(ROWS_PER_BLOCK):
            projected[rows] = self.projection(self._gather(rows))
        return projected

    def load(self) -> None:
        """Project all rows now if they fit into memory."""
        _ = self._in_memory

    def _gather(self, rows: Tensor) -> Tensor:
        return self.store.gather(self.rows[rows])

    def embeddings(self, rows: Tensor) -> Tensor:
        """Return the embeddings of the given training rows before PCA; see STANDARDIZE."""
        return self.projection.columns(self._gather(rows))

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the projected embeddings of the given training rows."""
        if self._in_memory is not None:
            return self._in_memory[rows]
        return self.projection(self._gather(rows))

    def on(self, device: torch.device) -> Gather:
        """Return a reader that keeps the rows on a GPU if they need at most half its memory."""
        projected = self._in_memory
        if projected is None or device.type != "cuda" or 2 * projected.nbytes > free_memory(device):
            return self
        on_device = projected.to(device)
        return lambda rows: on_device[to_device_async(rows, device)]
