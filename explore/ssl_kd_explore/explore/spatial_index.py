"""Sort the places of the map into the spatial index with which the page finds samples."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

LEAF = 64  # places that are not sorted any further
_MAGIC, _VERSION_1_FLOAT32 = 0xDB, 0x17


def spatial_index(places: NDArray[np.float32]) -> bytes:
    """Return a k-d tree of the places `[n, 2]`, with the places in it, in the format of KDBush 4.

    The format: a header of 8 bytes, the rows in the order of the tree (uint16 if there are fewer
    than 65,536, else uint32; padded to 8 bytes), and their places (float32). In each part, the
    middle place separates lower from higher values of x, then y, and so on.
    """
    n = len(places)
    order = np.arange(n)
    parts = [(0, n, 0)]
    while parts:
        start, stop, axis = parts.pop()
        if stop - start - 1 <= LEAF:
            continue
        middle = (start + stop - 1) // 2
        rows = order[start:stop]
        order[start:stop] = rows[np.argpartition(places[rows, axis], middle - start)]
        parts += [(start, middle, 1 - axis), (middle + 1, stop, 1 - axis)]
    rows = order.astype("<u2" if n < 65_536 else "<u4").tobytes()
    header = struct.pack("<BBHI", _MAGIC, _VERSION_1_FLOAT32, LEAF, n)
    return header + rows + bytes(-len(rows) % 8) + places[order].astype("<f4").tobytes()
