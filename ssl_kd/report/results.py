"""What a run folder holds, read back leniently: a part that is missing is empty, never an error."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssl_kd.report.assignments import Assignments, read_assignments


@dataclass(frozen=True)
class RunResults:
    """The files of one run, as `write_report` needs them.

    Args:
        path: The folder.
        config: `config.json`: settings, versions, commit, precision, command.
        metrics: `metrics.json`: the final judgement.
        steps: `metrics.jsonl`: one mapping a logged step.
        events: `events.jsonl`: one mapping a decision of the guard.
        assignments: `assignments.csv` or `.parquet`: of the samples that the page is about.
        arrays: `arrays.npz`: map, typical samples, confusion.
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
        """Whether a language model learned here; a folder that does not say is a vision run's."""
        return self.config.get("mode") == "language"

    @property
    def split(self) -> str:
        """The samples that the page is about: those that were added, of an extended run."""
        return _split(self.metrics)

    @classmethod
    def read(cls, path: Path) -> "RunResults":
        """Read what is there.

        Args:
            path: A run folder.

        Returns:
            Its content.

        Raises:
            FileNotFoundError: If it is not a folder.
        """
        if not path.is_dir():
            raise FileNotFoundError(f"no run folder at {path}: give a folder under runs/")
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
