"""Where the model sees the samples of a store, and how `assignments.csv` says it."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ssl_kd.store import EmbeddingStore
from ssl_kd.vision.consensus import sample_rows
from ssl_kd.vision.model import ROWS_PER_BLOCK, ClusterModel
from ssl_kd.vision.novelty import without_outliers
from ssl_kd.vision.settings import VisionSettings

JUDGED_ROWS = 100_000
PLACES = ("second", "third", *(f"{place}th" for place in range(4, 11)))


class Assigned:
    """The samples of a store, where the model sees them, and those of them that are scored.

    Attributes:
        likely: `[n, TOP_K]` int64, the likeliest clusters, first the likeliest.
        probabilities: `[n, TOP_K]` float32, of these.
        clusters: `[n]`, the likeliest, or -1 beyond NOISE_THRESHOLD.
        confidence: `[n]`, of the likeliest.
        outlier: `[n]`, how far out each lies.
        sizes: clusters of each level of the tree, finest first; empty where there is none.
        levels: `[n, level]`, each sample's, or -1 beyond NOISE_THRESHOLD.
        all_labels: `[n]`, or None.
        rows: those that are scored, a random part of very many.
        x: `[row, dim]`, their embeddings.
        labels: `[row]`, or None.
    """

    def __init__(
        self, store: EmbeddingStore, settings: VisionSettings, model: ClusterModel
    ) -> None:
        self.store = store
        self.sizes = model.options["levels"] or []
        most, probabilities, places = min(settings.top_k, model.n_clusters), [], []
        scores, levels = [], []
        for _, x in store.blocks(ROWS_PER_BLOCK):
            found = model.predict_proba(x).sort(stable=True, dim=-1, descending=True)
            probabilities.append(found.values[:, :most])
            places.append(found.indices[:, :most])
            scores.append(model.outlier_scores(x))
            if self.sizes:
                levels.append(model.predict_levels(x, found.indices[:, 0]))
        outlier, clusters = torch.cat(scores), torch.cat(places)
        self.likely, self.probabilities = clusters.numpy(), torch.cat(probabilities).numpy()
        self.outlier, self.confidence = outlier.numpy(), self.probabilities[:, 0]
        first = clusters[:, 0]
        if settings.noise_threshold is not None:
            first = without_outliers(first, outlier, settings.noise_threshold)
        self.clusters = first.numpy()
        tree = torch.cat(levels) if levels else torch.empty(store.n, 0, dtype=torch.int64)
        self.levels = torch.where(first.unsqueeze(1) < 0, -1, tree).numpy()
        self.all_labels = None if store.labels is None else store.labels.numpy()

        # Heads and baselines are compared on the same rows, a sample where there are very many.
        self.rows = sample_rows(store.n, settings.seed, JUDGED_ROWS)
        self.x = store.gather(self.rows).numpy()
        self.labels = None if self.all_labels is None else self.all_labels[self.rows.numpy()]

    @property
    def members(self) -> NDArray[np.int64]:
        """The clusters of the samples that have one."""
        return self.clusters[self.clusters >= 0]

    def columns(self, labelled: bool) -> list[str]:
        """The names of `assignments.csv`."""
        more = PLACES[: self.likely.shape[1] - 1]
        return [
            *("file", "cluster", "confidence", "split"),
            *(["label"] if labelled else []),
            "outlier",
            *(name for place in more for name in (place, f"{place}_confidence")),
            *(f"level_{size}" for size in self.sizes),
        ]

    def lines(self, split: str, columns: Sequence[str]) -> Iterator[str]:
        """Lines of `assignments.csv`, thousands at a time; a column not known stays empty."""
        for rows in torch.arange(self.store.n).split(ROWS_PER_BLOCK):
            text = io.StringIO()
            writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
            writer.writerows(self._line(row, split) for row in rows.tolist())
            yield text.getvalue()

    def _line(self, row: int, split: str) -> dict[str, Any]:
        line = {
            "file": self.store.ids[row],
            "cluster": int(self.clusters[row]),
            "confidence": f"{self.confidence[row]:.4f}",
            "split": split,
            "label": self._label(row),
            "outlier": f"{self.outlier[row]:.4f}",
        }
        for place, name in enumerate(PLACES[: self.likely.shape[1] - 1], 1):
            line[name] = int(self.likely[row, place])
            line[f"{name}_confidence"] = f"{self.probabilities[row, place]:.4f}"
        for size, cluster in zip(self.sizes, self.levels[row], strict=True):
            line[f"level_{size}"] = int(cluster)
        return line

    def _label(self, row: int) -> str:
        label = -1 if self.all_labels is None else int(self.all_labels[row])
        names = self.store.class_names
        return "" if label < 0 else str(label) if names is None else names[label]
