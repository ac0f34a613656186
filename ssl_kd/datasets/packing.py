"""Pieces of different lengths in rows of one length."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["best_fit", "digest_of", "numbered", "padded"]


def best_fit(lengths: Sequence[int], block_size: int) -> list[list[int]]:
    """Which pieces share a row: the longest first, each into the fullest row with room for it.

    Returns:
        The pieces of each row, by number; every piece once.
    """
    open_rows: dict[int, list[list[int]]] = {}
    rooms: list[int] = []  # the keys of open_rows, sorted
    rows: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect_left(rooms, lengths[i])
        if at == len(rooms):
            room, row = block_size, []
            rows.append(row)
        else:
            room = rooms[at]
            row = open_rows[room].pop()
            if not open_rows[room]:
                del open_rows[room], rooms[at]
        row.append(i)
        room -= lengths[i]
        if room not in open_rows:
            open_rows[room] = []
            insort(rooms, room)
        open_rows[room].append(row)
    # In the order of the documents again: the first rows must not be those of the longest ones.
    return sorted(sorted(row) for row in rows)


def padded(
    rows: Sequence[Sequence[np.ndarray]], size: int, dtype: Any, padding: int = 0
) -> np.ndarray:
    """Rows of one length: the arrays of each one after the other, then padding."""
    filled = np.full((len(rows), size), padding, dtype)
    for row, arrays in zip(filled, rows, strict=True):
        whole = np.concatenate(arrays)
        row[: len(whole)] = whole
    return filled


def digest_of(*columns: np.ndarray) -> str:
    """SHA-256 of columns of one shape."""
    digest = hashlib.sha256(repr(columns[0].shape).encode())
    for column in columns:
        digest.update(np.ascontiguousarray(column).data)  # no copy of it
    return digest.hexdigest()


def numbered(rows: Sequence[Sequence[int]], size: int) -> np.ndarray:
    """Which piece of its row, from 1, each place belongs to: int32 `[row, size]`; 0 is padding.

    >>> numbered([[2, 1], [1]], 4)
    array([[1, 1, 2, 0],
           [1, 0, 0, 0]], dtype=int32)
    """
    filled = np.zeros((len(rows), size), np.int32)
    for row, lengths in zip(filled, rows, strict=True):
        row[: sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return filled
