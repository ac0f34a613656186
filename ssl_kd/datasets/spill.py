"""Text and tokens that outgrow memory: beyond a size they lie in temporary files."""

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
from typing import Any, TypeVar, overload

import numpy as np

from ssl_kd.errors import InputError

logger = logging.getLogger(__name__)

IN_MEMORY = 1 << 30
"""Bytes of one collection, or of one column, up to which it stays in memory."""

T = TypeVar("T")


class SpilledSequence(Sequence[T]):
    """Items that are kept pickled: in memory, or in a temporary file once beyond `IN_MEMORY`.

    The file has no name, lies where `tempfile` puts it (TMPDIR) and is gone with the process.

    Args:
        items: what can be pickled; read once.

    Raises:
        InputError: the disk has no room.
    """

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._file = tempfile.SpooledTemporaryFile(IN_MEMORY)
        self._ends = array("Q", [0])
        weakref.finalize(self, self._file.close)
        for item in items:
            data = pickle.dumps(item, pickle.HIGHEST_PROTOCOL)
            self._ends.append(self._ends[-1] + len(data))
            with _explain_full_disk(self._ends[-1]):
                self._file.write(data)
        if self._ends[-1] > IN_MEMORY:
            with _explain_full_disk(self._ends[-1]):
                self._file.flush()
            _log_spill()

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
        self._file.seek(self._ends[index])
        return pickle.loads(self._file.read(self._ends[index + 1] - self._ends[index]))

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)


def filled_array(rows: int, width: int, dtype: Any, fill: int = 0) -> np.ndarray:
    """Return an array `[rows, width]` of one value; larger than `IN_MEMORY`, mapped from a file.

    Raises:
        InputError: the disk has no room.
    """
    dtype = np.dtype(dtype)
    if (size := rows * width * dtype.itemsize) <= IN_MEMORY:
        return np.full((rows, width), fill, dtype)
    height = max(1, min(rows, (1 << 24) // (width * dtype.itemsize)))
    block = np.full((height, width), fill, dtype)
    _log_spill()
    with _explain_full_disk(size), tempfile.TemporaryFile() as file:
        for _ in range(math.ceil(rows / height)):  # not sparse: a full disk fails here, not later
            file.write(block.data)
        file.flush()
        return np.memmap(file, dtype, "r+", shape=(rows, width))


def _log_spill() -> None:
    message = "text larger than %.1f GiB: it lies in temporary files in %s (TMPDIR)"
    logger.info(message, IN_MEMORY / 2**30, tempfile.gettempdir())


@contextlib.contextmanager
def _explain_full_disk(size: int) -> Iterator[None]:
    """Raise InputError with the ways out in place of the system's error of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise InputError(
            f"the text is larger than memory should hold, and {tempfile.gettempdir()} has no room "
            f"for {size:,} bytes of it: set TMPDIR to a folder of a larger disk, or read less"
        ) from error
