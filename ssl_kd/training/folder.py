"""The run folder: made before any work, resumed bit for bit, never overwritten unasked."""

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
    """The run that is to be resumed has ended; `path` is its folder, `way_on` what to do."""

    def __init__(self, path: Path, way_on: str = "") -> None:
        report = path / "report.html"
        missing = "its report was never written: ssl_kd.report.write_report writes it"
        found = f"its report is {report}" if report.exists() else missing
        super().__init__(f"{path} is finished; {found}{way_on}")
        self.path = path


class RunFolder:
    """One run's files; a context manager that holds the folder's lock.

    A new run that fails before it has trained leaves no folder behind: there is nothing to resume.
    The folder is left when the last checkpoint is on the disk.

    Args:
        settings: `runs_dir`, `run_name` and `resume` say which folder. A finished run goes on where
            `run_name` names it and the setting `extended_by` is above the steps that it has done;
            what it had found is then kept as `metrics_STEPS.json`.

    Raises:
        RunFolderError: the folder is finished, foreign, of another version, or there is nothing to
            resume.
        SettingsError: it is to be resumed with settings that would change the result.
        OSError: it cannot be written.

    Attributes:
        writes: False in the folder that another rank writes, where every write does nothing.
    """

    writes = True

    def __init__(self, settings: RunSettings) -> None:
        runs = Path(settings.runs_dir)
        self.path = _to_resume(runs, settings) if settings.resume else _fresh(runs, settings)
        self._resumed = settings.resume
        self._extends = _extends(self.path, settings) if settings.resume else None
        self.events = EventLog(self.path / "events.jsonl", announce=True)
        self._lock = Lock(self.path / ".lock")
        self._checkpoints = self.path / "checkpoint"
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        if settings.resume:
            _check_same(self.path, settings)

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
        """Whether there is anything to resume from, or to look at."""
        metrics = self.path / "metrics.jsonl"
        return self._checkpoints.exists() or (metrics.exists() and metrics.stat().st_size > 0)

    def become_latest(self) -> None:
        """Let `latest`, beside the folder, point to it."""
        if not self.writes:
            return
        link, new = self.path.parent / "latest", self.path.parent / f".latest.{self.path.name}"
        if link.exists() and not link.is_symlink():
            logger.warning("%s is no link, so it is left as it is: this run is %s", link, self.path)
            return
        try:
            new.unlink(missing_ok=True)
            new.symlink_to(self.path.name)
            new.replace(link)
        except OSError as error:  # a convenience, which not every file system or user may have
            logger.warning("%s does not point to this run: %s", link, error)

    def write_config(self, settings: RunSettings, **more: Any) -> None:
        """Write `config.json`: resolved settings, versions, commit, and `more`."""
        self.update_json(
            "config.json",
            settings=settings.to_dict(),
            versions=versions(),
            commit=commit(),
            command=_command(),
            **more,
        )

    def keep_to(self, digest: str) -> None:
        """Record what the run learns from; a resumed run must find the same."""
        path = self.path / "config.json"
        before = json.loads(path.read_text(encoding="utf-8")).get("learns_from")
        if before not in (None, digest):
            raise RunFolderError(
                f"{self.path} cannot be resumed: the data or the teacher are not those that it "
                "began with. Put them back, or start a new run without --resume"
            )
        self.update_json("config.json", learns_from=digest)

    def keep_to_code(self, own: Mapping[str, tuple[Path, str]]) -> None:
        """Record what the user's own classes are made of; a resumed run must find the same.

        Args:
            own: import path of a class -> its file, and that file's digest.

        Raises:
            RunFolderError: names the file that has changed.
        """
        path = self.path / "config.json"
        before = json.loads(path.read_text(encoding="utf-8")).get("own_code", {})
        for name, (file, digest) in own.items():
            if before.get(name, digest) != digest:
                raise RunFolderError(
                    f"{self.path} cannot be resumed: {file}, where {name} comes from, has changed "
                    "since it began. Put it back, or start a new run without --resume"
                )
        digests = {name: digest for name, (_, digest) in own.items()}
        self.update_json("config.json", own_code=before | digests)

    def update_json(self, name: str, **values: Any) -> None:
        """Add values to a JSON file of the run."""
        if not self.writes:
            return
        path = self.path / name
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        atomic_write_json(path, known | values)

    def log(self, row: Mapping[str, Any]) -> None:
        """Append a line to `metrics.jsonl`; a number that is not finite becomes null."""
        if not self.writes:
            return
        with open(self.path / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(_finite(row)) + "\n")

    def count_events(self) -> int:
        """How many events the guard has logged, those before a resume included."""
        with open(self.path / "events.jsonl", encoding="utf-8") as file:
            return sum(1 for _ in file)

    def save_checkpoint(self, step: int, tensors: dict[str, Any]) -> Callable[[], None]:
        """Begin to write `checkpoint/step_N.pt` and its checksum; the previous one is kept.

        What is written is a copy on the host, which a thread writes while the caller goes on. One
        is on its way at most. Where memory has no room for a copy, the caller waits.

        Args:
            step: steps done.
            tensors: tensors, and plain containers of them and of numbers.

        Returns:
            Waits until it is on the disk, and raises what that failed with.

        Raises:
            OSError: the one before, or with no room this one, could not be written.
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
            logger.info("checkpoints keep training waiting: a copy takes %.3g GiB", size / 2**30)
            self._written()
        return self._written

    def _written(self) -> None:
        """Wait for the checkpoint that is on its way; what it fails with is raised once."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write_checkpoint(self, step: int, tensors: dict[str, Any]) -> None:
        path = self._checkpoints / f"step_{step:09d}.pt"
        about = {"format": CHECKPOINT_FORMAT, "version": __version__, "step": step}
        save_tensors(path, about | {"tensors": tensors})
        atomic_write_text(path.with_suffix(".sha256"), sha256_file(path))
        for old in sorted(self._checkpoints.glob("step_*.pt"))[:-CHECKPOINTS_KEPT]:
            old.unlink()
            old.with_suffix(".sha256").unlink(missing_ok=True)

    def load_checkpoint(self) -> tuple[int, dict[str, Any]]:
        """The newest intact checkpoint; step 0 and an empty mapping where there is none.

        Raises:
            RunFolderError: another version of the library wrote it, in another form.
        """
        self._written()
        for partial in list(self.path.rglob(".*.tmp")):  # of a run that was killed while writing
            if partial.is_dir():
                shutil.rmtree(partial)
            else:
                partial.unlink(missing_ok=True)
        for path in sorted(self._checkpoints.glob("step_*.pt"), reverse=True):
            try:
                if path.with_suffix(".sha256").read_text() != sha256_file(path):
                    raise CorruptFileError(f"{path} has another checksum than when it was written")
                content = load_tensors(path)
            except (CorruptFileError, FileNotFoundError) as error:
                logger.warning("falling back to the checkpoint before %s: %s", path.stem, error)
                path.unlink()  # or it would count as one of the good checkpoints that are kept
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
        """Begin the logs, or drop their lines after `step`: they will be logged again.

        A finished run that is extended is unfinished from here on.
        """
        if not self.writes:
            return
        if self._extends is not None:
            done, total = self._extends
            known = json.loads((self.path / "config.json").read_text(encoding="utf-8"))
            extended = [*known.get("extended", []), {"from": step, "to": total}]
            self.update_json("config.json", extended=extended)
            (self.path / "metrics.json").replace(self.path / f"metrics_{done}.json")
            words = "%s goes on from step %d to %d; learning rates are those of %d steps in all"
            logger.info(words, self.path, step, total, total)
        for name, last in (("metrics.jsonl", step), ("events.jsonl", step - 1)):
            path = self.path / name
            lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
            steps = {line: _step(line) for line in lines}
            if damaged := sum(steps[line] is None for line in lines):
                logger.warning("%s: %d line(s) that cannot be read were removed", path, damaged)
            kept = [line for line in lines if (at := steps[line]) is not None and at <= last]
            atomic_write_bytes(path, b"".join(kept))


