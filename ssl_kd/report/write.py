"""Write `report.html`: what was done, how well and how fast, on one self-contained page."""

import re
import shlex
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2

from ssl_kd.files import atomic_write_text
from ssl_kd.report import language, vision
from ssl_kd.report.gallery import Images
from ssl_kd.report.results import RunResults
from ssl_kd.report.wording import DASH, number
from ssl_kd.training.clock import Progress
from ssl_kd.training.folder import RunFinished
from ssl_kd.training.stop import Interrupted


def write_report(run_dir: Path, *, images: Images | None = None) -> Path:
    """Write `report.html` from the files of a run folder, of either mode.

    What the files do not contain is left out, with a sentence that says so.

    Args:
        run_dir: The run folder.
        images: Returns the pictures of rows of the training split; None where the data has no
            pictures, as in the language mode. If it raises, the page says why it has no pictures.

    Returns:
        Path of the page.

    Raises:
        FileNotFoundError: If `run_dir` is not a folder.
    """
    run = RunResults.read(Path(run_dir))
    if run.is_language:
        name, content = "language.html", language.content(run)
    else:
        name, content = "vision.html", vision.content(run, images)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ssl_kd.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    page = environment.get_template(name).render(_frame(run) | content)
    path = run.path / "report.html"
    atomic_write_text(path, page)
    return path


def reported(
    start: Callable[[Progress], tuple[Path, Images | None]],
    images_of: Callable[[Path], Images | None],
    progress: Progress,
) -> Path:
    """Run, and write the report; resumed after its end, a run gets the report that it lacks.

    Args:
        start: Runs to the end; returns the run's folder, and the pictures for its report.
        images_of: Returns the pictures of a run that was finished before.
        progress: Called as `progress(stage, done, total, info)`.

    Returns:
        The run's folder.

    Raises:
        RunFinished: If the run that is to be resumed has ended, report and all.
    """
    try:
        path, images = start(progress)
    except RunFinished as ended:  # all but the report, perhaps
        if (ended.path / "report.html").exists():
            raise
        path, images = ended.path, images_of(ended.path)
    progress("report", 0, 1, {})
    try:
        write_report(path, images=images)
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
        "command": _again(str(run.config.get("command") or "")),
        "precision": run.config.get("precision", ""),
        "settings": sorted(_plain(run.config.get("settings", {}))) + _plain(versions),
        "folder": run.path.name,
    }


def _again(command: str) -> str:
    """Return the command without `--run_name` and `--resume`, to run it again."""
    try:
        arguments = shlex.split(command)
    except ValueError:  # a quote that is not closed
        return command
    kept, skipped = [], False
    for argument in arguments:
        name = argument.replace("-", "_")
        if not skipped and not re.match("__(resume|run_name)(=|$)", name):
            kept.append(argument)
        skipped = name == "__run_name"
    return shlex.join(kept)


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
