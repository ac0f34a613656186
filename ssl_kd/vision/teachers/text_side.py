"""Embed a text so that it can be compared with the embeddings of a teacher, to search by text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from firstnan.finite import safe_normalize
from ssl_kd.core.errors import InputError
from ssl_kd.core.settings.import_paths import check_installed
from ssl_kd.core.shards.fingerprint import Fingerprint
from ssl_kd.vision.teacher_kinds import SHORT_NAMES
from ssl_kd.vision.teachers.base import Teacher
from ssl_kd.vision.teachers.hugging_face import (
    loading_from_transformers,
    offline_without_network,
    unavailable,
)
from ssl_kd.vision.teachers.load import load_teacher

OPEN_CLIP_MODELS = {
    "clip_vitb32": ("ViT-B-32-quickgelu", "openai"),
    "clip_vitb16": ("ViT-B-16-quickgelu", "openai"),
    "clip_vitl14": ("ViT-L-14-quickgelu", "openai"),
    "clip_vitl14_336": ("ViT-L-14-336-quickgelu", "openai"),
    "siglip2_base": ("ViT-B-16-SigLIP2", "webli"),
    "siglip2_large": ("ViT-L-16-SigLIP2-256", "webli"),
    "siglip2_so400m": ("ViT-SO400M-16-SigLIP2-256", "webli"),
}
"""Name of an image tower in timm -> model and weights of open_clip with the tower and its texts."""


@dataclass(frozen=True)
class TextSide:
    """Compares texts with the embeddings of a teacher by the cosine in the space they share.

    Attributes:
        embed: function from a text to its embedding, float32 `[shared]`.
        projection: float32 `[dim, shared]`, which maps embeddings of the teacher into that space;
            None if they are in it.
    """

    embed: Callable[[str], Tensor]
    projection: Tensor | None = None

    @torch.inference_mode()
    def query(self, text: str) -> Tensor:
        """Return the embedding of a text at unit length, `[shared]`."""
        return safe_normalize(self.embed(text)[None].float().cpu())[0]

    @torch.inference_mode()
    def similarities(self, query: Tensor, embeddings: Tensor) -> Tensor:
        """Return the cosine of `query` with each of a teacher's embeddings `[n, dim]`, `[n]`."""
        embeddings = embeddings.float()
        if self.projection is not None:
            embeddings = embeddings @ self.projection
        return safe_normalize(embeddings) @ query


def has_text_side(name: str, kind: str, *, token: str = "class", weights: Any = None) -> bool:
    """Return whether texts can be compared with the embeddings of a teacher; nothing is loaded.

    Args:
        name: value of the setting TEACHER.
        kind: what the teacher embeds: `image`, `text`, `audio` or `features`.
        token: value of TOKEN.
        weights: value of TEACHER_WEIGHTS.
    """
    if kind == "text":
        return True
    is_published = weights is None and token == "class"  # else the text encoder is another one's
    if kind != "image" or not is_published:
        return False
    if name.startswith("hf:"):
        return "text_config" in _hf_config(name.partition(":")[2])
    return name.startswith("open_clip:") or SHORT_NAMES.get(name, name) in OPEN_CLIP_MODELS


