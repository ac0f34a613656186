"""Read the columns of tables: Parquet, CSV and JSON Lines files, saved data sets, and `.h5ad`."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as arrow
from numpy.typing import NDArray
from pyarrow import csv, ipc, parquet, types
from pyarrow import json as json_files

from ssl_kd.core.errors import InputError, brief, printable
from ssl_kd.core.files import CorruptFileError
from ssl_kd.core.images.decode import UnreadableImage
from ssl_kd.core.settings.early import TEXT_TABLES

FEATURES = ("features", "embeddings", "embedding", "x", "X", "data")
LABELS = ("labels", "label", "classes", "class", "class_label", "class_name")
MAYBE_LABELS = ("targets", "target", "y")
"""Names of labels, but also of measurements and coordinates."""
IDS = ("ids", "id", "file", "path")
LONGEST_LINE = 64 << 20  # bytes of a row of a table that is a text file
PREVIEW_ROWS = 20  # rows by which the kind of a column is found
ROOT = "ssl_kd.root"  # in the metadata of a Parquet file: the folder of relative paths


class Table(NamedTuple):
    """The columns of a file, each read when it is needed."""

    path: Path  # the name in messages
    root: Path  # folder of the relative paths in the columns
    n: int
    schema: arrow.Schema
    head: arrow.Table | arrow.RecordBatch  # the first rows of the columns that are not lists
    load: Callable[[str], arrow.ChunkedArray]
    default: str | None = None  # the column with the features, unless the user names another one
    files: Sequence[Path] = ()  # the shards of a Parquet table

    @property
    def kinds(self) -> dict[str, arrow.DataType]:
        """Name -> type of each column."""
        return dict(zip(self.schema.names, self.schema.types, strict=True))

    @property
    def lists(self) -> list[str]:
        """Names of the columns with a list of numbers in each row."""
        return [name for name, kind in self.kinds.items() if _is_vector(kind)]

    @property
    def scalars(self) -> list[str]:
        """Names of the columns with one value in each row."""
        kinds = self.kinds.items()
        return [
            n for n, k in kinds if not _is_list(k) and not types.is_struct(k) and not is_bytes(k)
        ]

    def read(self, name: str) -> arrow.ChunkedArray:
        """Read a column; the numbers of Hugging Face's ClassLabel become class names."""
        column, metadata = self.load(name), self.schema.metadata or {}
        info = json.loads(metadata.get(b"huggingface", b"{}")).get("info", {})
        feature = info.get("features", {}).get(name)
        if not isinstance(feature, dict) or feature.get("_type") != "ClassLabel":
            return column
        names = dict(enumerate(feature["names"]))  # -1: unknown
        return arrow.chunked_array([[names.get(k) for k in column.to_pylist()]], arrow.string())


def open_table(path: Path, files: Sequence[Path] = ()) -> Table | None:
    """Open a Parquet, CSV, JSON Lines or `.h5ad` file or a saved data set; None for other files.

    `files` are the shards of a table of Parquet files, if it has several.
    """
    if path.suffix.lower() == ".h5ad":
        from ssl_kd.vision.data.h5ad import open_h5ad

        return open_h5ad(path)
    if is_saved(path):
        return _open_saved(path)
    if path.suffix.lower() in TEXT_TABLES:
        return _open_text_table(path)
    files = files or (path,)
    if files[0].suffix.lower() == ".parquet":
        return _open_parquet(path, files)
    if len(files) > 1:
        raise InputError(
            f"{path} is one of {len(files)} shards, which are read together only from Parquet "
            "files: write them to one file"
        )
    return None


@contextlib.contextmanager
def one_line_errors(path: Path) -> Iterator[None]:
    """Raise InputError with one line for every way in which a file cannot be read."""
    try:
        yield
    except (ImportError, FileNotFoundError, InputError, UnreadableImage):
        raise
    except CorruptFileError as error:
        raise InputError(str(error)) from error
    except Exception as error:  # each format has its own exceptions for a broken file
        reason = brief(error)
        if "allow_pickle" in reason:  # NumPy's message recommends setting it
            reason = "it contains Python objects, which are not loaded; expected numbers or text"
        raise InputError(f"{path} cannot be read as a {path.suffix} file: {reason}") from error


def check_column(path: Path, column: str, names: Sequence[str]) -> None:
    """Raise InputError if a file has no such column; suggest a similar name."""
    if column not in names:
        texts = [str(name) for name in names]
        close = difflib.get_close_matches(column, texts, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        shown = ", ".join(texts[:10]) + (", ..." if len(texts) > 10 else "")
        raise InputError(
            f"{path} has no column {printable(column)!r}; expected one of {printable(shown)}"
            f"{printable(hint)}"
        )


def is_saved(folder: Path) -> bool:
    """Return whether `save_to_disk` of Hugging Face's `datasets` wrote a folder."""
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _is_list(kind: arrow.DataType) -> bool:
    return hasattr(kind, "value_type") and not types.is_dictionary(kind)


def _is_vector(kind: arrow.DataType) -> bool:
    """Return whether values of an Arrow type are lists of numbers."""
    value: arrow.DataType | None = getattr(kind, "value_type", None)
    if value is None or types.is_dictionary(kind):
        return False
    return types.is_integer(value) or types.is_floating(value) or types.is_boolean(value)


def is_bytes(kind: arrow.DataType) -> bool:
    """Return whether values of an Arrow type are bytes."""
    return types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)


def is_text(kind: arrow.DataType) -> bool:
    """Return whether values of an Arrow type are text."""
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def as_text(value: Any) -> Any:
    """Return a string or bytes as text that can be encoded; return other values unchanged."""
    if isinstance(value, str):
        value = value.encode("utf-8", "backslashreplace")
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value


