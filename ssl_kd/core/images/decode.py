"""Decode image files to 8-bit gray or RGB, as a viewer would show them."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

import numpy as np
from PIL import ExifTags, Image, ImageFile, ImageOps, TiffImagePlugin, UnidentifiedImageError

from ssl_kd.core.errors import UnreadableSample
from ssl_kd.core.images.formats import SIGNATURE_BYTES, formats_for, special_format, way_to_read
from ssl_kd.core.images.levels import NATURAL_WHITES, SIXTEEN_BITS, Extremes, Levels

LARGEST = 512 << 20
"""Bytes of memory that decoding an image may need; larger images are unreadable."""
FILE_BYTES = "ssl_kd.bytes"
"""Key in `info` of a decoded image: the size of its file in bytes."""
_COPIES = {"WEBP": 12, "AVIF": 8, "HEIF": 8, "JXL": 8, "JPEG2000": 18}
"""Format -> bytes per pixel that its library holds beside the image of Pillow."""
BATCH = 256
"""Images whose values are read at once, to find those of black and white."""
MAX_SAMPLE_VALUE = 281  # a tag of TIFF
_OTHER_BYTES = {
    f"{mode};16{order}": f"{mode};16{other}"
    for mode in ("RGB", "RGBA")
    for order, other in (("B", "L"), ("L", "B"), ("N", "B" if sys.byteorder == "little" else "L"))
}
"""How a file stores colors of 16 bits -> the other byte order."""
STRIP = 64
"""Rows of an image to convert at once."""


class UnreadableImage(UnreadableSample):
    """Raised if an image cannot be decoded."""


class _NotDecoded(ValueError):
    """An intact image that is not decoded."""


def decode(
    source: str | os.PathLike[str] | io.BytesIO,
    id: str | None = None,
    levels: Levels | None = None,
) -> Image.Image:
    """Decode an image file, or its content, to mode `L` or `RGB` as a viewer would show it.

    The first frame is used, the EXIF rotation is applied, transparent pixels are blended with
    white, values of more than 8 bits are scaled to 8 bits, and CMYK and palettes become RGB. A file
    and its content in memory give the same image.

    White is the largest value that the file can hold, or that it declares (BitsPerSample and
    MaxSampleValue of TIFF). Floats and 32-bit integers have no such value: the smallest of 1
    (floats only), 255 and 65535 that covers them is used; others are stretched to the full range.

    Args:
        source: path of a file, or its content.
        id: name of the image in messages; by default its path.
        levels: values of black and white of the data set that the image belongs to; values beyond
            them are clipped. None: those of the file alone.

    Raises:
        UnreadableImage: the image cannot be decoded.
    """
    name = id or ("bytes" if isinstance(source, io.BytesIO) else os.fsdecode(source))
    with _opened(source, name) as (file, image):
        _check_size(image)
        converted = _convert(image, file, levels or Levels())
        is_content = isinstance(source, io.BytesIO)
        n_bytes = source.getbuffer().nbytes if is_content else os.path.getsize(source)
    converted.info[FILE_BYTES] = n_bytes
    return converted


def extremes(
    source: str | os.PathLike[str] | io.BytesIO, *, needs_sixteen_bits: bool = True
) -> Extremes | None:
    """Return the extremes of the values of an image with more than 8 bits; None for another image.

    If the file declares its largest value, its pixels are not read. Transparency is left out. None
    also stands for files of 16 bits if these are not needed, since others use all their bits.

    Raises:
        UnreadableImage: the image cannot be decoded.
    """
    name = "bytes" if isinstance(source, io.BytesIO) else os.fsdecode(source)
    with _opened(source, name) as (file, image):
        is_color, is_float = _raw_mode(image) is not None, image.mode == "F"
        if not (is_color or _is_deep(image)):
            return None
        container = SIXTEEN_BITS[1] if is_color or image.mode.startswith("I;16") else math.inf
        if container == SIXTEEN_BITS[1] and not needs_sixteen_bits:
            return None
        if (white := _declared_white(image)) is not None:
            return Extremes(0.0, white, is_float, container)
        _check_size(image)
        values = _deep_colors(image, file) if is_color else None
        strips = _strips(image) if values is None else [values[..., :3]]
        low, high = _extremes(strips)
        return Extremes(low, high, is_float, container)


def find_levels(sources: Iterable[str | os.PathLike[str] | io.BytesIO]) -> Levels:
    """Return the values of black and white that suit all images of a data set."""
    needs_sixteen_bits = True

    def extremes_of(source: str | os.PathLike[str] | io.BytesIO) -> Extremes | None:
        nonlocal needs_sixteen_bits
        try:
            image = extremes(source, needs_sixteen_bits=needs_sixteen_bits)
        except UnreadableImage:  # reported when the image is decoded
            return None
        if image is not None and image.uses_all_bits:
            needs_sixteen_bits = False
        return image

    images = []
    with ThreadPoolExecutor() as pool:
        for some in _batches(sources):
            images += [image for image in pool.map(extremes_of, some) if image is not None]
    return Levels.of(images)


def _batches(sources: Iterable[Any]) -> Iterator[list[Any]]:
    remaining = iter(sources)
    while batch := list(itertools.islice(remaining, BATCH)):
        yield batch


@contextlib.contextmanager
def _opened(
    source: str | os.PathLike[str] | io.BytesIO, name: str
) -> Iterator[tuple[IO[bytes], ImageFile.ImageFile]]:
    """Open a file, or its content, and its image; every error becomes UnreadableImage."""
    head = b""
    try:
        # Pillow gets an open file: it maps a path into memory, and then reads the rows of a TIFF
        # that is stored turned with the width that it has after the turn.
        is_content = isinstance(source, io.BytesIO)
        with io.BytesIO(source.getvalue()) if is_content else open(source, "rb") as file:
            head = file.read(SIGNATURE_BYTES)
            with Image.open(file, formats=formats_for(head)) as image:
                yield file, image
    except MemoryError:
        raise
    except _NotDecoded as error:
        raise UnreadableImage(name, str(error)) from error
    except Exception as error:  # PIL raises OSError, SyntaxError, struct.error and more
        raise _unreadable(name, head, error) from error


def decoded(open_image: Callable[[int], Image.Image | None], row: int) -> Image.Image | None:
    """Call `open_image(row)`, and return None if it raises UnreadableImage."""
    try:
        return open_image(row)
    except UnreadableImage:
        return None


def _unreadable(name: str, head: bytes, error: Exception) -> UnreadableImage:
    """Return the error for an image that Pillow does not read, with the reason in one line."""
    message = error.strerror if isinstance(error, OSError) and error.errno else str(error)
    if isinstance(error, UnidentifiedImageError):
        message = "cannot identify image file"
    reason = " ".join(f"{type(error).__name__}: {message}".split())[:300]
    is_damaged = not (
        isinstance(error, Image.DecompressionBombError | ImportError)
        or (isinstance(error, OSError) and error.errno is not None)
        or "not available" in reason  # a decoder that Pillow was built without
    )
    suffix = special_format(head)
    if is_damaged and suffix is not None and isinstance(error, UnidentifiedImageError):
        way = way_to_read(suffix) or "convert them to 8-bit PNG"
        return UnreadableImage(name, f"{reason}: {suffix} files like this one are not read; {way}")
    return UnreadableImage(name, reason, is_damaged=is_damaged)


def _check_size(image: ImageFile.ImageFile) -> None:
    """Raise _NotDecoded if decoding would need more than `LARGEST` bytes at once.

    PIL stores up to four bytes per pixel, and a conversion needs source and result. The libraries
    of some formats hold more copies, and that of JPEG the coefficients of a progressive file. A
    JPEG that is too large is decoded at half its size.
    """
    per_pixel = 8 + _COPIES.get(image.format or "", 3 if "progressive" in image.info else 0)
    per_pixel += 0 if _raw_mode(image) is None else 20
    if image.format in ("JPEG", "MPO") and image.width * image.height * per_pixel > LARGEST:
        image.draft(image.mode, (image.width // 2, image.height // 2))
    if (size := image.width * image.height * per_pixel) > LARGEST:
        raise _NotDecoded(
            f"decoding {image.width} x {image.height} pixels ({image.mode}) takes {size >> 20} "
            f"MiB; expected at most {LARGEST >> 20}"
        )


def _convert(image: ImageFile.ImageFile, file: IO[bytes], levels: Levels) -> Image.Image:
    seen: Image.Image = image
    if levels.integers is not None and _raw_mode(image) is not None:
        seen = _scaled_colors(_deep_colors(image, file), levels.integers)
    image.load()
    # A PNG may store it after the pixels.
    orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    if seen.has_transparency_data and not _is_deep(seen):
        converted = _in_strips(seen, "RGB", _on_white)
    elif _is_deep(seen):
        converted = _in_strips(seen, "L", _scaled(*_range(image, levels)))
    elif seen.mode in ("L", "RGB"):
        converted = seen
    else:
        mode = "L" if seen.mode == "1" else "RGB"
        converted = _in_strips(seen, mode, lambda strip: strip.convert(mode))
    if converted is not image:
        image.close()
        converted.getexif()[ExifTags.Base.Orientation] = orientation
    ImageOps.exif_transpose(converted, in_place=True)
    return converted


def _is_deep(image: Image.Image) -> bool:
    """Return whether an image is gray with more than 8 bits."""
    return image.mode in ("I", "F") or image.mode.startswith("I;16")


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


def _scaled(low: float, high: float) -> Callable[[Image.Image], Image.Image]:
    """Return a function that converts gray values of more than 8 bits to 8 bits."""

    def eight_bits(strip: Image.Image) -> Image.Image:
        return Image.fromarray(_to_eight_bits(np.asarray(strip), low, high))

    return eight_bits


def _to_eight_bits(values: np.ndarray, low: float, high: float) -> np.ndarray:
    scale = 255 / (high - low or 1.0)
    return np.rint(((values.astype(np.float64) - low) * scale).clip(0, 255)).astype(np.uint8)


def _range(image: Image.Image, levels: Levels) -> tuple[float, float]:
    """Return the values of black and white of a gray image."""
    pair = levels.floats if image.mode == "F" else levels.integers
    if pair is not None:
        return pair
    if (white := _declared_white(image)) is not None:
        return 0.0, white
    if image.mode.startswith("I;16"):
        return SIXTEEN_BITS
    low, high = _extremes(_strips(image))
    if low < 0 or high > SIXTEEN_BITS[1]:
        return low, high
    whites = NATURAL_WHITES if image.mode == "F" else NATURAL_WHITES[1:]
    return 0.0, min(white for white in whites if white >= high)


def _declared_white(image: Image.Image) -> float | None:
    """Return the largest value of a TIFF of integers by its tags, if it has fewer than 16 bits."""
    tags = getattr(image, "tag_v2", None)
    if tags is None or image.mode == "F":
        return None
    bits = max(tags.get(TiffImagePlugin.BITSPERSAMPLE, (0,)))
    if 8 < bits < 16:
        return 2.0**bits - 1
    largest = tags.get(MAX_SAMPLE_VALUE, 0)
    white = float(max(largest) if isinstance(largest, tuple) else largest)
    return white if 255 <= white < SIXTEEN_BITS[1] else None


def _strips(image: Image.Image) -> Iterator[np.ndarray]:
    """Yield the values of an image strip by strip."""
    for top in range(0, image.height, STRIP):
        yield np.asarray(image.crop((0, top, image.width, min(top + STRIP, image.height))))


def _extremes(strips: Iterable[np.ndarray]) -> tuple[float, float]:
    """Return the smallest and the largest value; raise _NotDecoded for NaN and infinity."""
    pairs = [(float(strip.min()), float(strip.max())) for strip in strips]
    if not np.isfinite(pairs).all():  # a NaN is its own extreme
        raise _NotDecoded("the pixels contain NaN or infinity; expected finite values")
    return min(pair[0] for pair in pairs), max(pair[1] for pair in pairs)


def _raw_mode(image: ImageFile.ImageFile) -> str | None:
    """Return how the file stores colors of 16 bits, such as `RGB;16B`; None for other images."""
    modes = [tile[3] if isinstance(tile[3], str) else (tile[3] or [""])[0] for tile in image.tile]
    return modes[0] if modes and modes[0] in _OTHER_BYTES else None


def _deep_colors(image: ImageFile.ImageFile, file: IO[bytes]) -> np.ndarray:
    """Return colors of 16 bits, uint16 `[h, w, 3 or 4]`.

    Pillow keeps the high byte of each value only. A second reading in the other byte order gives
    the low bytes.
    """
    other = _OTHER_BYTES[_raw_mode(image) or ""]
    with Image.open(file, formats=(image.format or "",)) as low:
        low.tile = [_with_raw_mode(tile, other) for tile in low.tile]
        low_bytes = np.asarray(low.convert(low.mode), np.uint16)
    image.load()
    return np.asarray(image, np.uint16) * 256 + low_bytes


def _with_raw_mode(tile: Any, raw_mode: str) -> Any:
    args = raw_mode if isinstance(tile[3], str) else (raw_mode, *tile[3][1:])
    # Tiles are plain tuples in older versions of Pillow.
    return tile._replace(args=args) if hasattr(tile, "_replace") else (*tile[:3], args)


def _scaled_colors(colors: np.ndarray, levels: tuple[float, float]) -> Image.Image:
    """Scale colors of 16 bits to 8 bits; transparency uses all 16."""
    eight_bits = (colors >> 8).astype(np.uint8)
    for top in range(0, len(colors), STRIP):
        strip = slice(top, top + STRIP)
        eight_bits[strip, :, :3] = _to_eight_bits(colors[strip, :, :3], *levels)
    return Image.fromarray(eight_bits)
