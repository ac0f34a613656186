"""The parts of a model of images and text: vision tower, projector, language."""

from __future__ import annotations

from typing import Any

from torch import nn

from ssl_kd.teachers.causal import sees, without_adapters

_TOWERS = ("vision_tower", "visual", "vision_model", "vision_encoder", "image_tower")
_PROJECTORS = ("merger",)  # of Qwen-VL, inside its tower


def freeze_tower(model: Any, *, images: bool) -> None:
    """Say which weights of a model of images and text are trained; others are left alone.

    The language part always is, the projector where there are images to learn from, and the vision
    tower never.

    Args:
        model: of transformers, without adapters; changed in place.
        images: whether the model will see any.
    """
    if not sees(model):
        return
    decoder = model.get_decoder()
    language = {id(p) for p in (*decoder.parameters(), *model.get_output_embeddings().parameters())}
    for name, parameter in model.named_parameters():
        path = name.split(".")
        in_tower = any(part in _TOWERS for part in path) and not any(
            mark in part for part in path for mark in _PROJECTORS
        )
        parameter.requires_grad = id(parameter) in language or (images and not in_tower)


def trained_linears(model: Any) -> list[str]:
    """The linear layers that are trained, by name, without the output head."""
    head = without_adapters(model).get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and module.weight.requires_grad
    ]
