"""The parts of a causal language model: decoder layers, and the towers of one that sees images."""

from __future__ import annotations

from typing import Any

from torch import nn

from ssl_kd.errors import InputError
from ssl_kd.teachers.causal import sees, without_adapters

_TOWERS = {"vision_tower", "visual", "vision_model", "vision_encoder", "image_tower"}
_PROJECTOR = "merger"  # of Qwen-VL, which keeps it inside the tower


def stack_of(model: Any) -> str:
    """Return the name of the list of a causal model's decoder layers, such as `model.layers`.

    Raises:
        ValueError: no list has as many entries as the configuration has layers.
    """
    causal, start = without_adapters(model), ""
    if sees(causal):  # a vision tower has its own layers
        decoder = causal.get_decoder()
        start = next(f"{name}." for name, module in causal.named_modules() if module is decoder)
    depth = causal.config.get_text_config().num_hidden_layers
    for name, module in causal.named_modules():  # the outermost comes first
        if isinstance(module, nn.ModuleList) and len(module) == depth and name.startswith(start):
            return name
    raise InputError(f"{type(causal).__name__} has no list of its {depth} layers")


def freeze_tower(model: Any, *, images: bool) -> None:
    """Set which weights of a model of images and text are trained; leave other models alone.

    The language part is trained, the projector only with images, and the vision tower never.

    Args:
        model: of transformers, without adapters; changed in place.
        images: whether the training data contain images.
    """
    if not sees(model):
        return
    decoder = model.get_decoder()
    language = {id(p) for p in (*decoder.parameters(), *model.get_output_embeddings().parameters())}
    for name, parameter in model.named_parameters():
        path = name.split(".")
        in_tower = not _TOWERS.isdisjoint(path) and _PROJECTOR not in path
        parameter.requires_grad = id(parameter) in language or (images and not in_tower)


def trained_linears(model: Any) -> list[str]:
    """Return the names of the linear layers that are trained, without the output head."""
    head = without_adapters(model).get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and module.weight.requires_grad
    ]
