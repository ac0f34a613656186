"""Read weights from files."""

from __future__ import annotations

import argparse
import logging
import os
import pathlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ssl_kd.core.errors import InputError, brief, printable
from ssl_kd.core.files import load_tensors

logger = logging.getLogger(__name__)

State = dict[str, Tensor]

_AVERAGED = frozenset(
    "teacher teacher_backbone state_dict_ema model_ema ema_state_dict ema_model ema".split()
)
"""Parts of a checkpoint with averaged weights."""
_SECOND = frozenset(
    "student student_backbone encoder_k momentum_encoder momentum_backbone target_encoder "
    "target_network".split()
)
"""Parts of a checkpoint that are used only if there is no other copy of the model."""
_WRAPPERS = frozenset(
    "state_dict model_state_dict model_state model module net network backbone encoder "
    "base_encoder encoder_q online_encoder online_network".split()
).union(_AVERAGED, _SECOND)
"""Names that dictionaries, Lightning, DDP, DINO, MoCo, BYOL and others put before a model's."""
_INNER_WRAPPERS = frozenset("_orig_mod _fsdp_wrapped_module _checkpoint_wrapped_module".split())
"""Names that torch.compile, FSDP and activation checkpointing insert anywhere."""
_HEADS = frozenset(
    "head heads fc classifier projector projection_head projection predictor prediction_head "
    "prototypes dino_head ibot_head mlp_head queue queue_ptr decoder decoder_embed decoder_blocks "
    "decoder_pos_embed decoder_norm decoder_pred".split()
)
"""Names of the layers after a model, which are left out if the model lacks them."""
_CLASSES_OF_ARGUMENTS = (argparse.Namespace, pathlib.PosixPath)
"""Classes without code of their own, in which training programs store their arguments."""


def read_weights(path: str | os.PathLike[str]) -> State:
    """Read the tensors of a `.pth`, `.pt` or `.safetensors` file under their full names.

    Tensors of nested dictionaries are named by their path: `state_dict.model.conv1.weight`. A
    pickle that contains code is refused, not run.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"the weights file {path} does not exist")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            content: object = load_file(path)
        else:
            content = load_tensors(path, plain_classes=_CLASSES_OF_ARGUMENTS)
    except Exception as error:  # both libraries raise their own exceptions
        raise InputError(
            f"{path} is not a readable weights file: {brief(error)}. If it is a checkpoint with "
            "other objects and you trust it, save its state dict alone: "
            "torch.save(torch.load(FILE, weights_only=False)['state_dict'], NEW_FILE)"
        ) from error
    tensors = dict(_tensors(content))
    if not tensors:
        raise InputError(
            f"{path} holds no state dict, but a {type(content).__name__} without tensors"
        )
    return tensors


def _tensors(content: object, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested dictionaries with their names, joined by dots."""
    if not isinstance(content, Mapping):
        return
    for name, value in content.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{name}", value
        else:
            yield from _tensors(value, f"{prefix}{name}.")


def select_weights(
    tensors: State, model: Mapping[str, Tensor], source: str, classifiers: Collection[str] = ()
) -> State:
    """Return the tensors of a checkpoint that belong to a model, under the names of the model.

    Training programs put a model into wrappers, such as `state_dict`, `module` or
    `teacher.backbone`. The wrappers under which the file has most tensors of the model, by name and
    shape, are removed; of several equal parts, averaged weights are preferred. Heads that the model
    lacks are left out. Names that the model does not know are not changed, because timm renames
    some of them.

    Args:
        tensors: tensors of the file by full name, as `read_weights` returns them.
        model: state dict of the model, on any device.
        source: name of the file, for the log.
        classifiers: names of layers whose `weight` and `bias` are kept, although `model` lacks
            them.
    """
    named = {_without_inner_wrappers(name): tensor for name, tensor in tensors.items()}
    prefixes = {prefix for name in named for prefix in _wrappers_of(name)}
    prefix = min(prefixes, key=lambda prefix: _preference(prefix, named, model))
    known = {f"{name}.{kind}" for name in classifiers for kind in ("weight", "bias")}.union(model)
    heads = _HEADS.union(name.partition(".")[0] for name in classifiers)
    selected: State = {}
    for full_name, tensor in named.items():
        name = full_name.removeprefix(prefix)
        is_head = name not in known and name.partition(".")[0] in heads
        if full_name.startswith(prefix) and not is_head:
            selected[name] = tensor
    wrappers = [prefix.rstrip(".")] if prefix else []
    wrappers += sorted({part for name in tensors for part in name.split(".")} & _INNER_WRAPPERS)
    used = {prefix + name for name in selected}
    unused = sorted({_branch(name, prefix) for name in named if name not in used})
    _log_selection(source, wrappers, unused)
    return selected


def _log_selection(source: str, wrappers: Sequence[str], unused: Sequence[str]) -> None:
    parts = []
    if wrappers:
        parts.append(f"{', '.join(wrappers)} is removed from the names of the weights")
    if unused:
        parts.append(f"not used: {', '.join(unused)}")
    if parts:
        logger.info("%s: %s", source, printable("; ".join(parts)))


def _without_inner_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _INNER_WRAPPERS)


def _wrappers_of(name: str) -> Iterator[str]:
    """Yield each beginning of a name that consists of wrappers, from the empty one on."""
    prefix = ""
    yield prefix
    for part in name.split(".")[:-1]:
        if part not in _WRAPPERS:
            break
        prefix += f"{part}."
        yield prefix


def _preference(prefix: str, tensors: State, model: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """Return a key that is smallest for the wrappers to remove."""
    shapes = {name: getattr(tensors.get(prefix + name), "shape", None) for name in model}
    matches = sum(shapes[name] == tensor.shape for name, tensor in model.items())
    parts = prefix.split(".")
    # Without any match, timm renames all tensors: the part in which most names begin is taken.
    begins = 0
    if not matches:
        names = [name for name in tensors if name.startswith(prefix)]
        begins = sum(name[len(prefix) :].partition(".")[0] not in _WRAPPERS for name in names)
    is_second = any(part in _SECOND for part in parts)
    is_averaged = any(part in _AVERAGED for part in parts)
    return -matches, -begins, is_second, not is_averaged, len(parts), prefix


def _branch(name: str, prefix: str) -> str:
    """Return the beginning of a name up to the first part in which it differs from a prefix."""
    parts = name.split(".")
    pairs = zip(parts, prefix.split("."), strict=False)
    depth = next((depth for depth, (part, other) in enumerate(pairs) if part != other), 0)
    return ".".join(parts[: depth + 1])
