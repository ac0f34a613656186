"""The run folder: created before any work, resumed bit for bit, never overwritten unasked."""

from __future__ import annotations

import json
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssl_kd import __version__
from ssl_kd.errors import BAD_INPUT, RunFolderError, code_of
from ssl_kd.files import (
    CorruptFileError,
    atomic_write_bytes,
    atomic_write_json,
    atomic_write_text,
    load_tensors,
    save_tensors,
    sha256_file,
)
from ssl_kd.files.lock import Lock, LockHeld
from ssl_kd.guard.events import EventLog
from ssl_kd.guard.memory import free_memory
from ssl_kd.settings import RunSettings, SettingsError
from ssl_kd.settings.early import check_run_name

logger = logging.getLogger(__name__)

CHECKPOINTS_KEPT = 2
CHECKPOINT_FORMAT = 1
_VERSIONS = ("torch", "torchvision", "timm", "numpy", "scikit-learn", "faiss-cpu")
_VERSIONS += ("transformers", "tokenizers", "peft")


class RunFinished(RunFolderError):
    """The run to resume is finished; `path` is its folder, and `hint` is added to the message."""

    def __init__(self, path: Path, hint: str = "") -> None:
        report, missing = path / "report.html", "its report is missing: ssl_kd.report.write_report"
        state = f"its report is {report}" if report.exists() else f"{missing} writes it"
        super().__init__(f"{path} is finished; {state}{hint}")
        self.path = path


