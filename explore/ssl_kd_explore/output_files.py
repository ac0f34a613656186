"""Write output folders atomically, and make file names that are valid on any system."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ssl_kd.core.errors import InputError

LONGEST = 150  # maximum bytes of a name; most systems allow 255
_UNSAFE = re.compile(r'[\\/:*?"<>|\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]')
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


def refuse_existing(path: Path, remedy: str = "move it away") -> None:
    """Raise InputError if a file, folder or (broken) link exists at `path`."""
    if os.path.lexists(path):
        raise InputError(f"{path} exists: choose another path, or {remedy}")


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder, then rename it to `path`; on an error, remove it instead."""
    from ssl_kd.core.files import sync_folder  # imports torch

    refuse_existing(path)
    temporary = path.absolute().with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        refuse_existing(path)
        os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(path.absolute().parent)


def write_list(path: Path, items: Iterable[Any], begin: str = "[", end: str = "]") -> None:
    """Write a JSON list, one item per line, without keeping all items in memory."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(begin)
        for number, item in enumerate(items):
            file.write(("," if number else "") + "\n" + json.dumps(item, allow_nan=False))
        file.write(f"\n{end}\n")


def safe_name(text: str) -> str:
    r"""Turn any text into a file name of at most 150 bytes, valid on any system; keep the suffix.

    >>> safe_name("a/b\n..:c.jpg"), safe_name(".."), safe_name("NUL.txt")
    ('a_b_.._c.jpg', '_', '_NUL.txt')
    """
    name = _UNSAFE.sub("_", unicodedata.normalize("NFC", text)).strip(" ").rstrip(". ")
    name = f"_{name}" if not name.strip(".") or _RESERVED.fullmatch(name) else name
    stem, suffix = os.path.splitext(name)
    if len(suffix.encode()) > 11:
        stem, suffix = name, ""
    return stem.encode()[: LONGEST - len(suffix.encode())].decode(errors="ignore") + suffix


def unique_name(name: str, taken: set[str]) -> str:
    """Number a name that is taken, ignoring case, as `A (2).png`, and add it to those taken."""
    stem, suffix = os.path.splitext(name)
    unique = name
    number = 1
    while unique.casefold() in taken:
        number += 1
        unique = f"{stem} ({number}){suffix}"
    taken.add(unique.casefold())
    return unique
