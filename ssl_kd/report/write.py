"""`report.html`: what was done, how well and how fast, on one self-contained page."""

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
from ssl_kd.report.figures import shares
from ssl_kd.report.gallery import Images
from ssl_kd.report.results import RunResults
from ssl_kd.report.wording import DASH, duration, number
from ssl_kd.training.clock import Progress
from ssl_kd.training.folder import RunFinished
from ssl_kd.training.stop import Interrupted


def write_report(run_dir: Path, *, images: Images | None = None) -> Path:
    """Write `report.html` from the files of a run folder, of either mode.

    What the files do not contain is left out, with a sentence that says so.

    Args:
        run_dir: The run folder.
        images: Gives the pictures of these rows of the training split; None where the data has no
            pictures, as in the language mode. If it raises, the page has no pictures and says why.

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
    """Run, and write the report, of a finished run that lacks it, too.

    Args:
        start: Runs to the end; returns the run's folder, and the pictures for its report.
        images_of: The pictures of a run that was finished before.
        progress: Told how far it is.

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
    """What the pages of both modes have in common."""
    versions = run.config.get("versions", {})
    return {
        "events": [_event(e) for e in run.events[:200]],
        "n_events": len(run.events),
        "events_text": _events_text(run),
        "times": shares(run.metrics.get("seconds") or {}, duration),
        "command": _again(str(run.config.get("command") or "")),
        "precision": run.config.get("precision", ""),
        "settings": sorted(_plain(run.config.get("settings", {}))),
        "versions": _plain(versions | {"commit": run.config.get("commit") or "not known"}),
        "folder": run.path.name,
    }


def _again(command: str) -> str:
    """The command without what names or continues this very run: it makes another one."""
    try:
        words = shlex.split(command)
    except ValueError:  # a quote that is not closed
        return command
    kept, skipped = [], False
    for word in words:
        name = word.replace("-", "_")
        if not skipped and not re.match("__(resume|run_name)(=|$)", name):
            kept.append(word)
        skipped = name == "__run_name"
    return shlex.join(kept)


def _events_text(run: RunResults) -> str:
    if not run.events:
        return "Nothing happened: every loss, gradient and weight stayed finite throughout."
    actions = Counter(re.split("[,:]", str(e.get("action", "noted")))[0] for e in run.events)
    parts = len({str(e.get("part")) for e in run.events})
    counted = ", ".join(f"{count:,} {name}" for name, count in actions.most_common())
    kept = sorted(run.path.glob("faults/*.pt"))
    hint = f" To see the cause: ssl_kd replay {kept[0]}" if kept else ""
    return (
        f"The guard stepped in {_times_word(len(run.events))} on {parts} "
        f"part{'s' if parts != 1 else ''}: {counted}.{hint}"
    )


def _times_word(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _event(event: dict[str, Any]) -> dict[str, str]:
    keys = ("step", "part", "stage", "reason", "action")
    return {key: str(event.get(key, DASH)) for key in keys} | {"value": number(event.get("value"))}


def _plain(mapping: dict[str, Any]) -> list[tuple[str, str]]:
    return [(str(key), str(value)) for key, value in mapping.items()]
