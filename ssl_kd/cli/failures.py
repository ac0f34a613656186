"""Turn errors that a user can act on into a one-line message and an exit code."""

from __future__ import annotations

import errno
import io
import os
import shlex
import signal
import sys
from collections.abc import Callable
from typing import Any

from ssl_kd.core.errors import (
    FAILED,
    GUARD_STOPPED,
    InputError,
    Interrupted,
    SeveralFaults,
    UserError,
    code_of,
    printable,
)

MAX_LINES = 12  # printed of the guard's report
VISION_MEMORY = "lower BATCH_SIZE or N_HEADS"
LANGUAGE_MEMORY = (
    "lower BATCH_SIZE (and raise GRADIENT_ACCUMULATION_STEPS) or BLOCK_SIZE, set "
    "GRADIENT_CHECKPOINTING or LORA_RANK, cache the teacher (TEACHER_CACHE)"
)
"""What to change if memory runs out."""


def guarded(
    work: Callable[[], int], command: str = "", memory: str = VISION_MEMORY, *, kept: str = ""
) -> int:
    """Call a command and return its exit code; print an error that a user can act on as one line.

    The message about an interruption shows how to continue: a run by `--resume`, and work that
    leaves something behind (`kept`, such as "complete shards") by the same command.
    """
    try:
        use_utf8()
        keep_writing()
        try:
            os.getcwd()
        except FileNotFoundError:
            raise InputError("The current folder no longer exists: cd to another one.") from None
        return work()
    except (Exception, KeyboardInterrupt) as error:
        explanation = _explain(error, command, memory, kept)
        if explanation is None:
            raise
        code, message = explanation
        has_lines = code == GUARD_STOPPED or isinstance(error, SeveralFaults)
        print_failure(message, multiline=has_lines)
        return code


def _explain(error: BaseException, command: str, memory: str, kept: str) -> tuple[int, str] | None:
    """Return exit code and message of an error that a user can act on; None for other errors."""
    if isinstance(error, Interrupted) and error.run_dir is not None:
        stop, run_dir = signal.Signals(error.signal), error.run_dir
        flags = {"--resume": "", "--run_name": f" {shlex.quote(run_dir.name)}"}
        typed = command.replace("--run-name", "--run_name")
        more = [name + value for name, value in flags.items() if name not in typed]
        way = f"continue with: {' '.join([command, *more])}"
        return 128 + stop, f"Stopped by {stop.name}; a checkpoint is in {run_dir}; {way}"
    if isinstance(error, KeyboardInterrupt):
        stop = signal.Signals(getattr(error, "signal", signal.SIGINT))
        rest = f". The {kept} are kept; continue with: {command}" if kept else " before training."
        return 128 + stop, f"Stopped by {stop.name}{rest}"
    if isinstance(error, UserError):
        return error.exit_code, str(error)
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("ssl_kd"):
        way = "run `make train`, which installs everything in .venv, then .venv/bin/python train.py"
        return FAILED, f"The module {error.name} is not installed for {sys.executable}: {way}"
    if _is_out_of_memory(error):
        reason = str(error).partition(".")[0]
        return FAILED, f"Out of memory: {memory}, or use --device cpu. ({reason})"
    if isinstance(error, OSError):  # missing data, disk full, folder not writable
        place = "" if error.filename is None else f"{error.filename}: "
        return code_of(error), f"{place}{error.strerror}" if error.strerror else str(error)
    return None


class _Screen(io.FileIO):
    """Output to a terminal or pipe; after its reader has closed it, writes are dropped.

    Any other error, such as a full disk, is raised only once, because Python flushes again at exit.
    """

    _failed = False

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO) and not self._failed:
                self._failed = True
                raise
            return len(data)


def use_utf8() -> None:
    """Start the command again in UTF-8 mode if Python reads file names as ASCII (LC_ALL=C).

    The encoding of file names cannot change later, and names of images are UTF-8 nevertheless.
    """
    is_fresh = "torch" not in sys.modules and sys.stdout is sys.__stdout__  # not within a test
    is_ascii = sys.getfilesystemencoding() == "ascii"
    if is_ascii and is_fresh and os.environ.get("PYTHONUTF8") != "1":
        command = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, command, os.environ | {"PYTHONUTF8": "1"})


def keep_writing() -> None:
    """Replace stdout and stderr by streams that do not fail.

    A closed reader (`| head -1`) and characters that the terminal cannot show are tolerated.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__") and isinstance(stream, io.TextIOWrapper):
            buffer = io.BufferedWriter(_Screen(stream.fileno(), "w", closefd=False))
            encoding = stream.encoding, "backslashreplace"
            setattr(sys, name, io.TextIOWrapper(buffer, *encoding, line_buffering=True))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _is_out_of_memory(error: BaseException) -> bool:
    if "torch" not in sys.modules:  # importing it takes seconds
        return isinstance(error, MemoryError)
    from ssl_kd.core.memory import is_out_of_memory

    return is_out_of_memory(error)


def print_failure(message: object, multiline: bool = False) -> None:
    """Print a message to stderr: as one line, or the first lines of it if `multiline`."""
    lines = str(message).splitlines() if multiline else [str(message)]
    lines = [printable(" ".join(line.split())) for line in lines if line.strip()]
    if len(lines) > MAX_LINES:
        lines[MAX_LINES - 1 :] = [f"... ({len(lines) - MAX_LINES + 1} more lines)"]
    print("ssl_kd: " + "\n  ".join(lines), file=sys.stderr)
