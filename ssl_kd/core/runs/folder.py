"""Create, write and resume the folder of a run: settings, logs, checkpoints and results."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from firstnan.events import EventLog
from ssl_kd import __version__
from ssl_kd.core.errors import BAD_INPUT, RunFolderError, code_of
from ssl_kd.core.files import (
    CorruptFileError,
    atomic_write_bytes,
    atomic_write_json,
    atomic_write_text,
    load_tensors,
    save_tensors,
    sha256_file,
)
from ssl_kd.core.files.lock import Lock, LockHeld
from ssl_kd.core.memory import free_memory
from ssl_kd.core.settings import RunSettings, SettingsError
from ssl_kd.core.settings.early import check_run_name

logger = logging.getLogger(__name__)

CHECKPOINTS_KEPT = 2
CHECKPOINT_FORMAT = 1
_VERSIONS = ("torch", "torchvision", "timm", "numpy", "scikit-learn", "faiss-cpu")
_VERSIONS += ("transformers", "tokenizers", "peft")


class RunFinished(RunFolderError):
    """The run to resume is already finished; `path` is its folder."""

    def __init__(self, path: Path) -> None:
        report, missing = path / "report.html", f"its report is missing: ssl_kd report {path}"
        state = f"its report is {report}" if report.exists() else f"{missing} writes it"
        super().__init__(f"{path} is finished; {state}")
        self.path = path


class RunFolder:
    """Read and write the files of a run; a context manager that locks the folder.

    The folder of a new run that fails before any training is removed: there is nothing to resume.
    Leaving the context waits until the last checkpoint is written.

    Raises:
        RunFolderError: the run is finished, was written by another version of this library, or
            there is no run to resume.
        SettingsError: a setting that affects the result differs from the run to resume.
        OSError: the folder cannot be written.
    """

    writes = True  # on this rank; otherwise the writing methods do nothing

    def __init__(self, run: RunSettings) -> None:
        runs = Path(run.runs_dir)
        self.path = _to_resume(runs, run) if run.resume else _fresh(runs, run)
        self._resumed = run.resume
        self.events = EventLog(self.path / "events.jsonl", announce=True)
        self._lock = Lock(self.path / ".lock")
        self._checkpoints = self.path / "checkpoint"
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        if run.resume:
            _check_same(self.path, run)

    def __enter__(self) -> RunFolder:
        self._lock.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self._written()
        except Exception as error:
            if exception[0] is None:
                raise
            logger.warning("the last checkpoint could not be written: %s", error)
        finally:
            self._writer.shutdown()
            if exception[0] is not None and not self._resumed and not self.trained:
                shutil.rmtree(self.path, ignore_errors=True)
            self._lock.__exit__(*exception)

    @property
    def trained(self) -> bool:
        """Whether the folder has a checkpoint or a logged step."""
        metrics = self.path / "metrics.jsonl"
        return self._checkpoints.exists() or (metrics.exists() and metrics.stat().st_size > 0)

    def become_latest(self) -> None:
        """Point the link `latest` in the runs folder to this run."""
        if not self.writes:
            return
        link, new = self.path.parent / "latest", self.path.parent / f".latest.{self.path.name}"
        if link.exists() and not link.is_symlink():
            message = "%s is not a link, so it does not point to this run: this run's folder is %s"
            logger.warning(message, link, self.path)
            return
        try:
            new.unlink(missing_ok=True)
            new.symlink_to(self.path.name)
            new.replace(link)
        except OSError as error:  # not every file system has links
            logger.warning("the link %s does not point to this run: %s", link, error)

    def write_config(self, run: RunSettings, **more: Any) -> None:
        """Write settings, package versions, commit, command, and `more` to `config.json`.

        Relative paths in the settings are relative to the folder `started_in`.
        """
        about = {
            "settings": run.to_dict(),
            "versions": versions(),
            "commit": commit(),
            "command": _command(),
            "started_in": os.getcwd(),
        }
        self.update_json("config.json", **about | more)

    def check_data(self, digest: str) -> None:
        """Store a digest of data and teacher; raise RunFolderError if a resumed run had another."""
        before = _read_json(self.path / "config.json").get("learns_from")
        if before not in (None, digest):
            raise RunFolderError(
                f"{self.path} cannot be resumed: the data or the teacher has changed since the "
                "run began. Restore them, or start a new run without --resume"
            )
        self.update_json("config.json", learns_from=digest)

    def check_code(self, own: Mapping[str, tuple[Path, str]]) -> None:
        """Store digests of the files that define user classes; raise RunFolderError if one changed.

        `own`: import path of each user class -> the file that defines it, and its digest.
        """
        before = _read_json(self.path / "config.json").get("own_code", {})
        for name, (file, digest) in own.items():
            if before.get(name, digest) != digest:
                raise RunFolderError(
                    f"{self.path} cannot be resumed: {file}, which defines {name}, has changed "
                    "since the run began. Restore the file, or start a new run without --resume"
                )
        digests = {name: digest for name, (_, digest) in own.items()}
        self.update_json("config.json", own_code=before | digests)

    def update_json(self, name: str, **values: Any) -> None:
        """Add or replace values in the JSON file `name` of the run folder."""
        if not self.writes:
            return
        path = self.path / name
        before = _read_json(path) if path.exists() else {}
        atomic_write_json(path, before | values)

    def log(self, row: Mapping[str, Any]) -> None:
        """Append a row to `metrics.jsonl`, with null in place of NaN and infinity."""
        if not self.writes:
            return
        with open(self.path / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(tree_map(_finite, dict(row))) + "\n")

    def count_events(self) -> int:
        """Return the number of events in `events.jsonl`, including events from before a resume."""
        with open(self.path / "events.jsonl", encoding="utf-8") as file:
            return sum(1 for _ in file)

    def save_checkpoint(self, step: int, tensors: dict[str, Any]) -> Callable[[], None]:
        """Start writing `checkpoint/step_N.pt` and its checksum; keep the previous checkpoint.

        A thread writes a copy of the tensors in host memory, one checkpoint at a time. If the copy
        does not fit into memory, this method returns after the checkpoint is written. The result
        waits until the checkpoint is on disk; it raises OSError if the write failed, and so does
        the next call.
        """
        if not self.writes:
            return lambda: None
        self._written()
        self._checkpoints.mkdir(parents=True, exist_ok=True)
        size = sum(x.nbytes for x in tree_leaves(tensors) if isinstance(x, Tensor))
        has_room = 2 * size < free_memory(torch.device("cpu"))
        state = tensors
        if has_room:  # a copy, so that later steps do not change it
            state = tree_map_only(Tensor, lambda x: x.detach().to("cpu", copy=True), tensors)
        self._writing = self._writer.submit(self._write_checkpoint, step, state)
        if not has_room:
            logger.info("training waits: no memory to copy a %.3g GiB checkpoint", size / 2**30)
            self._written()
        return self._written

    def _written(self) -> None:
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

    def load_checkpoint(self) -> tuple[int, dict[str, Any]]:
        """Return the step and tensors of the newest intact checkpoint, or (0, {}) if there is none.

        Raises RunFolderError if another version of the library wrote it in another format.
        """
        self._written()
        for partial in list(self.path.rglob(".*.tmp")):  # left by a killed run
            if partial.is_dir():
                shutil.rmtree(partial)
            else:
                partial.unlink(missing_ok=True)
        for path in sorted(self._checkpoints.glob("step_*.pt"), reverse=True):
            try:
                if path.with_suffix(".sha256").read_text() != sha256_file(path):
                    raise CorruptFileError(f"{path} is damaged: its checksum does not match")
                content = load_tensors(path)
            except (CorruptFileError, FileNotFoundError) as error:
                logger.warning("falling back to the checkpoint before %s: %s", path.stem, error)
                path.unlink()  # else it would count as one of the checkpoints that are kept
                continue
            if content.get("format") != CHECKPOINT_FORMAT:
                raise RunFolderError(
                    f"{path} has format {content.get('format')}, expected {CHECKPOINT_FORMAT}: it "
                    f"was written by ssl_kd {content.get('version')}. To resume the run, install "
                    "that version (`commit` in config.json); or start a run without --resume"
                )
            return content["step"], content["tensors"]
        return 0, {}

    def rewind(self, step: int) -> None:
        """Remove log lines of steps after `step`, because these steps will be logged again."""
        if not self.writes:
            return
        file = self.path / "config.json"
        config = _read_json(file) if file.exists() else {}
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


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


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


def _command() -> str:
    """Return the shell command that started this process."""
    script = Path(sys.argv[0])
    if script.name == "__main__.py":
        return shlex.join(["python", "-m", script.parent.name, *sys.argv[1:]])
    program = ["python", sys.argv[0]] if script.suffix == ".py" else [script.name]
    return shlex.join([*program, *sys.argv[1:]])


def _finished(path: Path) -> bool:
    return (path / "metrics.json").exists()


def _fresh(runs: Path, run: RunSettings) -> Path:
    try:
        runs.mkdir(parents=True, exist_ok=True)
        if run.run_name is None:
            return named_by_time(runs)
        path = runs / run.run_name
        check_run_name(path, resume=False)
        path.mkdir(exist_ok=True)
        return path
    except OSError as error:
        if code_of(error) != BAD_INPUT:
            raise
        raise SettingsError(
            f"RUNS_DIR is {run.runs_dir!r} and RUN_NAME {run.run_name!r}, but {error.filename} "
            f"cannot be made ({error.strerror}): set --runs_dir to a writable folder and "
            "--run_name to a valid folder name"
        ) from error


def check_new_folder(run: RunSettings) -> None:
    """Raise the error with which the folder of a new run could not be made, without making it."""
    runs = Path(run.runs_dir)
    if run.run_name is not None:
        check_run_name(runs / run.run_name, resume=False)
    check_writable("RUNS_DIR", runs)


def check_writable(setting: str, path: Path, *, is_file: bool = False) -> None:
    """Raise SettingsError unless a folder, which may not exist yet, or a file can be written."""
    folders = path.absolute().parents if is_file else (path, *path.absolute().parents)
    place = next(folder for folder in folders if folder.exists())
    if not place.is_dir():
        state = "is a file; expected a folder, or the name of a new folder"
    elif not os.access(place, os.W_OK | os.X_OK):
        state = "is not writable"
    else:
        return
    raise SettingsError(
        f"{setting} is {str(path)!r}, and {place} {state}: set --{setting.lower()} to a"
        f" {'file' if is_file else 'folder'} that you can write to"
    )


def named_by_time(runs: Path) -> Path:
    """Create and return a new folder named after the current time."""
    name, again = time.strftime("%Y-%m-%d_%H-%M-%S"), 1
    while True:
        path = runs / (name if again == 1 else f"{name}_{again}")
        try:
            path.mkdir()  # fails if another process has created it
            return path
        except FileExistsError:
            again += 1


def _to_resume(runs: Path, run: RunSettings) -> Path:
    if run.run_name is not None:
        path = runs / run.run_name
        check_run_name(path, resume=True)
        if _finished(path):
            raise RunFinished(path)
        return path
    paths = [path.parent for path in runs.glob("*/config.json") if not path.parent.is_symlink()]
    unfinished = [path for path in paths if not _finished(path) and not _in_use(path)]
    # If all runs are finished, choose among those without a report.
    candidates = unfinished or [path for path in paths if not (path / "report.html").exists()]
    if not candidates:
        raise RunFolderError(f"no unfinished run in {runs} is free to resume: omit --resume")
    path = max(candidates, key=lambda path: os.path.getmtime(path / "config.json"))
    if _finished(path):
        raise RunFinished(path)
    return path


def _in_use(path: Path) -> bool:
    try:
        with Lock(path / ".lock"):
            return False
    except LockHeld:
        return True


def _check_same(path: Path, run: RunSettings) -> None:
    try:
        config = _read_json(path / "config.json")
        saved = dict(config["settings"])
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptFileError(
            f"{path / 'config.json'} cannot be read ({error}): restore it, or start a new run "
            "without --resume"
        ) from error
    check_version(path, config, type(run))
    free = {name.upper() for name in run.free_on_resume}
    differ = [
        f"{name} was {saved[name]!r} and is now {value!r}"
        for name, value in run.to_dict().items()
        if name not in free and saved[name] != value
    ]
    if differ:
        rows = " (the rows of all processes)" if run.per_process else ""
        shown = "; ".join(differ).replace("BATCH_SIZE was", f"BATCH_SIZE{rows} was")
        raise SettingsError(
            f"{path.name} cannot be resumed with other settings: {shown}. Change them back, or "
            "start a new run without --resume"
        )


def check_version(path: Path, config: Mapping[str, Any], kind: type[RunSettings]) -> None:
    """Raise RunFolderError if the setting names in `config.json` are not those of class `kind`."""
    names = {name.upper() for name in kind.rules()}
    if odd := sorted((config["settings"].keys() ^ names) - kind.obsolete):
        by = f"ssl_kd {config.get('versions', {}).get('ssl_kd')}, commit {config.get('commit')}"
        raise RunFolderError(
            f"{path / 'config.json'} was written by {by}, which had other settings "
            f"({', '.join(odd[:5])}): install that commit, or start a new run"
        )


def versions() -> dict[str, str]:
    """Return the versions of Python and of packages that affect results, and the thread count."""
    found = {"python": platform.python_version(), "ssl_kd": __version__}
    for name in _VERSIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found | {"threads": str(torch.get_num_threads())}


def commit() -> str | None:
    """Return the git commit that this library runs from; None outside a git checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
