"""The dtype of a language model's weights in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast a model's weights in place, one at a time.

    `model.to(dtype)` would also round rotary frequencies, which are buffers.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


def halve_products(model: Any, dtype: torch.dtype) -> None:
    """Cast the frozen weights of a model's linear layers to half precision, in place.

    `autocast(dtype=dtype)` rounds them to it at each product anyway, so every result is
    bit-identical to that of float32 weights, in half the memory. Embeddings, norms and the output
    head become float32, since the residual stream overflows in float16. Without autocast the
    products are the same, too.

    Args:
        model: a causal language model of transformers; trained weights (adapters) keep their dtype.
        dtype: float16 or bfloat16.
    """
    head = model.get_output_embeddings()
    halved: set[Tensor] = set()
    for module in model.modules():
        # GPT-2 has transposed linear layers, of the class Conv1D.
        linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        floating = linear and module.weight.is_floating_point()  # 4-bit layers cast by themselves
        if floating and module is not head and not module.weight.requires_grad:
            halved |= set(module.parameters(recurse=False))
            module.register_forward_pre_hook(_cast_input)
            module.register_forward_hook(_cast_output)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype if parameter in halved else torch.float32)


def _cast_input(module: Any, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (arguments[0].to(module.weight.dtype), *arguments[1:])


def _cast_output(module: Any, arguments: tuple[Tensor, ...], product: Tensor) -> Tensor:
    return product if torch.is_autocast_enabled(product.device.type) else product.float()
