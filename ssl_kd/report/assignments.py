"""The clusters of a run's samples, from its file; nothing here is a Python object per sample."""

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


@dataclass(frozen=True)
class Assignments:
    """The samples of one split.

    Args:
        n: Number of samples.
        confidence: `[n]`; None where the file has no such column of numbers.
        members: (cluster, label), as written in the file -> number of samples.
        labels: Distinct labels of all splits.
        rows: Returns rows by number, every column as it is written in a CSV.
    """

    n: int = 0
    confidence: NDArray[np.float64] | None = None
    members: Counter[tuple[str, str]] = field(default_factory=Counter)
    labels: list[str] = field(default_factory=list)
    rows: Callable[[Sequence[int]], list[dict[str, str]]] = lambda wanted: []


def read_assignments(folder: Path, split: str) -> Assignments:
    """Read the samples of one split of a run folder; none where there is no file.

    Raises:
        CorruptFileError: The file is damaged, or lacks a column that every run writes.
    """
    path = assignments_of(folder)
    if not path.exists():
        return Assignments()
    table = read_table(path, ["confidence", "cluster", "label", "split"])
    has_labels = "label" in table.column_names
    is_in_split = compute.call_function("equal", [table.column("split"), arrow.scalar(split)])
    places = np.flatnonzero(is_in_split.to_numpy())
    of_split = table.take(arrow.array(places))
    keys = ["cluster", "label"] if has_labels else ["cluster"]
    members = Counter()
    for row in of_split.group_by(keys).aggregate([([], "count_all")]).to_pylist():
        members[str(row["cluster"]), row.get("label") or ""] = row["count_all"]

    def rows(wanted: Sequence[int]) -> list[dict[str, str]]:
        known = [row for row in dict.fromkeys(wanted) if row < len(places)]
        lines = read_table(path).take(arrow.array(places[known])).to_pylist()
        written = dict(zip(known, map(_as_written, lines), strict=True))
        return [written.get(row, {}) for row in wanted]

    confidence = None
    if "confidence" in of_split.column_names:
        column = of_split.column("confidence")
        confidence = column.to_numpy() if arrow.types.is_floating(column.type) else None
    labels = table.column("label").unique().to_pylist() if has_labels else []
    return Assignments(len(places), confidence, members, [label or "" for label in labels], rows)


def _as_written(line: dict[str, Any]) -> dict[str, str]:
    return {
        name: "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
        for name, value in line.items()
    }
