"""Write files atomically, and report damaged files when reading them.

A plain `torch.save` that is killed leaves an unreadable file in place of a readable one. These
functions write a temporary file in the same folder, flush it to the disk, and then rename it.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import mmap
import os
import pickle
import re
import secrets
import stat
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from ssl_kd.core.errors import UserError

try:
    import fcntl
except ImportError:  # Windows, which removes no file that a program has open
    fcntl = None

_DISK_FAULTS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


class CorruptFileError(UserError, RuntimeError):
    """A file is damaged or has an unexpected type."""


def atomic_write(path: str | Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file so that a crash at any moment leaves either the old or the new content.

    `write` writes the content to an open temporary file, and a missing folder is created. If the
    disk is full or fails, OSError is raised, and `path` is unchanged.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    file = _open_temporary(path)
    temporary = Path(file.name)
    try:
        with file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        # torch.save on a full disk raises another error, whose context is the OSError.
        cause: BaseException | None = error
        while cause is not None and getattr(cause, "errno", None) not in _DISK_FAULTS:
            cause = cause.__context__
        if not isinstance(cause, OSError):
            raise
        reason = f"{cause.strerror} (temporary files are removed; an existing file is unchanged)"
        raise OSError(cause.errno, reason, str(path)) from error
    sync_folder(path.parent)


def _open_temporary(path: Path) -> BinaryIO:
    """Open a temporary file in the folder of `path`, locked while this process is alive."""
    while True:
        file = open(path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp"), "xb")
        if fcntl is not None:
            with suppress(OSError):  # without locks, `remove_orphans` keeps the file, too
                fcntl.flock(file, fcntl.LOCK_EX)
        if Path(file.name).exists():  # otherwise removed by `remove_orphans` before it was locked
            return file
        file.close()


def remove_orphans(path: str | Path) -> None:
    """Remove temporary files for `path` that killed calls of `atomic_write` have left."""
    path = Path(path)
    for orphan in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}.tmp"):
        if orphan.is_symlink() or not orphan.is_file():
            continue
        with suppress(OSError):
            if fcntl is None:
                orphan.unlink()
                continue
            with open(orphan, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                orphan.unlink()


def sync_folder(folder: str | Path) -> None:
    """Flush the entries of a folder to the disk, so that a rename survives a power failure."""
    if os.name != "nt":  # Windows cannot open a folder
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def atomic_write_bytes(path: str | Path, data: bytes) -> None:
    """Write bytes to a file atomically."""
    atomic_write(path, lambda file: file.write(data))


def atomic_write_text(path: str | Path, text: str) -> None:
    """Write a string to a file atomically, as UTF-8."""
    atomic_write_bytes(path, text.encode("utf-8"))


def atomic_write_json(path: str | Path, value: Any) -> None:
    """Write a value to a file atomically, as JSON; ValueError for NaN and infinities."""
    atomic_write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def strict_json(data: bytes, *, nan: bool = False) -> Any:
    """Parse strict JSON: UTF-8, without duplicate keys, and without NaN unless `nan`.

    ValueError is also raised for data that is nested too deeply, and for huge numbers.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(value := dict(pairs)) < len(pairs):
            raise ValueError("a key occurs twice in an object")
        return value

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not valid JSON")

    try:
        constant = None if nan else refuse
        return json.loads(data.decode(), object_pairs_hook=once, parse_constant=constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def size_of(path: str | Path) -> int:
    """Return the size in bytes of a regular file, following symbolic links."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise CorruptFileError(f"{path} is a device, a pipe or a folder; expected a regular file")
    return status.st_size


def sha256_file(path: str | Path) -> str:
    """Compute the SHA-256 of a regular file, in hexadecimal."""
    size_of(path)
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def release_pages(array: Any) -> None:
    """Release the memory of pages that were read of a read-only `numpy.memmap`, if it is one."""
    mapped = getattr(array, "_mmap", None)  # with mode "c", changes would be lost
    if mapped is not None and array.mode == "r" and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


def why_refused(error: pickle.UnpicklingError) -> str:
    """Say why `torch.load` refused a file, without the advice of its message to load it anyway."""
    name = re.search(r"GLOBAL ([\w.]+)", str(error))
    what = f"it contains {name[1]}, which might run code" if name else "it is not a file of tensors"
    return f"{what}; it was refused, and nothing was executed"


def save_tensors(path: str | Path, tensors: Any) -> None:
    """Write tensors to a file atomically, with `torch.save`."""
    import torch

    atomic_write(path, lambda file: torch.save(tensors, file))


def load_tensors(path: str | Path, mmap: bool = False, plain_classes: Sequence[type] = ()) -> Any:
    """Load tensors and plain containers to the CPU, without executing code from the file.

    CorruptFileError is raised if the file is damaged, contains anything else, or would be larger in
    memory than on the disk. With `mmap`, tensors are mapped instead of read. Objects of the
    `plain_classes`, which must run no code when they are created, are loaded too.
    """
    import torch

    size = size_of(path)
    try:
        is_zip = zipfile.is_zipfile(path)
        if is_zip:
            with zipfile.ZipFile(path) as archive:
                parts = archive.infolist()
            stored = all(part.compress_type == zipfile.ZIP_STORED for part in parts)
            if not stored or sum(part.file_size for part in parts) > size:
                raise ValueError("its parts are compressed or overlap, unlike those of torch.save")
        mmap = mmap and is_zip  # torch's older format cannot be mapped
        with torch.serialization.safe_globals(list(plain_classes)):
            return torch.load(str(path), weights_only=True, map_location="cpu", mmap=mmap)
    except Exception as error:  # the exception depends on the kind of damage
        cut = isinstance(error, OSError) and error.errno == errno.EINVAL  # a seek before its start
        if isinstance(error, OSError | MemoryError) and not cut:
            raise
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        if isinstance(error, pickle.UnpicklingError):
            reason = why_refused(error)
        raise CorruptFileError(
            f"{path} cannot be read as a file of tensors: {reason}. Expected tensors in plain "
            "containers, written by torch.save: delete the file, or write it again."
        ) from error
