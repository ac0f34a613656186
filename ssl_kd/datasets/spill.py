"""Collections that move to temporary files when they outgrow memory."""

from __future__ import annotations

import contextlib
import errno
import math
import pickle
import tempfile
import weakref
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from ssl_kd.errors import InputError

IN_MEMORY = 1 << 30
"""Largest size in bytes of a collection or a column in memory."""

T = TypeVar("T")


class SpilledSequence(Sequence[T]):
    """Pickled items in memory, or in a temporary file (in TMPDIR) beyond `IN_MEMORY` bytes.

    Args:
        items: picklable items; iterated once.

    Raises:
        InputError: the disk is full.
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
        with _explain_full_disk(self._ends[-1]):
            self._file.flush()

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(len(self))[index])
        index = range(len(self))[index]
        self._file.seek(self._ends[index])
        return pickle.loads(self._file.read(self._ends[index + 1] - self._ends[index]))

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)


def filled_array(rows: int, width: int, dtype: Any, fill: int = 0) -> np.ndarray:
    """Return an array `[rows, width]` of one value, beyond `IN_MEMORY` bytes mapped from a file."""
    dtype = np.dtype(dtype)
    if (size := rows * width * dtype.itemsize) <= IN_MEMORY:
        return np.full((rows, width), fill, dtype)
    height = max(1, min(rows, (1 << 24) // (width * dtype.itemsize)))
    block = np.full((height, width), fill, dtype)
    with _explain_full_disk(size), tempfile.TemporaryFile() as file:
        for _ in range(math.ceil(rows / height)):  # not sparse, so that a full disk fails here
            file.write(block.data)
        file.flush()
        return np.memmap(file, dtype, "r+", shape=(rows, width))


@contextlib.contextmanager
def _explain_full_disk(size: int) -> Iterator[None]:
    """Replace the error of a full disk by an InputError with the way out."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise InputError(
            f"the text needs {size:,} bytes of temporary files, and {tempfile.gettempdir()} is "
            "full: set TMPDIR to a folder of a larger disk, or read less"
        ) from error
