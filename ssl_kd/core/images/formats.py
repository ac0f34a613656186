"""List the formats of image files: those that Pillow reads here, and what reads the others."""

from __future__ import annotations

import importlib
import os
from importlib.util import find_spec
from typing import NamedTuple

from PIL import features

_SUFFIXES = {
    "JPEG": ".jpg .jpeg .jpe .jfif .mpo",
    "PNG": ".png .apng",
    "BMP": ".bmp .dib",
    "GIF": ".gif",
    "WEBP": ".webp",
    "TIFF": ".tif .tiff",
    "PPM": ".ppm .pgm .pbm .pnm .pfm",
    "JPEG2000": ".jp2 .j2k .j2c .jpc .jpf .jpx",
    "AVIF": ".avif .avifs",
}
"""Format of Pillow -> suffixes. Formats that start external programs, such as EPS, and those that
cannot be told from other files, such as TGA, are left out."""
_OPTIONAL = {"WEBP": "webp", "JPEG2000": "jpg_2000", "AVIF": "avif"}
"""Format -> feature of Pillow without which it is not read."""


class Plugin(NamedTuple):
    """A package that adds a format to Pillow; it is used if it is installed."""

    format: str
    suffixes: str  # separated by spaces
    package: str
    module: str
    register: str | None = None  # function of the module to call; None: importing it is enough


PLUGINS = (
    Plugin("HEIF", ".heic .heics .heif .heifs .hif", "pillow-heif", "pillow_heif",
           "register_heif_opener"),
    Plugin("JXL", ".jxl", "pillow-jxl-plugin", "pillow_jxl"),
)  # fmt: skip
_INSTALLED = [plugin for plugin in PLUGINS if find_spec(plugin.module) is not None]

FORMATS = tuple(
    format
    for format in _SUFFIXES
    if format not in _OPTIONAL or _OPTIONAL[format] in features.get_supported()
)
"""Formats that Pillow reads here without a plugin."""
EXTENSIONS = frozenset(
    [suffix for format in FORMATS for suffix in _SUFFIXES[format].split()]
    + [suffix for plugin in _INSTALLED for suffix in plugin.suffixes.split()]
)
"""Suffixes of the image files that can be read here, in lower case."""

DEEP = frozenset(
    suffix for format in ("PNG", "TIFF", "PPM", "JPEG2000") for suffix in _SUFFIXES[format].split()
)
"""Suffixes of the files whose values may have more than 8 bits."""

_UNREAD = {
    **{plugin.suffixes: f"install {plugin.package} to read them" for plugin in PLUGINS},
    **{_SUFFIXES[format]: "install a newer Pillow to read them" for format in _OPTIONAL},
    ".cr2 .cr3 .nef .arw .dng .raf .orf .rw2 .pef .srw": "convert them to TIFF, with rawpy",
    ".dcm .dicom": "convert them to PNG, with pydicom",
    ".nii .nrrd .mha .mhd": "convert them to PNG, with SimpleITK",
    ".svs .ndpi .mrxs .scn": "cut them into tiles, with openslide-python",
    ".czi .nd2 .lif .lsm .oib .oif .vsi": "convert them to TIFF, with bioio",
    ".fit .fits .fts": "convert them to TIFF, with astropy",
    ".exr .hdr": "convert them to TIFF, with OpenEXR or imageio",
    ".svg .svgz": "convert them to PNG, with cairosvg",
    ".pdf .ps .eps .ai": "convert them to PNG, with pdf2image",
    ".psd .psb .xcf .tga .icb .vda .vst .dds .ico .icns .cur .pcx .sgi .rgb .bw .ras .xbm .xpm "
    ".qoi .wmf .emf .msp .djvu .pict .pct": "convert them to PNG, with ImageMagick",
    ".mp4 .mov .avi .mkv .webm .m4v .mpg .mpeg .wmv": "extract frames as images, with ffmpeg",
}  # fmt: skip
_HINTS = {
    suffix: hint
    for suffixes, hint in _UNREAD.items()
    for suffix in suffixes.split()
    if suffix not in EXTENSIONS
}

_SIGNATURES = {
    ".tif": (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),
    ".webp": (b"RIFF",),
    ".jp2": (b"\0\0\0\x0cjP  \r\n\x87\n", b"\xff\x4f\xff\x51"),
    ".jxl": (b"\xff\x0a", b"\0\0\0\x0cJXL \r\n\x87\n"),
    ".psd": (b"8BPS",),
    ".eps": (b"%!PS", b"\xc5\xd0\xd3\xc6"),
    ".pdf": (b"%PDF",),
    ".svg": (b"<svg", b"<?xml"),
    ".dds": (b"DDS ",),
    ".qoi": (b"qoif",),
    ".ico": (b"\0\0\1\0", b"\0\0\2\0"),
    ".exr": (b"v/1\1",),
    ".hdr": (b"#?RADIANCE", b"#?RGBE"),
    ".fits": (b"SIMPLE  =",),
}
"""First bytes of the formats that Pillow does not read, or does not read every file of."""
_AVIF_BRANDS = (b"avif", b"avis")
_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
SIGNATURE_BYTES = 16


def suffix_of(name: str) -> str:
    """Return the suffix of a file name in lower case, such as `.jpg`; empty if it has none."""
    return os.path.splitext(name)[1].lower()


def way_to_read(suffix: str) -> str | None:
    """Return how to use pictures with a suffix that is not read here; None for other files."""
    return _HINTS.get(suffix)


def special_format(head: bytes) -> str | None:
    """Return the suffix of a file's format by its first bytes, if Pillow may be unable to read it.

    If it is None and Pillow cannot read the file, then the file is damaged.
    """
    if head[4:8] == b"ftyp":
        brand = head[8:12]
        return ".heic" if brand in _HEIF_BRANDS else ".avif" if brand in _AVIF_BRANDS else None
    return next((name for name, starts in _SIGNATURES.items() if head.startswith(starts)), None)


def may_be_deep(head: bytes) -> bool:
    """Return whether the values of an image may have more than 8 bits, by its first bytes."""
    return special_format(head) in (".tif", ".jp2") or head.startswith((b"\x89PNG", b"P"))


def formats_for(head: bytes) -> tuple[str, ...]:
    """Return the formats to try on a file by its first bytes; import the plugin that reads it."""
    suffix = special_format(head)
    for plugin in _INSTALLED:
        if suffix in plugin.suffixes.split():
            module = importlib.import_module(plugin.module)
            if plugin.register is not None:
                getattr(module, plugin.register)()
            return (*FORMATS, plugin.format)
    return FORMATS
