"""Images in a text: their sources, and the inputs of a model."""

from __future__ import annotations

import base64
import hashlib
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from ssl_kd.datasets.decode import decode

_KEYS = ("bytes", "image", "path", "url", "image_url")


@dataclass(frozen=True, slots=True)
class Picture:
    """An image of a record.

    Attributes:
        source: its file, or the bytes of a file.
        digest: SHA-256 of these bytes.
    """

    source: Path | bytes
    digest: str

    @classmethod
    def of(cls, source: Path | bytes) -> Picture:
        """Create an image, whose file is read once for its digest; raise OSError."""
        content = source if isinstance(source, bytes) else source.read_bytes()
        return cls(source, hashlib.sha256(content).hexdigest())

    def image(self, where: str) -> Image.Image:
        """Decode to RGB; raise UnreadableImage, which begins with `where` and names the file."""
        if isinstance(self.source, bytes):
            return decode(io.BytesIO(self.source), where).convert("RGB")
        return decode(self.source, f"{where}, {self.source}").convert("RGB")


@dataclass(frozen=True)
class Pictures:
    """The images of a batch.

    Attributes:
        inputs: inputs of a model in addition to the tokens, by argument name.
        of: the digests of each row's images, joined by spaces.
    """

    inputs: Mapping[str, Tensor]
    of: tuple[str, ...]


def picture_of(value: Any, folder: Path) -> Picture:
    """Read an image from a field of a record.

    Accepts a path (relative to the folder of the record's file), a `data:` URL, bytes, an image of
    PIL, or a mapping that contains one of these, as in `datasets` and OpenAI's API.

    Raises:
        ValueError: it is none of these, on the network, or a file that cannot be read.
    """
    if isinstance(value, Mapping):
        inner = next((value[key] for key in _KEYS if value.get(key)), None)
        if inner is None:
            raise ValueError(f"an image has {sorted(map(str, value))}; expected one of {_KEYS}")
        return picture_of(inner, folder)
    if isinstance(value, Image.Image):
        buffer = io.BytesIO()
        value.save(buffer, "PNG")
        return Picture.of(buffer.getvalue())
    if isinstance(value, bytes):
        return Picture.of(value)
    if not isinstance(value, str | os.PathLike):
        raise ValueError(
            f"an image is {type(value).__name__}: expected a path, URL, bytes or PIL's"
        )
    name = os.fspath(value)
    if name.startswith(("http://", "https://")):
        raise ValueError(f"the image {name[:80]} is on the network: download it, and give its file")
    try:
        if name.startswith("data:"):
            _, mark, content = name.partition(";base64,")
            if not mark:
                raise ValueError("an image is a data: URL that is not base64")
            return Picture.of(base64.b64decode(content, validate=True))
        return Picture.of(folder / Path(name).expanduser())
    except OSError as error:
        raise ValueError(f"the image {name} cannot be read: {error.strerror or error}") from error
