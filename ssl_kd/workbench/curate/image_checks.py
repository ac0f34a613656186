"""Find images that are unreadable, blank or tiny, and measure the size of all images."""

from __future__ import annotations

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
ROWS = 256  # images that are decoded between two calls of `progress`
WORKERS = 4  # threads


class ImageChecks(NamedTuple):
    """Sizes and gray values of all images, and the images that `odd_images` marked."""

    ids: Sequence[str]
    sizes: NDArray[np.int64]  # pixels of each image [n], 0 for an unreadable one
    spread: NDArray[np.float64]  # standard deviation of the gray values of each image [n]
    reasons: dict[int, str]  # row -> reason, for each unreadable, blank or tiny image

    def frame(self) -> arrow.Table:
        """Return a table of the odd images: `row`, `file`, `reason`, `pixels`, `spread`."""
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
    progress: Callable[[int, int], None] | None = None,
) -> ImageChecks:
    """Decode every image once, and find those that are unreadable, blank or tiny.

    An image is blank if its gray values have a standard deviation of 2 of 255 or less, and tiny if
    its shorter side is 8 pixels or less where the median one is 32 or more. `open_image`, for
    example `Samples.image`, gets a row number and may raise `UnreadableImage`.
    """
    n = len(ids)
    sides, sizes, spread = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n)
    reasons: dict[int, str] = {}

    def check(row: int) -> tuple[int, int, float] | UnreadableImage:
        try:
            image = open_image(row)
        except UnreadableImage as error:
            return error
        if image is None:
            raise InputError(
                f"sample {ids[row]} has no image, because the run was trained on features: leave "
                "out the check of images"
            )
        gray = np.asarray(image.convert("L"), np.float32)
        return min(image.size), image.width * image.height, float(gray.std())

    with ThreadPoolExecutor(WORKERS, "decode") as pool:
        for start in range(0, n, ROWS):
            rows = range(start, min(start + ROWS, n))
            for row, result in zip(rows, pool.map(check, rows), strict=True):
                if isinstance(result, UnreadableImage):
                    reasons[row] = f"unreadable: {result.reason}"
                    continue
                sides[row], sizes[row], spread[row] = result
                if spread[row] <= BLANK:
                    reasons[row] = "blank"
            if progress is not None:
                progress(rows.stop, n)
    if (sides > 0).any() and np.median(sides[sides > 0]) >= 4 * TINY:
        for row in np.flatnonzero((sides > 0) & (sides <= TINY)).tolist():
            reasons.setdefault(row, "tiny")
    return ImageChecks(ids, sizes, spread, reasons)
