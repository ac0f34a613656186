"""Watch a folder of pictures: train on it, then add its new pictures in rounds.

The folder of a watch holds a run for each round (`round-0001`, `round-0002`, ...) and the list of
the files that the round added (`round-0001.files`). Nothing else is stored, so a round that was
killed is repeated: with the same list if these files are unchanged, which reuses their embeddings.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from ssl_kd.datasets.catalog import read_file_list
from ssl_kd.datasets.decode import UnreadableImage
from ssl_kd.datasets.images import find_images, image_id, read_image
from ssl_kd.errors import InputError, UserError
from ssl_kd.files import atomic_write_json, atomic_write_text
from ssl_kd.files.lock import Lock
from ssl_kd.report import reported
from ssl_kd.report.watch import write_watch_page
from ssl_kd.settings.early import FILE_LIST
from ssl_kd.training.clock import Progress, no_progress
from ssl_kd.vision.extend import DECIDED, extend, inherited
from ssl_kd.vision.run import run
from ssl_kd.vision.samples import Samples
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.workbench.decisions import Curation
from ssl_kd.workbench.drift import describe_rounds

logger = logging.getLogger(__name__)

SETTLED = 5.0  # seconds since the last change after which a file counts as complete
ROUND, SUMMARY = "round-", "watch.json"
Files = dict[str, list[int]]  # path relative to the folder -> size, time of the change in ns


class Watch:
    """The rounds of the watched `folder`, whose runs are in the folder `place`.

    `settings` are those of the first run; `given` are those that were set by flags, which must
    agree with the first run in later rounds.
    """

    def __init__(
        self, folder: Path, place: Path, settings: VisionSettings, given: Mapping[str, Any]
    ) -> None:
        self.folder, self.place, self.given = folder.resolve(), place.resolve(), given
        self.settings = settings.replace(runs_dir=str(self.place))
        if self.place.is_relative_to(self.folder) or self.folder.is_relative_to(self.place):
            raise InputError(
                f"{self.folder} and the runs of its watch, {self.place}, lie in each other, so "
                "files of the runs could be taken for new pictures: set another --runs_dir"
            )

    def runs(self) -> dict[int, Path]:
        """Return number -> folder of the finished rounds, in order."""
        found = {file.parent for file in self.place.glob(f"{ROUND}*/metrics.json")}
        return dict(sorted((int(path.name.removeprefix(ROUND)), path) for path in found))

    def advance(
        self, at_least: int = 1, progress: Progress = no_progress
    ) -> tuple[dict[str, Any], bool]:
        """Add the new pictures in a round, if there are enough; write the page and the summary.

        Return the summary (`watch.json`), and whether it has changed since the last call. Its
        `run` is None while there is no run. LockHeld is raised while another watch is at work.
        """
        self.place.mkdir(parents=True, exist_ok=True)
        with Lock(self.place / ".lock"):
            runs = self.runs()
            last = runs[max(runs)] if runs else None
            samples = None if last is None else Samples(last)
            if samples is not None:
                _add_late_decisions(samples, [path for path in runs.values() if path != last])
            number = max(runs, default=0) + 1
            lists = self._lists(number)
            new, others = self._scan(samples, lists)
            files = lists.pop(number, {}).get("files", {})  # of a round that was killed
            if not files or any(new.get(path) != stamp for path, stamp in files.items()):
                files = dict(new)
            if len(files) >= at_least:
                lists[number] = {"folder": str(self.folder), "files": files}
                lists[number]["time"] = time.strftime("%Y-%m-%d %H:%M:%S")
                samples = Samples(self._add(number, lists[number], last, progress))
                new = {path: stamp for path, stamp in new.items() if path not in files}
            summary = {"folder": str(self.folder), "run": None, "rounds": []}
            return _report(summary | {"new": list(map(image_id, new))} | others, samples, lists)

    def _list(self, number: int) -> Path:
        return self.place / f"{ROUND}{number:04}{FILE_LIST}"

    def _lists(self, last: int) -> dict[int, dict[str, Any]]:
        """Return the lists of files of the rounds up to `last`, as far as they still exist."""
        paths = {number: self._list(number) for number in range(1, last + 1)}
        lists = {number: read_file_list(path) for number, path in paths.items() if path.exists()}
        if others := {listed["folder"] for listed in lists.values()} - {str(self.folder)}:
            raise InputError(
                f"{self.place} belongs to the watch of {min(others)}: choose another name for the "
                f"watch of {self.folder}, with --run NAME"
            )
        return lists

    def _scan(
        self, samples: Samples | None, lists: Mapping[int, dict[str, Any]]
    ) -> tuple[Files, dict[str, Any]]:
        """Return the files to add, and the ids of files that wait, were replaced or deleted."""
        known, new, waiting, replaced = set(), {}, {}, []
        if samples is not None:
            known = set(samples.column("file")[samples.column("split") != "test"].tolist())
        stamps = {image_id(p): s for listed in lists.values() for p, s in listed["files"].items()}
        paths = {image_id(path): path for path in sorted(find_images(self.folder))}
        if os.curdir in paths or not (paths or known):
            what = "cannot be listed" if paths else "holds no images"
            raise InputError(f"{self.folder} {what}: expected a readable folder of images")
        for id, path in paths.items():
            try:
                status = (self.folder / path).stat()
            except OSError as error:
                waiting[id] = str(error.strerror)
                continue
            stamp = [status.st_size, status.st_mtime_ns]
            if id in known:
                replaced += [id] if stamps.get(id, stamp) != stamp else []
            elif abs(time.time() - status.st_mtime) < SETTLED:
                waiting[id] = f"changed less than {SETTLED:g} seconds ago"
            else:
                new[path] = stamp
        with ThreadPoolExecutor() as pool:
            faults = dict(zip(list(new), pool.map(self._fault, new), strict=True))
        waiting |= {image_id(path): fault for path, fault in faults.items() if fault}
        new = {path: stamp for path, stamp in new.items() if not faults[path]}
        deleted = sorted(known - paths.keys())
        return new, {"waiting": waiting, "replaced": replaced, "deleted": deleted}

    def _fault(self, path: str) -> str:
        """Return why an image cannot be read; an empty text if it can."""
        try:
            read_image(self.folder, path).close()
        except UnreadableImage as error:
            return error.reason
        return ""

    def _add(
        self, number: int, listed: dict[str, Any], last: Path | None, progress: Progress
    ) -> Path:
        """Train on listed files, or extend the last run by them; return the folder of the run."""
        file, name = self._list(number), f"{ROUND}{number:04}"
        settings = self.settings.replace(dataset=str(file), run_name=name)
        if last is None:
            shutil.rmtree(self.place / name, ignore_errors=True)  # of a round that was killed
            work = partial(run, settings)
        else:
            work = partial(extend, inherited(settings.replace(extend=str(last)), self.given))
        atomic_write_json(file, listed)
        try:
            return reported(work, progress)
        except Exception:  # unlike a kill: the next round chooses its files anew
            file.unlink()
            raise


def _report(
    summary: dict[str, Any], samples: Samples | None, lists: Mapping[int, dict[str, Any]]
) -> tuple[dict[str, Any], bool]:
    """Complete the summary, and write it and the page unless they are up to date."""
    if samples is None:
        return summary, True
    summary |= {"run": str(samples.path), "rounds": describe_rounds(samples)}
    for about in summary["rounds"]:
        about["time"] = lists.get(about["round"], {}).get("time")
    path, text = samples.path / SUMMARY, json.dumps(summary, indent=1, allow_nan=False) + "\n"
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return summary, False
    write_watch_page(samples, summary)
    atomic_write_text(path, text)  # the last file: both are complete
    return summary, True


def _add_late_decisions(samples: Samples, earlier: list[Path]) -> None:
    """Add decisions that were made about earlier rounds after the last round began."""
    for path in earlier:
        if (path / DECIDED).is_file():
            try:
                Curation(samples).apply(path / DECIDED)
            except UserError as error:
                logger.warning("decisions about %s do not fit the last round: %s", path.name, error)
