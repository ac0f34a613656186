"""Read the settings and scores of finished runs of both modes from their folders."""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssl_kd.core.errors import InputError
from ssl_kd.core.files import CorruptFileError
from ssl_kd.core.runs.sweeps import PLAN, is_finished, read_failure, read_object, settings_of_runs
from ssl_kd.core.settings.early import home_resolved

ANSWERS = ("acc", "nmi", "ari", "ami")
_OF_STUDENT = ("perplexity", "nll", "bits_per_byte", "kl", "agreement", "acceptance", "ece")
_OF_STUDENT += ("repetition", "answer_accuracy", "answer_rate")
_NOT_SHOWN = {"RUNS_DIR", "RUN_NAME", "RESUME"}


@dataclass(frozen=True)
class Record:
    """A finished run.

    Attributes:
        path: its folder.
        mode: `vision` or `language`.
        settings: all settings, by UPPER_CASE names.
        scores: shares are between 0 and 1, `seconds` those of the whole run.
        commit: the commit of the working tree that it ran in; None outside git.
        command: the command line that started it.
        swept: settings that the sweep of the run varies, by UPPER_CASE names; empty without one.
    """

    path: Path
    mode: str
    settings: Mapping[str, Any]
    scores: Mapping[str, float]
    commit: str | None
    command: str
    swept: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Unfinished:
    """A run without results, and why it has none."""

    path: Path
    why: str


def read_runs(paths: Iterable[str | os.PathLike[str]]) -> tuple[list[Record], list[Unfinished]]:
    """Read runs, in the order of the paths, and of their names within a folder of runs.

    A run is read once, also if several paths or links lead to it. A run whose files are damaged is
    one of the unfinished.

    Args:
        paths: run folders, folders of runs such as that of a sweep, and patterns (`runs/a*`).

    Raises:
        InputError: a path holds no run.
    """
    records: list[Record] = []
    unfinished: list[Unfinished] = []
    plans: dict[Path, Mapping[str, Any]] = {}  # folder of a sweep -> the settings of its runs
    for folder in _folders(paths):
        try:
            if is_finished(folder):
                records.append(_record(folder, plans))
                continue
            failure = read_failure(folder.parent, folder.name)
            why = f"failed with code {failure[0]}: {failure[1]}" if failure else "not finished"
        except CorruptFileError as error:
            why = str(error)
        unfinished.append(Unfinished(folder, why))
    return records, unfinished


def runs(*paths: str | os.PathLike[str]) -> Any:
    """Return a pandas data frame with a row for each finished run.

    The columns are the folder of the run (`path`), its settings (UPPER_CASE), its scores (lower
    case), `commit` and `command`. Shares, such as `acc`, are between 0 and 1.

    Args:
        *paths: run folders, folders of runs such as that of a sweep, and patterns (`runs/a*`).

    Raises:
        InputError: a path holds no run.
        ImportError: pandas is not installed.
    """
    import pandas

    found, _ = read_runs(paths)
    return pandas.DataFrame(
        [
            {
                "path": str(record.path),
                **record.settings,
                **record.scores,
                "commit": record.commit,
                "command": record.command,
            }
            for record in found
        ]
    )


def _folders(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    folders: dict[Path, Path] = {}  # without links -> as it is shown
    for path in paths:
        name = os.fspath(home_resolved(os.fspath(path)))
        is_pattern = glob.has_magic(name) and not os.path.exists(name)
        places = sorted(glob.glob(name)) if is_pattern else [name]
        inside = [folder for place in places for folder in _runs_in(Path(place))]
        if not inside:
            raise InputError(f"{path} holds no run: give run folders, or a folder of runs")
        for folder in inside:
            target = folder.resolve()
            if target not in folders or folders[target].is_symlink():  # such as `latest`
                folders[target] = folder
    return list(folders.values())


def _runs_in(folder: Path) -> list[Path]:
    """Return the run folders that a path stands for; those of a sweep in the order of its plan."""
    if (folder / "config.json").exists():
        return [folder]
    if (folder / PLAN).exists():
        return [folder / name for name in settings_of_runs(folder)]
    configs = sorted(folder.glob("*/config.json"))
    return [config.parent for config in configs if not config.parent.is_symlink()]


def _record(folder: Path, plans: dict[Path, Mapping[str, Any]]) -> Record:
    config, metrics = read_object(folder / "config.json"), read_object(folder / "metrics.json")
    mode = config.get("mode", "vision")
    scores = _student_scores(metrics) if mode == "language" else _cluster_scores(metrics)
    scores["faults"] = metrics.get("events")
    scores["seconds"] = (metrics.get("seconds") or {}).get("total")
    return Record(
        folder,
        mode,
        {n: v for n, v in config.get("settings", {}).items() if n not in _NOT_SHOWN},
        {n: float(v) for n, v in scores.items() if v is not None and math.isfinite(v)},
        config.get("commit"),
        config.get("command", ""),
        _swept(folder.resolve(), plans),
    )


def _swept(folder: Path, plans: dict[Path, Mapping[str, Any]]) -> frozenset[str]:
    """Return the settings that the sweep of a run varies; its plan is added to `plans`."""
    sweep = folder.parent
    if sweep not in plans:
        plans[sweep] = settings_of_runs(sweep) if (sweep / PLAN).exists() else {}
    return frozenset(name.upper() for name in plans[sweep].get(folder.name, {}))


def _cluster_scores(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scores of the run's answer, on held-out data if it has labels."""
    rows: Sequence[Mapping[str, Any]] = metrics.get("table") or []
    splits = [row["split"] for row in rows]
    answer = next((row for row in rows if row["split"] == splits[-1]), {})
    heads = [head for head in metrics.get("heads") or [] if head.get("chosen")]
    chosen = [head["criterion"] for head in heads if head["criterion"] is not None]
    return {
        **{name: answer.get(name) for name in ANSWERS},
        "knn_accuracy": metrics.get("knn_accuracy"),
        "linear_probe": (metrics.get("linear_probe") or {}).get("accuracy"),
        "criterion": sum(chosen) / len(chosen) if chosen else None,
        "success_rate": metrics.get("success_rate"),
    }


def _student_scores(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scores of the student after training."""
    rows = {row["name"]: row for row in metrics.get("table") or []}
    student = rows.get("student", {})
    scores = {name: student.get(name) for name in _OF_STUDENT}
    return {**scores, "success_rate": metrics.get("success_rate")}
