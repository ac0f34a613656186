"""Load DINOv2, from torch.hub or from timm."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ssl_kd.core.errors import InputError
from ssl_kd.vision.teacher_kinds import DINOV2_MODELS
from ssl_kd.vision.teachers.base import Teacher, TeacherUnavailable
from ssl_kd.vision.teachers.network import Network, Transform
from ssl_kd.vision.teachers.request import Request
from ssl_kd.vision.teachers.timm_models import build_timm
from ssl_kd.vision.teachers.tokens import pooled


def load_dinov2(request: Request) -> Teacher:
    """Load DINOv2 from torch.hub; from timm if torch.hub fails or for weights in a file.

    torch.hub runs the code of Meta's repository. The two libraries resize the position embedding
    differently, so their embeddings differ slightly.
    """
    name = "dinov2_vits14" if request.name == "dinov2" else request.name
    image_size = request.image_size or 224
    state = request.read_state()
    if image_size % 14:
        near = max(14, 14 * round(image_size / 14))
        raise InputError(
            f"IMAGE_SIZE is {image_size}; expected a multiple of 14 (the patch size of DINOv2), "
            f"such as {near}"
        )
    from_timm = partial(
        build_timm, DINOV2_MODELS[name], f"{name} (timm)", state, image_size, request.token
    )
    if state is not None:
        return from_timm()
    try:
        return _hub(name, image_size, request.token)
    except TeacherUnavailable as hub:
        try:
            return from_timm()
        except TeacherUnavailable as timm:
            raise TeacherUnavailable(name, f"{hub.reason}; timm: {timm.reason}") from None


def _hub(name: str, image_size: int, token: str) -> Teacher:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "xFormers is not available", once per layer type
            model: Any = torch.hub.load(
                "facebookresearch/dinov2",
                name,
                trust_repo=True,  # pyright: ignore[reportArgumentType]
                verbose=False,
            )
    except Exception as error:  # the repository's code may raise anything
        raise TeacherUnavailable(f"{name} (hub)", error) from error

    def features(x: Tensor) -> Tensor:
        out = model.forward_features(x)
        return pooled(token, out["x_norm_clstoken"], out["x_norm_patchtokens"])

    return Network(f"{name} (hub)", model, features, Transform(image_size, image_size), token)
