"""Captions of a user's own: a table with a file and its text in each row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as arrow
from pyarrow import csv, parquet

from ssl_kd.errors import InputError
from ssl_kd.files.cells import from_cell
from ssl_kd.settings import nearest

FILE_COLUMNS = ("file", "file_name", "filename", "path", "image")
TEXT_COLUMNS = ("caption", "text", "description", "title")
KINDS = (".csv", ".tsv", ".parquet", ".jsonl", ".json")


def read_captions(
    path: str | Path,
    files: Sequence[str],
    splits: Sequence[str] | None = None,
    *,
    column: str | None = None,
) -> list[str]:
    """The caption of each sample, from a table of files and texts.

    CSV, TSV, Parquet, JSON Lines, or JSON (a list of objects, or file -> text). The column of files
    is `file`, `file_name`, `filename`, `path` or `image`, and that of texts `caption`, `text`,
    `description` or `title`. Several rows of a file, and lists of texts, are joined. A column
    `split` tells files of the same name in two splits apart.

    Args:
        path: the table.
        files: names of the samples, `[n]`.
        splits: of the samples, `[n]`.
        column: that of the texts, where it has another name.

    Returns:
        Texts `[n]`, empty where the table has none.

    Raises:
        FileNotFoundError: there is no such file.
        InputError: of another kind, damaged, without the columns, or of other files.
    """
    path = Path(path).expanduser()
    rows = _rows(path)
    names = list(rows[0]) if rows else []
    file_column = _column(path, names, FILE_COLUMNS, "files", None)
    text_column = _column(path, names, TEXT_COLUMNS, "captions", column)
    by_split = "split" in names and splits is not None
    texts: dict[Any, list[str]] = {}
    for row in rows:
        key = from_cell(str(row.get(file_column)))
        own = texts.setdefault((row["split"], key) if by_split else key, [])
        value = row.get(text_column)
        own += [str(text) for text in (value if isinstance(value, list) else [value]) if text]
    keys: Sequence[Any] = list(zip(splits or [], files, strict=True)) if by_split else files
    found = [" ".join(texts.get(key, ())) for key in keys]
    if not any(found):
        there = next(iter(texts), "nothing")
        raise InputError(
            f"{path} has no caption of any sample: it names {there!r}, and the samples are called "
            f"as {files[0]!r} is"
        )
    return found


def _column(
    path: Path, names: Sequence[str], usual: Sequence[str], what: str, asked: str | None
) -> str:
    if asked is not None and asked not in names:
        listed = ", ".join(names) or "none"
        raise InputError(f"{path} has no column {asked!r}, only {listed}.{nearest(asked, names)}")
    found = asked or next((name for name in usual if name in names), None)
    if found is None:
        raise InputError(
            f"{path} has no column of {what}: expected one of {', '.join(usual)}, and it has "
            f"{', '.join(names) or 'no rows'}"
        )
    return found


def _rows(path: Path) -> list[dict[str, Any]]:
    if path.suffix not in KINDS:
        raise InputError(f"{path} is no file of captions: expected {', '.join(KINDS)}")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        if path.suffix in (".json", ".jsonl"):
            return _of_json(path)
        if path.suffix == ".parquet":
            return parquet.read_table(path).to_pylist()
        comma = csv.ParseOptions(
            delimiter="\t" if path.suffix == ".tsv" else ",", newlines_in_values=True
        )
        with csv.open_csv(path, parse_options=comma) as file:
            text = dict.fromkeys(file.schema.names, arrow.string())
        kinds = csv.ConvertOptions(column_types=text)  # 0042 is a name, not a number
        return csv.read_csv(path, parse_options=comma, convert_options=kinds).to_pylist()
    except (ValueError, TypeError, RecursionError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {' '.join(str(error).split())}") from error


def _of_json(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        found: Any = [json.loads(line) for line in text.splitlines() if line.strip()]
    else:
        found = json.loads(text)
    if isinstance(found, dict):
        return [{"file": file, "caption": caption} for file, caption in found.items()]
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise ValueError("expected objects, one for each file")
    return found
