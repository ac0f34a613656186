"""Read text files one record at a time, and report damaged records instead of failing.

The package `datasets` (5.2) is not used for these files: one damaged line makes it reject the whole
file without the line's number, and it converts text that looks like something else
(`"2020-01-01T00:00:00"` becomes a date, and `0042` in a CSV the number 42).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ssl_kd.datasets.records import Example

LONGEST = 1_000_000
"""Bytes of one example, above which it is left out as an accident."""
_DOCUMENT, _LONG_DOCUMENT = 4_096, 16_384
_ROWS = 256  # of a table, in memory at once


class Record(NamedTuple):
    """One record of a file, to be interpreted by `as_example`."""

    where: str
    content: Any


Item = Record | Example | str
"""A record, a document, or a complaint about an unusable one."""


def read_file(path: Path) -> Iterator[Item]:
    """Yield the records of a file in order; only a `.json` file is read at once."""
    import pyarrow

    try:
        yield from TEXT_FILES[path.suffix.lower()](path)
    except (csv.Error, pyarrow.ArrowException) as error:
        reason = " ".join(str(error).split())[:200]
        yield f"{path.name}: damaged ({reason}); what comes after is left out"


class _Line(NamedTuple):
    where: str
    text: str
    fault: str  # why the line is unusable, or empty


def _lines(path: Path) -> Iterator[_Line]:
    """Yield the lines of a UTF-8 file; those that cannot be decoded have a fault."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            where, text, fault = f"{path.name}:{number}", "", ""
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                fault = f"not UTF-8 ({error.reason})"
            if b"\0" in raw:
                fault = "holds NUL bytes: binary, or UTF-16; save it as UTF-8"
            yield _Line(where, text, fault)


def _read_jsonl(path: Path) -> Iterator[Item]:
    for where, text, fault in _lines(path):
        fault = fault or ("" if text.strip() else "empty")
        yield f"{where}: {fault}" if fault else _parsed(text, where)


def _parsed(text: str, where: str) -> Record | str:
    try:
        return Record(where, json.loads(text))
    except (ValueError, RecursionError) as error:
        return f"{where}: not JSON ({error})"


def _read_json(path: Path) -> Iterator[Item]:
    """Read a list of records, or one record."""
    lines = list(_lines(path))
    if faulty := next((line for line in lines if line.fault), None):
        yield f"{faulty.where}: {faulty.fault}"
        return
    record = _parsed("".join(line.text for line in lines), path.name)
    if isinstance(record, Record) and isinstance(record.content, list):
        yield from (Record(f"{path.name}:{i}", each) for i, each in enumerate(record.content, 1))
    else:
        yield record


def _read_csv(path: Path) -> Iterator[Item]:
    """Read rows below a line of field names; a quoted field may contain line breaks."""
    csv.field_size_limit(max(csv.field_size_limit(), 4 * LONGEST))
    faults: list[str] = []

    def usable() -> Iterator[str]:
        for where, text, fault in _lines(path):
            if fault:
                faults.append(f"{where}: {fault}")
            else:
                yield text

    rows = csv.DictReader(usable())
    for row in rows:
        where = f"{path.name}:{rows.line_num}"
        if None in row:
            yield f"{where}: more fields than the first line names"
        else:
            yield Record(where, {k: v for k, v in row.items() if v is not None})
    yield from faults


def _read_parquet(path: Path) -> Iterator[Item]:
    from pyarrow import parquet

    with parquet.ParquetFile(path, memory_map=True) as file:
        rows = (row for batch in file.iter_batches(batch_size=_ROWS) for row in batch.to_pylist())
        for number, row in enumerate(rows, 1):
            yield Record(f"{path.name}:{number}", without_nulls(row))


def without_nulls(value: Any) -> Any:
    """Drop null fields: a table has nulls for fields that only other records have."""
    if isinstance(value, Mapping):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value


def _read_plain(path: Path) -> Iterator[Item]:
    """Cut text into documents: at a blank line after `_DOCUMENT` characters, or a line break."""
    lines: list[str] = []
    first, length = 1, 0
    for number, (where, line, fault) in enumerate(_lines(path), 1):
        if fault:
            yield f"{where}: {fault}"
            continue
        lines.append(line := line.replace("\r\n", "\n"))
        length += len(line)
        if length > _LONG_DOCUMENT or (length > _DOCUMENT and not line.strip()):
            yield as_document(lines, f"{path.name}:{first}")
            lines, first, length = [], number + 1, 0
    if first == 1 or any(map(str.strip, lines)):
        yield as_document(lines, f"{path.name}:{first}")


def as_document(lines: Iterable[str], where: str) -> Example | str:
    """Join lines to one document, without leading and trailing empty lines."""
    text = "".join(lines).strip("\n")
    return Example(where, text=text) if text.strip() else f"{where}: empty"


TEXT_FILES: Mapping[str, Callable[[Path], Iterator[Item]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".txt": _read_plain,
    ".md": _read_plain,
    ".parquet": _read_parquet,
}
"""The reader of each kind of file, by suffix."""
PLAIN = (".txt", ".md")
"""Kinds of files that hold documents without fields."""
