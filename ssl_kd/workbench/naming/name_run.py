"""Name the clusters of a finished run by words of captions or file names."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
from pyarrow import csv, json, parquet

from ssl_kd.errors import InputError
from ssl_kd.files.cells import from_cell
from ssl_kd.vision.samples import Samples
from ssl_kd.workbench.naming.contrastive_words import names_from_texts
from ssl_kd.workbench.naming.names import Names

FILE_COLUMNS = ("file", "file_name", "filename", "path", "image")
TEXT_COLUMNS = ("caption", "text", "description", "title")
_BOUNDARY = re.compile(r"(?<=[a-z])(?=[A-Z])|[\W\d_]+")


def name_samples(samples: Samples, captions: str | Path | Sequence[str] | None = None) -> Names:
    """Name the clusters of every level by words that distinguish them; labels are not used.

    Names in the run's `names.json` that a person chose are kept.

    Args:
        samples: the samples of the run.
        captions: path of a table of captions (see `read_captions`), or one text per sample `[n]`.
            None uses the words of file and folder names, without folders that are labels.

    Raises:
        InputError, FileNotFoundError: the table of captions cannot be used.
    """
    files = samples.column("file").tolist()
    if captions is None:
        labels = samples.column("label") if "label" in samples.table.column_names else ()
        texts = file_words(files, leave_out={label for label in labels if label})
    elif isinstance(captions, str | Path):
        texts = read_captions(captions, files, samples.column("split").tolist())
    else:
        texts = list(captions)
    levels = {name: samples.column(name).astype(np.int64) for name in samples.levels}
    return names_from_texts(texts, levels).edited(Names.load(samples.path).edits)


def file_words(files: Sequence[str], leave_out: Collection[str] = ()) -> list[str]:
    """Split the name and the folders of each file into words; skip the folders in `leave_out`.

    >>> file_words(["holiday/beach/IMG_0042_redBoat.jpg"], leave_out={"beach"})
    ['holiday IMG red Boat']
    """
    texts = []
    for file in files:
        *folders, last = file.replace("\\", "/").split("/")
        stem = last.rpartition(".")[0] or last
        parts = [folder for folder in folders if folder not in leave_out] + [stem]
        texts.append(" ".join(word for p in parts for word in _BOUNDARY.split(p) if word))
    return texts


def read_captions(path: str | Path, files: Sequence[str], splits: Sequence[str]) -> list[str]:
    """Read the caption of each sample from a table.

    The table is CSV, TSV, Parquet or JSON Lines. One column, `file`, `file_name`, `filename`,
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
    if path.suffix not in (".csv", ".tsv", ".parquet", ".jsonl"):
        raise InputError(
            f"{path} is not a table of captions: expected a .csv, .tsv, .parquet or .jsonl file"
        )
    if not path.is_file():
        raise FileNotFoundError(f"the table of captions {path} does not exist")
    try:
        if path.suffix == ".parquet":
            return parquet.read_table(path)
        if path.suffix == ".jsonl":
            return json.read_json(path)
        delimiter = "\t" if path.suffix == ".tsv" else ","
        format = csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
        with csv.open_csv(path, parse_options=format) as file:
            as_text = dict.fromkeys(file.schema.names, arrow.string())  # 0042 is a name
        return csv.read_csv(path, None, format, csv.ConvertOptions(column_types=as_text))
    except ValueError as error:  # the base class of Arrow's errors
        message = " ".join(str(error).split())
        raise InputError(f"the table of captions {path} cannot be read: {message}") from error
