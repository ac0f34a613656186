"""Each module's largest magnitudes in the last steps: where a step that cannot be repeated began.

A module that multiplies, normalises or exponentiates may make a value that is not finite out of
finite ones (a producer); what reads it only passes it on. Dropout and activations whose result is
never larger than what they read are passed over, as they produce none.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_PASSED_OVER = (nn.Dropout, nn.Identity, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Flatten)


class _Seen(NamedTuple):
    """One look at a tensor: its largest magnitude in each row, still on its device."""

    module: str
    what: str  # "output", "input", or "gradient"
    largest: Tensor


@dataclass(frozen=True)
class Origin:
    """The first look of a step that was not finite.

    Attributes:
        module: its name, after the class of the model: `Net.layers.2`.
        what: `output`, `input` (made between modules, in the forward of the one around this) or
            `gradient` at the module's output.
        rows: rows of the batch in which it was not finite, at most eight.
        before: (module, largest magnitude) of the looks before it in the same step, at most three.
        usual: largest magnitude of the same look in the steps before; None where there were none.
    """

    module: str
    what: str
    rows: tuple[int, ...]
    before: tuple[tuple[str, float], ...]
    usual: float | None

    def __str__(self) -> str:
        """One line: where, what is usual there, and the largest magnitudes just before."""
        words = f"the {self.what} of {self.module} was the first not to be finite"
        if self.usual is not None:
            words += f" (at most {self.usual:.3g} in the steps before)"
        if self.before:
            some = ", ".join(f"{name} up to {x:.3g}" for name, x in self.before)
            words += f"; just before: {some}"
        return words


class ModuleRanges:
    """Keeps the largest magnitude of each module's output, input and gradient, row by row.

    Nothing waits for a device until `origin` is asked. An input that is another module's output is
    not looked at twice.

    Args:
        model: whose modules are watched.
        steps: that are kept.
    """

    def __init__(self, model: nn.Module, steps: int = 8) -> None:
        self._steps: deque[list[_Seen]] = deque([[]], maxlen=steps)
        self._known: dict[int, weakref.ref[Tensor]] = {}
        mine: weakref.ref[ModuleRanges] = weakref.ref(self)
        top = type(model).__name__
        self._hooks = [
            module.register_forward_hook(partial(_look, mine, f"{top}.{name}" if name else top))
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
        """Begin another step."""
        self._steps.append([])
        self._known.clear()

    def see(self, module: str, what: str, x: Tensor) -> None:
        """Look at a tensor, unless it was looked at already."""
        if not x.is_floating_point() or not x.numel() or x.layout != torch.strided:
            return
        if what != "gradient":
            known = self._known.get(id(x))
            if known is not None and known() is x:
                return
            self._known[id(x)] = weakref.ref(x)
        with torch.no_grad():
            rows = x.detach().reshape(len(x), -1) if x.ndim > 1 else x.detach().reshape(1, -1)
            largest = torch.linalg.vector_norm(rows, math.inf, dim=1)
        self._steps[-1].append(_Seen(module, what, largest))

    def origin(self) -> Origin | None:
        """The first look of this step that was not finite; waits for the device."""
        looks = self._steps[-1]
        for i, seen in enumerate(looks):
            bad = ~torch.isfinite(seen.largest)
            if not bool(bad.any()):
                continue
            rows = bad.nonzero().flatten().tolist()
            whole = len(rows) == len(bad)
            before = [(s.module, float(s.largest.max())) for s in looks[max(0, i - 3) : i]]
            past = [float(s.largest.max()) for s in self._before(seen)]
            usual = max((x for x in past if math.isfinite(x)), default=None)
            few = () if whole else tuple(rows[:8])
            return Origin(seen.module, seen.what, few, tuple(before), usual)
        return None

    def _before(self, seen: _Seen) -> Sequence[_Seen]:
        older = [*self._steps][:-1]
        return [s for step in older for s in step if (s.module, s.what) == (seen.module, seen.what)]


def _look(
    ranges: weakref.ref[ModuleRanges], name: str, module: nn.Module, args: Any, output: Any
) -> None:
    if (mine := ranges()) is None or not is_first_run():
        return
    for x in floating(args):
        mine.see(name, "input", x)
    for x in floating(output):
        mine.see(name, "output", x)
        if x.requires_grad and x.grad_fn is not None:
            x.register_hook(partial(_look_back, ranges, name))


def _look_back(ranges: weakref.ref[ModuleRanges], name: str, gradient: Tensor) -> None:
    if (mine := ranges()) is not None:
        mine.see(name, "gradient", gradient)


def is_first_run() -> bool:
    """Whether a hook is neither traced by a compiler nor in a pass that checkpointing repeats."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() == -1


def floating(values: object) -> list[Tensor]:
    """The floating-point tensors in what a module returned: a tensor, a tree, or an object."""
    found = []
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            found += [leaf] if leaf.is_floating_point() or leaf.is_complex() else []
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, nn.Module | type):
            found += [
                x for x in vars(leaf).values() if isinstance(x, Tensor) and x.is_floating_point()
            ]
    return found
