"""Decode any image file to eight bits of gray or RGB, as a viewer would show it."""

from __future__ import annotations

import io
import os
from collections.abc import Callable

import numpy as np
from PIL import ExifTags, Image, ImageOps

from ssl_kd.errors import UserError

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
"""Accepted formats; some others make PIL start a program (EPS: Ghostscript)."""
LARGEST = 512 << 20
"""Bytes that decoding one image may need; larger images count as unreadable."""
STRIP = 64
"""Rows converted at a time."""


class UnreadableImage(UserError, ValueError):
    """An image that cannot be decoded, with its `id` and the `reason`."""

    def __init__(self, id: str, reason: str) -> None:
        super().__init__(f"{id}: {reason}")
        self.id = id
        self.reason = reason


def decode(source: str | os.PathLike[str] | io.BytesIO, id: str | None = None) -> Image.Image:
    """Decode an image file as a viewer would show it.

    The first frame is used, EXIF rotation is applied, transparency is blended with white, sixteen
    bits are scaled (not clipped) to eight, CMYK and palettes become RGB.

    Args:
        source: the file, or its bytes.
        id: its name in errors; None for its path.

    Returns:
        An image in mode `L` (gray, 1-bit and 16-bit sources) or `RGB`.

    Raises:
        UnreadableImage: it cannot be decoded, is none of `FORMATS`, or needs more than `LARGEST`
            bytes.
    """
    try:
        with Image.open(source, formats=FORMATS) as image:
            _check_size(image)
            return _convert(image)
    except MemoryError:
        raise
    except Exception as error:  # PIL raises OSError, SyntaxError, struct.error and more
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        name = "bytes" if isinstance(source, io.BytesIO) else os.fsdecode(source)
        for shown in (repr(source), repr(name)):
            reason = reason.replace(f" {shown}", "")
        raise UnreadableImage(id or name, reason[:300]) from error


def decoded(open_image: Callable[[int], Image.Image | None], row: int) -> Image.Image | None:
    """Return `open_image(row)`, or None if the image is unreadable."""
    try:
        return open_image(row)
    except UnreadableImage:
        return None


def _check_size(image: Image.Image) -> None:
    """Raise ValueError if decoding would need more than `LARGEST` bytes at once.

    PIL stores three channels in four bytes, and a conversion needs source and result. WebP's
    library has three more copies, that of JPEG the coefficients of a progressive file. A JPEG that
    is too large is decoded at half its size.
    """
    deep = 2 if image.mode.startswith("I;16") else 4
    per_pixel = 1 if image.mode in ("1", "L", "P") else deep
    if image.mode not in ("L", "RGB") or image.has_transparency_data:
        per_pixel += _answer_bytes(image)
    per_pixel += 12 if image.format == "WEBP" else 3 if "progressive" in image.info else 0
    if image.format in ("JPEG", "MPO"):
        per_pixel = max(per_pixel, 2 * _answer_bytes(image) * (_orientation(image) != 1))
        if image.width * image.height * per_pixel > LARGEST:
            image.draft(image.mode, (image.width // 2, image.height // 2))
    _check_bytes(image, per_pixel)


def _check_bytes(image: Image.Image, per_pixel: int) -> None:
    if (size := image.width * image.height * per_pixel) > LARGEST:
        raise ValueError(
            f"{image.width} x {image.height} pixels ({image.mode}) take {size >> 20} MiB to "
            f"decode, more than {LARGEST >> 20}"
        )


def _answer_bytes(image: Image.Image) -> int:
    is_gray = image.mode in ("1", "L", "I", "F") or image.mode.startswith("I;16")
    return 1 if is_gray and not image.has_transparency_data else 4


def _orientation(image: Image.Image) -> int:
    return image.getexif().get(ExifTags.Base.Orientation, 1)


def _convert(image: Image.Image) -> Image.Image:
    image.load()
    orientation = _orientation(image)  # in a PNG it may follow the pixels
    if orientation != 1:
        _check_bytes(image, 2 * _answer_bytes(image))
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
    """Convert an image in strips, which takes a fraction of the memory of full copies."""
    changed = Image.new(mode, image.size)
    for top in range(0, image.height, STRIP):
        box = (0, top, image.width, min(top + STRIP, image.height))
        changed.paste(change(image.crop(box)), box)
    return changed


def _on_white(strip: Image.Image) -> Image.Image:
    strip = strip.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", strip.size, "white"), strip).convert("RGB")


def _scaled(image: Image.Image) -> Callable[[Image.Image], Image.Image]:
    """Return the conversion of gray values of more than eight bits to eight.

    Floats and 32-bit integers have no declared scale: it is the smallest of 1 (floats only), 255
    and 65535 that covers the values; beyond that, or below zero, they are stretched.
    """
    low, high = 0.0, 65535.0
    if not image.mode.startswith("I;16"):
        tops = range(0, image.height, STRIP)
        strips = (image.crop((0, t, image.width, min(t + STRIP, image.height))) for t in tops)
        extremes = [(float(x.min()), float(x.max())) for x in map(np.asarray, strips)]
        if not np.isfinite(extremes).all():  # a NaN is its own extreme
            raise ValueError("NaN or infinity among the pixels")
        low, high = min(e[0] for e in extremes), max(e[1] for e in extremes)
        if low >= 0 and high <= 65535:
            low, high = 0.0, min(s for s in (1.0, 255.0, 65535.0)[image.mode == "I" :] if s >= high)
    span = high - low or 1.0

    def eight_bits(strip: Image.Image) -> Image.Image:
        values = np.asarray(strip).astype(np.float64)
        return Image.fromarray(np.rint((values - low) * (255 / span)).astype(np.uint8))

    return eight_bits
