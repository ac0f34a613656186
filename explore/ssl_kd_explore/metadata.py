"""Read the columns that describe samples beside their clusters, and join a user's own table.

They come from the data set itself, from a table that was joined (`metadata.parquet` in the run's
folder), and from measures of the images (`image_measures.parquet`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
from numpy.typing import NDArray
from pyarrow import compute, csv, parquet

from ssl_kd.core.errors import InputError, UserError, printable
from ssl_kd.core.files import CorruptFileError, atomic_write
from ssl_kd.vision.data.media import Rows
from ssl_kd.vision.data.tables import (
    ROOT,
    find_rows,
    one_line_errors,
    open_table,
    readable_values,
    value_columns,
)
from ssl_kd.vision.samples import JOINED, Samples

logger = logging.getLogger(__name__)

MEASURES = "image_measures.parquet"
KEYS = ("file", "id", "path")  # columns of a table that name its samples
_SPLIT = "ssl_kd.split"  # column that the tables of all splits have
_OURS = {"row", "file", "cluster", "cluster_name", "cluster_of_run", "checked", "excluded", "split"}


def metadata(samples: Samples) -> dict[str, arrow.ChunkedArray]:
    """Return all columns about the samples of a run, in the order of its table, with their types.

    A column with the name of a column of the run is called `data_NAME`.
    """
    columns: dict[str, arrow.ChunkedArray] = {}
    try:
        columns = _columns_of_data(samples)
    except (UserError, OSError, arrow.ArrowException) as error:
        logger.warning("the columns of the data set are left out: %s", error)
    for name in (JOINED, MEASURES):
        path = samples.path / name
        if not path.is_file():
            continue
        with one_line_errors(path):
            table = open_table(path)
        if table is None or table.n != len(samples):
            raise CorruptFileError(f"{path} has not one row per sample: remove it")
        columns |= value_columns(table, ("file",))
    taken, named = _OURS.union(samples.table.column_names), dict[str, arrow.ChunkedArray]()
    for name, column in columns.items():
        new = name
        while new in taken or (new != name and new in columns):
            new = f"data_{new}"
        named[new] = column
    return named


def _columns_of_data(samples: Samples) -> dict[str, arrow.ChunkedArray]:
    """Return the other columns of the data set's tables; null for splits without the column."""
    parts = []
    for split, rows in samples.splits.items():
        data = samples.rows(split)
        columns = data.columns() if isinstance(data, Rows) else {}
        taken = {name: _take(column, samples.places(split)) for name, column in columns.items()}
        parts.append(arrow.table({**taken, _SPLIT: [split] * len(rows)}))
    table = arrow.concat_tables(parts, promote_options="permissive").drop_columns([_SPLIT])
    return dict(zip(table.column_names, table.columns, strict=True))


def _take(values: Any, rows: NDArray[np.int64]) -> Any:
    """Return the rows of a column or table; null where a row is -1."""
    return values.take(arrow.array(rows, mask=rows < 0))


def join_table(samples: Samples, path: Path) -> int:
    """Join a CSV or Parquet table to the samples of a run; return how many of them it has.

    The columns are written to `metadata.parquet` in the run's folder, in place of those joined
    before. Relative paths in them are relative to the table.

    Raises:
        InputError: no column names the samples, or no name is one of a sample.
    """
    try:
        if path.suffix.lower() == ".parquet":
            table = parquet.ParquetFile(path).read()  # read_table adds columns of folder names
        else:
            table = _read_csv(path)
    except arrow.ArrowInvalid as error:
        raise InputError(f"{path} cannot be read as a table: {error}") from error
    found = ", ".join(table.column_names[:20])
    for name, column in zip(table.column_names, table.columns, strict=True):
        if table.column_names.count(name) > 1:
            raise InputError(f"{path} has several columns {printable(name)!r}: rename all but one")
        if path.suffix.lower() != ".parquet" and arrow.types.is_binary(column.type):
            raise InputError(f"column {printable(name)!r} of {path} is not UTF-8: save it as UTF-8")
    key = next((name for name in KEYS if name in table.column_names), None)
    if key is None:
        raise InputError(
            f"{path} has the columns {found}; expected one called {', '.join(KEYS)} with the names "
            f"of the samples, as in the column file of {samples.path.name}"
        )
    names = samples.table.column("file")
    with one_line_errors(path):
        known = readable_values(table.column(key).cast(arrow.string()))
    rows = find_rows(names.to_pylist(), known)
    if not (matched := int((rows >= 0).sum())):
        raise InputError(
            f"none of the {len(table):,} values of {key} in {path} names one of the "
            f"{len(samples):,} samples (columns: {found}); expected names such as {names[0]}"
        )
    joined = _take(table.drop_columns(["file"]) if key == "file" else table, rows)
    joined = joined.replace_schema_metadata({ROOT: str(path.absolute().parent)})
    write_columns(samples, JOINED, joined.add_column(0, "file", names))
    return matched


def _read_csv(path: Path) -> arrow.Table:
    """Read a CSV file; numbers that lose characters as such, as 007 and long ids, stay texts."""
    parsing = csv.ParseOptions(newlines_in_values=True)
    table = csv.read_csv(path, parse_options=parsing)
    if len(set(table.column_names)) < len(table.column_names):
        return table  # which is refused
    names = [n for n in table.column_names if n in KEYS or _lossy_digits(table.column(n).type)]
    as_written = csv.read_csv(
        path,
        parse_options=parsing,
        convert_options=csv.ConvertOptions(
            column_types=dict.fromkeys(names, arrow.string()),
            include_columns=names,
            null_values=[""],
            strings_can_be_null=True,
        ),
    )
    for name in names:
        column, pattern = as_written.column(name), _lossy_digits(table.column(name).type)
        options = compute.MatchSubstringOptions(pattern or "")
        loses = compute.call_function("match_substring_regex", [column], options)
        if name in KEYS or compute.call_function("any", [loses]).as_py():
            table = table.set_column(table.column_names.index(name), name, column)
    return table


def _lossy_digits(kind: arrow.DataType) -> str | None:
    """Return a pattern of the digits that a type of numbers does not keep; None: other types."""
    if arrow.types.is_integer(kind):
        return "^[+-]?0[0-9]"
    return "^[+-]?(0[0-9]|[0-9]{16,}$)" if arrow.types.is_floating(kind) else None


def write_columns(samples: Samples, name: str, table: arrow.Table) -> None:
    """Write a table with one row per sample to the run's folder."""
    atomic_write(samples.path / name, lambda file: parquet.write_table(table, file))


def write_measures(
    samples: Samples, split: str, measures: Mapping[str, NDArray[np.float64]]
) -> None:
    """Write the measures of the images of a split; those of other splits are kept."""
    path, rows = samples.path / MEASURES, samples.splits[split]
    before = parquet.read_table(path) if path.is_file() else None
    columns = {}
    for name, values in measures.items():
        known = np.full(len(samples), np.nan) if before is None else before.column(name)
        column = np.array(known)
        column[rows.start : rows.stop] = values
        columns[name] = arrow.array(column, from_pandas=True)
    write_columns(samples, MEASURES, arrow.table(columns))