def load_text_side(name: str, kind: str, fingerprint: Fingerprint) -> TextSide:
    """Load the text side of a teacher, for which `has_text_side` is True.

    A teacher of texts embeds the query as it embedded the texts. Models of images and texts of
    transformers and open_clip have a text encoder; image towers of CLIP and SigLIP 2 in timm get
    that of open_clip.

    Args:
        name: value of the setting TEACHER.
        kind: what the teacher embeds: `image` or `text`.
        fingerprint: that of the embeddings to compare with.

    Raises:
        MissingPackage: the text encoder needs a package that is not installed.
        TeacherUnavailable: its weights cannot be downloaded.
        InputError: the weights are no longer those that computed the embeddings.
    """
    if kind == "text":
        teacher = load_teacher(name, dataset=_Texts())
        _check_same(teacher, fingerprint)
        return TextSide(lambda text: teacher.embed([teacher.preprocess(text)])[0])
    if name.startswith("hf:"):
        network: Any = load_teacher(name)
        _check_same(network, fingerprint)
        return TextSide(_hf_text(network.model, name))
    check_installed(["open_clip"], "open_clip", f"Search by text with the teacher {name!r}")
    if name.startswith("open_clip:"):
        tower: Any = load_teacher(name)
        _check_same(tower, fingerprint)
        model_name = name.partition(":")[2]
        if not model_name.startswith(("hf-hub:", "local-dir:")):
            model_name = model_name.partition("/")[0]
        return TextSide(_encode_text(tower.model, model_name, name))
    model, model_name = _open_clip_model(name)
    # The towers of CLIP in timm end before the projection; those of SigLIP have none.
    return TextSide(_encode_text(model, model_name, name), getattr(model.visual, "proj", None))


class _Texts:
    """Stands for a data set of texts, for which `hf:NAME` is an encoder of texts."""

    kind = "text"


def _hf_config(source: str) -> dict[str, Any]:
    """Return the configuration of a model of transformers that is on this machine; else empty."""
    from transformers import PretrainedConfig

    try:
        return PretrainedConfig.get_config_dict(source, local_files_only=True)[0]
    except (OSError, ValueError):
        return {}


def _hf_text(model: Any, name: str) -> Callable[[str], Tensor]:
    """Return a function that embeds a text with a model of images and texts of transformers."""
    from transformers import AutoTokenizer

    if not hasattr(model, "get_text_features"):
        raise InputError(f"{name} has no text encoder to compare texts with images")
    try:
        with loading_from_transformers():
            tokenizer: Any = AutoTokenizer.from_pretrained(name.partition(":")[2])
    except (OSError, ValueError, ImportError) as error:
        raise unavailable(name, error, _WAY) from error
    length = model.config.text_config.max_position_embeddings
    options = {"padding": "max_length", "truncation": True, "max_length": length}

    def embed(text: str) -> Tensor:
        tokens = tokenizer([text], return_tensors="pt", **options)
        # SigLIP was trained without a mask: its text encoder attends to the padding.
        is_masked = not model.config.model_type.startswith("siglip")
        mask = {"attention_mask": tokens["attention_mask"]} if is_masked else {}
        output = model.get_text_features(input_ids=tokens["input_ids"], **mask)
        return getattr(output, "pooler_output", output)[0]  # transformers 4 returns a tensor

    return embed


def _open_clip_model(name: str) -> tuple[Any, str]:
    import open_clip  # pyright: ignore[reportMissingImports]

    model_name, tag = OPEN_CLIP_MODELS[SHORT_NAMES.get(name, name)]
    try:
        with offline_without_network():
            model: Any = open_clip.create_model(model_name, pretrained=tag)
    except (OSError, RuntimeError) as error:
        raise unavailable(f"open_clip:{model_name}/{tag}", error, _WAY) from error
    return model.requires_grad_(False).eval(), model_name


_WAY = "check the network, which downloads the text encoder once; the search for words needs none"


def _encode_text(model: Any, model_name: str, name: str) -> Callable[[str], Tensor]:
    """Return a function that embeds a text with a model of open_clip and its tokenizer."""
    import open_clip  # pyright: ignore[reportMissingImports]

    try:
        with offline_without_network():
            tokenizer: Any = open_clip.get_tokenizer(model_name)
    except (OSError, RuntimeError, ValueError, ImportError) as error:
        raise unavailable(name, error, _WAY) from error
    return lambda text: model.encode_text(tokenizer([text]))[0]


def _check_same(teacher: Teacher, fingerprint: Fingerprint) -> None:
    """Raise InputError unless a teacher is the one that computed the embeddings."""
    if (teacher.weights_id, teacher.transform_id) != (fingerprint.weights, fingerprint.transform):
        raise InputError(
            f"the teacher {teacher.name!r} has changed since it embedded the samples, so texts "
            "cannot be compared with them: restore its weights, or train a new run"
        )
