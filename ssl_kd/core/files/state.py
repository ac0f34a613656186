"""Tell whether a file is still the same, by its size and times and by its content."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NamedTuple

from ssl_kd.core.files import sha256_file

DIGEST_BYTES = 16
"""Length of a digest of content: the beginning of a SHA-256."""


class FileState(NamedTuple):
    """What a file system knows of a file: if all of it is the same, so is the content."""

    size: int  # bytes
    modified: int  # nanoseconds
    changed: int  # nanoseconds; of the entry, so a file that replaces another one has a later one

    @classmethod
    def of(cls, path: Path) -> FileState | None:
        """Return the state of a regular file, also through a link; None if there is none."""
        try:
            status = os.stat(path)
        except (OSError, ValueError):
            return None
        if not stat.S_ISREG(status.st_mode):
            return None
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def file_digest(path: Path) -> bytes:
    """Return a digest of the content of a file."""
    return bytes.fromhex(sha256_file(path))[:DIGEST_BYTES]
