"""Images that show nothing: unreadable, of one colour, or tiny; their sizes and equal ones."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pyarrow as arrow
from numpy.typing import NDArray
from PIL import Image

from ssl_kd.datasets import UnreadableImage
from ssl_kd.errors import InputError

BLANK = 2.0  # standard deviation of eight-bit values up to which an image shows nothing
TINY = 8  # pixels of the shorter side up to which it does, where others are four times as large
ROWS = 256  # decoded between two reports


class Pictures(NamedTuple):
    """What one look at each image of a data set says.

    Attributes:
        ids: their names.
        sizes: `[n]` pixels, 0 of what cannot be read.
        spread: `[n]`, standard deviation of the grey values, 0 ... 127.
        same: `[n]`, equal numbers for equal pixels.
        reasons: why an image is odd, by its row.
    """

    ids: Sequence[str]
    sizes: NDArray[np.int64]
    spread: NDArray[np.float64]
    same: NDArray[np.int64]
    reasons: dict[int, str]

    def __len__(self) -> int:
        """How many are odd."""
        return len(self.reasons)

    def frame(self) -> arrow.Table:
        """A line for each odd image: `row`, `file`, `reason`, `pixels`, `spread`."""
        rows = np.array(sorted(self.reasons), dtype=np.int64)
        return arrow.table(
            {
                "row": rows,
                "file": arrow.array([self.ids[row] for row in rows.tolist()], arrow.string()),
                "reason": arrow.array([self.reasons[r] for r in rows.tolist()], arrow.string()),
                "pixels": self.sizes[rows],
                "spread": self.spread[rows],
            }
        )


def odd_images(
    ids: Sequence[str],
    open_image: Callable[[int], Image.Image | None],
    *,
    workers: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> Pictures:
    """Decode every image once, and list those that cannot be read or show nothing.

    An image is blank if its gray values have a standard deviation of 2 of 255 or less, and tiny if
    its shorter side is 8 pixels or less where the median one is 32 or more.

    Args:
        ids: `[n]`, a name for each image.
        open_image: opens the image of a row, as `ImageDataset.image` and `Samples.image` do.
        workers: threads that decode.
        progress: called with (images done, n).

    Raises:
        InputError: `open_image` returned None: the data are features.
    """
    n = len(ids)
    sides, sizes, spread = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n)
    digests: list[bytes] = []
    reasons: dict[int, str] = {}

    def look(row: int) -> tuple[int, int, float, bytes] | UnreadableImage:
        try:
            image = open_image(row)
        except UnreadableImage as error:
            return error
        if image is None:
            raise InputError(f"{ids[row]} has no image: the data are features")
        grey = np.asarray(image.convert("L"), np.float32)
        shape = f"{image.mode}{image.size}".encode()
        digest = hashlib.sha256(shape + image.tobytes()).digest()
        return min(image.size), image.width * image.height, float(grey.std()), digest

    with ThreadPoolExecutor(workers, "decode") as pool:
        for start in range(0, n, ROWS):
            rows = range(start, min(start + ROWS, n))
            for row, found in zip(rows, pool.map(look, rows), strict=True):
                if isinstance(found, UnreadableImage):
                    reasons[row] = f"unreadable: {found.reason}"
                    digests.append(f"unreadable {row}".encode())
                    continue
                sides[row], sizes[row], spread[row], digest = found
                digests.append(digest)
                if spread[row] <= BLANK:
                    reasons[row] = "blank"
            if progress is not None:
                progress(rows.stop, n)
    typical = float(np.median(sides[sides > 0])) if (sides > 0).any() else 0.0
    for row in np.flatnonzero((sides > 0) & (sides <= TINY)).tolist():
        if typical >= 4 * TINY:
            reasons.setdefault(row, "tiny")
    numbers = {digest: number for number, digest in enumerate(dict.fromkeys(digests))}
    same = np.array([numbers[digest] for digest in digests], dtype=np.int64)
    return Pictures(ids, sizes, spread, same, reasons)
