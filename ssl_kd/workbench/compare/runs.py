"""Compare the clusters of two runs on the samples that both have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from ssl_kd.errors import InputError, printable
from ssl_kd.evaluate import clustering_scores, contingency
from ssl_kd.evaluate.sample import random_rows
from ssl_kd.vision.samples import Samples
from ssl_kd.workbench.compare.judgement import JUDGED, cannot_judge, judge
from ssl_kd.workbench.decisions import Curation

Ints = NDArray[np.int64]

PART = 0.2  # a cluster is split if its second largest part has at least this share of it
LISTED = 12  # splits, merges and differences that are listed
SHOWN = 8  # samples that are shown of each


@dataclass(frozen=True)
class Side:
    """One of the two runs: its clusters after all decisions."""

    samples: Samples
    clusters: Ints  # of all samples `[n]`, -1: none
    names: Mapping[int, str]

    @classmethod
    def of(cls, samples: Samples) -> Side:
        """Return the clusters of a run; an excluded sample has none."""
        curation = Curation(samples)
        clusters = np.where(curation.excluded, -1, curation.clusters)
        return cls(samples, clusters, curation.names)

    def describe(self, n_common: int) -> dict[str, Any]:
        """Return the facts about the run that the page shows."""
        return {
            "run": str(self.samples.path),
            "name": self.samples.path.name,
            "teacher": self.samples.metrics.get("teacher", {}).get("name"),
            "samples": len(self.samples),
            "missing_in_other": len(self.samples) - n_common,
            "clusters": int(np.count_nonzero(np.unique(self.clusters) >= 0)),
            "names": {str(number): name for number, name in self.names.items()},
        }


def compare_runs(a: Samples, b: Samples) -> dict[str, Any]:
    """Return how far two runs agree, where they differ, and which is better (`Run.compare`).

    Raises:
        InputError: the runs have no sample in common.
    """
    side_a, side_b = Side.of(a), Side.of(b)
    rows_a, rows_b = common_rows(a, b)
    n_common = len(rows_a)
    has_cluster = (side_a.clusters[rows_a] >= 0) & (side_b.clusters[rows_b] >= 0)
    rows_a, rows_b = rows_a[has_cluster], rows_b[has_cluster]
    if not n_common:
        first = [printable(str(s.column("file")[0])) for s in (a, b) if len(s)]
        raise InputError(
            f"{a.path} and {b.path} have no sample in common: their first files are "
            f"{' and '.join(first)}. Expected two runs on the same files"
        )
    if not len(rows_a):
        raise InputError(
            f"all {n_common:,} samples that {a.path} and {b.path} have in common are excluded or "
            "have no cluster: undo a decision with ssl_kd explore RUN --undo"
        )
    clusters_a, clusters_b = side_a.clusters[rows_a], side_b.clusters[rows_b]
    confidence = a.column("confidence")[rows_a], b.column("confidence")[rows_b]
    differences = largest_differences(clusters_a, clusters_b, *confidence)
    files = a.column("file")[rows_a]
    for difference in differences:
        difference["files"] = [str(files[row]) for row in difference["rows"]]
        difference["typical_b"] = rows_b[difference["typical_b"]].tolist()
        for key in ("rows", "typical_a"):
            difference[key] = rows_a[difference[key]].tolist()
    return {
        "a": side_a.describe(n_common),
        "b": side_b.describe(n_common),
        "samples": len(rows_a),
        "without_cluster": n_common - len(rows_a),
        "agreement": agreement(clusters_a, clusters_b),
        "splits": divided_clusters(clusters_a, clusters_b),
        "merges": divided_clusters(clusters_b, clusters_a),
        "differences": differences,
        "judgement": _judgement(side_a, side_b, rows_a, rows_b),
        "labels": _label_scores(a, b, rows_a, rows_b, clusters_a, clusters_b),
    }


def common_rows(a: Samples, b: Samples) -> tuple[Ints, Ints]:
    """Return the row numbers in both runs of the files that both have, in the order of `a`.

    If a file name repeats within a run, split and name identify a sample in both runs; a sample
    that is not unique then is left out.
    """
    maps = [_rows_by_name(samples, ("file",)) for samples in (a, b)]
    if any(row < 0 for of_run in maps for row in of_run.values()):
        maps = [_rows_by_name(samples, ("split", "file")) for samples in (a, b)]
    of_a, of_b = maps
    pairs = [(row, of_b[name]) for name, row in of_a.items() if of_b.get(name, -1) >= 0 <= row]
    rows = np.array(pairs, np.int64).reshape(-1, 2)
    return rows[:, 0], rows[:, 1]


def _rows_by_name(samples: Samples, columns: tuple[str, ...]) -> dict[tuple[str, ...], int]:
    """Map the values of columns to row numbers; -1 for values that several rows have."""
    rows: dict[tuple[str, ...], int] = {}
    names = zip(*(samples.table.column(name).to_pylist() for name in columns), strict=True)
    for row, name in enumerate(names):
        rows[name] = -1 if name in rows else row
    return rows


def agreement(clusters_a: Ints, clusters_b: Ints) -> dict[str, float]:
    """Return AMI, ARI, and the share of samples in clusters that are paired one to one."""
    a, b = (np.unique(clusters, return_inverse=True)[1] for clusters in (clusters_a, clusters_b))
    scores = clustering_scores(a, b)
    return {
        "matched": scores["acc"] or 0.0,
        "ami": scores["ami"] or 0.0,
        "ari": scores["ari"] or 0.0,
    }


def divided_clusters(clusters: Ints, others: Ints) -> list[dict[str, Any]]:
    """Return the clusters that fall into several clusters of the other run, largest loss first.

    Each has its size and all parts with at least a fifth of its samples, largest first.
    """
    numbers, a = np.unique(clusters, return_inverse=True)
    of_others, b = np.unique(others, return_inverse=True)
    table = contingency(a, b, len(numbers), len(of_others))
    divided = []
    for number, row in zip(numbers.tolist(), table, strict=True):
        size, order = int(row.sum()), np.argsort(-row, kind="stable")
        large = [k for k in order if row[k] >= PART * size]
        if len(large) > 1:
            parts = [{"cluster": int(of_others[k]), "samples": int(row[k])} for k in large]
            divided.append({"cluster": number, "samples": size, "parts": parts})
    return sorted(divided, key=lambda one: -one["parts"][1]["samples"])[:LISTED]


def largest_differences(
    clusters_a: Ints, clusters_b: Ints, confidence_a: NDArray, confidence_b: NDArray
) -> list[dict[str, Any]]:
    """Return the largest groups of samples that the two runs put into clusters that do not pair.

    Each has the most confident samples of the group (`rows`), and the typical samples of its
    cluster of each run (`typical_a`, `typical_b`), those that the other run agrees with if there
    are any; all as positions in the arguments.
    """
    numbers_a, a = np.unique(clusters_a, return_inverse=True)
    numbers_b, b = np.unique(clusters_b, return_inverse=True)
    table = contingency(a, b, len(numbers_a), len(numbers_b))
    paired = linear_sum_assignment(table, maximize=True)
    is_paired = np.zeros(table.shape, bool)
    is_paired[paired] = True
    order = np.argsort(-np.where(is_paired, 0, table), axis=None, kind="stable")[:LISTED]
    is_agreed = is_paired[a, b]
    both = np.minimum(confidence_a, confidence_b)
    differences = []
    for row, column in zip(*np.unravel_index(order, table.shape), strict=True):
        if is_paired[row, column] or not table[row, column]:
            break
        of_a, of_b = a == row, b == column
        agreed_a, agreed_b = of_a & is_agreed, of_b & is_agreed
        differences.append(
            {
                "a": int(numbers_a[row]),
                "b": int(numbers_b[column]),
                "samples": int(table[row, column]),
                "rows": _top(of_a & of_b, both),
                "typical_a": _top(agreed_a if agreed_a.any() else of_a, confidence_a),
                "typical_b": _top(agreed_b if agreed_b.any() else of_b, confidence_b),
            }
        )
    return differences


def _top(mask: NDArray[np.bool_], scores: NDArray) -> Ints:
    rows = np.flatnonzero(mask)
    return rows[np.argsort(-scores[rows], kind="stable")[:SHOWN]]


def _judgement(side_a: Side, side_b: Side, rows_a: Ints, rows_b: Ints) -> dict[str, Any]:
    """Judge without labels on a random subset of the samples, or say why this is impossible."""
    chosen = random_rows(len(rows_a), JUDGED, 0)
    try:
        x_a = side_a.samples.embeddings(rows_a[chosen]).numpy()
        x_b = side_b.samples.embeddings(rows_b[chosen]).numpy()
    except (OSError, InputError) as error:  # the cache of a run was deleted or replaced
        return cannot_judge(str(error))
    return judge(x_a, x_b, side_a.clusters[rows_a[chosen]], side_b.clusters[rows_b[chosen]])


def _label_scores(
    a: Samples, b: Samples, rows_a: Ints, rows_b: Ints, clusters_a: Ints, clusters_b: Ints
) -> dict[str, Any] | None:
    """Return the scores of both runs against the labels of the first run that has any."""
    for samples, rows in ((a, rows_a), (b, rows_b)):
        if "label" not in samples.table.column_names:
            continue
        texts = [text or "" for text in samples.table.column("label").take(rows).to_pylist()]
        names, labels = np.unique(texts, return_inverse=True)
        labels = np.where(np.isin(names, ("", "-1"))[labels], -1, labels)
        if (labels >= 0).any():
            scores = {
                key: clustering_scores(labels, np.unique(clusters, return_inverse=True)[1])
                for key, clusters in (("a", clusters_a), ("b", clusters_b))
            }
            return {"known": int((labels >= 0).sum()), "from": str(samples.path), **scores}
    return None
