"""Read a run folder for its report; a file that is missing counts as empty."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
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
    """The clusters of the samples in one split, as arrays rather than a Python object per sample.

    Args:
        table: One row per sample of the split.
        labels: The distinct labels of all splits.
    """

    table: arrow.Table
    labels: list[str]

    @property
    def confidence(self) -> NDArray[np.float64] | None:
        """The confidence of each sample `[n]`; None if the file has no such column of floats."""
        if "confidence" not in self.table.column_names:
            return None
        column = self.table.column("confidence")
        return column.to_numpy() if arrow.types.is_floating(column.type) else None

    def members(self) -> Counter[tuple[str, str]]:
        """Count the samples of each pair (cluster, label); the label is empty if unknown."""
        keys = [key for key in ("cluster", "label") if key in self.table.column_names]
        counts = Counter()
        for row in self.table.group_by(keys).aggregate([([], "count_all")]).to_pylist():
            counts[str(row["cluster"]), row.get("label") or ""] = row["count_all"]
        return counts

    def names(self, rows: Sequence[int]) -> list[str]:
        """Return the sample name of each row; a row beyond the table is called by its number."""
        names = self.table.column("file") if "file" in self.table.column_names else []
        return [str(names[row]) if row < len(names) else f"row {row}" for row in rows]


def read_assignments(folder: Path, split: str) -> Assignments:
    """Read the samples of one split of a run folder; none if the run has not written the file.

    Raises:
        CorruptFileError: The file is damaged, or lacks a column that every run writes.
    """
    path = assignments_of(folder)
    if not path.exists():
        return Assignments(arrow.table({"cluster": arrow.array([], arrow.int64())}), [])
    table = read_table(path, ["file", "confidence", "cluster", "label", "split"])
    labels = table.column("label").unique().to_pylist() if "label" in table.column_names else []
    is_in_split = compute.call_function("equal", [table.column("split"), arrow.scalar(split)])
    return Assignments(table.filter(is_in_split), [label or "" for label in labels])


@dataclass(frozen=True)
class RunResults:
    """The files of one run, as `write_report` needs them.

    Args:
        path: The run folder.
        config: The content of `config.json`: settings, versions, commit, precision, command.
        metrics: The content of `metrics.json`: the final scores.
        steps: The lines of `metrics.jsonl`: one mapping per logged step.
        events: The lines of `events.jsonl`: one mapping per decision of the guard.
        assignments: The clusters of the samples in `split`.
        arrays: The content of `arrays.npz`: map and typical samples.
    """

    path: Path
    config: dict[str, Any]
    metrics: dict[str, Any]
    steps: list[dict[str, Any]]
    events: list[dict[str, Any]]
    assignments: Assignments
    arrays: dict[str, NDArray]

    @property
    def is_language(self) -> bool:
        """Whether the run trained a language model; a clustering run if `config.json` is silent."""
        return self.config.get("mode") == "language"

    @property
    def split(self) -> str:
        """The split that the page shows: the added samples of an extended run, else `train`."""
        return _split(self.metrics)

    @classmethod
    def read(cls, path: Path) -> "RunResults":
        """Read the files of a run folder.

        Raises:
            FileNotFoundError: If `path` is not a folder.
        """
        if not path.is_dir():
            raise FileNotFoundError(
                f"There is no run folder {path}; expected one, such as runs/latest"
            )
        arrays: dict[str, NDArray] = {}
        if (path / "arrays.npz").exists():
            with np.load(path / "arrays.npz", allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
        metrics = _json(path / "metrics.json")
        return cls(
            path,
            _json(path / "config.json"),
            metrics,
            _json_lines(path / "metrics.jsonl"),
            _json_lines(path / "events.jsonl"),
            read_assignments(path, _split(metrics)),
            arrays,
        )


def _split(metrics: dict[str, Any]) -> str:
    return metrics.get("extended", {}).get("split", "train")


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _json_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue  # the last line of a run that was killed while writing it
    return [line for line in lines if isinstance(line, dict)]
