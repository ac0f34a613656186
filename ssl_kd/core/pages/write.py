"""Write a page from the files of a run: its own sections, and what every page of a run has."""

import re
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ssl_kd.core.files import atomic_write_text
from ssl_kd.core.pages.rendering import rendered
from ssl_kd.core.pages.run_files import RunFiles
from ssl_kd.core.pages.sweep_curves import section_of
from ssl_kd.core.pages.wording import DASH, number
from ssl_kd.core.runs.clock import Progress
from ssl_kd.core.runs.folder import RunFinished
from ssl_kd.core.runs.stop import Interrupted

# Flags that the command of another run lacks.
_NAME_OF_RUN = r" --(resume|run[_-]name([ =]('[^']*'|\S+))?)(?= |$)"


def write_page(
    run: RunFiles,
    template: tuple[str, str],
    content: dict[str, Any],
    name: str,
    defaults: dict[str, Any],
) -> Path:
    """Write the page `name` into the folder of a run, and return its path.

    `template` is a package and its template, `defaults` the settings of a run that changes none.
    """
    path = run.path / name
    atomic_write_text(path, rendered(*template, _frame(run, defaults) | content))
    return path


def reported(
    start: Callable[..., Path], progress: Progress, write_report: Callable[[Path], object]
) -> Path:
    """Train with `start(progress=progress)`, write the report, and return the run folder.

    A finished run that is resumed gets its report if it has none; RunFinished is raised if it has.
    """
    try:
        path = start(progress=progress)
    except RunFinished as error:  # it may lack a report
        if (error.path / "report.html").exists():
            raise
        path = error.path
    progress("report", 0, 1, {})
    try:
        write_report(path)
    except KeyboardInterrupt:
        raise Interrupted(signal.SIGINT, path) from None
    progress("report", 1, 1, {})
    return path


def _frame(run: RunFiles, defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the values that all pages share."""
    versions = run.config.get("versions", {})
    if run.config.get("commit"):
        versions = versions | {"commit": run.config["commit"]}
    return {
        "events": [_event(e) for e in run.events[:200]],
        "n_events": len(run.events),
        "events_text": _events_text(run),
        "command": re.sub(_NAME_OF_RUN, "", str(run.config.get("command") or "")),
        "precision": run.config.get("precision", ""),
        **_settings(run, defaults),
        "versions": _plain(versions),
        "folder": run.path.name,
        "sweep": section_of(run),
    }


def _settings(run: RunFiles, defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from their defaults, and all others."""
    settings = run.config.get("settings", {})
    same = {key for key, value in settings.items() if key in defaults and value == defaults[key]}
    changed = {key: value for key, value in settings.items() if key not in same}
    others = {key: settings[key] for key in same}
    return {"changed": sorted(_plain(changed)), "others": sorted(_plain(others))}


def _events_text(run: RunFiles) -> str:
    if not run.events:
        return "No events: every loss, gradient and weight stayed finite."
    actions = Counter(re.split("[,:]", str(e.get("action", "noted")))[0] for e in run.events)
    n, n_parts = len(run.events), len({str(event.get("part")) for event in run.events})
    counts = ", ".join(f"{count:,} {name}" for name, count in actions.most_common())
    bundles = sorted(run.path.glob("faults/*.safetensors"))
    hint = f" To see the cause: ssl_kd replay {bundles[0]}" if bundles else ""
    plurals = "s" if n > 1 else "", "s" if n_parts > 1 else ""
    return f"{n:,} event{plurals[0]} on {n_parts} part{plurals[1]}: {counts}.{hint}"


def _event(event: dict[str, Any]) -> dict[str, str]:
    keys = ("step", "part", "stage", "reason", "action")
    return {key: str(event.get(key, DASH)) for key in keys} | {"value": number(event.get("value"))}


def _plain(mapping: dict[str, Any]) -> list[tuple[str, str]]:
    return [(str(key), str(value)) for key, value in mapping.items()]
