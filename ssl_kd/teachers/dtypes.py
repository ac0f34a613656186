"""In which dtype a language model's weights lie in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast a model's weights, in place and one at a time.

    Not `model.to(dtype)`: that would round rotary frequencies, which are buffers.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


def halve_products(model: Any, dtype: torch.dtype) -> None:
    """Keep the frozen weights of a model's linear layers in half precision, in place.

    Under `autocast(dtype=dtype)` they would be rounded to it at each product anyway, so every
    result is to the bit that of float32 weights, in half the memory. Embeddings, norms and the
    output head are float32: the residual stream stays in it, where float16 overflows. Outside
    autocast the products are the same, too.

    Args:
        model: a causal language model of transformers with adapters, which are trained and stay
            as they are.
        dtype: float16 or bfloat16.
    """
    head = model.get_output_embeddings()
    halved: set[Tensor] = set()
    for module in model.modules():
        # GPT-2 keeps its linear layers transposed.
        linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        floats = linear and module.weight.is_floating_point()  # those in fewer bits are cast inside
        if floats and module is not head and not module.weight.requires_grad:
            halved |= set(module.parameters(recurse=False))
            module.register_forward_pre_hook(_as_the_weight)
            module.register_forward_hook(_as_the_others)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype if parameter in halved else torch.float32)


def _as_the_weight(module: Any, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (arguments[0].to(module.weight.dtype), *arguments[1:])


def _as_the_others(module: Any, arguments: tuple[Tensor, ...], product: Tensor) -> Tensor:
    return product if torch.is_autocast_enabled(product.device.type) else product.float()
