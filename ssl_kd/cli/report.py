"""The command `ssl_kd report`: write the report of a run anew, with names and decisions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ssl_kd.cli.flags import FlagParser
from ssl_kd.core import explorer
from ssl_kd.core.errors import OK
from ssl_kd.core.settings.early import run_folder

PROG = "ssl_kd report"


def report(argv: Sequence[str]) -> int:
    """Write `report.html` anew; no other file of the run changes."""
    about = (
        "Writes report.html of a run anew, with the names, clusters and history of the decisions "
        "in its curation.jsonl, and with pictures as they are now. Nothing else in the run's "
        "folder changes."
    )
    parser = FlagParser(prog=PROG, description=about)
    what = "folder of a run on images, features or text, such as runs/latest"
    parser.add_argument("run", metavar="RUN", help=what)
    path = run_folder(parser.parse_args(argv).run)

    from ssl_kd.cli.screen import open_screen

    open_screen()
    from ssl_kd.core.pages.run_files import RunFiles

    write = _of_texts if RunFiles.read(path).is_language else _of_clusters
    print(f"Report: {write(path)}")
    return OK


def _of_texts(path: Path) -> Path:
    from ssl_kd.language.report.page import write_report

    return write_report(path)


def _of_clusters(path: Path) -> Path:
    from ssl_kd.vision.extend import DECIDED
    from ssl_kd.vision.report import run_samples, write_report

    decided = None
    if (path / DECIDED).is_file():
        what = f"A report with the decisions in {path / DECIDED}"
        decided = explorer.load("objects", "decided", what)(path)
    return write_report(path, samples=run_samples(path), decided=decided)
