"""Treat all optimizers of a model as one, and guard each of their steps by hooks."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    from firstnan.loop import Guard

_HOOKS: weakref.WeakKeyDictionary[Optimizer, list[Any]] = weakref.WeakKeyDictionary()


class Optimizers:
    """The optimizers of one guard.

    During a step that is left out, an optimizer has no `param_groups`: a Muon that stacks its
    gradients fails if one is missing, and others move weights without a gradient by momentum.
    """

    def __init__(self, given: Optimizer | Iterable[Optimizer]) -> None:
        self.all = [*_plain(given)]
        for optimizer in self.all:
            _check_closure(optimizer)
        self._owner = {id(p): o for o in self.all for row in o.param_groups for p in row["params"]}
        self._hidden: dict[Optimizer, list[dict[str, Any]]] = {}
        self._stepped: set[Optimizer] = set()  # in the step that a hook has judged

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self.all for group in optimizer.param_groups]

    def state(self, p: Tensor) -> dict[Any, Any]:
        """Return the `state` of the optimizer that holds a parameter."""
        return self._owner[id(p)].state

    def step(self, guard: Guard) -> None:
        """Call `step` of each optimizer, also without any gradient: a scheduler expects it."""
        for optimizer in self.all:
            self._hide(optimizer, guard)
            optimizer.step()
            self._show(optimizer)

    def attach(self, guard: Guard) -> None:
        """Let each optimizer call the guard before and after its `step`, and keep it alive."""

        def before(optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
            closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is `self`
            if not callable(closure):
                return self._before(optimizer, guard)

            def closure_first() -> Any:
                loss = closure()
                self._before(optimizer, guard)
                return loss

            others = {name: value for name, value in kwargs.items() if name != "closure"}
            return (optimizer, closure_first, *args[2:]), others

        def after(optimizer: Optimizer, *_: Any) -> None:
            self._show(optimizer)
            if self._stepped:
                self._stepped.add(optimizer)
                if len(self._stepped) == len(self.all):
                    self._finish(guard)

        for optimizer in self.all:
            for hook in _HOOKS.get(optimizer, ()):
                hook.remove()
            register = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
            _HOOKS[optimizer] = [register[0](before), register[1](after)]

    def _before(self, optimizer: Optimizer, guard: Guard) -> None:
        if optimizer in self._stepped:  # the others do not step as often
            self._finish(guard)
        if not guard.is_judged:
            guard.before_step()
            self._stepped.add(optimizer)
        self._hide(optimizer, guard)

    def _finish(self, guard: Guard) -> None:
        self._stepped.clear()
        try:
            guard.after_step()
        finally:
            guard.events.log_new()

    def _hide(self, optimizer: Optimizer, guard: Guard) -> None:
        self._show(optimizer)  # after an exception in its last step
        if guard.skips:
            self._hidden[optimizer], optimizer.param_groups = optimizer.param_groups, []

    def _show(self, optimizer: Optimizer) -> None:
        optimizer.param_groups = self._hidden.pop(optimizer, optimizer.param_groups)


def _plain(given: Any) -> Iterator[Optimizer]:
    """Yield the optimizers in a list, torchtitan's container or accelerate's wrapper."""
    if isinstance(given, Iterable):
        for optimizer in given:
            yield from _plain(optimizer)
    else:
        yield given if hasattr(given, "_optimizer_step_pre_hooks") else given.optimizer


def _check_closure(optimizer: Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(
            f"{type(optimizer).__name__}.step needs a closure, but the guard checks the loss before"
            " the step and cannot check losses inside it: use an optimizer whose step can be called"
            " without a closure, such as AdamW"
        )
