"""Compute digests of the content of arrays and of files."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ssl_kd.core.files import release_pages
from ssl_kd.core.files.state import DIGEST_BYTES, FileState

logger = logging.getLogger(__name__)

LARGE = 256 << 20
"""Size in bytes above which a message is logged before reading all data for the fingerprint."""
BLOCK = 1 << 20
"""Number of bytes to read at once."""


def digest_array(array: np.ndarray, labels: np.ndarray | None = None) -> str:
    """Compute the SHA-256 of an array (shape, dtype and values) and of its labels."""
    digest = hashlib.sha256(f"{array.dtype}{array.shape}".encode())
    _log_if_large(array.nbytes)
    rows = max(1, BLOCK * len(array) // max(array.nbytes, 1))
    for start in range(0, len(array), rows):
        digest.update(np.ascontiguousarray(array[start : start + rows]).data)
        release_pages(array)
    if labels is not None:
        digest.update(np.ascontiguousarray(labels).data)
    return digest.hexdigest()


def digest_files(
    root: Path, paths: Sequence[str], *, follow_links: bool = False
) -> tuple[str, list[tuple[FileState, bytes] | None]]:
    """Compute the SHA-256 of the names, sizes and contents of files, ignoring their times.

    Also return the state of each file, and a digest of its content alone; None for an entry that is
    not a readable file.
    """
    digest = hashlib.sha256()
    total = 0
    for path in paths:
        file = root / path
        size = file.stat().st_size if is_file(file, root, follow_links) else -1
        digest.update(f"{size} ".encode() + os.fsencode(path) + b"\0")
        total += max(size, 0)
    _log_if_large(total)
    files: list[tuple[FileState, bytes] | None] = []
    for path in paths:
        file, own = root / path, hashlib.sha256()
        state = FileState.of(file) if is_file(file, root, follow_links) else None
        try:
            if state is not None:
                with open(file, "rb", buffering=0) as content:
                    while block := content.read(BLOCK):
                        digest.update(block)
                        own.update(block)
        except OSError as error:  # reported when the image is decoded
            digest.update(type(error).__name__.encode())
            state = None
        files.append(None if state is None else (state, own.digest()[:DIGEST_BYTES]))
    return digest.hexdigest(), files


def _log_if_large(size: int) -> None:
    if size > LARGE:
        logger.info("reading all %.1f GiB of the data to compute its fingerprint", size / 2**30)


def is_inside(path: Path, root: Path) -> bool:
    """Return whether a file is inside the folder `root` after resolving a symbolic link."""
    if not path.is_symlink():
        return True
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


def is_file(path: Path, root: Path, follow_links: bool) -> bool:
    """Return whether a path is a file that may be read."""
    try:
        return (follow_links or is_inside(path, root)) and path.is_file()
    except OSError:  # a folder that may be listed but not entered
        return False
