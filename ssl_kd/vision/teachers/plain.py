"""Load the teachers that need no network: pixels and features."""

from __future__ import annotations

import numpy as np

from ssl_kd.core.errors import InputError
from ssl_kd.vision.teachers.base import Features, Pixels
from ssl_kd.vision.teachers.request import Request

_PIXELS_OF_FOLDERS = 32


def load_pixels(request: Request) -> Pixels:
    """Return a teacher of the size of the data's images, or of 32 x 32 if they are files."""
    request.refuse_weights("has no weights")
    image_size = request.image_size
    arrays: np.ndarray | None = getattr(request.dataset, "arrays", None)
    if arrays is None:
        size = image_size or _PIXELS_OF_FOLDERS
        return Pixels(size, size, color=True)
    height, width = (image_size, image_size) if image_size else arrays.shape[1:3]
    return Pixels(height, width, color=arrays.ndim == 4)


def load_features(request: Request) -> Features:
    """Return the placeholder for the teacher that computed the data's features."""
    request.refuse_weights("has no weights")
    features: np.ndarray | None = getattr(request.dataset, "features", None)
    if features is None:
        raise InputError(
            "TEACHER is 'features', but the data set holds images: choose a teacher that embeds "
            "images, such as pixels, or a data set of features"
        )
    return Features(features.shape[1])
