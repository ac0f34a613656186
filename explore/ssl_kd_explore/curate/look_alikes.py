"""Find copies of images that were shrunk, or compressed again, by comparing small versions."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from ssl_kd.vision.cache.neighbors import nearest_neighbors

WIDTH, HEIGHT = 9, 8  # pixels of a small version, whose 8 x 8 differences are the hash
NEIGHBORS = 20
BITS = 12  # of 64 that may differ between copies
CONTRAST = 0.15  # largest difference of the gray values of copies, as a share of their spread
COLOR = 16.0  # largest difference of the colors of copies, of 255
SHAPE = 0.1  # largest difference of the log aspect ratios of copies
FLAT = 4.0  # smallest spread of the gray values; the bits of flatter images are noise
GRAY = np.array([0.299, 0.587, 0.114], np.float32)


def small_version(image: Image.Image) -> NDArray[np.uint8]:
    """Return an image in 9 x 8 pixels, `[8, 9, 3]`."""
    small = image.convert("RGB").resize((WIDTH, HEIGHT), Image.Resampling.BILINEAR)
    return np.asarray(small)


def look_alikes(
    small: NDArray[np.uint8], ratios: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the pairs of images that are copies, shrunk or compressed again: two rows `[m]` each.

    The difference hash of an image has 64 bits: whether each pixel of its small version is brighter
    than the one to the left. The 20 nearest images by the hash are compared, and are copies if few
    bits differ and the small versions agree: a hash alone confuses images of few edges. Images
    without contrast are copies of none.

    Args:
        small: small versions of n images `[n, 8, 9, 3]`.
        ratios: width by height of each image `[n]`; NaN for those to leave out.
    """
    gray = small.astype(np.float32) @ GRAY
    spread = gray.std((1, 2))
    rows = np.flatnonzero(np.isfinite(ratios) & (spread >= FLAT))
    if len(rows) < 2:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    bits = (np.diff(gray[rows], axis=2) > 0).reshape(len(rows), -1)
    signs = torch.from_numpy(bits.astype(np.float32) * 2 - 1)
    neighbors = nearest_neighbors(signs, min(NEIGHBORS, len(rows) - 1)).numpy()
    one = np.repeat(np.arange(len(rows)), neighbors.shape[1])
    pairs = np.unique(np.sort(np.stack([one, neighbors.reshape(-1)], 1), axis=1), axis=0)
    pairs = pairs[(bits[pairs[:, 0]] != bits[pairs[:, 1]]).sum(1) <= BITS]
    first, second = rows[pairs[:, 0]], rows[pairs[:, 1]]
    apart = _distance(gray[first], gray[second])
    colors_apart = _distance(small[first].astype(np.float32), small[second].astype(np.float32))
    is_copy = apart <= CONTRAST * np.minimum(spread[first], spread[second])
    is_copy &= colors_apart <= COLOR
    is_copy &= np.abs(np.log(ratios[first] / ratios[second])) <= SHAPE
    return first[is_copy], second[is_copy]


def _distance(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the root mean square difference of pairs of small versions, `[m]`."""
    return np.sqrt(np.square(a - b).reshape(len(a), -1).mean(1)) if len(a) else np.empty(0, "f4")
