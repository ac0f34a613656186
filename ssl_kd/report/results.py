"""Read a run folder for its report; a file that is missing counts as empty."""

import json
from contextlib import suppress
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
class RunResults:
    """The files of one run, as `write_report` needs them."""

    path: Path
    config: dict[str, Any]  # config.json: settings, versions, commit, precision, command
    metrics: dict[str, Any]  # metrics.json: the final scores
    steps: list[dict[str, Any]]  # metrics.jsonl: one mapping per logged step
    events: list[dict[str, Any]]  # events.jsonl: one mapping per decision of the guard
    split: str  # the split that the page shows: the added samples of an extended run, else train
    assignments: arrow.Table  # the samples of `split`
    arrays: dict[str, NDArray]  # arrays.npz: map and typical samples

    @property
    def is_language(self) -> bool:
        """Whether the run trained a language model; if `config.json` has no `mode`, it did not."""
        return self.config.get("mode") == "language"

    @classmethod
    def read(cls, path: Path) -> "RunResults":
        """Read the files of a run folder; raise FileNotFoundError if there is no such folder."""
        if not path.is_dir():
            raise FileNotFoundError(
                f"There is no run folder {path}; expected one, such as runs/latest"
            )
        arrays: dict[str, NDArray] = {}
        if (path / "arrays.npz").exists():
            with np.load(path / "arrays.npz", allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
        metrics = _json(path / "metrics.json")
        split = metrics.get("extended", {}).get("split", "train")
        return cls(
            path,
            _json(path / "config.json"),
            metrics,
            _json_lines(path / "metrics.jsonl"),
            _json_lines(path / "events.jsonl"),
            split,
            read_assignments(path, split),
            arrays,
        )


def read_assignments(folder: Path, split: str) -> arrow.Table:
    """Read the samples of one split of a run; an empty table if the run has not written any."""
    path = assignments_of(folder)
    if not path.exists():
        return arrow.table({"cluster": arrow.array([], arrow.int64())})
    table = read_table(path, ["file", "confidence", "cluster", "label", "split"])
    return table.filter(compute.field("split") == split)


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _json_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        with suppress(json.JSONDecodeError):  # the last line of a run that was killed meanwhile
            lines.append(json.loads(text))
    return [line for line in lines if isinstance(line, dict)]
