"""Any image file as eight bits of grey or colour, the way a person sees it."""

from __future__ import annotations

import io
import os

import numpy as np
from PIL import Image, ImageOps

from ssl_kd.errors import UserError

__all__ = ["UnreadableImage", "decode"]

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
"""What is decoded; some of PIL's other formats start a program, as EPS starts Ghostscript."""
LARGEST = 512 << 20
"""Bytes of one image, decoded, above which it counts as unreadable."""


class UnreadableImage(UserError, ValueError):
    """An image that cannot be decoded; `id` names it, `reason` says why in a few words."""

    def __init__(self, id: str, reason: str) -> None:
        super().__init__(f"{id}: {reason}")
        self.id = id
        self.reason = reason


def _eight_bits(values: np.ndarray, full_scale: float | None) -> Image.Image:
    """Grey values of more than eight bits as `L`.

    A file without a declared scale (floats, 32-bit integers) has the smallest of 1 (floats only),
    255 and 65535 that holds its values; beyond that, or below zero, it is stretched.
    """
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise ValueError("NaN or infinity among the pixels")
    low, high = 0.0, float(values.max())
    if full_scale is None and values.min() >= 0 and high <= 65535:
        full_scale = 255.0 if high <= 255 else 65535.0
    if full_scale is None:
        low = float(values.min())
        full_scale = high - low or 1.0
    grey = np.empty(values.shape, np.uint8)
    for row, of_file in zip(grey, values, strict=True):  # float64 of all would be eight times this
        row[:] = np.rint((of_file.astype(np.float64) - low) * (255 / full_scale))
    return Image.fromarray(grey)


def decode(source: str | os.PathLike[str] | io.BytesIO, id: str | None = None) -> Image.Image:
    """Read an image file as a person would see it.

    The first frame counts, EXIF rotation is applied, transparency is laid on white, sixteen bits
    become eight by scale (not by clipping), CMYK and palettes become RGB.

    Args:
        source: the file, or its bytes.
        id: what to call it in errors; its path when left out.

    Returns:
        An image in mode `L` (grey, 1-bit and 16-bit sources) or `RGB`.

    Raises:
        UnreadableImage: for whatever cannot be decoded, is none of `FORMATS`, or would take more
            than `LARGEST` bytes.
    """
    try:
        with Image.open(source, formats=FORMATS) as image:
            _check_size(image)
            return _as_seen(image)
    except MemoryError:
        raise
    except Exception as error:  # PIL raises OSError, SyntaxError, struct.error and more
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        name = "bytes" if isinstance(source, io.BytesIO) else os.fsdecode(source)
        for shown in (repr(source), repr(name)):
            reason = reason.replace(f" {shown}", "")
        raise UnreadableImage(id or name, reason[:300]) from error


def _check_size(image: Image.Image) -> None:
    # As PIL holds it: three channels take four bytes, and what is transparent becomes RGBA.
    deep = 2 if image.mode.startswith("I;16") else 4
    plain = image.mode in ("1", "L", "P") and not image.has_transparency_data
    size = image.width * image.height * (1 if plain else deep)
    if size > LARGEST:
        raise ValueError(
            f"{image.width} x {image.height} pixels ({image.mode}) take {size >> 20} MiB decoded, "
            f"more than {LARGEST >> 20}"
        )


def _as_seen(image: Image.Image) -> Image.Image:
    image.load()
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode.startswith("I;16"):
        return _eight_bits(np.asarray(image), 65535.0)
    if image.mode == "F":
        values = np.asarray(image)
        unit = values.size and values.min() >= 0 and values.max() <= 1
        return _eight_bits(values, 1.0 if unit else None)
    if image.mode == "I":
        return _eight_bits(np.asarray(image), None)
    if image.has_transparency_data:
        image = image if image.mode == "RGBA" else image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    if image.mode in ("1", "L"):
        return image.convert("L")
    return image.convert("RGB")
