"""Read what the rows of a table are, to show or to embed it: pictures, sounds, texts or links."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
from numpy.typing import NDArray
from PIL import Image
from pyarrow import types

from ssl_kd.core.errors import InputError, UnreadableSample, printable
from ssl_kd.core.files import sha256_file
from ssl_kd.core.files.spill import LazyStrings
from ssl_kd.core.images.decode import UnreadableImage, decode, find_levels
from ssl_kd.core.images.formats import (
    DEEP,
    EXTENSIONS,
    SIGNATURE_BYTES,
    formats_for,
    may_be_deep,
    suffix_of,
)
from ssl_kd.core.images.levels import Levels
from ssl_kd.vision.data.images import ImageDataset, with_levels
from ssl_kd.vision.data.labels import Labels, find_labels
from ssl_kd.vision.data.samples import NOUNS, SampleDataset
from ssl_kd.vision.data.sounds import LARGEST_SOUND, SOUNDS, read_sound
from ssl_kd.vision.data.tables import (
    FEATURES,
    IDS,
    LABELS,
    MAYBE_LABELS,
    Table,
    as_text,
    check_column,
    is_bytes,
    is_text,
    readable_values,
    valid_texts,
    value_columns,
)
from ssl_kd.vision.data.usage import LeftOut, Usage, counted

logger = logging.getLogger(__name__)

EMBEDDED = ("image", "text", "audio")
"""Kinds of columns whose rows a teacher can embed."""
_SUFFIXES = {"image": EXTENSIONS, "audio": SOUNDS.keys()}


class Rows:
    """The rows of a table without the embeddings: their names, labels, and what shows them.

    `media` is the `column` that shows what the rows are, and its `kind`: image, audio, text or url.
    The column has texts, links, paths of files relative to the table's folder, the content of
    image files, or structs of Hugging Face with the fields `bytes` and `path`.

    Args:
        table: the open table.
        column: column with the features, or with the pictures, texts or sounds to embed; None:
            found by name.
        media: column that shows what the rows are; None: found by its content.
        label_column: column with the labels, or `none`; None: found by name.
        class_names: classes of the training split.

    Attributes:
        features: column with the features; None if the table has none, or if several could be.
        embedded: column of pictures, texts or sounds that a teacher must embed; None if the rows
            have features.
        labels: the labels of the rows.
    """

    def __init__(
        self,
        table: Table,
        column: str | None = None,
        media: str | None = None,
        *,
        label_column: str | None = None,
        class_names: tuple[str, ...] | None = None,
    ) -> None:
        self.name, self.table = str(table.path), table
        self.features = self.embedded = None
        if column is not None:
            check_column(table.path, column, list(table.kinds))
        if column is not None and _media_kind(table, column) in EMBEDDED:
            self.embedded = column
        else:
            self.features = _find_features(table, column)
        self.media = _find_media(table, media or self.embedded)
        self.kind = "" if self.media is None else self.media["kind"]
        if self.features is None and not table.lists and self.media and self.kind in EMBEDDED:
            self.embedded = self.media["column"]
        self._id = next((name for name in IDS if name in table.scalars), None)
        if label_column in table.kinds and label_column not in table.scalars:
            raise InputError(
                f"LABEL_COLUMN is {label_column!r}, whose type in {table.path} is "
                f"{table.kinds[label_column]}; expected one value per row"
            )
        self.labels: Labels = find_labels(
            table.path,
            table.scalars,
            lambda name: readable_values(table.read(name)),
            label_column,
            features=self.features,
            class_names=class_names,
        )
        names = None if self._id is None else readable_values(table.read(self._id))
        self.ids = row_names(table.n, names)

    def __len__(self) -> int:
        return self.table.n

    @property
    def pictured(self) -> bool:
        """Whether the rows have pictures."""
        return self.kind == "image"

    @property
    def used(self) -> str:
        """Which columns are used, and for what."""
        shown = [] if self.media is None else [(self.media["column"], self.media["kind"])]
        uses = {
            "names": self._id,
            "labels": self.labels.name,
            **{f"{NOUNS.get(kind, kind)}s": column for column, kind in shown},
        }
        parts = [f"read from {n} files"] if (n := len(self.table.files)) > 1 else []
        parts += [f"{what} from column {name}" for what, name in uses.items() if name is not None]
        used = {self.features, *uses.values()}
        if others := [name for name in self.table.scalars if name not in used]:
            parts.append(f"shown only: {', '.join(others)}")
        return "; ".join(parts)

    @property
    def left_out(self) -> list[LeftOut]:
        """The columns that are not used."""
        left_out = list(self.labels.left_out)
        media = None if self.media is None else self.media["column"]
        for name in self.table.kinds:
            if name in (self.features, self.labels.name, self._id, media):
                continue
            if name in self.table.lists:
                reason = f"add --column {name} to cluster by it instead"
            elif _media_kind(self.table, name) == "image":
                reason = f"add --column {name} to embed these pictures"
            elif name in self.table.scalars:
                continue
            else:
                reason = f"values of type {self.table.kinds[name]} are not shown"
            left_out.append(LeftOut(f"column {name}", reason))
        return left_out

    def columns(self) -> dict[str, arrow.ChunkedArray]:
        """Read the columns that are neither features, labels nor names."""
        return value_columns(self.table, (self.features, self.labels.name, self._id))

    @cached_property
    def _values(self) -> arrow.ChunkedArray:
        assert self.media is not None
        values = self.table.read(self.media["column"])
        return valid_texts(values) if is_text(values.type) else values

    def _value(self, row: int) -> dict[str, Any]:
        """Return the `path` (or text, or link) of a row, and its `bytes`; None if it has none."""
        value = self._values[row].as_py()
        if isinstance(value, bytes):
            return {"path": None, "bytes": value}
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

    def sample(self, row: int) -> Any:
        """Read a row as a teacher gets it: a picture, a text or a sound; raise UnreadableSample."""
        if self.kind == "image":
            return self.image(row)
        if self.kind == "text":
            if text := self.text(row).strip():
                return text
            raise UnreadableSample(self.ids[row], "the text is empty")
        if (content := self._value(row)["bytes"]) is not None:
            return read_sound(io.BytesIO(content), self.ids[row])
        if (path := self._file(row)) is None:
            reason = f"{printable(self.text(row))!r} is not a sound file"
            raise UnreadableSample(self.ids[row], reason)
        return read_sound(path, self.ids[row])

    def image(self, row: int) -> Image.Image:
        """Decode the picture of a row to mode `L` or `RGB`; raise UnreadableImage."""
        name = self.ids[row]
        if (content := self._value(row)["bytes"]) is not None:
            return decode(io.BytesIO(content), name, self.levels)
        if (path := self._file(row)) is None:
            raise UnreadableImage(name, f"{printable(self.text(row))!r} is not an image file")
        return decode(path, name, self.levels)

    @cached_property
    def levels(self) -> Levels:
        """The values of black and white, for pictures of more than 8 bits.

        They suit all rows; those of another table may be assigned.
        """
        return find_levels(self._deep_pictures())

    def _deep_pictures(self) -> Iterator[Path | io.BytesIO]:
        """Yield the pictures whose values may have more than 8 bits."""
        for row in range(len(self)):
            content = self._value(row)["bytes"]
            if content is not None:
                if may_be_deep(content[:SIGNATURE_BYTES]):
                    yield io.BytesIO(content)
            elif suffix_of(self.text(row)) in DEEP and (path := self._file(row)) is not None:
                yield path

    def image_file(self, row: int) -> Path | None:
        """Return the file of a picture, or None; raise UnreadableImage if it is damaged."""
        self.image(row)
        return self.file(row)

    def file(self, row: int) -> Path | None:
        """Return the file of a picture or sound, which is not decoded; None if there is none."""
        return None if self._value(row)["bytes"] is not None else self._file(row)

    def digest(self) -> str:
        """Compute the SHA-256 of the content of all rows that `media` shows."""
        digest = hashlib.sha256()
        for row in range(len(self)):
            content = self._value(row)["bytes"]
            if content is None:
                content = self.text(row).encode()
                with contextlib.suppress(OSError, ValueError):  # reported when it is decoded
                    path = self._file(row)
                    content += b"" if path is None else sha256_file(path).encode()
            digest.update(f"{len(content)} ".encode() + content)
        return digest.hexdigest()

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


class SampleTable(SampleDataset):
    """The pictures, texts or sounds in a column of a table, to be embedded by a teacher.

    Args:
        rows: the rows, whose `media` are the samples.
        split: name of the split.
        labels: int64 `[n]`, -1 where unknown; None if no row is labeled.
        class_names: names of the classes.
        left_out: parts of the data set that are not in the table.
    """

    def __init__(
        self,
        rows: Rows,
        split: str,
        labels: NDArray[np.int64] | None,
        class_names: tuple[str, ...] | None,
        left_out: Sequence[LeftOut] = (),
    ) -> None:
        self.rows = rows
        super().__init__(rows.name, split, rows.ids, labels, class_names, "")
        del self.fingerprint  # it is computed when it is first read
        self.left_out = [*rows.left_out, *left_out]

    @property
    def kind(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What the samples are: `image`, `text` or `audio`."""
        return self.rows.kind

    @cached_property
    def fingerprint(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """SHA-256 of the samples."""
        return self.rows.digest()

    @property
    def usage(self) -> Usage:
        """What of the table is used, and what is left out."""
        noun = "picture" if self.kind == "image" else NOUNS[self.kind]
        parts = [counted(len(self), noun), self.rows.used, n_classes(self.class_names)]
        return Usage("; ".join(filter(None, parts)), self.left_out)

    def file(self, i: int) -> Path | None:
        """Return the file of a sample, or None if the table holds it."""
        return self.rows.file(i)

    def sample(self, i: int) -> Any:
        """Read a sample as the teacher gets it; raise UnreadableSample."""
        return self.rows.sample(i)


class PictureTable(SampleTable, ImageDataset):
    """The pictures in a column of a table, with levels for those of more than 8 bits."""

    kind = "image"  # pyright: ignore[reportAssignmentType]

    @cached_property
    def fingerprint(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """SHA-256 of the pictures, and of unusual `levels`."""
        return with_levels(self.rows.digest(), self.levels)

    @property
    def levels(self) -> Levels:
        """The values of black and white, for pictures of more than 8 bits."""
        return self.rows.levels

    @property
    def usage(self) -> Usage:
        """What of the table is used with which levels, and what is left out."""
        used, left_out = super().usage.used, self.left_out
        return Usage("; ".join(filter(None, [used, str(self.levels)])), left_out)

    def image_file(self, i: int) -> Path | None:
        """Return the file of a picture, or None if the table holds it."""
        return self.rows.image_file(i)

    def image(self, i: int) -> Image.Image:
        """Decode a picture to mode `L` or `RGB`; raise UnreadableImage."""
        return self.rows.image(i)


def n_classes(class_names: Sequence[str] | None) -> str:
    """Return the number of classes with its noun; an empty string if there are no labels."""
    return "" if class_names is None else counted(len(class_names), "class", "classes")


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
                "expected texts, links, paths of files, or pictures"
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
    if not (is_struct or is_text(kind) or is_bytes(kind)):
        return None
    values = [v for v in readable_values(table.head.column(column)) if v]
    if is_bytes(kind):
        is_named = f".{column.lower()}" in EXTENSIONS  # img2dataset's jpg, png or webp
        return "image" if any(map(_is_image, values)) or (is_named and not values) else None
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


def _is_image(content: bytes) -> bool:
    """Return whether bytes begin as an image file does."""
    formats = formats_for(content[:SIGNATURE_BYTES])
    with contextlib.suppress(Exception), Image.open(io.BytesIO(content), formats=formats):
        return True
    return False


def _find_features(table: Table, column: str | None) -> str | None:
    """Return the column with the features: `column`, or one found by its name."""
    if column is not None:
        if column not in table.lists:
            raise InputError(
                f"COLUMN is {column!r}, whose type in {table.path} is {table.kinds[column]}; "
                "expected lists of numbers, pictures, texts or sound files"
            )
        return column
    labels = (*LABELS, *MAYBE_LABELS)
    lists = [name for name in table.lists if name.lower() not in labels and name not in IDS]
    known = [*FEATURES, *(lists if len(lists) == 1 else [])]
    return table.default or next((name for name in known if name in lists), None)


def _log_no_images(table: Table, column: str, reason: str) -> None:
    message = "%s: no images are shown, since the column %s %s"
    logger.info(message, table.path, column, reason)
