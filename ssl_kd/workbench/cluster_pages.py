"""Describe the clusters of a run after all decisions: their faces, neighbors and differences."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ssl_kd.errors import InputError
from ssl_kd.evaluate.sample import random_rows
from ssl_kd.guard.finite import safe_normalize
from ssl_kd.vision.samples import Samples
from ssl_kd.workbench.columns import DECIDED, Categories, Columns, group_rows
from ssl_kd.workbench.decisions import Curation

TYPICAL, NEAREST, BETWEEN, DIFFERENT = 8, 3, 12, 3  # entries of a page's lists, at most
COMPARED = 20_000  # random samples of a cluster that are compared with another one
BLOCK = 16_384  # rows of embeddings in memory
LEAST = 0.1  # difference of a column that is worth a line, as a share of samples


class ClusterPages:
    """What the explorer shows about each cluster.

    Args:
        samples: the samples of the run.
        curation: the decisions of the run.
        columns: the columns by which clusters are compared.
    """

    def __init__(self, samples: Samples, curation: Curation, columns: Columns) -> None:
        self._samples, self._curation, self._columns = samples, curation, columns
        self._centroids = Centroids(samples)

    def list_clusters(self) -> list[dict[str, Any]]:
        """Return number, name, size, scores and typical rows of each cluster, largest first."""
        return self._list(self._curation.clusters)

    def _list(self, clusters: NDArray[np.int64]) -> list[dict[str, Any]]:
        names, checked = self._curation.names, self._curation.checked
        confidence = self._samples.column("confidence")
        graph = self._samples.metrics.get("graph") or {}
        agreement = dict(enumerate(graph.get("cluster_agreement") or ()))
        groups = group_rows(clusters, self._columns.find({}, "confidence", descending=True))
        entries = [
            {
                "cluster": cluster,
                "name": names.get(cluster, ""),
                "size": len(rows),
                "confidence": _finite(confidence[rows].mean()),
                "agreement": agreement.get(cluster),
                "checked": int(checked[rows].sum()),
                "typical": rows[:TYPICAL].tolist(),
            }
            for cluster, rows in groups.items()
        ]
        return sorted(entries, key=lambda entry: -entry["size"])

    def describe_cluster(self, cluster: int) -> dict[str, Any]:
        """Return the entry of a cluster in `list_clusters`, and its nearest clusters.

        Raises:
            InputError: there is no such cluster.
        """
        clusters = self._curation.clusters
        entry = next((e for e in self._list(clusters) if e["cluster"] == cluster), None)
        if entry is None:
            known = ", ".join(map(str, [*self._curation.sizes][:12])) or "none"
            raise InputError(f"there is no cluster {cluster}; the first clusters are {known}")
        numbers, centroids = self._centroids.at(clusters)
        place = numbers.index(cluster)
        similarities = centroids @ centroids[place]
        order = np.argsort(-similarities, kind="stable").tolist()
        here, neighbors = _some_rows(clusters, cluster), []
        x_here = self._embeddings(here)
        for other in [other for other in order if other != place][:NEAREST]:
            there = _some_rows(clusters, numbers[other])
            axis = centroids[place] - centroids[other]
            gaps = np.abs(np.concatenate([x_here @ axis, self._embeddings(there) @ axis]))
            rows = np.concatenate([here, there])[np.argsort(gaps, kind="stable")[:BETWEEN]]
            neighbors.append({
                "cluster": numbers[other],
                "similarity": _finite(similarities[other]),
                "between": rows.tolist(),
                "columns": self._differences(here, there),
            })  # fmt: skip
        return entry | {"nearest": neighbors}

    def _embeddings(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return embeddings at unit length, `[row, dim]`."""
        return safe_normalize(self._samples.embeddings(rows)).numpy()

    def _differences(
        self, here: NDArray[np.int64], there: NDArray[np.int64]
    ) -> list[dict[str, str]]:
        """Return the columns that differ most between two sets of rows, as short texts."""
        texts = []
        for name, kind in self._columns.kinds.items():
            if kind not in ("number", "category") or name in DECIDED:
                continue
            values = self._columns.values(name)
            if isinstance(values, Categories):
                share, *pair = _differing_value(values, here, there)
            else:
                share, *pair = _differing_median(values[here], values[there])
            if share >= LEAST:
                texts.append((share, {"column": name, "here": pair[0], "there": pair[1]}))
        return [text for _, text in sorted(texts, key=lambda pair: -pair[0])[:DIFFERENT]]


