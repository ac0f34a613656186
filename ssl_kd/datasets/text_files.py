"""Read text files one record at a time, and report damaged records instead of failing.

The package `datasets` (5.2) is not used for these files: one damaged line makes it reject the whole
file without the number of the line, and it turns text that looks like a date into a date.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ssl_kd.datasets.records import Example

LONGEST = 1_000_000
"""Size in bytes above which an example is left out, since it is probably a mistake."""
_DOCUMENT, _LONG_DOCUMENT = 4_096, 16_384
_ROWS = 256  # rows of a table in memory at once


class Record(NamedTuple):
    """A record of a file, and its position for messages."""

    where: str
    content: Any


Item = Record | Example | str
"""A record, a document, or a message that says why a record cannot be used."""


def read_file(path: Path) -> Iterator[Item]:
    """Yield the records of a file in order, without loading all of it (except `.json`)."""
    import pyarrow

    try:
        yield from TEXT_FILES[path.suffix.lower()](path)
    except pyarrow.ArrowException as error:
        reason = " ".join(str(error).split())[:200]
        yield f"{path.name}: the file is damaged ({reason}), so the remaining rows are left out"


class _Line(NamedTuple):
    where: str
    text: str
    fault: str  # why the line cannot be used, or empty


def _lines(path: Path) -> Iterator[_Line]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            where, text, fault = f"{path.name}:{number}", "", ""
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                fault = f"not UTF-8 ({error.reason})"
            if b"\0" in raw:
                fault = "contains NUL bytes; expected UTF-8 text: convert the file"
            yield _Line(where, text, fault)


def _read_jsonl(path: Path) -> Iterator[Item]:
    for where, text, fault in _lines(path):
        fault = fault or ("" if text.strip() else "empty")
        yield f"{where}: {fault}" if fault else _parsed(text, where)


def _parsed(text: str, where: str) -> Record | str:
    try:
        return Record(where, json.loads(text))
    except (ValueError, RecursionError) as error:
        return f"{where}: not valid JSON ({error})"


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


def _read_parquet(path: Path) -> Iterator[Item]:
    from pyarrow import parquet

    with parquet.ParquetFile(path, memory_map=True) as file:
        rows = (row for batch in file.iter_batches(batch_size=_ROWS) for row in batch.to_pylist())
        for number, row in enumerate(rows, 1):
            yield Record(f"{path.name}:{number}", without_nulls(row))


def without_nulls(value: Any) -> Any:
    """Remove null fields, which a table has where only other records have a value."""
    if isinstance(value, Mapping):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value


def _read_plain(path: Path) -> Iterator[Item]:
    """Split text into documents, preferably at blank lines."""
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
    """Join lines to a document without leading and trailing empty lines."""
    text = "".join(lines).strip("\n")
    return Example(where, text=text) if text.strip() else f"{where}: empty"


TEXT_FILES: Mapping[str, Callable[[Path], Iterator[Item]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".txt": _read_plain,
    ".md": _read_plain,
    ".parquet": _read_parquet,
}
"""Function that reads a file, by suffix."""
PLAIN = (".txt", ".md")
"""Suffixes of files that contain plain text instead of records."""
