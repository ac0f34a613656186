"""What the heads learn from: a store's embeddings, projected, all or a sample of them."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssl_kd.guard.memory import free_memory
from ssl_kd.store import EmbeddingStore
from ssl_kd.vision.consensus import sample_rows
from ssl_kd.vision.model import ROWS_PER_BLOCK
from ssl_kd.vision.projection import Projection
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.train import DeviceEmbeddings, Gather

PROJECTION_ROWS = 10_000
# Samples whose graph is searched: enough for any number of clusters that can be told apart, few
# enough to compare all pairs.
GRAPH_ROWS = 10_000
KEPT_IN_MEMORY = 2 * 2**30  # bytes of projected embeddings; more are read from the disk
COPY = 1e-5  # of the mean distance from the mean: what is nearer to a row is a copy of it
LEAST_DISTINCT = 64  # rows; with fewer no copy is left out


def training_rows(n: int, read: Gather, seed: int, n_clusters: int | None) -> Tensor:
    """Return the samples whose graph is searched, int64, in the order in which training sees them.

    These are the distinct ones, of very many a random part. They are shuffled from an order that
    depends on their distance from their mean alone: neither the order in which samples come nor a
    copy of one changes what is found.

    Args:
        n: samples there are.
        read: embeddings of these by their numbers.
        seed: of the random part.
        n_clusters: K, where that is known; with fewer distinct samples copies stay.
    """
    rows = sample_rows(n, seed, GRAPH_ROWS)
    x = (read(rows) + 0.0).contiguous().numpy()  # -0.0 is 0.0
    order = x.view(f"V{x.itemsize * x.shape[1]}").ravel().argsort(kind="stable")
    order, apart = _outwards(x, order)
    distinct = np.r_[True, apart > COPY]
    if distinct.sum() >= max(LEAST_DISTINCT, n_clusters or 0):
        order, _ = _outwards(x, order[distinct])  # around a mean that copies do not move
    return rows[np.random.default_rng(0).permutation(order)]


def _outwards(x: NDArray, order: NDArray) -> tuple[NDArray, NDArray]:
    """These rows by their distance from their mean, and how far each is from the one before.

    Distances are in units of the root mean square of those from the mean.
    """
    centred = x[order].astype(np.float64)
    centred -= centred.mean(0)
    from_mean = np.square(centred).sum(1)
    by_distance = from_mean.argsort(kind="stable")
    steps = np.diff(centred[by_distance], axis=0)
    scale = max(from_mean.mean(), np.finfo(np.float64).tiny)
    return order[by_distance], np.sqrt(np.square(steps).sum(1) / scale)


class Source:
    """Embeddings as the heads see them: projected, in memory if they fit, else read from disk.

    Args:
        store: the embeddings.
        projection: how the heads see them.
        rows: those that training sees, in this order; None: all.
    """

    def __init__(self, store: EmbeddingStore, projection: Projection, rows: Tensor | None) -> None:
        self.store, self.projection, self.rows = store, projection, rows
        self.n = store.n if rows is None else len(rows)

    @classmethod
    def fit(cls, store: EmbeddingStore, settings: VisionSettings, n_clusters: int | None) -> Source:
        """The rows that `settings` ask for, by a projection that is fitted to a sample of them."""
        rows = None
        if settings.searches_graph:
            rows = training_rows(store.n, store.gather, settings.seed, n_clusters)
        sample = sample_rows(store.n, settings.seed, PROJECTION_ROWS) if rows is None else rows
        projection = Projection.fit(store.gather(sample), settings.pca_dim)
        return cls(store, projection, rows)

    @cached_property
    def _held(self) -> Tensor | None:
        """All of them, if they fit: not before the first is read, neighbours need memory, too."""
        if self.n * self.projection.dim * 4 > KEPT_IN_MEMORY:
            return None
        held = torch.empty(self.n, self.projection.dim)
        for rows in torch.arange(self.n).split(ROWS_PER_BLOCK):
            held[rows] = self.projection(self.embeddings(rows))
        return held

    def hold(self) -> None:
        """Project all of them now, if they fit."""
        _ = self._held

    @property
    def whole(self) -> bool:
        """Whether these are all rows of the store."""
        return self.rows is None

    def embeddings(self, rows: Tensor) -> Tensor:
        """As the teacher gave them."""
        return self.store.gather(rows if self.rows is None else self.rows[rows])

    def __call__(self, rows: Tensor) -> Tensor:
        """As `Gather`."""
        if self._held is not None:
            return self._held[rows]
        return self.projection(self.embeddings(rows))

    def on(self, device: torch.device) -> Gather:
        """The same on a GPU, where they are held if half of what is free there is enough."""
        held = self._held
        if held is None or device.type != "cuda" or 2 * held.nbytes > free_memory(device):
            return self
        return DeviceEmbeddings(held.to(device))
