"""Write files that are complete or absent, and read them with their damage named.

A plain `torch.save` that is killed leaves an unreadable file where a readable one was. Everything
here writes beside the target, flushes to the disk, and only then takes the target's name.
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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ssl_kd.errors import UserError

try:
    import fcntl
except ImportError:  # Windows, which removes no file that a program has open
    fcntl = None

_DISK_FAULTS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


class CorruptFileError(UserError, RuntimeError):
    """A file that exists does not hold what was once written there."""


def atomic_write(path: str | Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file so that a crash at any moment leaves the old one or the new one.

    Args:
        path: the file; its folder is made if it is missing.
        write: is called with the open temporary file, in the same folder (a rename does not
            cross file systems). Whatever goes wrong in it, the temporary file is removed.

    Raises:
        OSError: the disk is full or failed; the message names `path`, which is unchanged.
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
        # torch.save on a full disk raises an enforce error of its own; the cause is in its context.
        cause: BaseException | None = error
        while cause is not None and getattr(cause, "errno", None) not in _DISK_FAULTS:
            cause = cause.__context__
        if not isinstance(cause, OSError):
            raise
        reason = f"{cause.strerror} (nothing was left behind; a file already there is unchanged)"
        raise OSError(cause.errno, reason, str(path)) from error
    sync_folder(path.parent)


def _open_temporary(path: Path) -> BinaryIO:
    """Open a new file beside the target; a lock on it shows that its writer is alive."""
    while True:
        file = open(path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp"), "xb")
        if fcntl is not None:
            with suppress(OSError):  # a file system without locks: `remove_orphans` gets none, too
                fcntl.flock(file, fcntl.LOCK_EX)
        if Path(file.name).exists():  # else removed as an orphan before it was locked
            return file
        file.close()


def remove_orphans(path: str | Path) -> None:
    """Remove the temporary files of `atomic_write` to this path that no living writer holds."""
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
    """Flush a folder's entries to the disk, so that a rename in it outlives a power cut."""
    if os.name != "nt":  # Windows cannot open a folder
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def atomic_write_bytes(path: str | Path, data: bytes) -> None:
    """`atomic_write` of bytes."""
    atomic_write(path, lambda file: file.write(data))


def atomic_write_text(path: str | Path, text: str) -> None:
    """`atomic_write` of a string, as UTF-8."""
    atomic_write_bytes(path, text.encode("utf-8"))


def atomic_write_json(path: str | Path, value: Any) -> None:
    """`atomic_write` of a value as JSON.

    Raises:
        ValueError: a NaN or an infinity, which JSON does not have (write `None` instead).
    """
    atomic_write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def strict_json(data: bytes, *, nan: bool = False) -> Any:
    """Parse strict JSON: UTF-8, no duplicate keys, no NaN unless `nan`.

    Raises:
        ValueError: it is not, is nested too deeply, or has a number of thousands of digits.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(value := dict(pairs)) < len(pairs):
            raise ValueError("a key occurs twice")
        return value

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not a number in JSON")

    try:
        constant = None if nan else refuse
        return json.loads(data.decode(), object_pairs_hook=once, parse_constant=constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def size_of(path: str | Path) -> int:
    """Return the size in bytes of a regular file, or of one that a link points to.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptFileError: a device, a pipe or a folder.
    """
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise CorruptFileError(f"{path} is a device, a pipe or a folder; expected a regular file")
    return found.st_size


def sha256_file(path: str | Path) -> str:
    """Return the SHA-256 of a file in hexadecimal, reading it block by block.

    Raises:
        FileNotFoundError, CorruptFileError: as `size_of`.
    """
    size_of(path)
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def release_pages(array: Any) -> None:
    """Release the memory pages of a read-only mapped array; other arrays are left alone.

    Pages that are needed again are read again. Without this, a file that is read from end to end
    stays in memory.
    """
    mapped = getattr(array, "_mmap", None)  # of a numpy.memmap; changes in mode "c" would be lost
    if mapped is not None and array.mode == "r" and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


def why_refused(error: pickle.UnpicklingError) -> str:
    """Return why `torch.load` refused a file; its own message advises to load it anyway."""
    wanted = re.search(r"GLOBAL ([\w.]+)", str(error))
    what = f"it asks for {wanted[1]}, which might run code" if wanted else "it is something else"
    return f"{what}; it was refused, and nothing was executed"


def save_tensors(path: str | Path, tensors: Any) -> None:
    """`torch.save` through `atomic_write`."""
    atomic_write(path, lambda file: torch.save(tensors, file))


def load_tensors(path: str | Path, mmap: bool = False) -> Any:
    """`torch.load` of tensors and plain containers, to the CPU; nothing in the file is executed.

    Args:
        path: a file by `save_tensors` or `torch.save`.
        mmap: map the tensors instead of reading them.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptFileError: empty, cut off, not a regular file of tensors, larger in memory than on
            the disk, or a pickle that wants to run code.
    """
    size = size_of(path)
    try:
        is_zip = zipfile.is_zipfile(path)
        if is_zip:
            with zipfile.ZipFile(path) as archive:
                parts = archive.infolist()
            stored = all(part.compress_type == zipfile.ZIP_STORED for part in parts)
            if not stored or sum(part.file_size for part in parts) > size:
                raise ValueError("its parts are compressed or overlap, which torch.save never does")
        mmap = mmap and is_zip  # torch's older format cannot be mapped
        return torch.load(str(path), weights_only=True, map_location="cpu", mmap=mmap)
    except Exception as error:  # each kind of damage has an exception of its own
        cut = isinstance(error, OSError) and error.errno == errno.EINVAL  # a seek before its start
        if isinstance(error, OSError | MemoryError) and not cut:
            raise
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        if isinstance(error, pickle.UnpicklingError):
            reason = why_refused(error)
        raise CorruptFileError(
            f"{path} cannot be read as a file of tensors: {reason}. "
            "Expected tensors in plain containers, as torch.save writes them; delete the file or "
            "write it again."
        ) from error
