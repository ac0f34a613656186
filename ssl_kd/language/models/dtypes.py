"""Set the dtype of a language model's weights in memory, or quantize frozen weights to 4 bits.

References:
    Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, NeurIPS 2023, section 3 (NF4,
    double quantization).
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

from ssl_kd.core.errors import MissingPackage


def bitsandbytes(setting: str) -> Any:
    """Return the package; raise MissingPackage, which names the setting that needs it."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingPackage(f"{setting} needs bitsandbytes: pip install 'ssl_kd[quantized]'")
    return importlib.import_module("bitsandbytes")


def nf4(device: torch.device, compute: torch.dtype) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that quantize a frozen model's linear layers.

    bitsandbytes packs the weights for the device, in about 4.1 bits each, and computes products in
    `compute`. Embeddings, norms and the output head keep their dtype. 8 bits are not offered,
    because bitsandbytes rounds the input of such a layer to float16, where it may overflow, and the
    result of a row depends on the other rows of the batch.
    """
    bitsandbytes("QUANTIZATION nf4")
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
    )
    return {"quantization_config": config, "device_map": {"": device}}


def keep_gradients(model: Any) -> None:
    """Turn off a CPU kernel of 4-bit layers that silently passes no gradient back."""
    for module in model.modules():  # would switch to it at the first pass in evaluation mode
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the weights of a model in place, one at a time.

    Unlike `model.to(dtype)`, this does not round buffers such as rotary frequencies.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


def halve_products(model: Any, dtype: torch.dtype) -> None:
    """Cast the frozen weights of a model's linear layers to float16 or bfloat16, in place.

    Autocast would round these weights at each matrix product anyway, so every result is
    bit-identical to the result with float32 weights, at half the memory. Embeddings, norms,
    trainable weights and the output head become float32, because the residual stream overflows in
    float16.
    """
    head = {*model.get_output_embeddings().modules()}  # with a trained copy, of PEFT
    halved: set[Tensor] = set()
    for module in model.modules():
        # GPT-2 has transposed linear layers, of the class Conv1D.
        linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        floating = linear and module.weight.is_floating_point()  # 4-bit layers cast by themselves
        if floating and module not in head and not module.weight.requires_grad:
            halved |= set(module.parameters(recurse=False))
            module.register_forward_pre_hook(cast_input)
            module.register_forward_hook(_cast_output)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype if parameter in halved else torch.float32)


def cast_input(module: Any, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Cast the input of a module to the dtype of its weight, as a forward pre-hook."""
    return (arguments[0].to(module.weight.dtype), *arguments[1:])


def _cast_output(module: Any, arguments: tuple[Tensor, ...], product: Tensor) -> Tensor:
    return product if torch.is_autocast_enabled(product.device.type) else product.float()
