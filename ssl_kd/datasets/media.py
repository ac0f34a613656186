"""Show what a row of a table of embeddings is: a picture, a sound, a text or a link."""

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
from ssl_kd.datasets.formats import EXTENSIONS
from ssl_kd.datasets.spill import LazyStrings
from ssl_kd.datasets.tables import (
    Table,
    as_text,
    check_column,
    is_text,
    readable_values,
    valid_texts,
    value_columns,
)
from ssl_kd.errors import InputError, printable

logger = logging.getLogger(__name__)

SOUNDS = {
    ".wav": "audio/wav", ".mp3": "audio/mpeg", ".flac": "audio/flac", ".ogg": "audio/ogg",
    ".opus": "audio/ogg", ".m4a": "audio/mp4", ".aac": "audio/aac",
}  # fmt: skip
"""Suffix -> type of the files that the explorer sends to the browser as they are."""
LARGEST_SOUND = 512 << 20  # bytes
_SUFFIXES = {"image": EXTENSIONS, "audio": SOUNDS.keys()}


class Rows:
    """The rows of a table of embeddings without the embeddings.

    `media` is the `column` that shows what the rows are, and its `kind`: image, audio, text or url.
    The column has texts, links, paths of files relative to the table's folder, or structs of
    Hugging Face with the fields `bytes` and `path`.
    """

    def __init__(self, table: Table, column: str | None = None, media: str | None = None) -> None:
        self.name, self.table, self.roles = str(table.path), table, table.roles(column)
        self.media = _find_media(table, media)
        self.kind = "" if self.media is None else self.media["kind"]
        name = self.roles["id"]
        self.ids = row_names(table.n, None if name is None else readable_values(table.read(name)))

    def __len__(self) -> int:
        return self.table.n

    @property
    def pictured(self) -> bool:
        """Whether the rows have pictures."""
        return self.kind == "image"

    def columns(self) -> dict[str, arrow.ChunkedArray]:
        """Read the columns that are neither features, labels nor names."""
        return value_columns(self.table, self.roles.values())

    @cached_property
    def _values(self) -> arrow.ChunkedArray:
        assert self.media is not None
        values = self.table.read(self.media["column"])
        return valid_texts(values) if is_text(values.type) else values

    def _value(self, row: int) -> dict[str, Any]:
        """Return the `path` (or text, or link) of a row, and its `bytes`; None if it has none."""
        value = self._values[row].as_py()
        return value if isinstance(value, dict) else {"path": value, "bytes": None}

    def text(self, row: int) -> str:
        """Return the text of a row; empty if it has none."""
        return str(self._value(row)["path"] or "")

    def sound(self, row: int) -> tuple[str, bytes] | None:
        """Return the type and content of a sound; None if it is missing, empty or too large."""
        content, path = self._value(row)["bytes"], self._file(row)
        if content is None and path is not None and path.stat().st_size <= LARGEST_SOUND:
            content = path.read_bytes()
        kind = SOUNDS.get(Path(self.text(row)).suffix.lower())
        return (kind, content) if kind and content else None

    def image(self, row: int) -> Image.Image:
        """Decode the picture of a row to mode `L` or `RGB`; raise UnreadableImage."""
        name = self.ids[row]
        if (content := self._value(row)["bytes"]) is not None:
            return decode(io.BytesIO(content), name)
        if (path := self._file(row)) is None:
            raise UnreadableImage(name, f"{printable(self.text(row))!r} is not an image file")
        return decode(path, name)

    def image_file(self, row: int) -> Path | None:
        """Return the file of a picture, or None; raise UnreadableImage if it is damaged."""
        self.image(row)
        return self.file(row)

    def file(self, row: int) -> Path | None:
        """Return the file of a picture or sound, which is not decoded; None if there is none."""
        return None if self._value(row)["bytes"] is not None else self._file(row)

    def _file(self, row: int) -> Path | None:
        """Return the path of the file of a row; None if it is not a regular file of this kind.

        A symbolic link to a file without a suffix of sounds does not count, since sounds are sent
        to the browser as they are.
        """
        path, suffixes = self.table.root / self.text(row), _SUFFIXES.get(self.kind, ())
        if path.suffix.lower() not in suffixes or not os.path.isfile(path):
            return None
        is_safe = self.kind == "image" or Path(os.path.realpath(path)).suffix.lower() in suffixes
        return path if is_safe else None


def row_names(n: int, names: Sequence[Any] | None) -> LazyStrings:
    """Return the names of `n` rows as text, or their numbers."""
    known = range(n) if names is None else names
    return LazyStrings(len(known), lambda row: as_text(str(known[row])))


def is_link(text: str) -> bool:
    """Return whether a text is a link to a web page."""
    return text.lower().startswith(("http://", "https://"))


def _find_media(table: Table, column: str | None) -> dict[str, str] | None:
    """Return the `column` that shows the rows, or one that is found, and its `kind`."""
    if column is not None:
        check_column(table.path, column, list(table.kinds))
        if (kind := _media_kind(table, column)) is None:
            raise InputError(
                f"--media is {column!r}, whose type in {table.path} is {table.kinds[column]}; "
                "expected texts, links, paths of files, or pictures of Hugging Face"
            )
        return {"kind": kind, "column": column}
    kinds = {name: _media_kind(table, name, needs_files=True) for name in table.kinds}
    for wanted in ("image", "audio", "text", "url"):
        for name, kind in kinds.items():
            if kind == wanted and (kind != "text" or name == "text"):
                if kind == "url":
                    _log_no_images(table, name, "contains links, which are not fetched")
                return {"kind": wanted, "column": name}
    return None


def _media_kind(table: Table, column: str, *, needs_files: bool = False) -> str | None:
    """Return what the first rows of a column hold: `image`, `text`, ...; None: other values."""
    kind = table.kinds[column]
    is_struct = types.is_struct(kind) and {"bytes", "path"} <= {field.name for field in kind}
    if not (is_struct or is_text(kind)):
        return None
    values = [v for v in readable_values(table.head.column(column)) if v]
    texts = [str(value["path"] or "") for value in values] if is_struct else values
    if texts and all(map(is_link, texts)):
        return "image" if is_struct else "url"
    for name, suffixes in _SUFFIXES.items():
        if texts and all(Path(text).suffix.lower() in suffixes for text in texts):
            if is_struct or not needs_files or any(os.path.isfile(table.root / t) for t in texts):
                return name
            first = f"names no files in {table.root}; the first is {printable(texts[0])}"
            _log_no_images(table, column, first)
            return None
    return "image" if is_struct else "text"


def _log_no_images(table: Table, column: str, reason: str) -> None:
    message = "%s: no images are shown, since the column %s %s"
    logger.info(message, table.path, column, reason)
