"""Check that a decision has the fields and values of a line of `curation.jsonl`."""

from __future__ import annotations

import re
import reprlib
import stat
from pathlib import Path
from typing import Any

from ssl_kd.errors import InputError, printable
from ssl_kd.files import CorruptFileError, strict_json

NAME_LENGTH = 200
LARGEST = 1 << 30  # bytes of a file; a hundred decisions about a million samples fit in
REQUIRED = ("id", "time", "samples", "digest", "do")
# The other fields of each decision; "?" marks an optional one. All may have the field `by`.
_FORMS = {
    "rename": ("cluster name",),
    "merge": ("clusters name?",),
    "split": ("cluster rows new name?", "cluster level parts"),
    "move": ("rows new name?", "rows into name?"),
    "exclude": ("rows",),
    "check": ("rows",),
    "undo": ("of",),
}
_REQUEST_FORMS = _FORMS | {"split": (_FORMS["split"][0], "cluster"), "check": ("rows", "cluster")}


def _text(pattern: str, length: int) -> dict[str, Any]:
    end = r"(?![\s\S])"  # `$` would match before a line break too
    return {"type": "string", "pattern": f"^{pattern}{end}", "maxLength": length}


# Most characters that str.isprintable refuses; no pattern can name them all.
_HIDDEN = (
    r"\u0000-\u001f\u007f-\u00a0\u00ad\u2000-\u200f\u2028-\u202f\u2060-\u206f\ud800-\uf8ff\ufeff"
)
_NUMBER = {"type": "integer", "minimum": 0, "maximum": 2**53 - 1}  # JavaScript reads these exactly
_NAME = _text(f"[^{_HIDDEN}]*", NAME_LENGTH)
_ONE_LINE = f"one line of at most {NAME_LENGTH} characters"
_LIST = {"type": "array", "items": _NUMBER, "minItems": 1}
# Field -> the JSON Schema of its value, and what is expected, in words.
_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "id": (_text("[0-9a-f]{12}", 12), "12 hexadecimal digits"),
    "time": (
        _text("[0-9]{4}(-[0-9]{2}){2}T[0-9]{2}(:[0-9]{2}){2}Z", 20),
        "a UTC time such as 2026-01-31T12:00:00Z",
    ),
    "digest": (_text("[0-9a-f]{16}", 16), "16 hexadecimal digits"),
    **dict.fromkeys(("samples", "cluster", "into", "new"), (_NUMBER, "a number, 0 or more")),
    **dict.fromkeys(("level", "name", "of"), (_NAME, _ONE_LINE)),
    "by": (_NAME | {"minLength": 1}, f"{_ONE_LINE}, at least one"),
    "clusters": (_LIST, "numbers of clusters, at least two"),
    "rows": (
        _LIST | {"uniqueItems": True},
        "numbers of samples, at least one, and each once",
    ),
    "parts": (
        {"type": "array", "items": _LIST | {"minItems": 2, "maxItems": 2}, "minItems": 1},
        "pairs of a part's number and its new one",
    ),
}


def schema(*, is_request: bool = False) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a line of `curation.jsonl`, or of a request.

    Args:
        is_request: return the schema of what `POST api/curation` accepts instead.
    """
    required = ("do",) if is_request else REQUIRED
    fields = {key: value | {"description": words} for key, (value, words) in _FIELDS.items()}
    if is_request:
        fields["new"] = {"type": "null"}
    forms = []
    for do, texts in (_REQUEST_FORMS if is_request else _FORMS).items():
        for text in texts:
            needed = [*required, *(key for key in text.split() if not key.endswith("?"))]
            known = dict.fromkeys([*needed, *text.replace("?", "").split(), "by"])
            properties = {key: fields[key] for key in known if key != "do"}
            forms.append(
                {
                    "type": "object",
                    "properties": {"do": {"const": do}} | properties,
                    "required": needed,
                    "additionalProperties": False,
                }
            )
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": dialect, "title": "A decision about the clusters of a run", "anyOf": forms}


def check_line(line: Any, *, is_request: bool = False) -> dict[str, Any]:
    """Return a decision unchanged after a check of its fields and their values.

    A request of the page has no id, time, samples and digest, null for the number of a new cluster,
    and no parts for a split by the tree. It may check a whole cluster.
    """
    if not isinstance(line, dict):
        raise InputError(
            f"a decision is {reprlib.repr(line)}; expected a JSON object with the fields "
            f"{', '.join(REQUIRED)}"
        )
    do, required = line.get("do"), ("do",) if is_request else REQUIRED
    forms = (_REQUEST_FORMS if is_request else _FORMS).get(do) if isinstance(do, str) else None
    if forms is None:
        raise InputError(f"`do` is {reprlib.repr(do)}; expected one of {', '.join(_FORMS)}")
    if missing := [key for key in required if key not in line]:
        raise InputError(
            f"a decision has no field `{missing[0]}`; expected the fields {', '.join(required)}"
        )
    keys = line.keys() - {*required, "by"}
    if not any(_fits(keys, form) for form in forms):
        raise InputError(
            f"the decision {do} has the fields {reprlib.repr(' '.join(sorted(keys)))}; expected "
            f"{' or '.join(forms)} (? marks an optional field)"
        )
    for key in line.keys() - {"do"}:
        if is_request and key == "new":
            if line[key] is not None:
                raise InputError(f"`new` is {reprlib.repr(line[key])}; expected null")
        else:
            check_field(key, line[key])
    return line


def check_field(key: str, value: Any) -> None:
    """Raise InputError if a value does not fit a field of a decision."""
    rule, expected = _FIELDS[key]
    if not _is_valid(value, rule):
        raise InputError(f"`{key}` is {reprlib.repr(value)}; expected {expected}")


def _is_valid(value: Any, rule: dict[str, Any]) -> bool:
    """Return True if a value fits a JSON Schema of `_FIELDS`."""
    if rule["type"] == "integer":
        return type(value) is int and rule["minimum"] <= value <= rule["maximum"]
    if rule["type"] == "string":
        is_text = isinstance(value, str) and value.isprintable()
        is_text = is_text and rule.get("minLength", 0) <= len(value) <= rule["maxLength"]
        return is_text and re.match(rule["pattern"], value) is not None
    is_list = isinstance(value, list) and rule["minItems"] <= len(value)
    if not is_list or len(value) > rule.get("maxItems", len(value)):
        return False
    is_valid = all(_is_valid(item, rule["items"]) for item in value)
    return is_valid and not (rule.get("uniqueItems") and len(set(value)) < len(value))


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