class Centroids:
    """Mean of the unit embeddings of each cluster; only samples that moved are read again."""

    def __init__(self, samples: Samples) -> None:
        self._samples, self._lock = samples, threading.Lock()
        self._clusters = np.full(len(samples), -1, np.int64)  # that the sums are about
        self._sums: dict[int, NDArray[np.float64]] = {}

    def at(self, clusters: NDArray[np.int64]) -> tuple[list[int], NDArray[np.float64]]:
        """Return the numbers of the clusters and their centroids at unit length, `[k, dim]`."""
        with self._lock:
            moved = np.flatnonzero(clusters != self._clusters)
            for start in range(0, len(moved), BLOCK):
                rows = moved[start : start + BLOCK]
                x = safe_normalize(self._samples.embeddings(rows)).double().numpy()
                self._add(x, self._clusters[rows], -1.0)
                self._add(x, clusters[rows], 1.0)
                self._clusters[rows] = clusters[rows]
            used = np.unique(clusters[clusters >= 0]).tolist()
            self._sums = {number: self._sums[number] for number in used}
            sums = np.stack([*self._sums.values()])
        lengths = np.linalg.norm(sums, axis=1, keepdims=True)
        return used, sums / np.where(lengths > 0, lengths, 1)

    def _add(self, x: NDArray[np.float64], clusters: NDArray[np.int64], times: float) -> None:
        """Add rows `[m, dim]`, multiplied, to the sums of their clusters; -1 is left out."""
        numbers, codes = np.unique(clusters, return_inverse=True)
        members = sp.csr_array((np.full(len(x), times), (codes, np.arange(len(x)))))
        for number, total in zip(numbers.tolist(), members @ x, strict=True):
            if number >= 0:
                self._sums[number] = self._sums.get(number, 0) + total


def _some_rows(clusters: NDArray[np.int64], cluster: int) -> NDArray[np.int64]:
    """Return all rows of a cluster, or a random 20,000 of them."""
    rows = np.flatnonzero(clusters == cluster)
    return rows[random_rows(len(rows), COMPARED, 0)]


def _differing_value(
    column: Categories, here: NDArray[np.int64], there: NDArray[np.int64]
) -> tuple[float, str, str]:
    """Return the largest difference of a value's share, and the two shares as texts."""
    n = len(column.values) + 1  # the last: missing
    shares = [
        np.bincount(column.codes[rows] % n, minlength=n) / len(rows) for rows in (here, there)
    ]
    place = int(np.argmax(np.abs(shares[0] - shares[1])))
    value = [*column.values, ""][place] or "none"
    one, other = (f"{100 * share[place]:.0f} % {value}" for share in shares)
    return float(abs(shares[0][place] - shares[1][place])), one, other


def _differing_median(here: NDArray[Any], there: NDArray[Any]) -> tuple[float, str, str]:
    """Return how far two sets of numbers are apart, and their medians as texts.

    The distance is the share that two normal distributions with this standardized difference do
    not have in common, which compares with a difference of shares.
    """
    x, y = (part[np.isfinite(part)].astype(np.float64) for part in (here, there))
    if not len(x) or not len(y):
        return 0.0, "", ""
    medians = np.median(x), np.median(y)
    with np.errstate(over="ignore", invalid="ignore"):  # numbers near the largest float
        spread = math.sqrt((np.var(x) + np.var(y)) / 2)
        difference = abs(medians[0] - medians[1])
    share = math.erf(difference / spread / math.sqrt(8)) if spread > 0 else float(difference > 0)
    return share, f"median {medians[0]:.3g}", f"median {medians[1]:.3g}"


def _finite(value: Any) -> float | None:
    return round(float(value), 4) if math.isfinite(value) else None
