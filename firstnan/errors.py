"""Define errors that a user can act on, and the exit codes of a command that they end."""

from __future__ import annotations

OK = 0
FAILED = 1
BAD_INPUT = 2
GUARD_STOPPED = 3


class UserError(Exception):
    """A failure that a user can act on; the message says what happened and what to do.

    Attributes:
        exit_code: The exit code of a command that this error ends.
    """

    exit_code: int = FAILED
