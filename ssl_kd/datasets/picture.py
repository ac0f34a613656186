"""Images that stand in a text: where they are read from, and what a model gets of them."""

from __future__ import annotations

import base64
import hashlib
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from PIL import Image
from torch import Tensor

from ssl_kd.datasets.decode import decode

_KEYS = ("image", "path", "url", "base64", "bytes", "image_url")


@dataclass(frozen=True, slots=True)
class Picture:
    """An image of a record.

    Attributes:
        source: its file, or the bytes of one.
        digest: SHA-256 of these bytes.
    """

    source: Path | bytes
    digest: str

    @classmethod
    def of(cls, source: Path | bytes) -> Picture:
        """An image, read once for its digest.

        Raises:
            OSError: the file cannot be read.
        """
        content = source if isinstance(source, bytes) else source.read_bytes()
        return cls(source, hashlib.sha256(content).hexdigest())

    def image(self, where: str) -> Image.Image:
        """The image in RGB, as a person would see it.

        Raises:
            UnreadableImage: it cannot be decoded; begins with `where`, and names its file.
        """
        if isinstance(self.source, bytes):
            return decode(io.BytesIO(self.source), where).convert("RGB")
        return decode(self.source, f"{where}, {self.source}").convert("RGB")


@dataclass(frozen=True)
class Pictures:
    """The images of a batch.

    Attributes:
        inputs: what a model gets beside the tokens, by the names of its arguments.
        of: a string for each row, which says what its images are; empty where it has none.
    """

    inputs: Mapping[str, Tensor]
    of: tuple[str, ...]


def picture_of(value: Any, folder: Path) -> Picture:
    """What a field of a record names as an image.

    A path, from the folder of the record's file on; a `file:` or `data:` URL; bytes; an image of
    PIL; or a mapping that holds one of these, as `datasets` and OpenAI's API write it.

    Raises:
        ValueError: it names none, one on the network, or a file that cannot be read; says so.
    """
    if isinstance(value, Mapping):
        inner = next((value[key] for key in ("bytes", *_KEYS) if value.get(key)), None)
        if inner is None:
            raise ValueError(f"an image holds {sorted(map(str, value))}; expected one of {_KEYS}")
        if value.get("base64"):
            inner = f"data:,;base64,{value['base64']}"
        return picture_of(inner, folder)
    if isinstance(value, Image.Image):
        buffer = io.BytesIO()
        value.save(buffer, "PNG")
        return Picture.of(buffer.getvalue())
    if isinstance(value, bytes):
        return Picture.of(value)
    if isinstance(value, str | os.PathLike):
        return _named(os.fspath(value), folder)
    raise ValueError(f"an image is {type(value).__name__}: expected a path, a URL, bytes or PIL's")


def _named(name: str, folder: Path) -> Picture:
    scheme = urlsplit(name[:16]).scheme
    if scheme in ("http", "https"):
        raise ValueError(f"the image {name[:80]} is on the network: fetch it, and name its file")
    try:
        if scheme == "data":
            _, mark, content = name.partition(";base64,")
            if not mark:
                raise ValueError("an image is a data: URL that is not base64")
            return Picture.of(base64.b64decode(content, validate=True))
        path = Path(unquote(urlsplit(name).path)) if scheme == "file" else Path(name).expanduser()
        return Picture.of(folder / path)
    except OSError as error:
        raise ValueError(f"the image {name} cannot be read: {error.strerror or error}") from error
