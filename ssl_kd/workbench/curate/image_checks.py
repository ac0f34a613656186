"""Find images that are unreadable, blank or tiny; measure sizes and find equal images."""

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

BLANK = 2.0  # largest standard deviation of the gray values (0 to 255) of a blank image
TINY = 8  # largest shorter side in pixels of a tiny image, if the median one is four times as large
ROWS = 256  # decoded between two calls of `progress`


class ImageChecks(NamedTuple):
    """The result of `odd_images`.

    Attributes:
        ids: names of the images.
        sizes: pixels `[n]`, 0 where an image cannot be read.
        spread: standard deviation of the gray values `[n]`.
        same: equal numbers for images with equal pixels `[n]`.
        reasons: row -> why an image is odd.
    """

    ids: Sequence[str]
    sizes: NDArray[np.int64]
    spread: NDArray[np.float64]
    same: NDArray[np.int64]
    reasons: dict[int, str]

    def frame(self) -> arrow.Table:
        """Return a row for each odd image: `row`, `file`, `reason`, `pixels`, `spread`."""
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
) -> ImageChecks:
    """Decode every image once, and find those that are unreadable, blank or tiny.

    An image is blank if its gray values have a standard deviation of 2 of 255 or less, and tiny if
    its shorter side is 8 pixels or less where the median one is 32 or more.

    Args:
        ids: names of the images `[n]`.
        open_image: opens the image of a row, as `ImageDataset.image` and `Samples.image` do.
        workers: number of threads.
        progress: called with (images done, n).

    Raises:
        InputError: `open_image` returned None, because the data are features.
    """
    n = len(ids)
    sides, sizes, spread = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n)
    digests: list[bytes] = []
    reasons: dict[int, str] = {}

    def check(row: int) -> tuple[int, int, float, bytes] | UnreadableImage:
        try:
            image = open_image(row)
        except UnreadableImage as error:
            return error
        if image is None:
            raise InputError(f"{ids[row]} has no image: the data are features")
        gray = np.asarray(image.convert("L"), np.float32)
        shape = f"{image.mode}{image.size}".encode()
        digest = hashlib.sha256(shape + image.tobytes()).digest()
        return min(image.size), image.width * image.height, float(gray.std()), digest

    with ThreadPoolExecutor(workers, "decode") as pool:
        for start in range(0, n, ROWS):
            rows = range(start, min(start + ROWS, n))
            for row, result in zip(rows, pool.map(check, rows), strict=True):
                if isinstance(result, UnreadableImage):
                    reasons[row] = f"unreadable: {result.reason}"
                    digests.append(f"unreadable {row}".encode())
                    continue
                sides[row], sizes[row], spread[row], digest = result
                digests.append(digest)
                if spread[row] <= BLANK:
                    reasons[row] = "blank"
            if progress is not None:
                progress(rows.stop, n)
    if (sides > 0).any() and np.median(sides[sides > 0]) >= 4 * TINY:
        for row in np.flatnonzero((sides > 0) & (sides <= TINY)).tolist():
            reasons.setdefault(row, "tiny")
    numbers = {digest: number for number, digest in enumerate(dict.fromkeys(digests))}
    same = np.array([numbers[digest] for digest in digests], dtype=np.int64)
    return ImageChecks(ids, sizes, spread, same, reasons)
