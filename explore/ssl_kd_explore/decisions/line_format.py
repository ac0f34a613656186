"""Check that a decision has the fields and values of a line of `curation.jsonl`."""

from __future__ import annotations

import re
import reprlib
import stat
from pathlib import Path
from typing import Any

from ssl_kd.core.errors import InputError, printable
from ssl_kd.core.files import CorruptFileError, strict_json

NAME_LENGTH = 200
LARGEST = 1 << 30  # bytes of a file; a hundred decisions about a million samples fit in
REQUIRED = ("id", "time", "samples", "digest", "do")
# The other fields of each decision; "?" marks an optional one. All may have the field `by`.
FORMS = {
    "rename": ("cluster name",),
    "merge": ("clusters name?",),
    "split": ("cluster rows new name?", "cluster level parts"),
    "move": ("rows new name?", "rows into"),
    "exclude": ("rows",),
    "check": ("rows",),
    "undo": ("of",),
}
_REQUEST_FORMS = FORMS | {"split": (FORMS["split"][0], "cluster"), "check": ("rows", "cluster")}


def _text(expected: str, pattern: str, length: int, shortest: int = 0) -> dict[str, Any]:
    end = r"(?![\s\S])"  # `$` would match before a line break too
    rule = {"type": "string", "pattern": f"^{pattern}{end}", "maxLength": length}
    return rule | {"minLength": shortest, "description": expected}


def _list(expected: str, items: dict[str, Any], **rules: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "description": expected} | rules


# Most characters that str.isprintable refuses; no pattern can name them all.
_HIDDEN = (
    r"\u0000-\u001f\u007f-\u00a0\u00ad\u2000-\u200f\u2028-\u202f\u2060-\u206f\ud800-\uf8ff\ufeff"
)
_ONE_LINE = f"one line of at most {NAME_LENGTH} characters"
_NAME = _text(_ONE_LINE, f"[^{_HIDDEN}]*", NAME_LENGTH)
_NUMBER = {"type": "integer", "minimum": 0, "maximum": 2**53 - 1,  # JavaScript reads these exactly
           "description": "a number, 0 or more"}  # fmt: skip
_PAIR = _list("two numbers", _NUMBER, minItems=2, maxItems=2)
# The JSON Schema of each field. Its description says in messages what is expected.
_FIELDS: dict[str, dict[str, Any]] = {
    "id": _text("12 hexadecimal digits", "[0-9a-f]{12}", 12),
    "time": _text(
        "a UTC time such as 2026-01-31T12:00:00Z",
        "[0-9]{4}(-[0-9]{2}){2}T[0-9]{2}(:[0-9]{2}){2}Z",
        20,
    ),
    "digest": _text("16 hexadecimal digits", "[0-9a-f]{16}", 16),
    **dict.fromkeys(("samples", "cluster", "into", "new"), _NUMBER),
    **dict.fromkeys(("level", "name", "of"), _NAME),
    "by": _NAME | {"minLength": 1, "description": f"{_ONE_LINE}, at least one"},
    "clusters": _list("numbers of clusters, at least two", _NUMBER),
    "rows": _list("numbers of samples, at least one, and each once", _NUMBER, uniqueItems=True),
    "parts": _list("pairs of a part's number and its new one", _PAIR),
}


def schema(*, is_request: bool = False) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a line of `curation.jsonl`, or of a request.

    Args:
        is_request: return the schema of what `POST api/curation` accepts instead.
    """
    dialect = "https://json-schema.org/draft/2020-12/schema"
    table = _REQUEST_FORMS if is_request else FORMS
    forms = [_form(do, form, is_request) for do, forms in table.items() for form in forms]
    return {"$schema": dialect, "title": "A decision about the clusters of a run", "anyOf": forms}


def _form(do: str, form: str, is_request: bool) -> dict[str, Any]:
    """Return the JSON Schema of a decision with the fields of one form in `FORMS`."""
    fields = _FIELDS | {"do": {"const": do}}
    if is_request:
        fields["new"] = {"type": "null", "description": "null"}
    required = ["do"] if is_request else list(REQUIRED)
    required += [key for key in form.split() if not key.endswith("?")]
    known = dict.fromkeys([*required, *form.replace("?", "").split(), "by"])
    return {
        "type": "object",
        "properties": {key: fields[key] for key in known},
        "required": required,
        "additionalProperties": False,
    }


def check_line(line: Any, *, is_request: bool = False) -> dict[str, Any]:
    """Return a decision, or the request for one, unchanged after a check of its fields."""
    required = ("do",) if is_request else REQUIRED
    if not isinstance(line, dict):
        raise InputError(
            f"a decision is {reprlib.repr(line)}; expected a JSON object with the fields "
            f"{', '.join(required)}"
        )
    do, forms = line.get("do"), _REQUEST_FORMS if is_request else FORMS
    if not isinstance(do, str) or do not in forms:
        raise InputError(f"`do` is {reprlib.repr(do)}; expected one of {', '.join(forms)}")
    for form in forms[do]:
        rules = _form(do, form, is_request)
        if set(rules["required"]) <= line.keys() <= rules["properties"].keys():
            for key in line.keys() - {"do"}:
                check_field(key, line[key], rules["properties"])
            return line
    raise InputError(
        f"the decision {do} has the fields {reprlib.repr(' '.join(sorted(line)))}; expected "
        f"{' or '.join(forms[do])} (? marks an optional field), and {', '.join(required)}"
    )


def check_field(key: str, value: Any, rules: dict[str, dict[str, Any]] = _FIELDS) -> None:
    """Raise InputError if a value does not fit a field of a decision."""
    if not _is_valid(value, rules[key]):
        expected = rules[key]["description"]
        raise InputError(f"`{key}` is {reprlib.repr(value)}; expected {expected}")


def _is_valid(value: Any, rule: dict[str, Any]) -> bool:
    """Return True if a value fits a JSON Schema of `_FIELDS`."""
    if rule["type"] == "null":
        return value is None
    if rule["type"] == "integer":
        return type(value) is int and rule["minimum"] <= value <= rule["maximum"]
    if rule["type"] == "string":
        is_text = isinstance(value, str) and value.isprintable()
        is_text = is_text and rule["minLength"] <= len(value) <= rule["maxLength"]
        return is_text and re.match(rule["pattern"], value) is not None
    most = rule.get("maxItems", LARGEST)
    if not isinstance(value, list) or not rule["minItems"] <= len(value) <= most:
        return False
    is_valid = all(_is_valid(item, rule["items"]) for item in value)
    return is_valid and not (rule.get("uniqueItems") and len(set(value)) < len(value))


def without_person(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line without the name of the person who decided."""
    return {key: value for key, value in line.items() if key != "by"}


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
    for text in complete:
        try:
            lines.append(check_line(strict_json(text)))
        except ValueError as error:
            is_json = isinstance(error, InputError)
            reason = error if is_json else f"the line is damaged ({error})"
            raise line_fault(path, len(lines) + 1, reason) from error
    if rest:
        reason = "the line is cut off (no line break at its end)"
        raise line_fault(path, len(lines) + 1, reason)
    return lines


def line_fault(path: Path, number: int, reason: object) -> CorruptFileError:
    """Return the error about a line that is not valid: path, line number, reason and remedy."""
    return CorruptFileError(
        f"{printable(str(path))}, line {number}: {printable(str(reason))}. Delete that line, or "
        "use another copy of the file. No decision was changed"
    )
