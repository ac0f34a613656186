"""Name the clusters of a finished run by the words of captions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
from pyarrow import csv, parquet

from ssl_kd.errors import InputError
from ssl_kd.files.cells import from_cell
from ssl_kd.vision.samples import Samples
from ssl_kd.workbench.naming.contrastive_words import names_from_texts
from ssl_kd.workbench.naming.names import Names

FILE_COLUMNS = ("file", "file_name", "filename", "path", "image")
TEXT_COLUMNS = ("caption", "text", "description", "title")


def name_samples(samples: Samples, captions: str | Path | Sequence[str]) -> Names:
    """Name the clusters of every level by words that distinguish them; labels are not used.

    Names in the run's `names.json` that a person chose are kept.

    Args:
        samples: the samples of the run.
        captions: path of a table of captions (see `read_captions`), or one text per sample `[n]`.

    Raises:
        InputError, FileNotFoundError: the table of captions cannot be used.
    """
    if isinstance(captions, str | Path):
        files, splits = samples.column("file").tolist(), samples.column("split").tolist()
        captions = read_captions(captions, files, splits)
    levels = {name: samples.column(name).astype(np.int64) for name in samples.levels}
    return names_from_texts(captions, levels).edited(Names.load(samples.path).edits)


def read_captions(path: str | Path, files: Sequence[str], splits: Sequence[str]) -> list[str]:
    """Read the caption of each sample from a table.

    The table is a CSV or Parquet file. One column, `file`, `file_name`, `filename`,
    `path` or `image`, names the file; another, `caption`, `text`, `description` or `title`, has the
    text. Several texts for one file, in several rows or in a list, are joined. An optional column
    `split` distinguishes files with the same name.

    Args:
        path: path of the table.
        files: file names of the samples `[n]`.
        splits: splits of the samples `[n]`.

    Returns:
        One text per sample `[n]`, empty for a sample that the table does not name.

    Raises:
        FileNotFoundError: the table does not exist.
        InputError: the table is damaged or of another format, lacks a column, or names no sample.
    """
    path = Path(path).expanduser()
    table = _read_table(path)
    columns = []
    for what, usual in (("files", FILE_COLUMNS), ("captions", TEXT_COLUMNS)):
        name = next((name for name in usual if name in table.column_names), None)
        if name is None:
            raise InputError(
                f"{path} has no column of {what}; expected one of {', '.join(usual)}, got the "
                f"columns {', '.join(table.column_names) or '(none)'}"
            )
        columns.append(table.column(name).to_pylist())
    by_split = "split" in table.column_names
    rows_splits = table.column("split").to_pylist() if by_split else [None] * table.num_rows
    texts: dict[Any, list[str]] = {}
    for file, value, split in zip(*columns, rows_splits, strict=True):
        values = value if isinstance(value, list) else [value]
        joined = texts.setdefault((split, from_cell(str(file))), [])
        joined += [str(text) for text in values if text]
    keys = zip(splits if by_split else [None] * len(files), files, strict=True)
    captions = [" ".join(texts.get(key, ())) for key in keys]
    if not any(captions):
        _, first = next(iter(texts), (None, "nothing"))
        raise InputError(
            f"{path} has no caption for any sample: its files have names like {first!r}, the "
            f"samples have names like {files[0]!r}"
        )
    return captions


def _read_table(path: Path) -> arrow.Table:
    if path.suffix not in (".csv", ".parquet"):
        raise InputError(f"{path} is not a table of captions: expected a .csv or .parquet file")
    if not path.is_file():
        raise FileNotFoundError(f"the table of captions {path} does not exist")
    try:
        if path.suffix == ".parquet":
            return parquet.read_table(path)
        multiline = csv.ParseOptions(newlines_in_values=True)
        with csv.open_csv(path, parse_options=multiline) as file:
            as_text = dict.fromkeys(file.schema.names, arrow.string())  # 0042 is a name
        return csv.read_csv(path, None, multiline, csv.ConvertOptions(column_types=as_text))
    except ValueError as error:  # the base class of Arrow's errors
        message = " ".join(str(error).split())
        raise InputError(f"the table of captions {path} cannot be read: {message}") from error