def readable_values(column: arrow.ChunkedArray | arrow.Array) -> list[Any]:
    """Return the values of a column; escape bytes that are not UTF-8."""
    if not is_text(column.type):
        return column.to_pylist()
    plain = column.cast(arrow.large_string()).cast(arrow.large_binary())
    return [as_text(value) for value in plain.to_pylist()]


def value_columns(table: Table, left_out: Collection[str | None]) -> dict[str, Any]:
    """Read all columns except some, embeddings and content of files, with their types.

    Their values are numbers, truth values, times and texts, or lists and structs of them.
    Categories become their values, and texts have the Arrow type `string`.
    """
    columns: dict[str, arrow.ChunkedArray] = {}
    for name, kind in table.kinds.items():
        value = kind.value_type if types.is_dictionary(kind) else kind
        if name not in left_out and _is_value(value):
            column = table.read(name)
            if types.is_dictionary(column.type):
                column = column.cast(value)
            columns[name] = valid_texts(column) if is_text(column.type) else column
    return columns


def _is_value(kind: arrow.DataType) -> bool:
    """Return whether a type has values to export, rather than embeddings or content of files."""
    if types.is_struct(kind):
        return all(_is_value(field.type) for field in kind)
    if _is_list(kind):
        return is_text(kind.value_type) or types.is_struct(kind.value_type)
    return (
        is_text(kind) or types.is_decimal(kind) or types.is_null(kind) or types.is_primitive(kind)
    )


def valid_texts(column: arrow.ChunkedArray) -> arrow.ChunkedArray:
    """Return a column of texts as valid UTF-8, of Arrow type `string`."""
    return arrow.chunked_array([readable_values(column)], arrow.string())


def find_rows(names: Sequence[str], known: Sequence[str]) -> NDArray[np.int64]:
    """Return the row in `known` of each name: the same one, or the only one; else -1."""
    known = list(known)
    numbers: dict[str, int] = {}
    for number, name in enumerate(known):
        numbers[name] = -1 if name in numbers else number
    rows = np.array([numbers.get(name, -1) for name in names], np.int64)
    for row in np.flatnonzero(rows[: len(known)] < 0).tolist():
        rows[row] = row if known[row] == names[row] else -1
    return rows


def _open_parquet(path: Path, files: Sequence[Path]) -> Table:
    schemas, n = [], 0
    for file in files:
        with parquet.ParquetFile(file) as opened:
            schemas.append(opened.schema_arrow)
            n += opened.metadata.num_rows
    schema = _common_schema(files, schemas)
    metadata = schema.metadata or {}
    root = metadata.get(ROOT.encode())
    folder = files[0].parent if root is None else Path(os.fsdecode(root))
    scalars = [field.name for field in schema if not _is_list(field.type)]

    def load(name: str) -> arrow.ChunkedArray:
        chunks: list[arrow.Array] = []
        kind = schema.field(name).type
        for file in files:
            with parquet.ParquetFile(file) as opened:  # read_table adds columns of folder names
                column = opened.read([name]).column(name)
            chunks += (column if column.type == kind else column.cast(kind)).chunks
        return arrow.chunked_array(chunks) if chunks else arrow.chunked_array([], kind)

    head = arrow.schema([schema.field(name) for name in scalars]).empty_table()
    for file in files:
        with parquet.ParquetFile(file) as opened:
            batch = next(opened.iter_batches(PREVIEW_ROWS, columns=scalars), None)
        if batch is not None and len(batch):
            head = batch
            break
    return Table(path, folder, n, schema, head, load, files=tuple(files))


def _common_schema(files: Sequence[Path], schemas: Sequence[arrow.Schema]) -> arrow.Schema:
    """Return one schema for all shards of a table; raise InputError if there is none."""
    first = schemas[0]
    for file, schema in zip(files, schemas, strict=True):
        if differing := sorted(set(first.names) ^ set(schema.names)):
            raise InputError(
                f"{file} and {files[0]} are not shards of one table: only one of them has the "
                f"column {printable(differing[0])!r}. Give one file, or move the others away"
            )
        if schema.equals(first):
            continue
        try:
            first = arrow.unify_schemas([first, schema], promote_options="permissive")
        except arrow.ArrowException as error:
            raise InputError(
                f"{file} and {files[0]} are not shards of one table: {brief(error)}"
            ) from error
    return first


def _open_text_table(path: Path) -> Table:
    """Open a CSV, TSV or JSON Lines file, which is read whole."""
    suffix = path.suffix.lower()
    if suffix in (".jsonl", ".ndjson"):
        table = json_files.read_json(path, json_files.ReadOptions(block_size=LONGEST_LINE))
    else:
        parsed = csv.ParseOptions(
            delimiter="\t" if suffix == ".tsv" else ",", newlines_in_values=True
        )
        table = csv.read_csv(path, csv.ReadOptions(block_size=LONGEST_LINE), parsed)
        if other := [
            name
            for name, kind in zip(table.schema.names, table.schema.types, strict=True)
            if is_bytes(kind)
        ]:
            raise InputError(
                f"the column {printable(other[0])!r} of {path} is not UTF-8: save the file in UTF-8"
            )
    head = table[:PREVIEW_ROWS]
    return Table(path, path.parent, len(table), table.schema, head, table.column)


def _open_saved(folder: Path) -> Table:
    """Open one split of a data set that `save_to_disk` wrote."""
    parts = json.loads((folder / "state.json").read_text(encoding="utf-8"))["_data_files"]
    files = [arrow.memory_map(str(folder / Path(part["filename"]).name)) for part in parts]
    table = arrow.concat_tables([ipc.open_stream(file).read_all() for file in files])
    head = table[:PREVIEW_ROWS]
    return Table(folder, folder, len(table), table.schema, head, table.column)
