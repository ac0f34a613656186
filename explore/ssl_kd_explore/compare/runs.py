"""Compare the clusters of two runs on the samples that both have."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as arrow
from numpy.typing import NDArray
from pyarrow import compute
from scipy.optimize import linear_sum_assignment

from ssl_kd.core.errors import InputError, printable
from ssl_kd.core.pages.wording import percent
from ssl_kd.vision.evaluate import clustering_scores, contingency
from ssl_kd.vision.evaluate.sample import random_rows
from ssl_kd.vision.samples import Samples
from ssl_kd_explore.compare.judgement import JUDGED, cannot_judge, judge
from ssl_kd_explore.decisions import Curation

logger = logging.getLogger(__name__)

Ints = NDArray[np.int64]

PART = 0.2  # a cluster is split if its second largest part has at least this share of it
LISTED = 12  # splits, merges and differences that are listed
SHOWN = 8  # samples that are shown of each


@dataclass(frozen=True)
class Side:
    """One of the two runs, reduced to the `n` common samples that have a cluster in both."""

    letter: str
    samples: Samples
    names: dict[int, str]
    rows: Ints  # `[n]`
    numbers: Ints  # `[k]` of the clusters that these samples have, after all decisions
    clusters: Ints  # `[n]` positions in `numbers`

    def title(self, cluster: int) -> str:
        """Return the number of a cluster, with its name if it has one."""
        number = int(self.numbers[cluster])
        return f"{number} {self.names[number]}" if number in self.names else str(number)


def compare_runs(a: Samples, b: Samples) -> dict[str, Any]:
    """Return how far two runs agree, where they differ, and which is better (`Run.compare`).

    Raises:
        InputError: the runs have no sample in common.
    """
    runs, all_rows = (a, b), common_rows(a, b)
    curations = [Curation(samples) for samples in runs]
    clusters = [np.where(c.excluded, -1, c.clusters) for c in curations]  # -1: none
    n_common = len(all_rows[0])
    has_both = np.all([c[rows] >= 0 for c, rows in zip(clusters, all_rows, strict=True)], 0)
    if not n_common:
        first = [printable(str(s.column("file")[0])) for s in runs if len(s)]
        raise InputError(
            f"{a.path} and {b.path} have no sample in common: their first files are "
            f"{' and '.join(first)}. Expected two runs on the same files"
        )
    if not has_both.any():
        raise InputError(
            f"all {n_common:,} samples that {a.path} and {b.path} have in common are excluded or "
            "have no cluster: undo a decision with ssl_kd explore RUN --undo"
        )
    sides, about = [], {}
    for i, (letter, samples, curation) in enumerate(zip("AB", runs, curations, strict=True)):
        rows = all_rows[i][has_both]
        codes = np.unique(clusters[i][rows], return_inverse=True)
        sides.append(Side(letter, samples, curation.names, rows, *codes))
        about[letter.lower()] = {
            "run": str(samples.path),
            "name": samples.path.name,
            "teacher": samples.metrics.get("teacher", {}).get("name"),
            "samples": len(samples),
            "missing_in_other": len(samples) - n_common,
            "clusters": int(np.count_nonzero(np.unique(clusters[i]) >= 0)),
            "names": {str(number): name for number, name in curation.names.items()},
        }
    side_a, side_b = sides
    table = contingency(side_a.clusters, side_b.clusters)
    scores = clustering_scores(side_a.clusters, side_b.clusters)
    comparison = about | {
        "samples": len(side_a.rows),
        "without_cluster": n_common - len(side_a.rows),
        "agreement": {"matched": scores["acc"], "ami": scores["ami"], "ari": scores["ari"]},
        "splits": divided(side_a, side_b, table),
        "merges": divided(side_b, side_a, table.T),
        "differences": list(largest_differences(side_a, side_b, table)),
        "judgement": _judgement(side_a, side_b),
        "labels": _label_scores(side_a, side_b),
    }
    return comparison | {"sentences": list(agreement_sentences(comparison))}


def common_rows(a: Samples, b: Samples) -> tuple[Ints, Ints]:
    """Return the row numbers in both runs of the files that both have, in the order of `a`.

    If a file name repeats within a run, split and name identify a sample in both runs; a sample
    that is not unique then is left out, and so is one whose file has another content.
    """
    for keys in (["file"], ["split", "file"]):
        tables = [_rows_by_name(samples, keys) for samples in (a, b)]
        if all(table["row_count"].unique().to_pylist() in ([], [1]) for table in tables):
            break
    unique_a, unique_b = (table.filter(compute.field("row_count") == 1) for table in tables)
    both = unique_a.join(unique_b, keys, join_type="inner", right_suffix="_b").sort_by("row_min")
    rows_a, rows_b = both["row_min"].to_numpy(), both["row_min_b"].to_numpy()
    pairs = zip(a.file_digests[rows_a], b.file_digests[rows_b], strict=True)
    is_same = np.array([None in pair or pair[0] == pair[1] for pair in pairs], bool)
    if n_others := int(np.count_nonzero(~is_same)):
        logger.warning(
            "%s samples have the same name in %s and %s, but other pictures: they are left out",
            f"{n_others:,}",
            a.path.name,
            b.path.name,
        )
    return rows_a[is_same], rows_b[is_same]


def _rows_by_name(samples: Samples, keys: list[str]) -> arrow.Table:
    """Return the values of columns, the first row that has each, and how many rows have it."""
    columns = {key: samples.table.column(key).cast(arrow.string()) for key in keys}
    table = arrow.table(columns | {"row": np.arange(len(samples))})
    return table.group_by(keys).aggregate([("row", "min"), ("row", "count")])


def agreement_sentences(comparison: dict[str, Any]) -> Iterator[str]:
    """Yield sentences on how far two runs agree, the most important first."""
    a = comparison["a"]
    b = comparison["b"]
    agreement = comparison["agreement"]
    matched = percent(agreement["matched"])
    yield f"A and B agree on {matched} % of {comparison['samples']:,} samples."
    yield (
        f"AMI {agreement['ami']:.3f}, ARI {agreement['ari']:.3f}; "
        f"A has {a['clusters']} clusters, B {b['clusters']}."
    )
    for letter, other in (("A", b), ("B", a)):
        if lacking := other["missing_in_other"]:
            yield f"{letter} lacks {lacking:,} samples of the other."
    if left_out := comparison["without_cluster"]:
        yield f"{left_out:,} common samples are excluded or have no cluster in one of them."


def divided(whole: Side, other: Side, table: Ints) -> list[dict[str, Any]]:
    """Return the clusters that fall into several clusters of the other run, largest loss first.

    Each has its size, all parts with at least a fifth of its samples, largest first, and a `text`
    such as `3 of A (412) is 7 (300) and 9 (105) of B`. `table` `[whole, other]` counts samples.
    """
    listed = []
    for cluster, counts in enumerate(table):
        size = int(counts.sum())
        order = np.argsort(-counts, kind="stable")
        parts = [(int(k), int(counts[k])) for k in order if counts[k] >= PART * size]
        if len(parts) < 2:
            continue
        *texts, last = (f"{other.title(part)} ({n:,})" for part, n in parts)
        text = f"{whole.title(cluster)} of {whole.letter} ({size:,}) is "
        listed.append(
            {
                "cluster": int(whole.numbers[cluster]),
                "samples": size,
                "parts": [{"cluster": int(other.numbers[k]), "samples": n} for k, n in parts],
                "text": f"{text}{', '.join(texts)} and {last} of {other.letter}",
            }
        )
    return sorted(listed, key=lambda split: -split["parts"][1]["samples"])[:LISTED]


def largest_differences(a: Side, b: Side, table: Ints) -> Iterator[dict[str, Any]]:
    """Yield the largest groups of samples that the two runs put into clusters that do not pair.

    Each has the most confident samples of the group (`rows` of A), and the typical samples of its
    cluster of each run (`typical_a`, `typical_b`), first those that the other run agrees with.
    """
    is_paired = np.zeros(table.shape, bool)
    is_paired[linear_sum_assignment(table, maximize=True)] = True
    is_agreed = is_paired[a.clusters, b.clusters]
    confidence_a, confidence_b = (s.samples.column("confidence")[s.rows] for s in (a, b))
    unpaired = np.where(is_paired, 0, table)
    order = np.argsort(-unpaired, axis=None, kind="stable")[:LISTED]
    for row, column in zip(*np.unravel_index(order, table.shape), strict=True):
        if not unpaired[row, column]:
            return
        in_a, in_b = a.clusters == row, b.clusters == column
        rows = a.rows[_first(in_a & in_b, np.minimum(confidence_a, confidence_b))]
        yield {
            "a": int(a.numbers[row]),
            "b": int(b.numbers[column]),
            "name_a": a.title(row),
            "name_b": b.title(column),
            "samples": int(table[row, column]),
            "rows": rows.tolist(),
            "files": a.samples.table.column("file").take(rows).to_pylist(),
            "typical_a": a.rows[_first(in_a, confidence_a, is_agreed)].tolist(),
            "typical_b": b.rows[_first(in_b, confidence_b, is_agreed)].tolist(),
        }


def _first(mask: NDArray[np.bool_], *scores: NDArray) -> Ints:
    """Return the positions in a mask with the largest scores, the last score first."""
    positions = np.flatnonzero(mask)
    order = np.lexsort([-score[positions].astype(float) for score in scores])
    return positions[order[:SHOWN]]


def _judgement(a: Side, b: Side) -> dict[str, Any]:
    """Judge without labels on a random subset of the samples, or say why this is impossible."""
    chosen = random_rows(len(a.rows), JUDGED, 0)
    try:
        x_a, x_b = (side.samples.embeddings(side.rows[chosen]).numpy() for side in (a, b))
    except (OSError, InputError) as error:  # the cache of a run was deleted or replaced
        return cannot_judge(str(error))
    return judge(x_a, x_b, a.clusters[chosen], b.clusters[chosen])


def _label_scores(a: Side, b: Side) -> dict[str, Any] | None:
    """Return the scores of both runs against the labels of the first run that has any."""
    for side in (a, b):
        if "label" not in side.samples.table.column_names:
            continue
        texts = compute.fill_null(side.samples.table.column("label").take(side.rows), "")
        names, labels = np.unique(texts.to_numpy().astype(str), return_inverse=True)
        labels = np.where(np.isin(names, ("", "-1"))[labels], -1, labels)
        if known := int((labels >= 0).sum()):
            scores = {s.letter.lower(): clustering_scores(labels, s.clusters) for s in (a, b)}
            return {"known": known, "from": str(side.samples.path), **scores}
    return None
