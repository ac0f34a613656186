"""Sequences and arrays that need little memory."""

from __future__ import annotations

import contextlib
import errno
import math
import pickle
import tempfile
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from ssl_kd.core.errors import InputError

IN_MEMORY = 1 << 30
"""Largest size in bytes of a sequence or an array in memory; larger ones use temporary files."""

T = TypeVar("T")


class LazyStrings(Sequence[str]):
    """A sequence of strings that are computed on access."""

    def __init__(self, n: int, read: Callable[[int], str]) -> None:
        self._rows, self._read = range(n), read

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int | slice) -> Any:
        rows = self._rows[row]
        return self._read(rows) if isinstance(rows, int) else [self._read(at) for at in rows]

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)


class SpilledSequence(Sequence[T]):
    """An immutable sequence of items, pickled in memory or, if large, in a temporary file."""

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
    """Create an array `[rows, width]` filled with one value; map it from a file if it is large."""
    dtype = np.dtype(dtype)
    if (size := rows * width * dtype.itemsize) <= IN_MEMORY:
        return np.full((rows, width), fill, dtype)
    height = max(1, min(rows, (1 << 24) // (width * dtype.itemsize)))
    block = np.full((height, width), fill, dtype)
    with _explain_full_disk(size), tempfile.TemporaryFile() as file:
        for _ in range(math.ceil(rows / height)):  # a sparse file would not detect a full disk here
            file.write(block.data)
        file.flush()
        return np.memmap(file, dtype, "r+", shape=(rows, width))


@contextlib.contextmanager
def _explain_full_disk(size: int) -> Iterator[None]:
    """Turn the OSError of a full disk into an InputError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise InputError(
            f"the data needs {size:,} bytes in temporary files, but {tempfile.gettempdir()} is "
            "full: set TMPDIR to a folder of a larger disk, or read less data"
        ) from error
