"""Check that a decision has the fields and values of a line of `curation.jsonl`."""

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
LARGEST = 1 << 30  # bytes of a file; a hundred decisions about a million samples fit in
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
    "time": (
        _matches("[0-9]{4}(-[0-9]{2}){2}T[0-9]{2}(:[0-9]{2}){2}Z"),
        "a UTC time such as 2026-01-31T12:00:00Z",
    ),
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
    """Return a decision unchanged after a check of its fields and their values.

    A request of the page has no id, time, samples and digest, null for the number of a new cluster,
    and no parts for a split by the tree.
    """
    if not isinstance(line, dict):
        raise InputError(
            f"a decision is {reprlib.repr(line)}; expected a JSON object with the fields "
            f"{', '.join(REQUIRED)}"
        )
    do, required = line.get("do"), ("do",) if is_request else REQUIRED
    forms = _FORMS.get(do) if isinstance(do, str) else None
    if forms is None:
        raise InputError(f"`do` is {reprlib.repr(do)}; expected one of {', '.join(_FORMS)}")
    if is_request and do == "split":
        forms = (forms[0], "cluster")
    if missing := [key for key in required if key not in line]:
        raise InputError(
            f"a decision has no field `{missing[0]}`; expected the fields {', '.join(required)}"
        )
    keys = line.keys() - set(required)
    if not any(_fits(keys, form) for form in forms):
        raise InputError(
            f"the decision {do} has the fields {reprlib.repr(' '.join(sorted(keys)))}; expected "
            f"{' or '.join(forms)} (? marks an optional field)"
        )
    for key in line.keys() - {"do"}:
        is_valid, expected = _FIELDS[key]
        if is_request and key == "new":
            is_valid, expected = lambda value: value is None, "null"
        if not is_valid(line[key]):
            raise InputError(f"`{key}` is {reprlib.repr(line[key])}; expected {expected}")
    return line


def _fits(keys: set[str], form: str) -> bool:
    needed = {key for key in form.split() if not key.endswith("?")}
    return needed <= keys <= {key.removesuffix("?") for key in form.split()}


def read_file(path: Path) -> bytes:
    """Return the bytes of a `curation.jsonl`; refuse devices, pipes and files above 1 GiB."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST:
        raise InputError(
            f"{printable(str(path))} is not a file of decisions; expected the curation.jsonl of a "
            f"run, a regular file of at most {LARGEST >> 30} GiB"
        )
    return path.read_bytes()


def parse_lines(path: Path, content: bytes) -> list[dict[str, Any]]:
    """Parse and check all lines of a `curation.jsonl`; raise CorruptFileError for a bad one."""
    *complete, rest = content.split(b"\n")
    lines = []
    for number, text in enumerate([*complete, rest] if rest else complete, 1):
        fault = "cut off" if number > len(complete) else "damaged"
        try:
            lines.append(check_line(strict_json(text)))
        except ValueError as error:
            reason = error if isinstance(error, InputError) else f"the line is {fault} ({error})"
            raise CorruptFileError(describe_fault(path, number, reason)) from error
    if rest:
        reason = "the line is cut off (no line break at its end)"
        raise CorruptFileError(describe_fault(path, len(lines), reason))
    return lines


def describe_fault(path: Path, number: int, error: object) -> str:
    """Return the message about an invalid line: path, line number, reason and remedy."""
    return (
        f"{printable(str(path))}, line {number}: {printable(str(error))}. Delete that line, or "
        "use another copy of the file. No decision was changed"
    )
