"""Load the models that torch.hub has: DINOv2 and Franca."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ssl_kd.core.errors import InputError
from ssl_kd.vision.teacher_kinds import DINOV2_MODELS
from ssl_kd.vision.teachers.base import Teacher, TeacherUnavailable
from ssl_kd.vision.teachers.network import Network, Transform
from ssl_kd.vision.teachers.request import Request
from ssl_kd.vision.teachers.timm_models import build_timm
from ssl_kd.vision.teachers.tokens import last_layers, one_layer

_PATCH = 14


def load_dinov2(request: Request) -> Teacher:
    """Load DINOv2 from torch.hub; from timm if torch.hub fails or for weights in a file.

    torch.hub runs the code of Meta's repository. The two libraries resize the position embedding
    differently, so their embeddings differ slightly.
    """
    name = "dinov2_vits14" if request.name == "dinov2" else request.name
    image_size = _image_size(request)

    def from_timm() -> Teacher:
        state = request.read_state()
        return build_timm(request, DINOV2_MODELS[name], f"{name} (timm)", state)

    if request.weights is not None:
        return from_timm()
    try:
        transform = Transform(image_size, image_size)
        return _from_hub("facebookresearch/dinov2", name, request.token, transform)
    except TeacherUnavailable as hub:
        try:
            return from_timm()
        except TeacherUnavailable as timm:
            raise TeacherUnavailable(name, f"{hub.reason}; timm: {timm.reason}") from None


def load_franca(request: Request) -> Teacher:
    """Load Franca from torch.hub, which runs the code of Valeo's repository."""
    name = "franca_vitb14" if request.name == "franca" else request.name
    image_size = _image_size(request)
    request.refuse_weights("is loaded from torch.hub alone")
    # Its README resizes to 256 for a crop of 224.
    transform = Transform(image_size, round(image_size * 256 / 224))
    return _from_hub("valeoai/Franca", name, request.token, transform)


def _image_size(request: Request) -> int:
    """Return IMAGE_SIZE, or 224, if it is a multiple of the size of a patch."""
    image_size = request.image_size or 224
    if image_size % _PATCH:
        near = max(_PATCH, _PATCH * round(image_size / _PATCH))
        raise InputError(
            f"IMAGE_SIZE is {image_size}; expected a multiple of {_PATCH} (the patch size of "
            f"{request.name}), such as {near}"
        )
    return image_size


def _from_hub(repository: str, name: str, token: str, transform: Transform) -> Teacher:
    """Load a model with the methods of DINOv2's."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "xFormers is not available", once per layer type
            model: Any = torch.hub.load(
                repository,
                name,
                trust_repo=True,  # pyright: ignore[reportArgumentType]
                verbose=False,
            )
    except Exception as error:  # the repository's code may raise anything
        raise TeacherUnavailable(f"{name} (hub)", error) from error

    def features(x: Tensor) -> Tensor:
        if token == "last4":
            return last_layers(model.get_intermediate_layers(x, n=4, return_class_token=True))
        out = model.forward_features(x)
        return one_layer(token, out["x_norm_clstoken"], out["x_norm_patchtokens"])

    return Network(f"{name} (hub)", model, features, transform, token)
