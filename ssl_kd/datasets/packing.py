"""Pack pieces of different lengths into rows of one length."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np


def best_fit(lengths: Sequence[int], block_size: int) -> list[list[int]]:
    """Assign pieces to rows, the longest first, each to the fullest row with room for it.

    Returns:
        The numbers of the pieces in each row.
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
    # In the order of the documents, so that the first rows are not those of the longest ones.
    return sorted(sorted(row) for row in rows)


def digest_of(*columns: np.ndarray) -> str:
    """Return the SHA-256 of columns of one shape."""
    digest = hashlib.sha256(repr(columns[0].shape).encode())
    for column in columns:
        digest.update(np.ascontiguousarray(column).data)  # no copy of it
    return digest.hexdigest()
