"""The command `ssl_kd report`: write the report of a run anew, with names and decisions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ssl_kd.cli.flags import FlagParser
from ssl_kd.errors import OK
from ssl_kd.settings.early import run_folder

if TYPE_CHECKING:
    from pathlib import Path

    from ssl_kd.report import Decided

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
    from ssl_kd.report import run_images, write_report

    page = write_report(path, images=run_images(path), decided=_decided(path))
    print(f"Report: {page}")
    return OK


def _decided(path: Path) -> Decided | None:
    """Return what people decided about the samples that the report shows; None if nothing."""
    from ssl_kd.report import Decided
    from ssl_kd.vision.samples import Samples
    from ssl_kd.workbench.decisions import Curation
    from ssl_kd.workbench.decisions.curation import FILE

    if not (path / FILE).is_file():
        return None
    samples = Samples(path)
    curation = Curation(samples)
    split = (samples.metrics.get("extended") or {}).get("split", "train")
    rows = samples.splits[split]
    clusters = curation.clusters[rows.start : rows.stop]
    return Decided(clusters, curation.names, curation.lines)
