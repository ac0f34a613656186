"""Create, write and resume the folder of a run: settings, logs, checkpoints and results."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ssl_kd import __version__
from ssl_kd.core.errors import BAD_INPUT, RunFolderError, code_of
from ssl_kd.core.files import (
    CorruptFileError,
    load_tensors,
    sha256_file,
)
from ssl_kd.core.files.lock import Lock, LockHeld
from ssl_kd.core.runs.writer import (
    CHECKPOINT_FORMAT,
    CHECKPOINTS,
    NoWriter,
    Writer,
    is_trained,
    read_json,
)
from ssl_kd.core.settings import RunSettings, SettingsError
from ssl_kd.core.settings.early import check_run_name

logger = logging.getLogger(__name__)

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
    """The files of a run: what is read from them, and `writer`, which writes them.

    If a run has several processes, one of them writes, and the others have a `NoWriter`.
    """

    def __init__(self, path: Path, writer: Writer | NoWriter) -> None:
        self.path = path
        self.writer = writer
        self.events = writer.events

    @classmethod
    def open(cls, run: RunSettings) -> RunFolder:
        """Make the folder of a new run, or find that of the run to resume, to write to it.

        The result is a context manager, which does what that of `Writer` does.

        Raises:
            RunFolderError: the run is finished, was written by another version of this library, or
                there is no run to resume.
            SettingsError: a setting that affects the result differs from the run to resume.
            OSError: the folder cannot be written.
        """
        runs = Path(run.runs_dir)
        path = _to_resume(runs, run) if run.resume else _fresh(runs, run)
        if run.resume:
            _check_same(path, run)
        return cls(path, Writer(path, is_new=not run.resume))

    def __enter__(self) -> RunFolder:
        self.writer.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.writer.__exit__(*exception)

    @property
    def writes(self) -> bool:
        """Whether this process writes the folder."""
        return isinstance(self.writer, Writer)

    @property
    def trained(self) -> bool:
        """Whether the folder has a checkpoint or a logged step."""
        return is_trained(self.path)

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
        self.writer.update_json("config.json", **about | more)

    def check_data(self, digest: str) -> None:
        """Store a digest of data and teacher; raise RunFolderError if a resumed run had another."""
        before = read_json(self.path / "config.json").get("learns_from")
        if before not in (None, digest):
            raise RunFolderError(
                f"{self.path} cannot be resumed: the data or the teacher has changed since the "
                "run began. Restore them, or start a new run without --resume"
            )
        self.writer.update_json("config.json", learns_from=digest)

    def check_code(self, own: Mapping[str, tuple[Path, str]]) -> None:
        """Store digests of the files that define user classes; raise RunFolderError if one changed.

        `own`: import path of each user class -> the file that defines it, and its digest.
        """
        before = read_json(self.path / "config.json").get("own_code", {})
        for name, (file, digest) in own.items():
            if before.get(name, digest) != digest:
                raise RunFolderError(
                    f"{self.path} cannot be resumed: {file}, which defines {name}, has changed "
                    "since the run began. Restore the file, or start a new run without --resume"
                )
        digests = {name: digest for name, (_, digest) in own.items()}
        self.writer.update_json("config.json", own_code=before | digests)

    def count_events(self) -> int:
        """Return the number of events in `events.jsonl`, including events from before a resume."""
        with open(self.path / "events.jsonl", encoding="utf-8") as file:
            return sum(1 for _ in file)

    def load_checkpoint(self) -> tuple[int, dict[str, Any]]:
        """Return the step and tensors of the newest intact checkpoint, or (0, {}) if there is none.

        Raises RunFolderError if another version of the library wrote it in another format.
        """
        self.writer.wait()
        for partial in list(self.path.rglob(".*.tmp")):  # left by a killed run
            if partial.is_dir():
                shutil.rmtree(partial)
            else:
                partial.unlink(missing_ok=True)
        for path in sorted((self.path / CHECKPOINTS).glob("step_*.pt"), reverse=True):
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
    if is_file and path.is_dir():
        raise SettingsError(
            f"{setting} is {str(path)!r}, which is a folder; expected a file: set "
            f"--{setting.lower()} to a file that you can write to"
        )
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
        config = read_json(path / "config.json")
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
        if name not in free and not run.agrees(name.lower(), saved[name])
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
