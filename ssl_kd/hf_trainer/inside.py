"""A loss inside the forward pass of whatever a Trainer has around the student."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ssl_kd.teachers.causal import without_adapters


def inside(
    model: nn.Module, student: nn.Module, work: Callable[[], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Return the terms of `work`, computed inside the forward pass of `model` around `student`."""
    inner = student
    if hasattr(student, "unshard"):  # FSDP2's: the head's weights are whole while it runs
        inner = without_adapters(student).get_output_embeddings()
    before = {module: vars(module).get("forward") for module in (student, inner)}

    def restore() -> None:
        for module, forward in before.items():  # accelerate puts one there, for autocast
            vars(module).pop("forward", None)
            if forward is not None:
                vars(module)["forward"] = forward

    @torch.compiler.disable
    def forward() -> dict[str, Tensor]:
        restore()
        return {name: term.clone() for name, term in work().items()}  # FSDP2 warns of views

    vars(student)["forward"] = inner
    vars(inner)["forward"] = forward
    try:
        return model()
    finally:
        restore()
