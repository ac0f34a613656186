"""Text and tokens that memory does not hold: beyond a size they lie in temporary files."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import pickle
import tempfile
import weakref
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any, TypeVar, overload

import numpy as np

from ssl_kd.errors import InputError

logger = logging.getLogger(__name__)

IN_MEMORY = 1 << 30
"""Bytes of one collection, or of one column, up to which it stays in memory."""

T = TypeVar("T")


def held(items: Iterable[T]) -> Sequence[T]:
    """All items: a tuple, or where they are larger than `IN_MEMORY`, a file of this process.

    The file has no name, lies where `tempfile` puts it (TMPDIR) and ends with the process. In
    memory are 8 bytes an item.

    Args:
        items: what can be pickled; each is asked for once.

    Raises:
        InputError: the disk has no room.
    """
    kept: list[T] = []
    whole = None
    size = 0
    with contextlib.ExitStack() as stack:
        for item in items:
            data = pickle.dumps(item, pickle.HIGHEST_PROTOCOL)
            size += len(data)
            if whole is None and size <= IN_MEMORY:
                kept.append(item)
                continue
            with _room(size):
                if whole is None:
                    whole = _InFile[T](stack.enter_context(_opened()))
                    for earlier in kept:
                        whole.append(pickle.dumps(earlier, pickle.HIGHEST_PROTOCOL))
                    kept.clear()
                whole.append(data)
        if whole is None:
            return tuple(kept)
        with _room(size):
            whole.file.flush()
        weakref.finalize(whole, stack.pop_all().close)
    return whole


class _InFile(Sequence[T]):
    """Pickled items, one after the other, each read when it is asked for."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self._ends = file, array("Q", [0])

    def append(self, data: bytes) -> None:
        self.file.write(data)
        self._ends.append(self._ends[-1] + len(data))

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(len(self))[index])
        index = range(len(self))[index]
        self.file.seek(self._ends[index])
        return pickle.loads(self.file.read(self._ends[index + 1] - self._ends[index]))


def table(rows: int, width: int, dtype: Any, fill: int = 0) -> np.ndarray:
    """An array `[rows, width]` full of one value; larger than `IN_MEMORY`, mapped from a file.

    Raises:
        InputError: the disk has no room.
    """
    dtype = np.dtype(dtype)
    if (size := rows * width * dtype.itemsize) <= IN_MEMORY:
        return np.full((rows, width), fill, dtype)
    height = max(1, min(rows, (1 << 24) // (width * dtype.itemsize)))
    block = np.full((height, width), fill, dtype)
    with _room(size), _opened() as file:
        for _ in range(math.ceil(rows / height)):  # not sparse: a full disk says so here
            file.write(block.data)
        file.flush()
        return np.memmap(file, dtype, "r+", shape=(rows, width))


def _opened() -> IO[bytes]:
    words = "text larger than %.1f GiB: it lies in temporary files in %s (TMPDIR)"
    logger.info(words, IN_MEMORY / 2**30, tempfile.gettempdir())
    return tempfile.TemporaryFile()


@contextlib.contextmanager
def _room(size: int) -> Iterator[None]:
    """Say what to do where the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise InputError(
            f"the text is larger than memory should hold, and {tempfile.gettempdir()} has no room "
            f"for {size:,} bytes of it: set TMPDIR to a folder of a larger disk, or read less "
            "(--max_megabytes)"
        ) from error