class RunFolder:
    """The files of a run; a context manager that holds the folder's lock.

    A new run that fails before it has trained leaves no folder, because there is nothing to resume.
    Leaving the context waits for the last checkpoint.

    Args:
        run: `runs_dir`, `run_name` and `resume` select the folder. A finished run is continued if
            `run_name` names it and the setting `extended_by` exceeds the steps it has done; its
            results are then kept as `metrics_STEPS.json`.

    Raises:
        RunFolderError: the folder is finished, foreign, of another version, or there is nothing to
            resume.
        SettingsError: it would be resumed with settings that change the result.
        OSError: it cannot be written.

    Attributes:
        writes: False on ranks that do not write, where every write does nothing.
    """

    writes = True

    def __init__(self, run: RunSettings) -> None:
        runs = Path(run.runs_dir)
        self.path = _to_resume(runs, run) if run.resume else _fresh(runs, run)
        self._resumed = run.resume
        self._extends = _extends(self.path, run) if run.resume else None
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
        """Whether there is anything to resume from or to read."""
        metrics = self.path / "metrics.jsonl"
        return self._checkpoints.exists() or (metrics.exists() and metrics.stat().st_size > 0)

    def become_latest(self) -> None:
        """Point the link `latest` in the runs folder to this run."""
        if not self.writes:
            return
        link, new = self.path.parent / "latest", self.path.parent / f".latest.{self.path.name}"
        if link.exists() and not link.is_symlink():
            logger.warning(
                "%s is not a link, so it is not changed: this run is %s", link, self.path
            )
            return
        try:
            new.unlink(missing_ok=True)
            new.symlink_to(self.path.name)
            new.replace(link)
        except OSError as error:  # not every file system has links
            logger.warning("%s does not point to this run: %s", link, error)

    def write_config(self, run: RunSettings, **more: Any) -> None:
        """Write `config.json`: resolved settings, versions, commit, and `more`."""
        self.update_json(
            "config.json",
            settings=run.to_dict(),
            versions=versions(),
            commit=commit(),
            command=_command(),
            **more,
        )

    def check_data(self, digest: str) -> None:
        """Record a digest of data and teacher; raise RunFolderError if it differs from before."""
        before = _read_json(self.path / "config.json").get("learns_from")
        if before not in (None, digest):
            raise RunFolderError(
                f"{self.path} cannot be resumed: the data or the teacher are not those that it "
                "began with. Restore them, or start a new run without --resume"
            )
        self.update_json("config.json", learns_from=digest)

    def check_code(self, own: Mapping[str, tuple[Path, str]]) -> None:
        """Record the code of the user's classes; raise RunFolderError if it has changed.

        Args:
            own: import path of each user class -> the file that defines it, and its digest.
        """
        before = _read_json(self.path / "config.json").get("own_code", {})
        for name, (file, digest) in own.items():
            if before.get(name, digest) != digest:
                raise RunFolderError(
                    f"{self.path} cannot be resumed: {file}, where {name} comes from, has changed "
                    "since it began. Restore it, or start a new run without --resume"
                )
        digests = {name: digest for name, (_, digest) in own.items()}
        self.update_json("config.json", own_code=before | digests)

    def update_json(self, name: str, **values: Any) -> None:
        """Add values to a JSON file of the run."""
        if not self.writes:
            return
        path = self.path / name
        before = _read_json(path) if path.exists() else {}
        atomic_write_json(path, before | values)

    def log(self, row: Mapping[str, Any]) -> None:
        """Append a line to `metrics.jsonl`; NaN and infinity become null."""
        if not self.writes:
            return
        with open(self.path / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(_finite(row)) + "\n")

    def count_events(self) -> int:
        """Return the number of the guard's events, including those before a resume."""
        with open(self.path / "events.jsonl", encoding="utf-8") as file:
            return sum(1 for _ in file)

    def save_checkpoint(self, step: int, tensors: dict[str, Any]) -> Callable[[], None]:
        """Start writing `checkpoint/step_N.pt` and its checksum; the previous one is kept.

        A thread writes a copy in host memory, one checkpoint at a time. If there is no memory for
        a copy, the caller waits.

        Args:
            step: steps done.
            tensors: tensors and numbers in plain containers.

        Returns:
            A function that waits until the checkpoint is on disk, and raises its errors.

        Raises:
            OSError: the previous checkpoint, or without memory for a copy this one, could not be
                written.
        """
        if not self.writes:
            return lambda: None
        self._written()
        self._checkpoints.mkdir(parents=True, exist_ok=True)
        size = sum(tensor.nbytes for tensor in _tensors(tensors))
        has_room = 2 * size < free_memory(torch.device("cpu"))
        state = _on_host(tensors) if has_room else tensors
        self._writing = self._writer.submit(self._write_checkpoint, step, state)
        if not has_room:
            logger.info("training waits for checkpoints: a copy takes %.3g GiB", size / 2**30)
            self._written()
        return self._written

    def _written(self) -> None:
        """Wait for the checkpoint that is being written, and raise its error once."""
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
        """Return step and tensors of the newest intact checkpoint; step 0 and {} without one.

        Raises:
            RunFolderError: it has the format of another version of the library.
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
                    raise CorruptFileError(f"{path} has changed: its checksum does not match")
                content = load_tensors(path)
            except (CorruptFileError, FileNotFoundError) as error:
                logger.warning("falling back to the checkpoint before %s: %s", path.stem, error)
                path.unlink()  # else it would count as one of the checkpoints that are kept
                continue
            if content.get("format") != CHECKPOINT_FORMAT:
                raise RunFolderError(
                    f"{path} has format {content.get('format')}, expected {CHECKPOINT_FORMAT}: it "
                    f"was written by ssl_kd {content.get('version')}. Install that version to "
                    "resume it (`commit` in config.json), or start a new run without --resume"
                )
            return content["step"], content["tensors"]
        return 0, {}

    def rewind(self, step: int) -> None:
        """Drop the logs' lines after `step`, which will be logged again.

        A finished run that is extended becomes unfinished.
        """
        if not self.writes:
            return
        if self._extends is not None:
            done, total = self._extends
            before = _read_json(self.path / "config.json").get("extended", [])
            self.update_json("config.json", extended=[*before, {"from": step, "to": total}])
            (self.path / "metrics.json").replace(self.path / f"metrics_{done}.json")
            message = "%s goes on from step %d to %d; learning rates are those of %d steps in all"
            logger.info(message, self.path, step, total, total)
        for name, last in (("metrics.jsonl", step), ("events.jsonl", step - 1)):
            path = self.path / name
            lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
            steps = {line: _step(line) for line in lines}
            if damaged := sum(steps[line] is None for line in lines):
                logger.warning("%s: %d line(s) that cannot be read were removed", path, damaged)
            kept = [line for line in lines if (at := steps[line]) is not None and at <= last]
            atomic_write_bytes(path, b"".join(kept))


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in plain containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(inner)


def _on_host(value: Any) -> Any:
    """Copy tensors and containers to CPU memory, where later steps do not change them."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {name: _on_host(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_host(inner) for inner in value)
    return value


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not abs(value) < float("inf") else value


