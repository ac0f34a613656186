"""Find images that are damaged, blank or tiny, and measure the size of all images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pyarrow as arrow
from numpy.typing import NDArray
from PIL import Image, ImageOps
from scipy.ndimage import laplace

from ssl_kd.core.errors import InputError
from ssl_kd.core.images.decode import FILE_BYTES, UnreadableImage
from ssl_kd_explore.curate.look_alikes import HEIGHT, WIDTH, small_version

BLANK = 2.0  # largest standard deviation of the gray values (0 to 255) of a blank image
TINY = 8  # largest shorter side in pixels of a tiny image, if the median one is four times as large
ROWS = 256  # images that are decoded between two calls of `progress`
WORKERS = 4  # threads
MEASURES = ("width", "height", "sharpness", "brightness", "bytes")
SIDE = 256  # pixels of the longer side of the image whose sharpness is measured


class ImageChecks(NamedTuple):
    """Sizes and gray values of all images, and the images that `odd_images` marked."""

    ids: Sequence[str]
    sizes: NDArray[np.int64]  # pixels of each image [n], 0 for an unreadable one
    spread: NDArray[np.float64]  # standard deviation of the gray values of each image [n]
    reasons: dict[int, str]  # row -> reason, for each damaged, blank or tiny image
    measures: dict[str, NDArray[np.float64]]  # of `MEASURES`, of each image [n], NaN if unreadable
    small: NDArray[np.uint8]  # of each image [n, 8, 9, 3], see `look_alikes`
    unchecked: dict[int, str]  # row -> reason, for each image that is not read, but may be intact

    def frame(self) -> arrow.Table:
        """Return a table of the odd images: `row`, `file`, `reason`, `pixels`, `spread`.

        It ends with the images that could not be checked.
        """
        reasons = {row: self.reasons[row] for row in sorted(self.reasons)}
        reasons |= {row: f"not checked: {self.unchecked[row]}" for row in sorted(self.unchecked)}
        rows = np.array(list(reasons), dtype=np.int64)
        return arrow.table(
            {
                "row": rows,
                "file": arrow.array([self.ids[row] for row in rows.tolist()], arrow.string()),
                "reason": arrow.array(list(reasons.values()), arrow.string()),
                "pixels": self.sizes[rows],
                "spread": self.spread[rows],
            }
        )


def odd_images(
    ids: Sequence[str],
    open_image: Callable[[int], Image.Image | None],
    progress: Callable[[int, int], None] | None = None,
) -> ImageChecks:
    """Decode every image once, and find those that are damaged, blank or tiny.

    An image is blank if its gray values have a standard deviation of 2 of 255 or less, and tiny if
    its shorter side is 8 pixels or less where the median one is 32 or more. `open_image`, for
    example `Samples.image`, gets a row number and may raise `UnreadableImage`. The sharpness is the
    variance of the Laplacian of the gray image, fitted into 256 x 256 pixels. An image that cannot
    be read although its file may be intact, such as a missing one, is not odd but `unchecked`.
    """
    n = len(ids)
    reasons: dict[int, str] = {}
    unchecked: dict[int, str] = {}
    values = np.full((n, 1 + len(MEASURES)), np.nan)  # spread and measures

    small = np.zeros((n, HEIGHT, WIDTH, 3), np.uint8)

    def measure(row: int) -> tuple[float, ...] | UnreadableImage:
        try:
            image = open_image(row)
        except FileNotFoundError as error:
            return UnreadableImage(ids[row], str(error))
        except UnreadableImage as error:
            return error
        if image is None:
            raise InputError(
                f"sample {ids[row]} has no image, because the run was trained on features: leave "
                "out the check of images"
            )
        small[row] = small_version(image)
        gray = image.convert("L")
        pixels = np.asarray(gray, np.float32)
        fitted = ImageOps.contain(gray, (SIDE, SIDE))
        sharpness = laplace(np.asarray(fitted, np.float32)).var()
        n_bytes = image.info.get(FILE_BYTES, np.nan)
        return pixels.std(), image.width, image.height, sharpness, pixels.mean(), n_bytes

    with ThreadPoolExecutor(WORKERS, "decode") as pool:
        for start in range(0, n, ROWS):
            rows = range(start, min(start + ROWS, n))
            for row, result in zip(rows, pool.map(measure, rows), strict=True):
                if isinstance(result, UnreadableImage):
                    if result.is_damaged:
                        reasons[row] = f"unreadable: {result.reason}"
                    else:
                        unchecked[row] = result.reason
                else:
                    values[row] = result
            if progress is not None:
                progress(rows.stop, n)
    spread, *columns = values.T
    measures: dict[str, NDArray[np.float64]] = dict(zip(MEASURES, columns, strict=True))
    reasons |= dict.fromkeys(np.flatnonzero(spread <= BLANK).tolist(), "blank")
    sides = np.fmin(measures["width"], measures["height"])
    if np.nan_to_num(sides).any() and np.nanmedian(sides) >= 4 * TINY:
        reasons = dict.fromkeys(np.flatnonzero(sides <= TINY).tolist(), "tiny") | reasons
    sizes = np.nan_to_num(measures["width"] * measures["height"]).astype(np.int64)
    return ImageChecks(ids, sizes, np.nan_to_num(spread), reasons, measures, small, unchecked)
