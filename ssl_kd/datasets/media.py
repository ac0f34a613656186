"""Show what a row of a table of embeddings is: a picture, a sound, a video, a text or a link."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as arrow
from PIL import Image
from pyarrow import types

from ssl_kd.datasets.decode import UnreadableImage, decode
from ssl_kd.datasets.images import EXTENSIONS
from ssl_kd.datasets.spill import LazyStrings
from ssl_kd.datasets.tables import (
    LONGEST,
    Table,
    as_text,
    check_column,
    is_text,
    readable_values,
    scalar_columns,
)
from ssl_kd.errors import InputError, printable

logger = logging.getLogger(__name__)

SOUNDS_AND_VIDEOS = {
    ".wav": "audio/wav", ".mp3": "audio/mpeg", ".flac": "audio/flac", ".ogg": "audio/ogg",
    ".opus": "audio/ogg", ".m4a": "audio/mp4", ".aac": "audio/aac", ".mp4": "video/mp4",
    ".m4v": "video/mp4", ".webm": "video/webm", ".ogv": "video/ogg", ".mov": "video/quicktime",
}  # fmt: skip
"""Suffix -> type of the files that the explorer sends to the browser as they are."""
_SUFFIXES = {
    kind: {s for s, full in SOUNDS_AND_VIDEOS.items() if full.startswith(kind)}
    for kind in ("audio", "video")
}
_SUFFIXES = {"image": EXTENSIONS, **_SUFFIXES}


class Media:
    """The column of a table that shows what its rows are.

    The column has texts, links, paths of files relative to the table's folder, or structs of
    Hugging Face with the fields `bytes` and `path`; `kind` is image, audio, video, text or url.
    """

    def __init__(self, table: Table, column: str, kind: str) -> None:
        self.column, self.kind, self._table = column, kind, table

    @cached_property
    def _values(self) -> arrow.ChunkedArray:
        values = self._table.read(self.column)
        return values.cast(arrow.large_string()) if is_text(values.type) else values

    def text(self, row: int) -> str:
        """Return the text of a row, at most 2,000 characters; empty if it has none."""
        value = self._values[row]
        if types.is_struct(value.type):
            return (value.as_py() or {}).get("path") or ""
        content = memoryview(value.as_buffer() if value.is_valid else b"")
        return as_text(bytes(content[: 4 * LONGEST]))[:LONGEST]

    def content(self, row: int) -> bytes | None:
        """Return the bytes of a row that is a struct of Hugging Face; None if there are none."""
        is_struct = types.is_struct(self._values.type)
        return (self._values[row].as_py() or {}).get("bytes") if is_struct else None

    def file(self, row: int) -> Path | None:
        """Return the path of the file of a row; None if it is not a regular file of this kind.

        A symbolic link to a file without a suffix of sounds or videos does not count, since such
        files are sent to the browser as they are.
        """
        path, suffixes = self._table.root / self.text(row), _SUFFIXES.get(self.kind, ())
        if path.suffix.lower() not in suffixes or not os.path.isfile(path):
            return None
        is_safe = self.kind == "image" or Path(os.path.realpath(path)).suffix.lower() in suffixes
        return path if is_safe else None

    def image(self, row: int, name: str) -> Image.Image:
        """Decode the picture of a row to mode `L` or `RGB`; raise UnreadableImage."""
        if (content := self.content(row)) is not None:
            return decode(io.BytesIO(content), name)
        if (path := self.file(row)) is None:
            raise UnreadableImage(name, f"{printable(self.text(row))!r} is not an image file")
        return decode(path, name)


class Shown:
    """Rows with names, some of which have pictures."""

    media: Media | None
    ids: Sequence[str]

    @property
    def pictured(self) -> bool:
        """Whether the rows have pictures."""
        return self.media is not None and self.media.kind == "image"

    def image(self, i: int) -> Image.Image:
        """Decode the picture of row `i` to mode `L` or `RGB`; raise UnreadableImage."""
        assert self.media is not None
        return self.media.image(i, self.ids[i])

    def image_file(self, i: int) -> Path | None:
        """Return the picture's file of row `i`, or None; raise UnreadableImage if it is damaged."""
        if not self.pictured:
            return None
        self.image(i)
        assert self.media is not None
        return None if self.media.content(i) is not None else self.media.file(i)


class Rows(Shown):
    """The rows of a table of embeddings without the embeddings.

    `column` has the embeddings, if it is not the default; `media` is as in `find_media`.
    """

    def __init__(self, name: str, table: Table, column: str | None, media: str | None) -> None:
        self.name, self.table, self.roles = name, table, table.roles(column)
        self.media = find_media(table, media)
        self.ids = row_names(table.n, table.names_of_rows(column))

    def __len__(self) -> int:
        return self.table.n

    def columns(self) -> dict[str, arrow.ChunkedArray]:
        """Read the columns that are neither features, labels nor names."""
        return scalar_columns(self.table, self.roles.values())


def row_names(n: int, names: Sequence[Any] | None) -> LazyStrings:
    """Return the names of `n` rows as text, or their numbers."""
    known = range(n) if names is None else names
    return LazyStrings(len(known), lambda row: as_text(str(known[row])))


def find_media(table: Table, column: str | None = None) -> Media | None:
    """Return the media of a column, or find one: pictures, sounds, videos, `text`, links."""
    if column is not None:
        check_column(table.path, column, list(table.kinds))
        if (kind := _media_kind(table, column)) is None:
            raise InputError(
                f"--media is {column!r}, whose type in {table.path} is {table.kinds[column]}; "
                "expected texts, links, paths of files, or pictures of Hugging Face"
            )
        return Media(table, column, kind)
    kinds = {name: _media_kind(table, name) for name in table.kinds}
    for wanted in _SUFFIXES:
        for name, kind in kinds.items():
            if kind == wanted and _has_content(table, name):
                logger.info("%s: the column %s contains the %s files", table.path, name, wanted)
                return Media(table, name, wanted)
    if kinds.get("text") == "text":
        return Media(table, "text", "text")
    if (name := next((name for name, kind in kinds.items() if kind == "url"), None)) is None:
        return None
    message = "%s: no images are shown, since the column %s contains links, which are not fetched"
    logger.info(message, table.path, name)
    return Media(table, name, "url")


def _media_kind(table: Table, column: str) -> str | None:
    """Return what the first rows of a column hold: `image`, `text`, ...; None: other values."""
    kind = table.kinds[column]
    is_struct = types.is_struct(kind) and {"bytes", "path"} <= {field.name for field in kind}
    if not (is_struct or is_text(kind)):
        return None
    values = [v for v in readable_values(table.read(column, preview=True)) if v]
    paths = [value.get("path") or "" for value in values] if is_struct else values
    for name, suffixes in _SUFFIXES.items():
        if paths and all(Path(p).suffix.lower() in suffixes and not is_link(p) for p in paths):
            return name
    if is_struct:
        return "image"
    return "url" if paths and all(map(is_link, paths)) else "text"


def is_link(text: str) -> bool:
    """Return whether a text is a link to a web page."""
    return text.lower().startswith(("http://", "https://"))


def _has_content(table: Table, column: str) -> bool:
    """Return whether one of the first rows has a file; log a message if none has."""
    if types.is_struct(table.kinds[column]):
        return True
    paths = [path for path in readable_values(table.read(column, preview=True)) if path]
    if any(os.path.isfile(table.root / path) for path in paths):
        return True
    message = "%s: no images are shown, since the column %s names no files in %s; the first is %s"
    logger.info(message, table.path, column, table.root, printable(paths[0]))
    return False
