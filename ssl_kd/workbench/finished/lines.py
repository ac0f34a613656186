"""The lines of `curation.jsonl`: each is checked whole before anything follows it.

One function checks what a file, the page and Python ask for: what is written can be read again.
"""

from __future__ import annotations

import re
import reprlib
import stat
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any

from ssl_kd.errors import InputError, printable
from ssl_kd.files import CorruptFileError, strict_json

NAME_LENGTH = 200
LARGEST = 1 << 30  # bytes of a file of decisions: a hundred, of a million samples each
ABOUT = ("id", "time", "samples", "digest", "do")
# What each decision has beside that; with a question mark: perhaps.
_FORMS = {
    "rename": ("cluster name",),
    "merge": ("clusters name?",),
    "split": ("cluster rows new name?", "cluster level parts"),
    "move": ("rows new name?", "rows into name?"),
    "exclude": ("rows",),
    "undo": ("of",),
}


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53  # as JavaScript counts


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_number, value))


def _are_pairs(value: Any) -> bool:
    pairs = value if isinstance(value, list) else []
    return bool(pairs) and all(_are_numbers(pair) and len(pair) == 2 for pair in pairs)


def _matches(pattern: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


_NUMBER = (_is_number, "a number, 0 or more")
_NAME = (
    lambda value: isinstance(value, str) and value.isprintable() and len(value) <= NAME_LENGTH,
    f"one line of at most {NAME_LENGTH} characters",
)
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "id": (_matches("[0-9a-f]{12}"), "12 hexadecimal digits"),
    "time": (_matches("[0-9]{4}(-[0-9]{2}){2}T[0-9]{2}(:[0-9]{2}){2}Z"), "as 2026-01-31T12:00:00Z"),
    "digest": (_matches("[0-9a-f]{16}"), "16 hexadecimal digits"),
    **dict.fromkeys(("samples", "cluster", "into", "new"), _NUMBER),
    **dict.fromkeys(("level", "name", "of"), _NAME),
    "clusters": (_are_numbers, "numbers of clusters, at least two"),
    "rows": (
        lambda value: _are_numbers(value) and len(set(value)) == len(value),  # the page counts them
        "numbers of samples, at least one, and each once",
    ),
    "parts": (_are_pairs, "pairs of a part's number and its new one"),
}


def checked(line: Any, *, asked: bool = False) -> dict[str, Any]:
    """Return a decision that has exactly what it must have, each value of its kind.

    Args:
        line: of the file, as JSON.
        asked: it is what the page asks for: without id, time and run, with null for the number of
            a new cluster, and a split by the tree without its parts.

    Raises:
        InputError: it is something else; the message names the value.
    """
    if not isinstance(line, dict):
        raise InputError(f"it is {reprlib.repr(line)}; expected an object with {', '.join(ABOUT)}")
    do, about = line.get("do"), ("do",) if asked else ABOUT
    forms = _FORMS.get(do) if isinstance(do, str) else None
    if forms is None:
        raise InputError(f"{reprlib.repr(do)} is no decision; expected one of {', '.join(_FORMS)}")
    if asked and do == "split":
        forms = (forms[0], "cluster")
    if missing := [key for key in about if key not in line]:
        raise InputError(f"it has no {missing[0]}; expected an object with {', '.join(about)}")
    keys = line.keys() - set(about)
    if not any(_fits(keys, form.split()) for form in forms):
        raise InputError(
            f"{do} does not say what it should: it has {reprlib.repr(' '.join(sorted(keys)))}; "
            f"expected {' or '.join(forms)}"
        )
    for key in line.keys() - {"do"}:
        is_kind, kind = _KINDS[key]
        if asked and key == "new":
            is_kind, kind = lambda value: value is None, "null"
        if not is_kind(line[key]):
            raise InputError(f"{key}: expected {kind}, not {reprlib.repr(line[key])}")
    return line


def _fits(keys: Set[str], form: Sequence[str]) -> bool:
    needed = {key for key in form if not key.endswith("?")}
    return needed <= keys <= {key.removesuffix("?") for key in form}


def read_lines(path: Path) -> bytes:
    """Return the content of a file of decisions; raise InputError where it cannot be one."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST:
        raise InputError(
            f"{printable(str(path))} is no file of decisions; expected a regular file of at most "
            f"{LARGEST >> 30} GiB, as the page or a run's curation.jsonl is"
        )
    return path.read_bytes()


def parsed(path: Path, data: bytes) -> list[dict[str, Any]]:
    """Return the lines of a file, each checked; raise CorruptFileError with a line's number."""
    *whole, last = data.split(b"\n")
    lines = []
    for number, text in enumerate([*whole, last] if last else whole, 1):
        cut = "cut off" if number > len(whole) else "damaged"
        try:
            lines.append(checked(strict_json(text)))
        except ValueError as error:
            why = error if isinstance(error, InputError) else f"it is {cut} ({error})"
            raise CorruptFileError(at(path, number, why)) from error
    if last:  # whole, but for its end
        raise CorruptFileError(at(path, len(lines), "it is cut off (no end of line)"))
    return lines


def at(path: Path, number: int, error: object) -> str:
    """Return what is wrong with a line of a file, and the way out."""
    return (
        f"{printable(str(path))}, line {number}: {printable(str(error))}. Delete that line, or "
        "take another copy of the file; nothing was changed"
    )
