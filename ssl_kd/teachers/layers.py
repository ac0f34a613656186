"""The decoder layers of a causal language model, and what is inside them by name."""

from __future__ import annotations

from typing import Any

from torch import nn

from ssl_kd.errors import InputError
from ssl_kd.teachers.causal import sees, without_adapters


def stack_of(model: Any) -> str:
    """The name of the list of a causal model's decoder layers, as in `model.layers`.

    Raises:
        ValueError: there is none with as many entries as the configuration says.
    """
    causal = without_adapters(model)
    begin = f"{_inside(causal)}." if sees(causal) else ""  # a vision tower has layers of its own
    depth = causal.config.get_text_config().num_hidden_layers
    for name, module in causal.named_modules():  # the outermost comes first
        fits = isinstance(module, nn.ModuleList) and len(module) == depth
        if fits and name.startswith(begin):
            return name
    raise InputError(f"{type(causal).__name__} has no list of its {depth} layers")


def _inside(causal: Any) -> str:
    """The name of the part of a model of images and text that reads text."""
    decoder = causal.get_decoder()
    return next(name for name, module in causal.named_modules() if module is decoder)


def decoder_layers(model: Any) -> list[nn.Module]:
    """The decoder layers of a causal model of transformers, with or without PEFT's wrapping."""
    return [*without_adapters(model).get_submodule(stack_of(model))]
