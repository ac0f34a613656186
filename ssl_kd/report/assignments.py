"""Who is in which cluster, from the file of a run: some numbers of each sample, rows on demand.

Nothing that grows with the samples is a Python object of each of them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
from numpy.typing import NDArray
from pyarrow import compute

from ssl_kd.vision.assignments import assignments_of
from ssl_kd.vision.samples import read_table

NUMBERS = ("confidence", "outlier")
Rows = Callable[[Sequence[int]], list[dict[str, str]]]


@dataclass(frozen=True)
class Assignments:
    """The samples of one split, and some facts of all others.

    Args:
        n: How many samples the split has.
        numbers: `confidence` and `outlier` of the split, `[n]` each; lacking where the file has no
            such column of numbers.
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
    """Read those of a run folder, of one split; empty where there is no file.

    Raises:
        CorruptFileError: The file is damaged, or lacks a column that every run writes.
    """
    path = assignments_of(folder)
    if not path.exists():
        return Assignments()
    table = read_table(path, [*NUMBERS, "cluster", "label", "split"])
    labelled = "label" in table.column_names
    is_own = compute.call_function("equal", [table.column("split"), arrow.scalar(split)])
    places = np.flatnonzero(is_own.to_numpy())
    own, members = table.take(arrow.array(places)), Counter()
    keys = ["cluster", "label"] if labelled else ["cluster"]
    for row in own.group_by(keys).aggregate([([], "count_all")]).to_pylist():
        members[str(row["cluster"]), row.get("label") or ""] = row["count_all"]

    def rows(wanted: Sequence[int]) -> list[dict[str, str]]:
        inside = [row for row in dict.fromkeys(wanted) if row < len(places)]
        lines = read_table(path).take(arrow.array(places[inside])).to_pylist()
        found = dict(zip(inside, map(_as_written, lines), strict=True))
        return [found.get(row, {}) for row in wanted]

    numbers = {name: values for name in NUMBERS if (values := _numbers(own, name)) is not None}
    labels = table.column("label").unique().to_pylist() if labelled else []
    everyone = _numbers(table, "confidence")
    return Assignments(
        len(places), numbers, everyone, members, [label or "" for label in labels], rows
    )


def _numbers(table: arrow.Table, name: str) -> NDArray[np.float64] | None:
    """Return a column of floats; None where there is none."""
    if name not in table.column_names or not arrow.types.is_floating(table.column(name).type):
        return None
    return table.column(name).to_numpy()


def _as_written(line: dict[str, Any]) -> dict[str, str]:
    """Return a row of numbers and text as it stands in a CSV."""
    return {
        name: "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
        for name, value in line.items()
    }
