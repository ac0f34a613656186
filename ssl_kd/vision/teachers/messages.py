"""Word the errors that several kinds of teachers share."""

from __future__ import annotations

import difflib

from ssl_kd.core.errors import InputError, brief


def misfit(model: str, error: Exception) -> InputError:
    """Return the error about weights in a file that do not fit a model."""
    return InputError(
        f"the weights in TEACHER_WEIGHTS do not fit {model}: {brief(error, 500)}. Use the weights "
        "of this architecture, or set TEACHER to theirs"
    )


def unknown_model(library: str, name: str, known: list[str]) -> str:
    """Return a message about a name that is not among the `known` ones, with those close to it."""
    close = difflib.get_close_matches(name, known, n=3)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    return f"{library} has no model {name!r}{hint}"
