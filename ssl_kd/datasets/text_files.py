"""Files of text, read a record at a time: each kind's own form, and what is damaged in it.

Not by the readers of the package datasets (5.2), though `hf:NAME` goes through it: one damaged line
costs them the whole file, without the line's number, and they change text that looks like something
else (`"2020-01-01T00:00:00"` becomes a date, and `0042` in a CSV the number 42).
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from ssl_kd.datasets.records import Example

LONGEST = 1_000_000
"""Bytes of one example, above which it is taken for an accident and left out."""
_DOCUMENT, _LONG_DOCUMENT = 4_096, 16_384
_ROWS = 256  # of a table, in memory at once


class Record(NamedTuple):
    """The content of a file at one place, to be interpreted by `as_example`."""

    where: str
    content: Any


Item = Record | Example | str
"""A record, a document, or the complaint about one that cannot be used."""


def kind_of(path: Path) -> str | None:
    """Return the suffix that decides how a file is read, as `.jsonl.gz`; None for other files."""
    name = path.name.lower()
    return next((kind for kind in TEXT_FILES if name.endswith(kind)), None)


def stem_of(path: Path) -> str:
    """Return the name of a file without the suffix of its kind."""
    return path.name[: len(path.name) - len(kind_of(path) or "")]


def is_saved_dataset(folder: Path) -> bool:
    """Return whether `save_to_disk` of the package datasets wrote the folder."""
    return all((folder / name).is_file() for name in ("state.json", "dataset_info.json"))


def files_in(folder: Path) -> Iterator[Path]:
    """Yield the files of text below a folder, sorted by path.

    Of a folder that `save_to_disk` wrote only those in its index: `map` leaves caches beside them.
    """
    if is_saved_dataset(folder):
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        yield from (folder / entry["filename"] for entry in state["_data_files"])
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():  # which may lead back
            yield from files_in(path)
        elif path.is_file() and kind_of(path) and path.name != "dataset_dict.json":
            yield path


def read_file(path: Path) -> Iterator[Item]:
    """Yield the records of a file in their order, with one of them in memory at a time.

    (A `.json` file is read whole.)
    """
    import pyarrow

    read = TEXT_FILES[str(kind_of(path))]
    try:
        yield from read(path)
    except (EOFError, zlib.error, gzip.BadGzipFile, csv.Error, pyarrow.ArrowException) as error:
        reason = " ".join(str(error).split())[:200]
        yield f"{path.name}: damaged ({reason}); what comes after is left out"


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb")  # pyright: ignore[reportReturnType]


class _Line(NamedTuple):
    where: str
    text: str
    fault: str  # why the line cannot be used; empty where it can


def _lines(path: Path) -> Iterator[_Line]:
    """Yield the lines of a text file in UTF-8, those that cannot be decoded with their fault."""
    with _open(path) as file:
        for number, raw in enumerate(file, 1):
            where, text, fault = f"{path.name}:{number}", "", ""
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                fault = f"not UTF-8 ({error.reason})"
            if b"\0" in raw:
                fault = "holds NUL bytes: binary, or UTF-16, which is to be saved as UTF-8"
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
    """Read a list of records or a single one; also a record a line, as many `.json` files have."""
    lines = list(_lines(path))
    if faulty := next((line for line in lines if line.fault), None):
        yield f"{faulty.where}: {faulty.fault}"
        return
    whole = _parsed("".join(line.text for line in lines), path.name)
    if isinstance(whole, str):
        yield from _read_jsonl(path) if "Extra data" in whole else (whole,)
    elif isinstance(whole.content, list):
        yield from (Record(f"{path.name}:{i}", each) for i, each in enumerate(whole.content, 1))
    else:
        yield whole


def _read_csv(path: Path) -> Iterator[Item]:
    """Read the rows below a line of names; a field in quotes may hold line breaks."""
    csv.field_size_limit(max(csv.field_size_limit(), 4 * LONGEST))
    faults: list[str] = []

    def usable() -> Iterator[str]:
        for where, text, fault in _lines(path):
            if fault:
                faults.append(f"{where}: {fault}")
            else:
                yield text

    rows = csv.DictReader(usable(), delimiter="\t" if ".tsv" in path.suffixes else ",")
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
        yield from _rows(path, file.iter_batches(batch_size=_ROWS))


def _read_arrow(path: Path) -> Iterator[Item]:
    import pyarrow
    from pyarrow import ipc

    with pyarrow.memory_map(str(path)) as mapped:
        try:
            batches: Iterable[Any] = ipc.open_stream(mapped)
        except pyarrow.ArrowInvalid:  # the other of Arrow's two forms
            file = ipc.open_file(mapped)
            batches = (file.get_batch(i) for i in range(file.num_record_batches))
        yield from _rows(path, batches)


def _rows(path: Path, batches: Iterable[Any]) -> Iterator[Record]:
    number = 0
    for batch in batches:
        for start in range(0, batch.num_rows, _ROWS):
            for row in batch.slice(start, _ROWS).to_pylist():
                number += 1
                yield Record(f"{path.name}:{number}", without_nulls(row))


def without_nulls(value: Any) -> Any:
    """Drop null fields: in a table a field that only some records have is null in the others."""
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
    """Join lines to one document, without the empty ones around it."""
    text = "".join(lines).strip("\n")
    return Example(where, text=text) if text.strip() else f"{where}: empty"


TEXT_FILES: Mapping[str, Callable[[Path], Iterator[Item]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".txt": _read_plain,
    ".raw": _read_plain,
    ".md": _read_plain,
    ".jsonl.gz": _read_jsonl,
    ".json.gz": _read_json,
    ".csv.gz": _read_csv,
    ".tsv.gz": _read_csv,
    ".txt.gz": _read_plain,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
"""How each kind of file is read, by its suffix."""
PLAIN = tuple(kind for kind, read in TEXT_FILES.items() if read is _read_plain)
"""Kinds of files that hold documents without fields."""
