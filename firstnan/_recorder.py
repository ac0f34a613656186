"""Record the range of every tensor between modules, to locate a fault without running again.

Each tensor that enters or leaves a module is reduced to its smallest and largest entry, and its
gradient in the backward pass to its norm. Nothing waits for the device until `Recorder.origin`.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from firstnan._hooks import version_of, weakly
from firstnan._norms import as_reals, stored

_STEPS = 8  # earlier steps that are kept
_BEFORE = 3  # values that a report lists before the first bad one

repeating: list[Recorder] = []  # while a `Watch` repeats a pass: its recorder, of names alone


@dataclass(eq=False)
class _Value:
    """A tensor between modules, or its gradient."""

    place: str  # such as `output of Net.0`
    maker: str | None  # the module that computed it; None if it came from outside of the model
    owner: str | None = None  # the module that got it from `maker`
    readers: list[str] = field(default_factory=list)  # modules that took it as an input
    ends: tuple[Tensor, ...] = ()  # smallest and largest entry, both NaN if one is; or the norm

    @property
    def size(self) -> float:
        return max(abs(float(x)) for x in self.ends)

    def __str__(self) -> str:
        kind = "norm" if len(self.ends) == 1 else str(self.ends[0].dtype).removeprefix("torch.")
        return f"{self.place}: {kind} {' to '.join(f'{float(x):.3g}' for x in self.ends)}"

    def source(self, backward: bool) -> tuple[str | None, str]:
        """Return the module that made the value, or its gradient, and a sentence about it."""
        words = f"the {self.place} was the first value that is not finite"
        if not backward:
            return self.maker, words
        read = {*self.readers}
        inner = sorted(r for r in read if not any(other.startswith(f"{r}.") for other in read))
        name = " or ".join(inner) or self.owner or "what follows the model, such as the loss"
        return inner[0] if inner else self.owner, f"{words}, by the backward pass of {name}"


class Recorder:
    """The ranges of values and gradients between the modules of a model, in its last steps."""

    def __init__(self, model: nn.Module) -> None:
        self._backward = ""  # the module whose backward pass runs now
        self._model, self._top = model, type(model).__name__
        # A step is two lists, in the order in which they were computed: values, gradients.
        self._steps: deque[tuple[list[_Value], list[_Value]]] = deque([([], [])], _STEPS + 1)
        self._open: list[str] = []  # names of the modules that run now
        # By id of a tensor; an in-place operation, which changes its version, makes it unknown.
        self._known: dict[int, tuple[weakref.ref[Tensor], int, _Value]] = {}
        self._at_gradient = weakly(self._note_gradient)
        self.hooks = []
        for path, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                continue
            name = f"{self._top}.{path}".rstrip(".")
            enter, leave = weakly(self._enter, name), weakly(self._leave, name)
            self.hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            self.hooks.append(module.register_forward_hook(leave, always_call=True))

    def forget(self) -> None:
        """Begin a step; the ranges of the last eight stay."""
        self._steps.append(([], []))
        self._open.clear()
        self._known.clear()

    def origin(self) -> tuple[str | None, str, tuple[tuple[str, str], ...]] | None:
        """Return the module that made the first NaN or infinity, a sentence, and report lines."""
        for kind in (0, 1):
            *earlier, values = [step[kind] for step in self._steps]
            for i, value in enumerate(values):
                if not math.isfinite(value.size):
                    same = [[x.size for x in step if x.place == value.place] for step in earlier]
                    sizes = [max(known) for known in same if known]
                    if not (sizes and all(map(math.isinf, [*sizes, value.size]))):  # a mask
                        grown = ", ".join(f"{x:.2g}" for x in [*sizes, value.size])
                        lines = [("before", str(x)) for x in values[max(0, i - _BEFORE) : i]]
                        lines += [("then", str(value)), ("magnitude", f"{grown} (last steps)")]
                        return *value.source(backward=kind == 1), tuple(lines)
        return None

    def running(self) -> str:
        """Return the module whose forward pass runs now, or after that whose backward pass."""
        return self._backward or (self._open[-1] if self._open else self._top)

    def _enter(self, name: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Record the inputs of a module that no module before has returned."""
        if not is_first_run(self) or not (torch.is_grad_enabled() or self._model.training):
            return
        outer = self._open[-1] if self._open else None
        for x in floating((args, kwargs)):
            value = self._find(x) or self._note(x, _Value(f"input of {name}", outer))
            value.readers.append(name)
        self._open.append(name)

    def _leave(self, name: str, module: nn.Module, args: tuple, output: object) -> None:
        """Record the outputs of a module, unless a module inside has returned them."""
        if not is_first_run(self) or self._open[-1:] != [name]:
            return
        self._open.pop()
        for x in floating(output):
            value = self._find(x) or self._note(x, _Value(f"output of {name}", name))
            value.owner = self._open[-1] if self._open else None

    def _find(self, x: Tensor) -> _Value | None:
        reference, version, value = self._known.get(id(x), (None, 0, None))
        return value if reference and reference() is x and version == version_of(x) else None

    def _note(self, x: Tensor, value: _Value) -> _Value:
        if not repeating:
            values = stored(x.detach())
            with torch._C._DisableTorchDispatch():  # no part of a step that a `Microscope` checks
                value.ends = tuple(torch.aminmax(as_reals(values)))
        self._steps[-1][0].append(value)
        self._known[id(x)] = weakref.ref(x), version_of(x), value
        if x.requires_grad:
            x.register_hook(partial(self._at_gradient, value))
        return value

    def _note_gradient(self, value: _Value, gradient: Tensor) -> None:
        self._backward = value.maker or self._top
        if not repeating:
            values = stored(gradient.detach())
            with torch._C._DisableTorchDispatch():
                real = as_reals(values)
                wide = torch.promote_types(real.dtype, torch.float32)
                norm = torch.linalg.vector_norm(real, dtype=wide)
            place = f"gradient at the {value.place}"
            self._steps[-1][1].append(replace(value, place=place, ends=(norm,)))


def is_transformed() -> bool:
    """Return whether torch.func (`grad`, `vmap`) runs now, whose tensors end with it."""
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    return functorch.maybe_current_level() is not None


def is_first_run(recorder: Recorder | None = None) -> bool:
    """Return False for a pass that is recomputed, repeated by a `Watch`, traced or transformed."""
    is_traced = torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
    if is_transformed() or is_traced:
        return False
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return False
    return repeating in ([], [recorder]) and torch._C._current_graph_task_id() == -1


def floating(values: object, depth: int = 4) -> list[Tensor]:
    """Return the floating-point tensors with entries in a value: tensor, container or object."""
    if isinstance(values, Tensor):
        is_read = values.is_floating_point() or values.is_complex()
        is_dense = values.layout == torch.strided or values.is_nested
        return [values] if is_read and is_dense and values.numel() and not values.is_meta else []
    parts: Iterable[object] = ()
    if isinstance(values, (tuple, list)):
        parts = values
    elif isinstance(values, Mapping):
        parts = values.values()
    elif hasattr(values, "__dict__") and not isinstance(values, (nn.Module, type)):
        parts = vars(values).values()
    return [x for part in parts for x in floating(part, depth - 1)] if depth else []
