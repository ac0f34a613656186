"""Write `report.html`, a self-contained page with the settings, scores and course of a run."""

import dataclasses
import re
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pyarrow as arrow

from ssl_kd.files import atomic_write_text
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.report import language, vision
from ssl_kd.report.decided import Decided
from ssl_kd.report.gallery import Images, run_images
from ssl_kd.report.results import RunResults
from ssl_kd.report.wording import DASH, number
from ssl_kd.training.clock import Progress
from ssl_kd.training.folder import RunFinished
from ssl_kd.training.stop import Interrupted
from ssl_kd.vision.settings import VisionSettings

# Flags that the command of another run lacks.
_NAME_OF_RUN = r" --(resume|run[_-]name([ =]('[^']*'|\S+))?)(?= |$)"


def write_report(
    run_dir: Path, *, images: Images | None = None, decided: Decided | None = None
) -> Path:
    """Write `report.html` from the files of a run folder, and return its path.

    A section whose data is missing is replaced by a sentence that says so.

    Args:
        run_dir: folder of the run; no other file in it changes.
        images: loads the pictures of rows of the shown split; if it raises, the page says why it
            has no pictures. None: the run has no pictures.
        decided: the clusters and names after all decisions, of the shown split. None: the clusters
            of the run.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    run = RunResults.read(Path(run_dir))
    if decided is not None:
        place = run.assignments.column_names.index("cluster")
        clusters = arrow.array(decided.clusters)
        with_decisions = run.assignments.set_column(place, "cluster", clusters)
        run = dataclasses.replace(run, assignments=with_decisions)
    if run.is_language:
        name, content = "language.html", language.content(run)
    else:
        name, content = "vision.html", vision.content(run, images, decided)
    return write_page(run, name, content, "report.html")


def write_page(run: RunResults, template: str, content: dict[str, Any], name: str) -> Path:
    """Write the page `name` into the folder of a run, and return its path."""
    path = run.path / name
    atomic_write_text(path, rendered(template, _frame(run) | content))
    return path


def rendered(template: str, content: dict[str, Any]) -> str:
    """Return the HTML of a template; raise if `content` lacks a value."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ssl_kd.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(template).render(content)


def reported(start: Callable[..., Path], progress: Progress) -> Path:
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
        write_report(path, images=run_images(path))
    except KeyboardInterrupt:
        raise Interrupted(signal.SIGINT, path) from None
    progress("report", 1, 1, {})
    return path


def _frame(run: RunResults) -> dict[str, Any]:
    """Return the values that the pages of both modes share."""
    versions = run.config.get("versions", {})
    if run.config.get("commit"):
        versions = versions | {"commit": run.config["commit"]}
    return {
        "events": [_event(e) for e in run.events[:200]],
        "n_events": len(run.events),
        "events_text": _events_text(run),
        "command": re.sub(_NAME_OF_RUN, "", str(run.config.get("command") or "")),
        "precision": run.config.get("precision", ""),
        **_settings(run),
        "versions": _plain(versions),
        "folder": run.path.name,
    }


def _settings(run: RunResults) -> dict[str, Any]:
    """Return the settings that differ from their defaults, and all others."""
    settings = run.config.get("settings", {})
    defaults = (LanguageSettings if run.is_language else VisionSettings)().to_dict()
    same = {key for key, value in settings.items() if key in defaults and value == defaults[key]}
    changed = {key: value for key, value in settings.items() if key not in same}
    others = {key: settings[key] for key in same}
    return {"changed": sorted(_plain(changed)), "others": sorted(_plain(others))}


def _events_text(run: RunResults) -> str:
    if not run.events:
        return "No events: every loss, gradient and weight stayed finite."
    actions = Counter(re.split("[,:]", str(e.get("action", "noted")))[0] for e in run.events)
    n, n_parts = len(run.events), len({str(event.get("part")) for event in run.events})
    counts = ", ".join(f"{count:,} {name}" for name, count in actions.most_common())
    bundles = sorted(run.path.glob("faults/*.pt"))
    hint = f" To see the cause: ssl_kd replay {bundles[0]}" if bundles else ""
    plurals = "s" if n > 1 else "", "s" if n_parts > 1 else ""
    return f"{n:,} event{plurals[0]} on {n_parts} part{plurals[1]}: {counts}.{hint}"


def _event(event: dict[str, Any]) -> dict[str, str]:
    keys = ("step", "part", "stage", "reason", "action")
    return {key: str(event.get(key, DASH)) for key in keys} | {"value": number(event.get("value"))}


def _plain(mapping: dict[str, Any]) -> list[tuple[str, str]]:
    return [(str(key), str(value)) for key, value in mapping.items()]
