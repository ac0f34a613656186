"""Failures that a user can act on: a message with the way out, and the exit code of a command.

Every command ends with one of these codes:

- 0: success.
- 2: invalid input: a flag, a setting, a path that is missing or not writable, a file of the wrong
  kind, conflicting options, a run that cannot be resumed. Nothing was started; change the input.
- 1: the input is valid, but the command failed: no network, no memory, a full disk, a package that
  is not installed, a damaged file of an earlier run, a lock that another process holds. Also where
  a check found a fault: `doctor`, `install-check`, `verify`, `replay`.
- 3: the guard stopped a run in which too few parts were healthy.
- 128 + N: signal N ended it, 130 after Ctrl-C and 143 after SIGTERM.

An uncaught exception is a bug in ssl_kd; it ends with 1, too.
"""

from __future__ import annotations

import errno
from pathlib import Path

_NO_PATH = {errno.ELOOP, errno.ENAMETOOLONG, errno.EROFS}

OK, FAILED, BAD_INPUT, GUARD_STOPPED = 0, 1, 2, 3


class UserError(Exception):
    """A failure that a user can act on: its message says what happened and what to do.

    Attributes:
        exit_code: of the command that it ends.
    """

    exit_code: int = FAILED


class InputError(UserError, ValueError):
    """Invalid input: a name, a path, a file's content, or options that conflict."""

    exit_code = BAD_INPUT


class DatasetUnavailable(InputError, RuntimeError):
    """The data do not exist; the message says where they are expected and what to do."""


class RunFolderError(InputError, RuntimeError):
    """A run folder that cannot be used; the message says why and what to do."""


class MissingPackage(UserError, ImportError):
    """An optional package is not installed; the message says how to install it."""


def code_of(error: OSError) -> int:
    """Return the exit code of an operating system error: BAD_INPUT if it is about a path."""
    kinds = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError)
    about_path = isinstance(error, (*kinds, PermissionError)) or error.errno in _NO_PATH
    return BAD_INPUT if about_path else FAILED


class Interrupted(KeyboardInterrupt):
    """A signal stopped the run.

    Attributes:
        signal: SIGINT or SIGTERM.
        run_dir: the folder with its checkpoint; None before the training began.
    """

    def __init__(self, signal: int, run_dir: Path | None) -> None:
        super().__init__(f"stopped by signal {signal}; run folder {run_dir}")
        self.signal, self.run_dir = signal, run_dir


def printable(text: str) -> str:
    r"""Return the text as one line, with everything that is not printable escaped.

    A file name may contain line breaks and control sequences of a terminal.

    >>> printable("a\nWARNING b\x1b[2J")
    'a\\nWARNING b\\x1b[2J'
    """
    escaped = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return "".join(escaped)
