"""Record the range of each module's outputs, to locate the fault of a step that cannot rerun."""

from __future__ import annotations

import math
import weakref
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_PASSED_OVER = (nn.Dropout, nn.Identity, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Flatten)


class ModuleRanges:
    """Record the largest magnitude of each module's outputs in one step.

    Skips dropout and activations that do not enlarge values. Only `origin` waits for the device.
    """

    def __init__(self, model: nn.Module) -> None:
        self._looks: list[tuple[str, Tensor]] = []
        self._last: weakref.ref[Tensor] | None = None
        ranges: weakref.ref[ModuleRanges] = weakref.ref(self)
        top = type(model).__name__
        self._hooks = [
            module.register_forward_hook(partial(_look, ranges, f"{top}.{name}" if name else top))
            for name, module in model.named_modules()
            if not isinstance(module, _PASSED_OVER)
        ]
        for hook in self._hooks:
            weakref.finalize(self, hook.remove)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def end_step(self) -> None:
        """Forget the ranges of the step."""
        self._looks = []

    def see(self, module: str, x: Tensor) -> None:
        """Record a module's output, unless it is the previous one returned by a container."""
        if (
            x.numel()
            and x.layout == torch.strided
            and (self._last is None or self._last() is not x)
        ):
            self._last = weakref.ref(x)
            self._looks.append((module, torch.linalg.vector_norm(x.detach(), math.inf)))

    def origin(self) -> tuple[str, str] | None:
        """Return the first module whose output has a NaN or infinity, and a sentence about it."""
        for i, (module, largest) in enumerate(self._looks):
            if not bool(torch.isfinite(largest)):
                before = self._looks[max(0, i - 3) : i]
                ranges = ", ".join(f"{name} up to {float(x):.3g}" for name, x in before)
                note = f"the output of {module} was the first not to be finite"
                return module, note + (f"; just before: {ranges}" if before else "")
        return None


def _look(
    reference: weakref.ref[ModuleRanges], name: str, module: nn.Module, args: object, output: object
) -> None:
    if (ranges := reference()) is not None and is_first_run():
        for x in floating(output):
            ranges.see(name, x)


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
