"""The weights of a Trainer's checkpoint, where transformers writes them under other names."""

from __future__ import annotations

from typing import Any

import torch

from ssl_kd.teachers.causal import llm_module, quiet, sees, without_adapters


def load_seeing(model: Any, checkpoint: str) -> bool:
    """Give a model of images and text the weights of a checkpoint, in place.

    `save_pretrained` writes those of a Llava or Qwen-VL under their older names, which a Trainer
    compares with the present ones as they stand: it would go on from the weights it began with.

    Args:
        model: the Trainer's.
        checkpoint: the folder.

    Returns:
        False where the Trainer itself does it right: of text alone, or with adapters.
    """
    if model is not without_adapters(model) or not sees(model):
        return False
    with quiet(llm_module("transformers")):
        saved = type(model).from_pretrained(checkpoint, dtype=torch.float32)
    model.load_state_dict(saved.state_dict())
    return True
