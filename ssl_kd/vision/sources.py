"""Record what each sample of a run was, and find the samples again when their data are opened.

A run folder has a file `sources.parquet` with one row per sample, in the order of the assignments:
its split, its row in the data set, a digest of the content of this row if the data set is a table,
and state and digest of its file if it has one. The metadata of the file have for each split the
fingerprint of the data set, and the columns and files of the table.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
from numpy.typing import NDArray
from pyarrow import compute, parquet

from ssl_kd.core.errors import InputError, brief, first_few, printable
from ssl_kd.core.files import CorruptFileError, atomic_write
from ssl_kd.core.files.state import DIGEST_BYTES, FileState, file_digest
from ssl_kd.vision.cache import EmbeddingStore
from ssl_kd.vision.data import FileFolder, SampleDataset
from ssl_kd.vision.data.identity import files_of_table, row_digests
from ssl_kd.vision.data.media import Rows
from ssl_kd.vision.data.tables import find_rows
from ssl_kd.vision.extract import Dataset

logger = logging.getLogger(__name__)

SOURCES = "sources.parquet"
MOST_BYTES = 2 << 30
"""Files that a table of features names are read for their digests up to this total size."""
_KEY = b"ssl_kd.sources"
_WORKERS = 8
_DIGEST = arrow.binary(DIGEST_BYTES)
_SCHEMA = arrow.schema(
    {
        "split": arrow.string(),
        "row": arrow.int64(),
        "content": _DIGEST,
        **dict.fromkeys(FileState._fields, arrow.int64()),
        "digest": _DIGEST,
    }
)


class SourceChanged(InputError, FileNotFoundError):
    """Raised if the data of a run are not what they were, so that nothing of them is used."""


@dataclass(frozen=True)
class Source:
    """What the samples of one split were when the run read them."""

    fingerprint: str  # of the data set
    columns: Sequence[str]  # of the table, whose content the digests cover; empty for other data
    table_files: Mapping[str, FileState]  # of the table, by path relative to it
    media: str | None  # column of the table with the samples' own files
    rows: NDArray[np.int64]  # row in the data set of each sample [n]
    contents: Sequence[bytes | None]  # digests of the rows of a table [n]
    files: Sequence[FileState | None]  # states of the samples' own files [n]
    digests: Sequence[bytes | None]  # of the content of these files [n]; None: they were not read

    @property
    def identities(self) -> Sequence[bytes | None]:
        """What identifies each sample: the digest of its row, or else of its file, `[n]`."""
        return self.contents if self.columns else self.digests

    def find(self, data: SampleDataset | Rows, names: Sequence[str]) -> NDArray[np.int64]:
        """Return the row in `data` of each sample, `[n]`; -1 for a sample that is not found.

        Rows of tables are found by their content; images by their `names`, and by their content if
        there is no such name any more. The file of a sample is checked by `check_file`.

        Raises:
            SourceChanged: no sample is found.
        """
        if isinstance(data, Rows):
            rows = self._rows_of_table(data)
        elif isinstance(data, FileFolder):
            rows = self._rows_of_folder(data, names)
        elif data.fingerprint == self.fingerprint:
            rows = self.rows
        else:
            rows = np.full(len(self.rows), -1)
        if len(rows) and (rows < 0).all():
            raise SourceChanged(
                f"{printable(data.name)} has changed since the run: none of its {len(rows):,} "
                "samples is in it as it was, so nothing of it is used. Restore the data set"
            )
        lost = [str(names[sample]) for sample in np.flatnonzero(rows < 0).tolist()]
        if lost:
            logger.warning(
                "%s has changed since the run: %s of %s samples are not in it as they were, and "
                "nothing of it is used for them: %s",
                printable(data.name),
                f"{len(lost):,}",
                f"{len(rows):,}",
                printable(", ".join(first_few(lost, 3))),
            )
        return rows

    def check_file(self, sample: int, data: SampleDataset | Rows, row: int) -> None:
        """Raise SourceChanged unless the file of a sample, in `row`, is the one that the run read.

        Size and times are compared first; the file is read only if its times differ. Files in a
        column of a table that was chosen after the run are not known, and not checked.
        """
        if isinstance(data, Rows) and _media_column(data) != self.media:
            return
        before, path = self.files[sample], data.file(row)
        now = None if path is None else FileState.of(path)
        if path is None or now is None or before in (None, now):
            return
        digest = self.digests[sample]
        if digest is None:
            is_same = now[:2] == before[:2]  # size and time of the last change of the content
        else:
            is_same = now.size == before.size and file_digest(path) == digest
        if not is_same:
            raise SourceChanged(
                f"{printable(str(path))} has changed since the run, so it is not used: restore it"
            )

    def _rows_of_table(self, data: Rows) -> NDArray[np.int64]:
        if list(files_of_table(data.table).values()) == list(self.table_files.values()):
            return self.rows
        try:
            contents = row_digests(data.table, self.columns)
        except InputError as error:
            raise SourceChanged(
                f"{error}, which the run read, so nothing of the table is used. Restore the table"
            ) from error
        numbers = {digest: row for row, digest in reversed(list(enumerate(contents)))}
        rows = np.array([numbers.get(digest or b"", -1) for digest in self.contents], np.int64)
        if (rows >= 0).all() and not np.array_equal(rows, self.rows):
            logger.info(
                "%s was written again since the run: all %s samples are found by their content",
                printable(data.name),
                f"{len(rows):,}",
            )
        return rows

    def _rows_of_folder(self, data: FileFolder, names: Sequence[str]) -> NDArray[np.int64]:
        rows = find_rows(names, data.ids)
        lost = np.flatnonzero(rows < 0).tolist()
        sizes = {state.size for sample in lost if (state := self.files[sample]) is not None}
        moved: dict[bytes | None, int] = {}
        new = sorted(set(range(len(data))) - set(rows.tolist())) if sizes else []
        for row in new:
            path = data.file(row)
            state = FileState.of(path)
            if state is not None and state.size in sizes:
                moved[file_digest(path)] = row
        for sample in lost:
            rows[sample] = moved.get(self.digests[sample], -1)
        return rows


def describe_source(dataset: Dataset, store: EmbeddingStore) -> Source:
    """Return what the samples of a store are in the data set that they were embedded from."""
    data = getattr(dataset, "rows", None) or dataset
    rows = store.indices.numpy()
    contents: Sequence[bytes | None] = [None] * len(dataset)
    files: Sequence[tuple[FileState, bytes | None] | None] = [None] * len(dataset)
    columns: list[str] = []
    table_files: dict[str, FileState] = {}
    media = None
    if isinstance(data, Rows):
        table_files, media = files_of_table(data.table), _media_column(data)
        columns = list(data.table.kinds)
        contents, files = row_digests(data.table, columns), _files_of_rows(data)
    elif isinstance(data, FileFolder):
        files = data.files
    kept = [files[row] or (None, None) for row in rows.tolist()]
    return Source(
        dataset.fingerprint,
        columns,
        table_files,
        media,
        rows,
        [contents[row] for row in rows.tolist()],
        [state for state, _ in kept],
        [digest for _, digest in kept],
    )


def _media_column(rows: Rows) -> str | None:
    return None if rows.media is None else rows.media["column"]


def _files_of_rows(rows: Rows) -> list[tuple[FileState, bytes | None] | None]:
    """Return state and digest of the file that each row names, or None."""
    if rows.kind not in ("image", "audio"):
        return [None] * len(rows)
    paths = [rows.file(row) for row in range(len(rows))]
    states = [None if path is None else FileState.of(path) for path in paths]
    total = sum(state.size for state in states if state is not None)
    if total > MOST_BYTES:
        logger.info(
            "%s: the files in the column %s have %.1f GiB, so they are recognized later by size "
            "and time alone",
            printable(rows.name),
            printable(_media_column(rows) or ""),
            total / 2**30,
        )
        return [None if state is None else (state, None) for state in states]

    def read(row: int) -> tuple[FileState, bytes | None] | None:
        path, state = paths[row], states[row]
        return None if path is None or state is None else (state, file_digest(path))

    with ThreadPoolExecutor(_WORKERS, "digest") as pool:
        return list(pool.map(read, range(len(rows))))


def write_sources(folder: Path, sources: Mapping[str, Source], before: Path | None = None) -> None:
    """Write `sources.parquet` to a run folder: what the samples of each split are.

    `before` is the file of the run that is extended, whose splits come first.
    """
    tables, about = [], dict[str, Any]()
    if before is not None and before.is_file():
        tables.append(parquet.read_table(before))
        about |= json.loads(tables[0].schema.metadata[_KEY])
    for split, source in sources.items():
        about[split] = {
            "fingerprint": source.fingerprint,
            "columns": source.columns,
            "files": source.table_files,
            "media": source.media,
        }
        columns: dict[str, Any] = {
            "split": [split] * len(source.rows),
            "row": source.rows,
            "content": source.contents,
            "digest": source.digests,
        }
        for place, name in enumerate(FileState._fields):
            columns[name] = [None if state is None else state[place] for state in source.files]
        tables.append(arrow.table(columns, schema=_SCHEMA))
    table = arrow.concat_tables(tables).replace_schema_metadata({_KEY: json.dumps(about)})
    atomic_write(
        folder / SOURCES, lambda file: parquet.write_table(table, file, compression="zstd")
    )


def read_sources(folder: Path) -> dict[str, Source]:
    """Read `sources.parquet` of a run folder: split -> source. It is empty for older runs."""
    path = folder / SOURCES
    if not path.is_file():
        return {}
    try:
        with parquet.ParquetFile(path) as file:
            table = file.read()
        about = json.loads((table.schema.metadata or {})[_KEY])
        table = table.select(_SCHEMA.names).cast(_SCHEMA)
    except (arrow.ArrowException, KeyError, ValueError) as error:
        raise CorruptFileError(f"{path} is damaged ({brief(error)}): copy it again") from error
    sources = {}
    for split, entry in about.items():
        rows = table.filter(compute.field("split") == split)
        states = zip(*(rows.column(name).to_pylist() for name in FileState._fields), strict=True)
        sources[split] = Source(
            entry["fingerprint"],
            entry["columns"],
            {name: FileState(*state) for name, state in entry["files"].items()},
            entry["media"],
            rows.column("row").to_numpy(),
            rows.column("content").to_pylist(),
            [None if state[0] is None else FileState(*state) for state in states],
            rows.column("digest").to_pylist(),
        )
    return sources
