"""Frozen weights in 4 bits, by bitsandbytes.

References:
    Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, NeurIPS 2023, section 3 (NF4,
    double quantization).
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

from ssl_kd.errors import MissingPackage


@dataclass(frozen=True)
class Quantization:
    """Linear layers in NF4, about 4.1 bits a weight; embeddings, norms and output head unchanged.

    8 bits are not offered: bitsandbytes rounds their input to float16, where it may overflow, and
    the result of a row depends on the other rows of the batch.

    Args:
        device: where the model goes, since weights are packed for their device.
        compute: dtype of the products.

    Raises:
        MissingPackage: bitsandbytes is not installed.
    """

    device: torch.device
    compute: torch.dtype

    def __post_init__(self) -> None:
        if importlib.util.find_spec("bitsandbytes") is None:
            raise MissingPackage(
                "weights in 4 bits need bitsandbytes: pip install 'ssl_kd[quantized]'"
            )

    @classmethod
    def of(
        cls, kind: str | None, device: torch.device, compute: torch.dtype
    ) -> Quantization | None:
        """Return the quantization of the setting QUANTIZATION: `nf4`, or None."""
        return None if kind is None else cls(device, compute)

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of `from_pretrained`."""
        from transformers import BitsAndBytesConfig

        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=self.compute,
        )
        return {"quantization_config": config, "device_map": {"": self.device}}


def keep_gradients(model: Any) -> None:
    """Turn off a CPU kernel for 4-bit layers that passes no gradient back, without an error.

    A layer would switch to it at its first forward pass in evaluation mode.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def stacked_bytes(model: Any) -> int:
    """Return the bytes of a mixture's experts, whose stacked tensors are not quantized."""
    return sum(p.nbytes for p in model.parameters() if p.ndim > 2 and p.is_floating_point())
