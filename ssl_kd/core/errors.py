"""Define errors that a user can act on, and the exit codes of the commands.

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
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from firstnan.errors import BAD_INPUT as BAD_INPUT
from firstnan.errors import FAILED as FAILED
from firstnan.errors import GUARD_STOPPED as GUARD_STOPPED
from firstnan.errors import OK as OK
from firstnan.errors import UserError as UserError

_NO_PATH = {errno.ELOOP, errno.ENAMETOOLONG, errno.EROFS}


class InputError(UserError, ValueError):
    """An input is invalid: a name, a path, the content of a file, or a combination of options."""

    exit_code = BAD_INPUT


class DatasetUnavailable(InputError, RuntimeError):
    """A data set does not exist; the message says where it is expected and what to do."""


class DatasetUnreachable(UserError, RuntimeError):
    """Raised if a data set cannot be downloaded or loaded."""


class UnreadableSample(UserError, ValueError):
    """A sample cannot be read, so it is left out.

    `id` names the sample, and `reason` says why. `is_damaged` is True if its file is damaged, and
    False if it may be intact: it is missing, not allowed, too large, or of a format that is not
    read here.
    """

    def __init__(self, id: str, reason: str, *, is_damaged: bool = False) -> None:
        super().__init__(f"{id}: {reason}")
        self.id = id
        self.reason = reason
        self.is_damaged = is_damaged


class RunFolderError(InputError, RuntimeError):
    """A run folder that cannot be used; the message says why and what to do."""


class MissingPackage(UserError, ImportError):
    """An optional package is not installed; the message says how to install it."""


class SeveralFaults(InputError):
    """Several inputs are invalid; after the first, each line of the message names one of them."""


class Faults:
    """Collect the errors of independent checks, and raise them together."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []

    @contextmanager
    def of(self, setting: str) -> Iterator[None]:
        """Catch an error that a user can act on; its message will contain the setting's name."""
        try:
            yield
        except (UserError, OSError) as error:
            if isinstance(error, OSError) and error.strerror:
                error.strerror += f": check {setting}"
            elif not re.search(rf"(?<![\w/.'\"-]){setting}(?![\w/.'\"-])", str(error)):  # as a word
                error.args = (f"{setting}: {error}",)
            self.errors.append(error)

    def raise_all(self, consequence: str) -> None:
        """Raise the only error as it is, or one SeveralFaults for all; do nothing without errors.

        `consequence` ends the first line of the message about several, as in `nothing was run`.
        """
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            messages = dict.fromkeys(f"- {error}" for error in self.errors)
            several = SeveralFaults(
                "\n".join([f"{len(messages)} faults were found, and {consequence}:", *messages])
            )
            several.exit_code = max(getattr(e, "exit_code", BAD_INPUT) for e in self.errors)
            raise several from self.errors[0]


def code_of(error: OSError) -> int:
    """Return the exit code for an OSError: BAD_INPUT if a path is wrong, else FAILED."""
    kinds = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError)
    about_path = isinstance(error, (*kinds, PermissionError)) or error.errno in _NO_PATH
    return BAD_INPUT if about_path else FAILED


class Interrupted(KeyboardInterrupt):
    """A signal stopped a run.

    Attributes:
        signal: SIGINT or SIGTERM.
        run_dir: The run folder with a checkpoint; None if training had not begun.
    """

    def __init__(self, signal: int, run_dir: Path | None) -> None:
        super().__init__(f"stopped by signal {signal}; run folder {run_dir}")
        self.signal, self.run_dir = signal, run_dir


def brief(error: object, width: int = 200) -> str:
    """Return the text of an error as one line of at most `width` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= width else f"{text[: width - 2]} …"


def first_few(lines: Sequence[str], limit: int = 20) -> tuple[str, ...]:
    """Return the first `limit` lines, followed by the number of remaining lines.

    >>> first_few(["a", "b", "c"], limit=2)
    ('a', 'b', 'and 1 more')
    """
    more = len(lines) - limit
    return (*lines[:limit], *([f"and {more} more"] if more > 0 else []))


def printable(text: str) -> str:
    r"""Escape unprintable characters: a file name may contain line breaks and terminal codes.

    >>> printable("a\nWARNING b\x1b[2J")
    'a\\nWARNING b\\x1b[2J'
    """
    escaped = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return "".join(escaped)
