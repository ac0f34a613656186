"""Describe the clusters of a run after all decisions: their faces, neighbors and differences."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

import numpy as np
import pyarrow as arrow
import scipy.stats
import torch
from numpy.typing import NDArray

from firstnan.finite import safe_normalize
from ssl_kd.core.errors import InputError
from ssl_kd.vision.evaluate.sample import random_rows
from ssl_kd.vision.samples import Samples
from ssl_kd_explore.columns import DECIDED, Column, Columns, codes_of, group_rows
from ssl_kd_explore.decisions import Curation

# Entries of the lists of a page, at most.
TYPICAL = 8
NEAREST = 3
BETWEEN = 12
DIFFERENT = 3
COMPARED = 20_000  # random samples of a cluster that are compared with another one
BLOCK = 16_384  # rows of embeddings in memory
LEAST = 0.1  # difference of a column that is worth a line, as a share of samples


class ClusterPages:
    """What the explorer shows about each cluster, after all decisions."""

    def __init__(self, samples: Samples, curation: Curation) -> None:
        self.columns = Columns(samples, curation)
        self._samples, self._curation = samples, curation
        self._lock = threading.Lock()
        self._clusters = np.full(len(samples), -1, np.int64)  # that the sums are about
        self._sums: dict[int, Any] = defaultdict(float)  # of the unit embeddings of each cluster

    def list_clusters(self, clusters: NDArray[np.int64] | None = None) -> list[dict[str, Any]]:
        """Return number, name, size, scores and typical rows of each cluster, largest first."""
        clusters = self._curation.clusters if clusters is None else clusters
        names, checked = self._curation.names, self._curation.checked
        confidence = self._samples.column("confidence")
        graph = self._samples.metrics.get("graph") or {}
        agreement = dict(enumerate(graph.get("cluster_agreement") or ()))
        groups = group_rows(clusters, self.columns.find({}, "confidence", descending=True))
        entries = [
            {
                "cluster": cluster,
                "name": names.get(cluster, ""),
                "size": len(rows),
                "confidence": round(float(confidence[rows].mean()), 4),
                "agreement": agreement.get(cluster),
                "checked": int(checked[rows].sum()),
                "typical": rows[:TYPICAL].tolist(),
            }
            for cluster, rows in groups.items()
        ]
        return sorted(entries, key=lambda entry: -entry["size"])

    def describe_cluster(self, cluster: int) -> dict[str, Any]:
        """Return the entry of a cluster in `list_clusters`, and its nearest clusters."""
        clusters = self._curation.clusters
        entries = {entry["cluster"]: entry for entry in self.list_clusters(clusters)}
        if cluster not in entries:
            known = ", ".join(map(str, list(entries)[:12])) or "none"
            raise InputError(f"there is no cluster {cluster}; the largest clusters are {known}")
        numbers, centroids = self._centroids(clusters)
        place = numbers.index(cluster)
        similarities = centroids @ centroids[place]
        similarities[place] = -np.inf
        here, nearest = _some_rows(clusters, cluster), []
        for other in np.argsort(-similarities, kind="stable")[: len(numbers) - 1][:NEAREST]:
            there = _some_rows(clusters, numbers[other])
            rows = np.concatenate([here, there])
            gaps = np.abs(self._units(rows) @ (centroids[place] - centroids[other]))
            nearest.append({
                "cluster": numbers[other],
                "similarity": round(float(similarities[other]), 4),
                "between": rows[np.argsort(gaps, kind="stable")[:BETWEEN]].tolist(),
                "columns": self._differences(here, there),
            })  # fmt: skip
        return entries[cluster] | {"nearest": nearest}

    def _units(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return embeddings at unit length, `[row, dim]`."""
        return safe_normalize(self._samples.embeddings(rows)).numpy()

    def _centroids(self, clusters: NDArray[np.int64]) -> tuple[list[int], NDArray[np.float64]]:
        """Return the numbers of the clusters, and the directions of their centroids `[k, dim]`.

        Only samples that moved since the last call are read.
        """
        with self._lock:
            moved = np.flatnonzero(clusters != self._clusters)
            for sign, part in ((-1, self._clusters), (1, clusters)):
                for number, rows in group_rows(part, moved).items():
                    for start in range(0, len(rows), BLOCK):
                        units = self._units(rows[start : start + BLOCK])
                        self._sums[number] += sign * units.sum(0, dtype=np.float64)
            self._clusters = clusters
            numbers = np.unique(clusters[clusters >= 0]).tolist()
            sums = np.stack([self._sums[number] for number in numbers])
        return numbers, safe_normalize(torch.from_numpy(sums)).numpy()

    def _differences(
        self, here: NDArray[np.int64], there: NDArray[np.int64]
    ) -> list[dict[str, str]]:
        """Return the columns that differ most between two sets of rows, as short texts."""
        found = []
        for name, kind in self.columns.kinds.items():
            if kind in ("number", "category") and name not in DECIDED:
                share, texts = _difference(self.columns.column(name), here, there)
                found.append((share, {"column": name, "here": texts[0], "there": texts[1]}))
        found.sort(key=lambda pair: -pair[0])
        return [text for share, text in found[:DIFFERENT] if share >= LEAST]


def _some_rows(clusters: NDArray[np.int64], cluster: int) -> NDArray[np.int64]:
    """Return all rows of a cluster, or a random 20,000 of them."""
    rows = np.flatnonzero(clusters == cluster)
    return rows[random_rows(len(rows), COMPARED, 0)]


def _difference(
    column: Column, here: NDArray[np.int64], there: NDArray[np.int64]
) -> tuple[float, list[str]]:
    """Return by what share of samples two sets of rows differ in a column, and how, as texts.

    Categories: the value whose share differs most. Numbers: the largest difference of the shares
    below any threshold (the statistic of Kolmogorov and Smirnov).
    """
    if isinstance(column, arrow.DictionaryArray):
        codes, values = codes_of(column), [*column.dictionary.to_pylist(), "none"]
        n = len(values)  # -1, for missing values, is the last one
        x, y = (np.bincount(codes[rows] % n, minlength=n) / len(rows) for rows in (here, there))
        place = int(np.argmax(np.abs(x - y)))
        texts = [f"{100 * shares[place]:.0f} % {values[place]}" for shares in (x, y)]
        return float(abs(x - y)[place]), texts
    numbers = np.asarray(column, np.float64)
    x, y = (numbers[rows][~np.isnan(numbers[rows])] for rows in (here, there))
    if not len(x) or not len(y):
        return 0.0, ["", ""]
    test: Any = scipy.stats.ks_2samp(x, y, method="asymp")
    return float(test.statistic), [f"median {np.median(part):.3g}" for part in (x, y)]