def _tensors(value: Any) -> Iterator[Tensor]:
    """Those in plain containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(inner)


def _on_host(value: Any) -> Any:
    """The same in memory of its own on the CPU, which later steps cannot change."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {name: _on_host(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_host(inner) for inner in value)
    return value


def _finite(value: Any) -> Any:
    """The value as JSON can hold it, which has no NaN and no infinity."""
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not abs(value) < float("inf") else value


def _step(line: bytes) -> int | None:
    """The step of a line of a log; None for half a line of a run that was killed."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):  # ValueError: neither JSON nor UTF-8
        return None
    return step if isinstance(step, int) else None


def _command() -> str:
    """The command that started this process, which starts the same again."""
    script = Path(sys.argv[0])
    if script.name == "__main__.py":
        return shlex.join(["python", "-m", script.parent.name, *sys.argv[1:]])
    program = ["python", sys.argv[0]] if script.suffix == ".py" else [script.name]
    return shlex.join([*program, *sys.argv[1:]])


def _finished(path: Path) -> bool:
    return (path / "metrics.json").exists()


def _fresh(runs: Path, settings: RunSettings) -> Path:
    try:
        runs.mkdir(parents=True, exist_ok=True)
        return named_by_time(runs) if settings.run_name is None else _named(settings.run_name, runs)
    except OSError as error:
        if code_of(error) != BAD_INPUT:
            raise
        raise SettingsError(
            f"RUNS_DIR is {settings.runs_dir!r} and RUN_NAME {settings.run_name!r}, but "
            f"{error.filename} cannot be made ({error.strerror}): give a --runs_dir that you may "
            "write to and a --run_name that a folder can have"
        ) from error


def _named(name: str, runs: Path) -> Path:
    path = runs / name
    check_run_name(path, resume=False)
    path.mkdir(exist_ok=True)
    return path


def named_by_time(runs: Path) -> Path:
    """Make a folder of its own for a run that has no name, and return it."""
    name, again = time.strftime("%Y-%m-%d_%H-%M-%S"), 1
    while True:
        path = runs / (name if again == 1 else f"{name}_{again}")
        try:
            path.mkdir()  # it did not exist: no other process has it
            return path
        except FileExistsError:
            again += 1


def _to_resume(runs: Path, settings: RunSettings) -> Path:
    if settings.run_name is not None:
        path = runs / settings.run_name
        check_run_name(path, resume=True)
        if _finished(path) and _extends(path, settings) is None:
            by = settings.extended_by
            raise RunFinished(path, f"; a larger --{by} extends it" if by else "")
        return path
    paths = [path.parent for path in runs.glob("*/config.json") if not path.parent.is_symlink()]
    unfinished = [path for path in paths if not _finished(path) and not _in_use(path)]
    # A run that was stopped before its report was written comes last: little of it is left to do.
    candidates = unfinished or [path for path in paths if not (path / "report.html").exists()]
    if not candidates:
        raise RunFolderError(f"there is no unfinished run in {runs} to resume that is not in use")
    path = max(candidates, key=lambda path: os.path.getmtime(path / "config.json"))
    if _finished(path):
        raise RunFinished(path)
    return path


def _extends(path: Path, settings: RunSettings) -> tuple[int, int] | None:
    """The steps that a finished run has done, and how many it is to have; None: it stays finished.

    Raises:
        RunFolderError: it is to have more, and nothing is left to go on from.
    """
    if settings.extended_by is None or not _finished(path):
        return None
    done = json.loads((path / "metrics.json").read_text(encoding="utf-8"))["steps"]
    total = getattr(settings, settings.extended_by)
    if total <= done or getattr(settings, "epochs", None) is not None:
        return None
    if not any((path / "checkpoint").glob("step_*.pt")):
        raise RunFolderError(
            f"{path} is finished, and its checkpoints are gone: there is nothing to go on from. "
            f"Start a new run, with {path / 'student'} as its student"
        )
    return done, total


def _in_use(path: Path) -> bool:
    try:
        with Lock(path / ".lock"):
            return False
    except LockHeld:
        return True


def _check_same(path: Path, settings: RunSettings) -> None:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        saved = dict(config["settings"])
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptFileError(
            f"{path / 'config.json'} cannot be read ({error}): put it back, or start a new run "
            "without --resume"
        ) from error
    check_version(path, config, type(settings))
    now = settings.to_dict()
    free = {name.upper() for name in settings.free_on_resume}
    more, grows = _extends(path, settings), str(settings.extended_by).upper()
    differ = [
        f"{name} was {saved[name]!r} and is now {value!r}"
        for name, value in now.items()
        if name not in free and saved[name] != value and not (more and name == grows)
    ]
    if differ:
        counts = " (the rows of all processes)" if settings.per_process else ""
        shown = "; ".join(differ).replace("BATCH_SIZE was", f"BATCH_SIZE{counts} was")
        raise SettingsError(
            f"{path.name} cannot be resumed with other settings: {shown}. Give the same ones, or "
            "start a new run without --resume"
        )


def check_version(path: Path, config: Mapping[str, Any], settings: type[RunSettings]) -> None:
    """Raise RunFolderError where a run's `config.json` holds other settings than `settings`."""
    if odd := sorted(config["settings"].keys() ^ {name.upper() for name in settings.rules()}):
        by = f"ssl_kd {config.get('versions', {}).get('ssl_kd')}, commit {config.get('commit')}"
        raise RunFolderError(
            f"{path / 'config.json'} was written by {by}, which had other settings "
            f"({', '.join(odd[:5])}): install that commit, or start a new run"
        )


def versions() -> dict[str, str]:
    """Python and the packages that the numbers depend on."""
    found = {"python": platform.python_version(), "ssl_kd": __version__}
    for name in _VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    found["threads"] = str(torch.get_num_threads())
    return found


def commit() -> str | None:
    """The commit of the working copy that this library runs from, if it is one."""
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
