"""Load the teachers that need no network: pixels and features."""

from __future__ import annotations

import numpy as np

from ssl_kd.core.errors import InputError
from ssl_kd.vision.data.samples import NOUNS
from ssl_kd.vision.teachers.base import Features, Pixels
from ssl_kd.vision.teachers.request import Request

_PIXELS_OF_FOLDERS = 32
_EXAMPLES = {"image": "pixels", "text": "minilm", "audio": "resemblyzer"}


def load_pixels(request: Request) -> Pixels:
    """Return a teacher of the size of the data's images, or of 32 x 32 if they are files."""
    request.refuse_weights("has no weights")
    request.refuse_token("has no tokens")
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
    request.refuse_token("has no tokens")
    features: np.ndarray | None = getattr(request.dataset, "features", None)
    if features is None:
        kind = getattr(request.dataset, "kind", "image")
        raise InputError(
            f"TEACHER is 'features', but the data set holds {NOUNS[kind]}s: choose a teacher that "
            f"embeds {NOUNS[kind]}s, such as {_EXAMPLES[kind]}, or a data set of features"
        )
    return Features(features.shape[1])
