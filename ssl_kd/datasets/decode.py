"""Decode image files to 8-bit gray or RGB, as a viewer would show them."""

from __future__ import annotations

import io
import os
from collections.abc import Callable

import numpy as np
from PIL import ExifTags, Image, ImageOps

from ssl_kd.errors import UserError

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
"""Accepted formats. For some others PIL starts external programs, such as Ghostscript for EPS."""
LARGEST = 512 << 20
"""Bytes of memory that decoding an image may need; larger images are unreadable."""
FILE_BYTES = "ssl_kd.bytes"
"""Key in `info` of a decoded image: the size of its file in bytes."""
STRIP = 64
"""Rows of an image to convert at once."""


class UnreadableImage(UserError, ValueError):
    """Raised if an image cannot be decoded; `id` names the image and `reason` says why."""

    def __init__(self, id: str, reason: str) -> None:
        super().__init__(f"{id}: {reason}")
        self.id = id
        self.reason = reason


def decode(source: str | os.PathLike[str] | io.BytesIO, id: str | None = None) -> Image.Image:
    """Decode an image file, or its content, to mode `L` or `RGB` as a viewer would show it.

    The first frame is used, the EXIF rotation is applied, transparent pixels are blended with
    white, 16-bit values are scaled (not clipped) to 8 bits, and CMYK and palettes become RGB.
    UnreadableImage names the image by `id`, or by its path.
    """
    try:
        with Image.open(source, formats=FORMATS) as image:
            _check_size(image)
            converted = _convert(image)
        is_file = not isinstance(source, io.BytesIO)
        size = os.path.getsize(source) if is_file else source.getbuffer().nbytes
        converted.info[FILE_BYTES] = size
        return converted
    except MemoryError:
        raise
    except Exception as error:  # PIL raises OSError, SyntaxError, struct.error and more
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        name = "bytes" if isinstance(source, io.BytesIO) else os.fsdecode(source)
        for shown in (repr(source), repr(name)):
            reason = reason.replace(f" {shown}", "")
        raise UnreadableImage(id or name, reason[:300]) from error


def decoded(open_image: Callable[[int], Image.Image | None], row: int) -> Image.Image | None:
    """Call `open_image(row)`, and return None if it raises UnreadableImage."""
    try:
        return open_image(row)
    except UnreadableImage:
        return None


def _check_size(image: Image.Image) -> None:
    """Raise ValueError if decoding would need more than `LARGEST` bytes at once.

    PIL stores up to four bytes per pixel, and a conversion needs source and result. The library of
    WebP holds three more copies, that of JPEG the coefficients of a progressive file. A JPEG that
    is too large is decoded at half its size.
    """
    per_pixel = 8 + (12 if image.format == "WEBP" else 3 if "progressive" in image.info else 0)
    if image.format in ("JPEG", "MPO") and image.width * image.height * per_pixel > LARGEST:
        image.draft(image.mode, (image.width // 2, image.height // 2))
    if (size := image.width * image.height * per_pixel) > LARGEST:
        raise ValueError(
            f"decoding {image.width} x {image.height} pixels ({image.mode}) takes {size >> 20} "
            f"MiB; expected at most {LARGEST >> 20}"
        )


def _convert(image: Image.Image) -> Image.Image:
    image.load()
    # A PNG may store it after the pixels.
    orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    deep = image.mode in ("I", "F") or image.mode.startswith("I;16")
    if image.has_transparency_data and not deep:
        converted = _in_strips(image, "RGB", _on_white)
    elif deep:
        converted = _in_strips(image, "L", _scaled(image))
    elif image.mode in ("L", "RGB"):
        converted = image
    else:
        mode = "L" if image.mode == "1" else "RGB"
        converted = _in_strips(image, mode, lambda strip: strip.convert(mode))
    if converted is not image:
        image.close()
        converted.getexif()[ExifTags.Base.Orientation] = orientation
    ImageOps.exif_transpose(converted, in_place=True)
    return converted


def _in_strips(
    image: Image.Image, mode: str, change: Callable[[Image.Image], Image.Image]
) -> Image.Image:
    """Convert an image strip by strip, which needs less memory than converting it at once."""
    changed = Image.new(mode, image.size)
    for top in range(0, image.height, STRIP):
        box = (0, top, image.width, min(top + STRIP, image.height))
        changed.paste(change(image.crop(box)), box)
    return changed


def _on_white(strip: Image.Image) -> Image.Image:
    strip = strip.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", strip.size, "white"), strip).convert("RGB")


def _scaled(image: Image.Image) -> Callable[[Image.Image], Image.Image]:
    """Return a function that converts gray values of more than 8 bits to 8 bits.

    Floats and 32-bit integers have no declared scale. The smallest of 1 (floats only), 255 and
    65535 that covers the values is used; other values are stretched to the full range.
    """
    low, high = 0.0, 65535.0
    if not image.mode.startswith("I;16"):
        tops = range(0, image.height, STRIP)
        strips = (image.crop((0, t, image.width, min(t + STRIP, image.height))) for t in tops)
        extremes = [(float(x.min()), float(x.max())) for x in map(np.asarray, strips)]
        if not np.isfinite(extremes).all():  # a NaN is its own extreme
            raise ValueError("the pixels contain NaN or infinity; expected finite values")
        low, high = min(e[0] for e in extremes), max(e[1] for e in extremes)
        if low >= 0 and high <= 65535:
            low, high = 0.0, min(s for s in (1.0, 255.0, 65535.0)[image.mode == "I" :] if s >= high)
    span = high - low or 1.0

    def eight_bits(strip: Image.Image) -> Image.Image:
        values = np.asarray(strip).astype(np.float64)
        return Image.fromarray(np.rint((values - low) * (255 / span)).astype(np.uint8))

    return eight_bits
