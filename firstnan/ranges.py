"""Record the range of each module's outputs, to locate the fault of a step that cannot rerun."""

from __future__ import annotations

import math
import weakref
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class ModuleRanges:
    """The largest magnitude of each module's outputs in one step; only `origin` waits for it."""

    def __init__(self, model: nn.Module) -> None:
        self._magnitudes: list[tuple[str, Tensor]] = []
        self._last: weakref.ref[Tensor] | None = None
        ranges: weakref.ref[ModuleRanges] = weakref.ref(self)
        top = type(model).__name__
        self.hooks = [
            module.register_forward_hook(partial(_record, ranges, f"{top}.{name}".rstrip(".")))
            for name, module in model.named_modules()
        ]

    def forget(self) -> None:
        """Forget the ranges of the step."""
        self._magnitudes = []

    def record(self, module: str, x: Tensor) -> None:
        """Record a module's output, unless a container returns its last module's output."""
        if (
            x.numel()
            and x.layout == torch.strided
            and (self._last is None or self._last() is not x)
        ):
            self._last = weakref.ref(x)
            self._magnitudes.append((module, torch.linalg.vector_norm(x.detach(), math.inf)))

    def origin(self) -> tuple[str, str] | None:
        """Return the first module with a NaN or infinity in its output, and a sentence about it."""
        for i, (module, magnitude) in enumerate(self._magnitudes):
            if not bool(torch.isfinite(magnitude)):
                before = self._magnitudes[max(0, i - 3) : i]
                ranges = ", ".join(f"{name} up to {float(x):.3g}" for name, x in before)
                note = f"the output of {module} was the first not to be finite"
                return module, note + (f"; just before: {ranges}" if before else "")
        return None


def _record(
    reference: weakref.ref[ModuleRanges], name: str, module: nn.Module, args: object, output: object
) -> None:
    if (ranges := reference()) is not None and is_first_run():
        for x in floating(output):
            ranges.record(name, x)


def is_first_run() -> bool:
    """Return False while a compiler traces the hook or checkpointing recomputes the pass."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() == -1


def floating(values: object) -> list[Tensor]:
    """Return the floating-point tensors in a module's output (a tensor, a tree or an object)."""
    tensors = []
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            tensors += [leaf] if leaf.is_floating_point() or leaf.is_complex() else []
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, nn.Module | type):
            tensors += [
                x for x in vars(leaf).values() if isinstance(x, Tensor) and x.is_floating_point()
            ]
    return tensors
