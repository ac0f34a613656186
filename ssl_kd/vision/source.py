"""What the heads learn from: a store's embeddings, projected, all or a sample of them."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from ssl_kd.guard.memory import free_memory
from ssl_kd.store import EmbeddingStore
from ssl_kd.vision.consensus import sample_rows
from ssl_kd.vision.model import ROWS_PER_BLOCK
from ssl_kd.vision.projection import Projection
from ssl_kd.vision.settings import AUTO, VisionSettings
from ssl_kd.vision.train import Gather, Held

PROJECTION_ROWS = 10_000
# Samples whose graph is searched: enough for any number of clusters that can be told apart, few
# enough to compare all pairs.
GRAPH_ROWS = 10_000


def graph_rows(n: int, settings: VisionSettings) -> Tensor | None:
    """The samples that training sees: of very many a random part where a graph is searched.

    Args:
        n: samples there are.
        settings: method, number of clusters and seed.

    Returns:
        Their rows in order, int64; None: all of them.
    """
    searched = settings.by_graph or settings.n_clusters == AUTO
    return sample_rows(n, settings.seed, GRAPH_ROWS) if searched and n > GRAPH_ROWS else None


class Source:
    """Embeddings as the heads see them: projected, in memory if they fit, else read from disk.

    With METHOD graph a random sample of a very large store: the heads that learn its clusters tell
    those of all others.

    Args:
        store: the embeddings.
        settings: of the run.
        projection: how the heads see them; None: fitted to a sample.
    """

    def __init__(
        self, store: EmbeddingStore, settings: VisionSettings, projection: Projection | None = None
    ) -> None:
        self.store = store
        self._rows = graph_rows(store.n, settings)
        self.n = store.n if self._rows is None else len(self._rows)
        if projection is None:
            sample = store.gather(sample_rows(store.n, settings.seed, PROJECTION_ROWS))
            projection = Projection.fit(sample, settings.pca_dim)
        self.projection = projection
        self._most_bytes = settings.keep_in_memory_gib * 2**30

    @cached_property
    def _held(self) -> Tensor | None:
        """All of them, if they fit: not before the first is read, neighbours need memory, too."""
        if self.n * self.projection.dim * 4 > self._most_bytes:
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
        return self._rows is None

    def embeddings(self, rows: Tensor) -> Tensor:
        """As the teacher gave them."""
        return self.store.gather(rows if self._rows is None else self._rows[rows])

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
        return Held(held.to(device))
