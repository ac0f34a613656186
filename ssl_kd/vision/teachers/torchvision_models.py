"""Load the classification models of torchvision."""

from __future__ import annotations

from typing import Any

from torch import nn

from ssl_kd.core.errors import InputError
from ssl_kd.vision.teachers.base import Teacher, TeacherUnavailable
from ssl_kd.vision.teachers.messages import misfit, unknown_model
from ssl_kd.vision.teachers.network import Network, Transform
from ssl_kd.vision.teachers.request import Request
from ssl_kd.vision.teachers.weights import select_weights


def load_torchvision(request: Request) -> Teacher:
    """Load `torchvision:NAME` without its last linear layer."""
    from torchvision import models

    name = request.model
    known = models.list_models(module=models)
    if name not in known:
        raise InputError(unknown_model("torchvision", name, known))
    if request.token != "class":
        raise InputError(
            f"TOKEN is {request.token!r}, but torchvision:{name} has no patch tokens: set it to "
            "'class', or use a ViT from timm"
        )
    state = request.read_state()
    weights: Any = models.get_model_weights(name)["DEFAULT"]
    # These two models transform their input only if they are built with published weights.
    inception = state is not None and name in ("googlenet", "inception_v3")
    kwargs = {"transform_input": True, "init_weights": False} if inception else {}
    try:
        model = models.get_model(name, weights=weights if state is None else None, **kwargs)
    except (OSError, RuntimeError) as error:
        raise TeacherUnavailable(f"torchvision:{name}", error) from error
    linears = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linears:
        raise InputError(
            f"TEACHER is torchvision:{name}, which has no linear classifier to remove: choose a "
            "model for classification"
        )
    classifier = linears[-1]
    model.set_submodule(classifier, nn.Identity())
    if state is not None:
        body = model.state_dict()  # with the modules' versions, which MNASNet requires
        selected = select_weights(state, body, "TEACHER_WEIGHTS")
        selected = {k: v for k, v in selected.items() if not k.startswith(f"{classifier}.")}
        body.clear()
        body |= selected
        try:
            model.load_state_dict(body)
        except RuntimeError as error:
            raise misfit(f"torchvision:{name}", error) from error
    transform = torchvision_transform(weights.transforms(), request.image_size)
    return Network(f"torchvision:{name}", model, lambda x: model(x).flatten(1), transform)


def torchvision_transform(preset: Any, image_size: int | None = None) -> Transform:
    """Return the preprocessing of torchvision's `ImageClassification` preset.

    With `image_size`, the same share of the image is kept.
    """
    size = image_size or preset.crop_size[0]
    resize = round(size * preset.resize_size[0] / preset.crop_size[0])
    mean, std = tuple(preset.mean), tuple(preset.std)
    return Transform(size, resize, preset.interpolation.value, mean, std)
