"""Failures that a user can act on: a message with the way out, and the exit code of a command."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

FAILED, BAD_INPUT, GUARD_STOPPED = 1, 2, 3
"""Exit codes; what a signal ends has 128 + its number: 130 after Ctrl-C, 143 after SIGTERM."""


class UserError(Exception):
    """A failure that a user can act on: its message says what happened and what to do.

    Attributes:
        exit_code: of the command that it ends.
    """

    exit_code: ClassVar[int] = FAILED


class InputError(UserError, ValueError):
    """Something that was asked for and cannot be: a name, a file's content, two that do not fit."""

    exit_code = BAD_INPUT


class MissingPackage(UserError, ImportError):
    """A package that only some need, and that is not installed; the message says how to."""

    exit_code = BAD_INPUT


class Interrupted(KeyboardInterrupt):
    """The run was told to stop.

    Attributes:
        signal: SIGINT or SIGTERM.
        run_dir: the folder with its checkpoint; None before the training began.
    """

    def __init__(self, signal: int, run_dir: Path | None) -> None:
        super().__init__(f"stopped by signal {signal}; run folder {run_dir}")
        self.signal, self.run_dir = signal, run_dir
