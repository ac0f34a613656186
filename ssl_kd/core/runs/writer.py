"""Write the files of a run: results, logs, and checkpoints, which a thread writes."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from firstnan.events import EventLog
from ssl_kd import __version__
from ssl_kd.core.files import (
    atomic_write_bytes,
    atomic_write_json,
    atomic_write_text,
    save_tensors,
    sha256_file,
)
from ssl_kd.core.files.lock import Lock
from ssl_kd.core.memory import free_memory

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoint"  # a folder in that of the run
CHECKPOINTS_KEPT = 2
CHECKPOINT_FORMAT = 1


class Writer(AbstractContextManager["Writer"]):
    """Write the files of a run; a context manager that locks its folder.

    Leaving the context waits until the last checkpoint is written. The folder of a run that
    `is_new` and fails before any training is removed: there is nothing to resume.
    """

    def __init__(self, path: Path, *, is_new: bool) -> None:
        self.path = path
        self.events = EventLog(path / "events.jsonl", announce=True)
        self._is_new, self._lock = is_new, Lock(path / ".lock")
        self._checkpoints = path / CHECKPOINTS
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None

    def __enter__(self) -> Writer:
        self._lock.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        try:
            self.wait()
        except Exception as error:
            if exception[0] is None:
                raise
            logger.warning("the last checkpoint could not be written: %s", error)
        finally:
            self._thread.shutdown()
            if exception[0] is not None and self._is_new and not is_trained(self.path):
                shutil.rmtree(self.path, ignore_errors=True)
            self._lock.__exit__(*exception)

    def become_latest(self) -> None:
        """Point the link `latest` in the runs folder to this run."""
        become_latest(self.path)

    def update_json(self, name: str, **values: Any) -> None:
        """Add or replace values in the JSON file `name` of the run folder."""
        path = self.path / name
        before = read_json(path) if path.exists() else {}
        atomic_write_json(path, before | values)

    def log(self, row: Mapping[str, Any]) -> None:
        """Append a row to `metrics.jsonl`, with null in place of NaN and infinity."""
        with open(self.path / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(tree_map(_finite, dict(row))) + "\n")

    def save_checkpoint(self, step: int, tensors: dict[str, Any]) -> Callable[[], None]:
        """Start writing `checkpoint/step_N.pt` and its checksum; keep the previous checkpoint.

        A thread writes a copy of the tensors in host memory, one checkpoint at a time. If the copy
        does not fit into memory, this method returns after the checkpoint is written. The result
        waits until the checkpoint is on disk; it raises OSError if the write failed, and so does
        the next call.
        """
        self.wait()
        self._checkpoints.mkdir(parents=True, exist_ok=True)
        size = sum(x.nbytes for x in tree_leaves(tensors) if isinstance(x, Tensor))
        has_room = 2 * size < free_memory(torch.device("cpu"))
        state = tensors
        if has_room:  # a copy, so that later steps do not change it
            state = tree_map_only(Tensor, lambda x: x.detach().to("cpu", copy=True), tensors)
        self._writing = self._thread.submit(self._write_checkpoint, step, state)
        if not has_room:
            logger.info("training waits: no memory to copy a %.3g GiB checkpoint", size / 2**30)
            self.wait()
        return self.wait

    def wait(self) -> None:
        """Wait for the checkpoint that is being written, and raise the error of that write."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write_checkpoint(self, step: int, tensors: dict[str, Any]) -> None:
        path = self._checkpoints / f"step_{step:09d}.pt"
        header = {"format": CHECKPOINT_FORMAT, "version": __version__, "step": step}
        save_tensors(path, header | {"tensors": tensors})
        atomic_write_text(path.with_suffix(".sha256"), sha256_file(path))
        for old in sorted(self._checkpoints.glob("step_*.pt"))[:-CHECKPOINTS_KEPT]:
            old.unlink()
            old.with_suffix(".sha256").unlink(missing_ok=True)

    def rewind(self, step: int) -> None:
        """Remove log lines of steps after `step`, because these steps will be logged again."""
        file = self.path / "config.json"
        config = read_json(file) if file.exists() else {}
        for name in ("metrics.jsonl", "events.jsonl"):
            path = self.path / name
            lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
            steps = {line: _step(line) for line in lines}
            if damaged := sum(steps[line] is None for line in lines):
                logger.warning("%s: %d line(s) that cannot be read were removed", path, damaged)
            if name == "events.jsonl" and "first_step" not in config:
                # Older runs counted the steps of events from 0, and those of metrics from 1.
                lines = [_one_later(line) for line in lines if steps[line] is not None]
                steps = {line: _step(line) for line in lines}
            kept = [line for line in lines if (at := steps[line]) is not None and at <= step]
            atomic_write_bytes(path, b"".join(kept))
        self.update_json("config.json", first_step=1)


class NoWriter(AbstractContextManager["NoWriter"]):
    """Write nothing, in a process that does not write the folder; events stay in memory."""

    def __init__(self) -> None:
        self.events = EventLog()

    def __exit__(self, *exception: Any) -> None:
        pass

    def become_latest(self) -> None:
        """Leave the link to the process that writes."""

    def update_json(self, name: str, **values: Any) -> None:
        """Drop the values."""

    def log(self, row: Mapping[str, Any]) -> None:
        """Drop the row."""

    def save_checkpoint(self, step: int, tensors: dict[str, Any]) -> Callable[[], None]:
        """Drop the tensors; the result returns at once."""
        return self.wait

    def wait(self) -> None:
        """Return at once, as no checkpoint is being written."""

    def rewind(self, step: int) -> None:
        """Leave the log to the process that writes."""


def is_trained(path: Path) -> bool:
    """Return whether a run folder has a checkpoint or a logged step."""
    metrics = path / "metrics.jsonl"
    has_logged = metrics.exists() and metrics.stat().st_size > 0
    return has_logged or (path / CHECKPOINTS).exists()


def become_latest(path: Path) -> None:
    """Point the link `latest` in a runs folder to the run in folder `path`."""
    link, new = path.parent / "latest", path.parent / f".latest.{path.name}"
    if link.exists() and not link.is_symlink():
        message = "%s is not a link, so it does not point to this run: this run's folder is %s"
        logger.warning(message, link, path)
        return
    try:
        new.unlink(missing_ok=True)
        new.symlink_to(path.name)
        new.replace(link)
    except OSError as error:  # not every file system has links
        logger.warning("the link %s does not point to this run: %s", link, error)


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file of a run folder."""
    return json.loads(path.read_text(encoding="utf-8"))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a file with one on each line; empty if there is no such file."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        with suppress(json.JSONDecodeError):  # the last line of a run that was killed meanwhile
            lines.append(json.loads(text))
    return [line for line in lines if isinstance(line, dict)]


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON cannot represent, with None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _step(line: bytes) -> int | None:
    """Return the step of a log line; None if the line is damaged, for example by a kill."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


def _one_later(line: bytes) -> bytes:
    """Return a log line with its step increased by one."""
    row = json.loads(line)
    return json.dumps(row | {"step": row["step"] + 1}).encode() + b"\n"
