"""Load the models of timm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from ssl_kd.core.errors import InputError, brief
from ssl_kd.vision.teacher_kinds import SHORT_NAMES, TIMM_MODELS
from ssl_kd.vision.teachers.base import Teacher
from ssl_kd.vision.teachers.hugging_face import offline_without_network, unavailable
from ssl_kd.vision.teachers.messages import misfit, unknown_model
from ssl_kd.vision.teachers.network import Network, Transform
from ssl_kd.vision.teachers.request import Request
from ssl_kd.vision.teachers.tokens import last_layers, one_layer
from ssl_kd.vision.teachers.weights import State, select_weights


def _timm_config(model_name: str) -> Any:
    """Return timm's configuration of a model, or None for `hf-hub:` names."""
    import timm

    if ":" in model_name:
        if model_name.startswith(("hf-hub:", "hf_hub:")):
            return None  # the configuration comes with the weights
        raise InputError(
            f"timm:{model_name}: expected the name of a model or hf-hub:OWNER/NAME after timm:"
        )
    if not timm.is_model(model_name):
        raise InputError(unknown_model("timm", model_name, timm.list_models()))
    try:
        return timm.get_pretrained_cfg(model_name)
    except RuntimeError as error:  # an unknown tag after the dot
        raise InputError(f"timm:{model_name}: {error}") from error


def load_timm(request: Request) -> Teacher:
    """Load `timm:NAME`, or `timm:hf-hub:OWNER/NAME` from the Hub."""
    state = request.read_state()
    return build_timm(request, request.model, request.name, state)


def load_named(request: Request) -> Teacher:
    """Load a model of timm by the name that its authors gave it, as in `TIMM_MODELS`.

    With TOKEN `class`, DINOv3 embeds by its class token; timm's own pooling is the mean patch.
    """
    name = SHORT_NAMES.get(request.name, request.name)
    options = {"global_pool": "token"} if name.startswith("dinov3_vit") else {}
    state = request.read_state()
    return build_timm(request, TIMM_MODELS[name], f"{name} (timm)", state, **options)


def build_timm(
    request: Request, model_name: str, name: str, state: State | None, **kwargs: Any
) -> Teacher:
    """Build a teacher from a model of timm.

    Args:
        request: sets IMAGE_SIZE and TOKEN. Without IMAGE_SIZE the side of the input is that of the
            weights' configuration, and 224 for DINOv2.
        model_name: name of the model in timm.
        name: name of the teacher.
        state: tensors of a local file of weights; None: the published ones.
        kwargs: options for `timm.create_model`.
    """
    import timm

    config = _timm_config(model_name)
    image_size = request.image_size
    token = request.token
    if config is not None and config.fixed_input_size:
        native = config.input_size[-2:]
        # DINOv2's configuration says 518, which costs 5 times the work of 224.
        if image_size is None and "patch14" in model_name and native == (518, 518):
            image_size = 224
        if image_size is not None and (image_size, image_size) != native:
            kwargs["img_size"] = image_size
    model: Any
    if state is None:
        try:
            with offline_without_network():
                model = timm.create_model(model_name, pretrained=True, num_classes=0, **kwargs)
        except (OSError, RuntimeError, ValueError, SafetensorError) as error:
            if config is None and isinstance(error, ValueError):  # an impossible name
                raise InputError(f"timm:{model_name}: {brief(error)}") from error
            raise unavailable(name, error) from error
    else:
        model = _timm_from_file(model_name, state, config, kwargs)

    transform = timm_transform(model.pretrained_cfg, image_size)
    # Class token, if there is one, and registers: they come before the patches.
    prefix: int | None = getattr(model, "num_prefix_tokens", None)
    if token != "class" and prefix is None:
        raise InputError(f"TOKEN is {token!r}, but {name} has no patch tokens: set it to 'class'")
    if token == "last4" and getattr(model, "cls_token", None) is None:
        raise InputError(
            f"TOKEN is 'last4', but {name} has no class token: set it to 'class', 'patch' or 'both'"
        )

    def features(x: Tensor) -> Tensor:
        if token == "last4":
            options = {"return_prefix_tokens": True, "norm": True, "intermediates_only": True}
            layers = model.forward_intermediates(x, indices=4, output_fmt="NLC", **options)
            return last_layers([(patches, tokens[:, 0]) for patches, tokens in layers])
        tokens = model.forward_features(x)
        return one_layer(token, model.forward_head(tokens), tokens[:, prefix:])

    return Network(name, model, model if token == "class" else features, transform, token)


def timm_transform(config: Mapping[str, Any], image_size: int | None = None) -> Transform:
    """Return the preprocessing of a timm model for a configuration of its weights.

    It is that of timm's `create_transform`. `image_size` is the side of a square input, and None
    stands for the input size in the configuration.
    """
    from timm.data.config import resolve_data_config

    data = resolve_data_config(pretrained_cfg=config)
    height, width = (image_size, image_size) if image_size else data["input_size"][-2:]
    resize = tuple(math.floor(side / data["crop_pct"]) for side in (height, width))
    is_square = height == width
    return Transform(
        size=height if is_square else (height, width),
        resize=resize[0] if is_square else resize,
        interpolation=data["interpolation"],
        mean=tuple(data["mean"]),
        std=tuple(data["std"]),
        crop_mode=data["crop_mode"],
    )


def _timm_from_file(model_name: str, state: State, config: Any, kwargs: dict[str, Any]) -> Any:
    """Build a timm model with weights from a file, which must fit once timm has renamed them."""
    import timm

    classifier = getattr(config, "classifier", None) or "head"
    classifiers = [classifier] if isinstance(classifier, str) else list(classifier)
    with torch.device("meta"):  # names and shapes alone, with the classifier
        expected = timm.create_model(model_name, pretrained=False, **kwargs)
    state = select_weights(state, expected.state_dict(), "TEACHER_WEIGHTS", classifiers)
    weight = state.get(f"{classifiers[0]}.weight")
    # timm loads strictly only if the number of classes is that of the file.
    classes = 0 if weight is None else len(weight)
    overlay = {"state_dict": state, "num_classes": classes, "custom_load": False, "label_offset": 0}
    kwargs |= {"num_classes": classes, "pretrained_cfg_overlay": overlay}
    try:
        model: Any = timm.create_model(model_name, pretrained=True, **kwargs)
    except (RuntimeError, KeyError) as error:
        raise misfit(model_name, error) from error
    model.reset_classifier(0)
    return model
