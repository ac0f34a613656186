"""Read the folder of a sweep: its runs, which of them are finished, and why others failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ssl_kd.core.files import CorruptFileError
from ssl_kd.core.runs.writer import read_json

PLAN = "sweep.json"
LOGS = "logs"


def settings_of_runs(sweep_folder: Path) -> dict[str, dict[str, str]]:
    """Return name of a run -> the settings that are its own, in the order of the plan.

    Raises:
        CorruptFileError: the plan is damaged.
    """
    return read_object(sweep_folder / PLAN)["runs"]


def is_finished(folder: Path) -> bool:
    """Return whether a run folder is that of a finished run."""
    return (folder / "metrics.json").exists()


def failure_file(sweep_folder: Path, name: str) -> Path:
    """Return the file that says why a run of a sweep failed."""
    return sweep_folder / LOGS / f"{name}.failed.json"


def read_failure(sweep_folder: Path, name: str) -> tuple[int, str] | None:
    """Return exit code and reason of a run that failed; None if it did not."""
    file = failure_file(sweep_folder, name)
    if not file.exists():
        return None
    failure = read_object(file)
    return failure["code"], failure["reason"]


def read_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raise CorruptFileError if there is something else in it."""
    try:
        content = read_json(file)
    except (OSError, ValueError) as error:
        raise CorruptFileError(
            f"{file} cannot be read ({error}): restore it, or remove it"
        ) from error
    if not isinstance(content, dict):
        raise CorruptFileError(
            f"{file} holds a {type(content).__name__}; expected an object in JSON: restore it, or "
            "remove it"
        )
    return content
