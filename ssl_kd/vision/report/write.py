"""Write `report.html`, a self-contained page with the settings, scores and course of a run."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pyarrow as arrow

from ssl_kd.core.pages import write as pages
from ssl_kd.core.runs.clock import Progress
from ssl_kd.vision.report import vision
from ssl_kd.vision.report.decided import Decided
from ssl_kd.vision.report.gallery import ShownSamples, run_samples
from ssl_kd.vision.report.results import RunResults
from ssl_kd.vision.settings import VisionSettings


def write_report(
    run_dir: Path, *, samples: ShownSamples | None = None, decided: Decided | None = None
) -> Path:
    """Write `report.html` from the files of a run folder, and return its path.

    A section whose data is missing is replaced by a sentence that says so.

    Args:
        run_dir: folder of the run; no other file in it changes.
        samples: loads the pictures, texts or sounds of rows of the shown split; if it raises, the
            page says why it has none. None: the run has features.
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
    content, defaults = vision.content(run, samples, decided), VisionSettings().to_dict()
    return pages.write_page(
        run, ("ssl_kd.vision.report", "vision.html"), content, "report.html", defaults
    )


def reported(start: Callable[..., Path], progress: Progress) -> Path:
    """Train with `start(progress=progress)`, write the report, and return the run folder.

    A finished run that is resumed gets its report if it has none; RunFinished is raised if it has.
    """
    return pages.reported(
        start, progress, lambda path: write_report(path, samples=run_samples(path))
    )
