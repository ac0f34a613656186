"""Read the files that every run folder has; one that is missing counts as empty."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssl_kd.core.runs.writer import read_json_lines


@dataclass(frozen=True)
class RunFiles:
    """The settings, scores, log and events of one run."""

    path: Path
    config: dict[str, Any]  # config.json: settings, versions, commit, precision, command
    metrics: dict[str, Any]  # metrics.json: the final scores
    steps: list[dict[str, Any]]  # metrics.jsonl: one mapping per logged step
    events: list[dict[str, Any]]  # events.jsonl: one mapping per decision of the guard

    @property
    def is_language(self) -> bool:
        """Whether the run trained a language model; if `config.json` has no `mode`, it did not."""
        return self.config.get("mode") == "language"

    @classmethod
    def read(cls, path: Path) -> "RunFiles":
        """Read the files of a run folder; raise FileNotFoundError if there is no such folder."""
        if not path.is_dir():
            raise FileNotFoundError(
                f"There is no run folder {path}; expected one, such as runs/latest"
            )
        return RunFiles(
            path,
            _json(path / "config.json"),
            _json(path / "metrics.json"),
            read_json_lines(path / "metrics.jsonl"),
            read_json_lines(path / "events.jsonl"),
        )


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
