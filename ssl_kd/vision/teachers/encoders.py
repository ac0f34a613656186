"""Load `hf:NAME` for images, texts or sounds, whichever the data set holds."""

from __future__ import annotations

from ssl_kd.core.errors import InputError
from ssl_kd.vision.teachers import hf_models, sounds, texts
from ssl_kd.vision.teachers.base import Teacher
from ssl_kd.vision.teachers.request import Request

_LOADERS = {
    "image": hf_models.load_hf,
    "text": texts.load_text_encoder,
    "audio": sounds.load_audio_encoder,
}
"""Kind of a data set -> the function that loads a model of transformers for it."""


def load_hf(request: Request) -> Teacher:
    """Load a model of the Hub, or of a folder, for the samples of the data set; else for images."""
    kind = getattr(request.dataset, "kind", "image")
    if kind not in _LOADERS:
        raise InputError(
            f"TEACHER is {request.name!r}, but the data set holds features: use --teacher features"
        )
    return _LOADERS[kind](request)
