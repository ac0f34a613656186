"""Failures that a user can act on: a message with the way out, and the exit code of a command.

Every command ends with one of these codes:

- 0: it is done.
- 2: what was given cannot be: a flag, a setting, a path where nothing is or nothing may be written,
  a file of another kind, two things that do not fit, a run that cannot be resumed. Nothing was
  begun; give something else.
- 1: what was given is right, and it failed: no network, no memory, a full disk, a package that is
  not installed, a damaged file of an earlier run, a lock that another process holds. Also where a
  check found what it looked for: `doctor`, `install-check`, `verify`, `replay`.
- 3: the guard stopped a run in which nothing was healthy any more.
- 128 + its number: a signal ended it, 130 after Ctrl-C and 143 after SIGTERM.

A traceback is a fault of ours, and ends with 1, too.
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
    """Something that was asked for and cannot be: a name, a file's content, two that do not fit."""

    exit_code = BAD_INPUT


class DatasetUnavailable(InputError, RuntimeError):
    """The data are not there; the message says where they are expected and what to do."""


class RunFolderError(InputError, RuntimeError):
    """A run folder that cannot be used; the message says why and what to do."""


class MissingPackage(UserError, ImportError):
    """A package that only some need, and that is not installed; the message says how to."""


def code_of(error: OSError) -> int:
    """The exit code of what the system refused: about a path that was given, or otherwise."""
    kinds = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError)
    about_path = isinstance(error, (*kinds, PermissionError)) or error.errno in _NO_PATH
    return BAD_INPUT if about_path else FAILED


class Interrupted(KeyboardInterrupt):
    """The run was told to stop.

    Attributes:
        signal: SIGINT or SIGTERM.
        run_dir: the folder with its checkpoint; None before the training began.
    """

    def __init__(self, signal: int, run_dir: Path | None) -> None:
        super().__init__(f"stopped by signal {signal}; run folder {run_dir}")
        self.signal, self.run_dir = signal, run_dir


def printable(text: str) -> str:
    r"""The text as one line that forges no other: what is not printable is escaped.

    A file may be called anything, with line breaks and a terminal's control sequences in it.

    >>> printable("a\nWARNING b\x1b[2J")
    'a\\nWARNING b\\x1b[2J'
    """
    escaped = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return "".join(escaped)
