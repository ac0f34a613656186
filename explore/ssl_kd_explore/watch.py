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

from ssl_kd.core.errors import InputError, UserError
from ssl_kd.core.files import atomic_write_json, atomic_write_text
from ssl_kd.core.files.lock import Lock
from ssl_kd.core.images.decode import UnreadableImage
from ssl_kd.core.pages.wording import DASH
from ssl_kd.core.runs.clock import Progress, no_progress
from ssl_kd.core.settings.early import FILE_LIST, check_run_name
from ssl_kd.vision.data.catalog import read_file_list
from ssl_kd.vision.data.folders import file_id
from ssl_kd.vision.data.images import find_images, read_image
from ssl_kd.vision.extend import DECIDED, extend, inherited
from ssl_kd.vision.report import reported
from ssl_kd.vision.run import run
from ssl_kd.vision.samples import Samples
from ssl_kd.vision.settings import VisionSettings
from ssl_kd_explore.decisions import Curation
from ssl_kd_explore.drift import describe_rounds
from ssl_kd_explore.watch_page import write_watch_page

logger = logging.getLogger(__name__)

SETTLED = 5.0  # seconds since the last change after which a file counts as complete
ROUND, SUMMARY = "round-", "watch.json"
Lists = dict[int, dict[str, Any]]  # round -> `folder`, `time`, and `files`: path -> `_stamp`


