"""The fields of a line of `curation.jsonl`; the same check serves the file, the page and Python."""

from __future__ import annotations

import re
import reprlib
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ssl_kd.errors import InputError, printable
from ssl_kd.files import CorruptFileError, strict_json

NAME_LENGTH = 200
LARGEST = 1 << 30  # bytes of a file: a hundred decisions of a million samples each
REQUIRED = ("id", "time", "samples", "digest", "do")
# The other fields of each decision; "?" marks an optional one.
_FORMS = {
    "rename": ("cluster name",),
    "merge": ("clusters name?",),
    "split": ("cluster rows new name?", "cluster level parts"),
    "move": ("rows new name?", "rows into name?"),
    "exclude": ("rows",),
    "undo": ("of",),
}


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53  # JavaScript reads these exactly


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
# Field -> a check of its value, and what is expected.
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "id": (_matches("[0-9a-f]{12}"), "12 hexadecimal digits"),
    "time": (_matches("[0-9]{4}(-[0-9]{2}){2}T[0-9]{2}(:[0-9]{2}){2}Z"), "as 2026-01-31T12:00:00Z"),
    "digest": (_matches("[0-9a-f]{16}"), "16 hexadecimal digits"),
    **dict.fromkeys(("samples", "cluster", "into", "new"), _NUMBER),
    **dict.fromkeys(("level", "name", "of"), _NAME),
    "clusters": (_are_numbers, "numbers of clusters, at least two"),
    "rows": (
        lambda value: _are_numbers(value) and len(set(value)) == len(value),
        "numbers of samples, at least one, and each once",
    ),
    "parts": (_are_pairs, "pairs of a part's number and its new one"),
}


def check_line(line: Any, *, is_request: bool = False) -> dict[str, Any]:
    """Return a decision if it has exactly the fields that it must have, with valid values.

    Args:
        line: a line of the file, parsed.
        is_request: it comes from the page: without id, time and run, with null for the number of a
            new cluster, and a split by the tree without its parts.

    Raises:
        InputError: it has not; the message names the value.
    """
    if not isinstance(line, dict):
        fields = ", ".join(REQUIRED)
        raise InputError(f"it is {reprlib.repr(line)}; expected an object with {fields}")
    do, required = line.get("do"), ("do",) if is_request else REQUIRED
    forms = _FORMS.get(do) if isinstance(do, str) else None
    if forms is None:
        decisions = ", ".join(_FORMS)
        raise InputError(f"{reprlib.repr(do)} is not a decision; expected one of {decisions}")
    if is_request and do == "split":
        forms = (forms[0], "cluster")
    if missing := [key for key in required if key not in line]:
        raise InputError(f"it has no {missing[0]}; expected an object with {', '.join(required)}")
    keys = line.keys() - set(required)
    if not any(_fits(keys, form) for form in forms):
        raise InputError(
            f"{do} has the fields {reprlib.repr(' '.join(sorted(keys)))}; "
            f"expected {' or '.join(forms)}"
        )
    for key in line.keys() - {"do"}:
        is_valid, expected = _FIELDS[key]
        if is_request and key == "new":
            is_valid, expected = lambda value: value is None, "null"
        if not is_valid(line[key]):
            raise InputError(f"{key}: expected {expected}, not {reprlib.repr(line[key])}")
    return line


def _fits(keys: set[str], form: str) -> bool:
    needed = {key for key in form.split() if not key.endswith("?")}
    return needed <= keys <= {key.removesuffix("?") for key in form.split()}


def read_file(path: Path) -> bytes:
    """Return the content of a file of decisions; raise InputError if it cannot be one."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST:
        raise InputError(
            f"{printable(str(path))} is not a file of decisions; expected a regular file of at "
            f"most {LARGEST >> 30} GiB, such as a run's curation.jsonl"
        )
    return path.read_bytes()


def parse_lines(path: Path, content: bytes) -> list[dict[str, Any]]:
    """Return the checked lines of a file; raise CorruptFileError with the number of a bad one."""
    *complete, rest = content.split(b"\n")
    lines = []
    for number, text in enumerate([*complete, rest] if rest else complete, 1):
        fault = "cut off" if number > len(complete) else "damaged"
        try:
            lines.append(check_line(strict_json(text)))
        except ValueError as error:
            reason = error if isinstance(error, InputError) else f"it is {fault} ({error})"
            raise CorruptFileError(describe_fault(path, number, reason)) from error
    if rest:
        raise CorruptFileError(describe_fault(path, len(lines), "it is cut off (no end of line)"))
    return lines


def describe_fault(path: Path, number: int, error: object) -> str:
    """Return a message with the line of a file, what is wrong with it, and the remedy."""
    return (
        f"{printable(str(path))}, line {number}: {printable(str(error))}. Delete that line, or "
        "take another copy of the file; nothing was changed"
    )