def _step(line: bytes) -> int | None:
    """Return the step of a line of a log; None if it is damaged, as by a kill while writing."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


def _command() -> str:
    """Return the command that started this process."""
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
            "--run_name to a possible folder name"
        ) from error


def named_by_time(runs: Path) -> Path:
    """Create and return a new folder for a run without a name."""
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
        if _finished(path) and _extends(path, run) is None:
            by = run.extended_by
            raise RunFinished(path, f"; a larger --{by} extends it" if by else "")
        return path
    paths = [path.parent for path in runs.glob("*/config.json") if not path.parent.is_symlink()]
    unfinished = [path for path in paths if not _finished(path) and not _in_use(path)]
    # Runs that only lack their report come last.
    candidates = unfinished or [path for path in paths if not (path / "report.html").exists()]
    if not candidates:
        raise RunFolderError(f"there is no unfinished run in {runs} to resume that is not in use")
    path = max(candidates, key=lambda path: os.path.getmtime(path / "config.json"))
    if _finished(path):
        raise RunFinished(path)
    return path


def _extends(path: Path, run: RunSettings) -> tuple[int, int] | None:
    """Return steps done and wanted of a finished run that is extended; None if it is not.

    Raises:
        RunFolderError: its checkpoints are gone.
    """
    if run.extended_by is None or not _finished(path):
        return None
    done = _read_json(path / "metrics.json")["steps"]
    total = getattr(run, run.extended_by)
    if total <= done or getattr(run, "epochs", None) is not None:
        return None
    if not any((path / "checkpoint").glob("step_*.pt")):
        raise RunFolderError(
            f"{path} is finished, and its checkpoints are gone: there is nothing to continue from. "
            f"Start a new run, with {path / 'student'} as its student"
        )
    return done, total


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
    if _extends(path, run):
        free.add(str(run.extended_by).upper())
    differ = [
        f"{name} was {saved[name]!r} and is now {value!r}"
        for name, value in run.to_dict().items()
        if name not in free and saved[name] != value
    ]
    if differ:
        rows = " (the rows of all processes)" if run.per_process else ""
        shown = "; ".join(differ).replace("BATCH_SIZE was", f"BATCH_SIZE{rows} was")
        raise SettingsError(
            f"{path.name} cannot be resumed with other settings: {shown}. Set them as before, or "
            "start a new run without --resume"
        )


def check_version(path: Path, config: Mapping[str, Any], kind: type[RunSettings]) -> None:
    """Raise RunFolderError if a run's `config.json` has other settings than the class `kind`."""
    names = {name.upper() for name in kind.rules()}
    if odd := sorted((config["settings"].keys() ^ names) - kind.obsolete):
        by = f"ssl_kd {config.get('versions', {}).get('ssl_kd')}, commit {config.get('commit')}"
        raise RunFolderError(
            f"{path / 'config.json'} was written by {by}, which had other settings "
            f"({', '.join(odd[:5])}): install that commit, or start a new run"
        )


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that the numbers depend on."""
    found = {"python": platform.python_version(), "ssl_kd": __version__}
    for name in _VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    found["threads"] = str(torch.get_num_threads())
    return found


def commit() -> str | None:
    """Return the commit of the working copy that this library runs from, if there is one."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