class Watch:
    """The rounds of the watched `folder`, whose runs are in the folder `place`.

    `settings` are those of the first run; `given` are those that were set by flags, which must
    agree with the first run in later rounds.
    """

    def __init__(
        self, folder: Path, place: Path, settings: VisionSettings, given: Mapping[str, Any]
    ) -> None:
        self.folder = folder.resolve()
        self.place = place.resolve()
        self.given = given
        self.settings = settings.replace(runs_dir=str(self.place))
        if self.place.is_relative_to(self.folder) or self.folder.is_relative_to(self.place):
            raise InputError(
                f"{self.folder} and the runs of its watch, {self.place}, lie in each other, so "
                "files of the runs could be taken for new pictures: set another --runs_dir"
            )

    def advance(
        self, at_least: int = 1, progress: Progress = no_progress
    ) -> tuple[dict[str, Any], bool]:
        """Add the new pictures in a round, if there are enough; write the page and the summary.

        Return the summary (`watch.json`), and whether it has changed since the last call. Its
        `run` is None while there is no run. LockHeld is raised while another watch is at work.
        """
        self.place.mkdir(parents=True, exist_ok=True)
        with Lock(self.place / ".lock"):
            last = max(self._numbered("/metrics.json"), default=0)
            samples = Samples(self._run(last)) if last else None
            lists = self._lists()
            new, summary = self._scan(samples, lists)
            files = lists.pop(last + 1, {}).get("files")  # of a round that was killed
            if not files or not files.items() <= new.items():
                files = new
            if len(files) >= at_least:
                time_now = time.strftime("%Y-%m-%d %H:%M:%S")
                lists[last + 1] = {"folder": str(self.folder), "time": time_now, "files": files}
                samples = Samples(self._add(last + 1, lists[last + 1], progress))
                new = {path: stamp for path, stamp in new.items() if path not in files}
            summary["new"] = list(map(file_id, new))
            if samples is None:
                return summary | {"run": None, "rounds": []}, True
            return self._report(summary, samples, lists)

    def _run(self, number: int) -> Path:
        return self.place / f"{ROUND}{number:04}"

    def _numbered(self, end: str) -> dict[int, Path]:
        """Return number -> path for a file of the rounds; `round-1-old` is a copy, no round."""
        paths = {str(p.relative_to(self.place)): p for p in self.place.glob(f"{ROUND}*{end}")}
        numbers = {name: name.removeprefix(ROUND).removesuffix(end) for name in paths}
        return {int(n): paths[name] for name, n in numbers.items() if n.isdecimal()}

    def _lists(self) -> Lists:
        """Return the lists of files of the rounds, as far as they still exist."""
        lists = {n: read_file_list(path) for n, path in self._numbered(FILE_LIST).items()}
        if others := {listed["folder"] for listed in lists.values()} - {str(self.folder)}:
            raise InputError(
                f"{self.place} belongs to the watch of {min(others)}: choose another name for the "
                f"watch of {self.folder}, with --run NAME"
            )
        return lists

    def _scan(self, samples: Samples | None, lists: Lists) -> tuple[dict, dict[str, Any]]:
        """Return the files to add, and the ids of files that wait, were replaced or deleted."""
        known = set()
        if samples is not None:
            known = set(samples.column("file")[samples.column("split") != "test"].tolist())
        paths = {file_id(path): path for path in sorted(find_images(self.folder))}
        if os.curdir in paths or not (paths or known):
            what = "cannot be listed" if paths else "holds no images"
            raise InputError(f"{self.folder} {what}: expected a readable folder of images")
        listed = {path: stamp for each in lists.values() for path, stamp in each["files"].items()}
        stamps = {path: self._stamp(path) for path in paths.values()}
        unknown = [path for id, path in paths.items() if id not in known]
        with ThreadPoolExecutor() as pool:
            faults = dict(zip(unknown, pool.map(self._fault, unknown), strict=True))
        changed = {path for path, stamp in stamps.items() if listed.get(path, stamp) != stamp}
        return {path: stamps[path] for path in unknown if not faults[path]}, {
            "waiting": {file_id(path): fault for path, fault in faults.items() if fault},
            "replaced": [id for id, path in paths.items() if id in known and path in changed],
            "deleted": sorted(known - paths.keys()),
        }

    def _stamp(self, path: str) -> list[int] | None:
        """Return the size of a file and the time of its last change in ns; None on an error."""
        try:
            status = (self.folder / path).stat()
        except OSError:
            return None
        return [status.st_size, status.st_mtime_ns]

    def _fault(self, path: str) -> str:
        """Return why a new file has to wait; an empty text if it can be added."""
        stamp = self._stamp(path)
        if stamp and abs(time.time() - stamp[1] / 1e9) < SETTLED:
            return f"changed less than {SETTLED:g} seconds ago"
        try:
            read_image(self.folder, path).close()
        except UnreadableImage as error:
            return error.reason
        return ""

    def _add(self, number: int, listed: dict[str, Any], progress: Progress) -> Path:
        """Train on listed files, or extend the last run by them; return the folder of the run."""
        place, last = self._run(number), self._run(number - 1)
        file = place.with_suffix(FILE_LIST)
        settings = self.settings.replace(dataset=str(file), run_name=place.name)
        if number == 1 and file.exists():  # of a round that was killed, so the folder is ours
            shutil.rmtree(place, ignore_errors=True)
        check_run_name(place, resume=False)
        if number == 1:
            work = partial(run, settings)
        else:
            work = partial(extend, inherited(settings.replace(extend=str(last)), self.given))
        atomic_write_json(file, listed)
        try:
            return reported(work, progress)
        except Exception:  # unlike a kill: the next round chooses its files anew
            if not place.exists():
                file.unlink()
            raise

    def _report(
        self, summary: dict[str, Any], samples: Samples, lists: Lists
    ) -> tuple[dict[str, Any], bool]:
        """Complete the summary, and write it and the page unless they are up to date."""
        for path in sorted(self.place.glob(f"{ROUND}*/{DECIDED}")):
            try:  # add decisions about earlier rounds that were made after the last round began
                Curation(samples).apply(path)
            except UserError as error:
                logger.warning("%s does not fit the last round: %s", path, error)
        rounds = describe_rounds(samples)
        for described in rounds:
            described["time"] = lists.get(described["round"], {}).get("time", DASH)
        summary |= {"folder": str(self.folder), "run": str(samples.path), "rounds": rounds}
        path, text = samples.path / SUMMARY, json.dumps(summary, indent=1, allow_nan=False) + "\n"
        if path.exists() and path.read_text(encoding="utf-8") == text:
            return summary, False
        write_watch_page(samples, summary)
        atomic_write_text(path, text)  # the last file: both are complete
        return summary, True
