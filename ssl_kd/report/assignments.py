"""Who is in which cluster, from the file of a run: a few numbers of each sample, rows when asked.

Nothing that grows with the samples is a Python object of each of them.
"""

import csv
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
from numpy.typing import NDArray
from pyarrow import parquet

from ssl_kd.files.cells import from_cell

NUMBERS = ("confidence", "outlier")
Rows = Callable[[Sequence[int]], list[dict[str, str]]]


@dataclass(frozen=True)
class Assignments:
    """The samples of one split, and what is said of all others.

    Args:
        n: How many samples the split has.
        numbers: `confidence` and `outlier` of the split, `[n]` each; lacking where the file has no
            such column, or something else in it.
        confidence: Of the samples of all splits; None as above.
        members: How many of the split have a cluster and a label, by both as they are written.
        labels: All labels of all splits.
        rows: Some rows of the split, every column as it is written in a CSV.
    """

    n: int = 0
    numbers: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    confidence: NDArray[np.float64] | None = None
    members: Counter[tuple[str, str]] = field(default_factory=Counter)
    labels: list[str] = field(default_factory=list)
    rows: Rows = lambda wanted: []


def read_assignments(folder: Path, split: str) -> Assignments:
    """Those of a run folder, of one split; empty where there is no file."""
    if (path := folder / "assignments.parquet").exists():
        return _of_parquet(path, split)
    if (path := folder / "assignments.csv").exists():
        return _of_csv(path, split)
    return Assignments()


def _lines(path: Path, split: str) -> Iterator[tuple[bool, dict[str, str]]]:
    """Each line, and whether it is of the split."""
    with open(path, newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            for name in {"file", "label"} & line.keys():
                line[name] = from_cell(line[name] or "")
            yield line["split"] == split, line


def _of_csv(path: Path, split: str) -> Assignments:
    everyone, mine = _Numbers(), {name: _Numbers() for name in NUMBERS}
    members: Counter[tuple[str, str]] = Counter()
    labels: dict[str, None] = {}
    n = 0
    for own, line in _lines(path, split):
        everyone.add(line.get("confidence"))
        labels[line.get("label", "")] = None
        if own:
            n += 1
            members[line.get("cluster", ""), line.get("label", "")] += 1
            for name, values in mine.items():
                values.add(line.get(name))

    def rows(wanted: Sequence[int]) -> list[dict[str, str]]:
        asked, found = set(wanted), {}
        at = 0
        for own, line in _lines(path, split):
            if own and at in asked:
                found[at] = line
            at += own
        return [found.get(row, {}) for row in wanted]

    read = {name: values.array() for name, values in mine.items()}
    numbers = {name: values for name, values in read.items() if values is not None}
    return Assignments(n, numbers, everyone.array(), members, list(labels), rows)


class _Numbers:
    """A column of numbers; of none where something else is in it."""

    def __init__(self) -> None:
        self._values, self._odd = array("d"), False

    def add(self, text: str | None) -> None:
        try:
            self._values.append(float(text or ""))
        except ValueError:
            self._odd = True

    def array(self) -> NDArray[np.float64] | None:
        return None if self._odd else np.array(self._values)


def _of_parquet(path: Path, split: str) -> Assignments:
    with parquet.ParquetFile(path) as file:
        wanted = [*NUMBERS, "cluster", "label", "split"]
        table = file.read([name for name in wanted if name in file.schema_arrow.names])
    table = table.unify_dictionaries()  # each group of rows has its own
    everyone, splits = table.column("confidence").to_numpy(), table.column("split")
    named = splits.combine_chunks()
    own = named.indices.to_numpy() == [*named.dictionary.to_pylist(), split].index(split)
    before = int(own.argmax())  # a split's rows lie together
    labels: list[str] = []
    if labelled := "label" in table.column_names:
        labels = [label or "" for label in table.column("label").unique().to_pylist()]
    table, members = table.filter(arrow.array(own)), Counter()
    if labelled:
        counted = table.group_by(["cluster", "label"]).aggregate([([], "count_all")])
        for row in counted.to_pylist():
            members[str(row["cluster"]), row["label"] or ""] = row["count_all"]
    else:
        for row in table.column("cluster").value_counts().to_pylist():
            members[str(row["values"]), ""] = row["counts"]

    n = table.num_rows

    def rows(asked: Sequence[int]) -> list[dict[str, str]]:
        found: dict[int, dict[str, str]] = {}
        with parquet.ParquetFile(path) as file:
            start = -before
            for group in range(file.num_row_groups):
                stop = start + file.metadata.row_group(group).num_rows
                inside = [row for row in dict.fromkeys(asked) if start <= row < min(stop, n)]
                if inside:
                    lines = file.read_row_group(group).take([row - start for row in inside])
                    found |= zip(inside, map(_as_written, lines.to_pylist()), strict=True)
                start = stop
        return [found.get(row, {}) for row in asked]

    numbers = {name: table.column(name).to_numpy() for name in NUMBERS}
    return Assignments(n, numbers, everyone, members, labels, rows)


def _as_written(line: dict[str, Any]) -> dict[str, str]:
    """A row of numbers and text, as it stands in a CSV."""
    return {
        name: "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
        for name, value in line.items()
    }
