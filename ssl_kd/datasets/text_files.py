"""Files of text, read a record at a time: each kind's own form, and what is damaged in it."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from ssl_kd.datasets.records import Example

LONGEST = 1_000_000
"""Bytes of one example, above which it is taken for an accident and left out."""
_DOCUMENT, _LONG_DOCUMENT = 4_096, 16_384
_HEAD = 4_096  # bytes in which a file shows whether it is text
_ROWS = 256  # of a table, in memory at once
_MARKS = {  # UTF-32's begins like UTF-16's, so it comes first
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


class Record(NamedTuple):
    """What a file holds at a place; its meaning is `as_example`'s business."""

    where: str
    content: Any


Item = Record | Example | str
"""A record, a document, or what is wrong at a place."""


def kind_of(path: Path) -> str | None:
    """The suffix that says how a file is read: `.jsonl` or `.jsonl.gz`; None for other files."""
    name = path.name.lower()
    return next((kind for kind in TEXT_FILES if name.endswith(kind)), None)


def stem_of(path: Path) -> str:
    """The name of a file without the suffix that says how it is read."""
    return path.name[: len(path.name) - len(kind_of(path) or "")]


def is_saved_dataset(folder: Path) -> bool:
    """Whether `save_to_disk` of the package datasets wrote the folder."""
    return all((folder / name).is_file() for name in ("state.json", "dataset_info.json"))


def files_in(folder: Path) -> Iterator[Path]:
    """The files to be read, in all folders below, sorted by path.

    Of a folder that `save_to_disk` wrote those that it says: later `map`s leave caches beside them.
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
    """What a file holds, in its order; a line or a row after the other is in memory.

    (All of a `.json` file is.)
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


def _lines(path: Path) -> Iterator[bytes | str]:
    """Lines of a text file as UTF-8; one that is a string says what is wrong in its place."""
    with _open(path) as file:
        head = file.read(_HEAD)
        file.seek(0)
        encoding = next((name for mark, name in _MARKS.items() if head.startswith(mark)), None)
        if encoding is None and b"\0" not in head:
            for line in file:
                yield "holds NUL bytes" if b"\0" in line else line
            return
        if encoding is None:
            yield "the file holds NUL bytes: binary, or UTF-16 without a byte order mark"
            return
        try:
            with io.TextIOWrapper(file, encoding, newline="\n") as decoded:
                for line in decoded:
                    yield line.encode()
        except UnicodeError as error:
            yield f"not {encoding.upper()} ({error}); it and all after it are left out"


def _decoded(path: Path, refused: list[str]) -> Iterator[tuple[int, str]]:
    """Number and text of each line; what is wrong with one goes to `refused`."""
    for number, raw in enumerate(_lines(path), 1):
        if isinstance(raw, str):
            refused.append(f"{path.name}:{number}: {raw}")
            continue
        try:
            yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            refused.append(f"{path.name}:{number}: not UTF-8 ({error.reason})")


def _read_jsonl(path: Path) -> Iterator[Item]:
    for number, line in enumerate(_lines(path), 1):
        where = f"{path.name}:{number}"
        if isinstance(line, str):
            yield f"{where}: {line}"
        elif not line.strip():
            yield f"{where}: empty"
        else:
            yield _parsed(line, where)


def _parsed(text: bytes, where: str) -> Record | str:
    try:
        return Record(where, json.loads(text.decode("utf-8-sig")))
    except (ValueError, RecursionError) as error:
        return f"{where}: not JSON ({error})"


def _read_json(path: Path) -> Iterator[Item]:
    """A list of records, or one; or a record a line, as many a `.json` file has."""
    lines = list(_lines(path))
    if refused := next((line for line in lines if isinstance(line, str)), None):
        yield f"{path.name}: {refused}"
        return
    whole = _parsed(b"".join(line for line in lines if isinstance(line, bytes)), path.name)
    if isinstance(whole, str):
        yield from _read_jsonl(path) if "Extra data" in whole else (whole,)
    elif isinstance(whole.content, list):
        yield from (Record(f"{path.name}:{i}", each) for i, each in enumerate(whole.content, 1))
    else:
        yield whole


def _read_csv(path: Path) -> Iterator[Item]:
    """Rows below a line of names; a field may hold line breaks in quotes."""
    csv.field_size_limit(max(csv.field_size_limit(), 4 * LONGEST))
    refused: list[str] = []
    lines = (line for _, line in _decoded(path, refused))
    rows = csv.DictReader(lines, delimiter="\t" if ".tsv" in path.suffixes else ",")
    for row in rows:
        where = f"{path.name}:{rows.line_num}"
        if None in row:
            yield f"{where}: more fields than the first line names"
        else:
            yield Record(where, {k: v for k, v in row.items() if v is not None})
    yield from refused


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
    """What stands in a row of a table: there, a field that one record has is null in all others."""
    if isinstance(value, Mapping):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value


def _read_plain(path: Path) -> Iterator[Item]:
    """Documents, cut at the first blank line after `_DOCUMENT` characters, or a line break."""
    lines: list[str] = []
    refused: list[str] = []
    first, length = 1, 0
    for number, line in _decoded(path, refused):
        yield from refused
        refused.clear()
        lines.append(line := line.replace("\r\n", "\n"))
        length += len(line)
        if length > _LONG_DOCUMENT or (length > _DOCUMENT and not line.strip()):
            yield as_document(lines, f"{path.name}:{first}")
            lines, first, length = [], number + 1, 0
    yield from refused
    if first == 1 or any(map(str.strip, lines)):
        yield as_document(lines, f"{path.name}:{first}")


def as_document(lines: Iterable[str], where: str) -> Example | str:
    """Lines as one text, without the empty ones around it."""
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
"""Those that hold no records but documents."""
