"""Treat all optimizers of a model as one, and guard each of their steps by hooks."""

from __future__ import annotations

import atexit
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol, cast

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from firstnan._hooks import version_of
from firstnan._norms import are_finite, norm_of
from firstnan._recorder import is_first_run
from firstnan._skipped_steps import give_back, is_skipping, skipping

_ATTACHED: weakref.WeakSet[Optimizers] = weakref.WeakSet()
atexit.register(lambda: [optimizers.detach() for optimizers in list(_ATTACHED)])


class StepJudge(Protocol):
    """What decides about the steps of optimizers: a `Guard`."""

    is_judged: bool  # the present step was judged, and is not finished
    skips: bool  # the judgement leaves nothing to update
    withheld: list[tuple[Tensor, Tensor | None]]  # weights with the gradients taken from them

    def before_step(self) -> None:
        """Judge all gradients, and take away those that must not be used."""
        ...

    def after_step(self) -> object:
        """Write the events of the step that was judged, and restore what stays unhealthy."""
        ...

    def log_events(self) -> object:
        """Log the events since the last call."""
        ...


def judged_first(
    optimizer: Optimizer, judge: Callable[[], object], args: tuple, kwargs: dict
) -> tuple[tuple, dict]:
    """Return the arguments of a step of `optimizer` that is judged after its closure, if any."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is `self`
    if not callable(closure):
        judge()
        return (optimizer, *args[1:]), kwargs

    def closure_first() -> Any:
        loss = closure()
        judge()
        return loss

    if len(args) > 1:
        return (optimizer, closure_first, *args[2:]), kwargs
    return (optimizer,), {**kwargs, "closure": closure_first}


def unscale_(optimizer: Optimizer) -> bool:
    """Divide gradients by the scale that a GradScaler leaves to a fused optimizer.

    Return False, without a change, if they overflowed: the optimizer itself skips the step.
    """
    overflow = getattr(optimizer, "found_inf", None)
    if overflow is not None and bool(overflow):
        return False
    scale = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        for g in _gradients(optimizer.param_groups):
            g.div_(scale.to(g.device))
        optimizer.grad_scale = None  # pyright: ignore[reportAttributeAccessIssue]
    return True


class Optimizers:
    """The optimizers of one guard."""

    def __init__(self, given: Optimizer | Iterable[Optimizer]) -> None:
        self._guard: StepJudge | None = None  # while attached
        self._hooks: list[Any] = []
        self.all = list(dict.fromkeys(_plain(given)))
        for optimizer in self.all:
            _check_closure(optimizer)
        self._owner = {id(p): o for o in self.all for row in o.param_groups for p in row["params"]}
        self._stepped: set[Optimizer] = set()  # in the step that a hook has judged
        self._seen = WeakTensorKeyDictionary()  # gradient -> its version then

    @property
    def is_attached(self) -> bool:
        """Whether a guard judges every step of the optimizers."""
        return self._guard is not None

    def watch_steps(self, hook: Callable[..., object]) -> None:
        """Call a hook before each step of each optimizer."""
        for optimizer in self.all:
            handle = optimizer.register_step_pre_hook(cast(Any, hook))
            weakref.finalize(self, handle.remove)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self.all for group in optimizer.param_groups]

    def state(self, p: Tensor) -> dict[Any, Any]:
        """Return the `state` of the optimizer that holds a parameter."""
        return self._owner[id(p)].state

    def step(self, guard: StepJudge) -> None:
        """Call `step` of each optimizer, also without any gradient: a scheduler expects it."""
        for optimizer in self.all:
            if not guard.skips:
                optimizer.step()
                continue
            other = skipping(optimizer, lambda: True)
            hook = optimizer.register_step_pre_hook(lambda _, a, k, o=other: ((o, *a[1:]), k))
            try:
                optimizer.step()
            finally:
                hook.remove()

    def attach(self, guard: StepJudge) -> None:
        """Let each optimizer call the guard before and after its `step`, and keep it alive."""
        for other in list(_ATTACHED):
            if {*other.all} & {*self.all}:
                other.detach()
        _ATTACHED.add(self)
        self._guard = guard
        others = {optimizer: skipping(optimizer, lambda: guard.skips) for optimizer in self.all}

        def before(optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
            if is_skipping(optimizer):  # its step calls `super().step()`
                return None
            judge = partial(self._before, optimizer, guard)
            return judged_first(others[optimizer], judge, args, kwargs)

        def after(optimizer: Optimizer, *_: Any) -> None:
            if self._stepped and not is_skipping(optimizer):
                self._stepped.add(optimizer)
                if len(self._stepped) == len(self.all):
                    give_back(guard.withheld)
                    self._finish(guard)

        for optimizer in self.all:
            self._hooks.append(optimizer.register_step_pre_hook(before))
            self._hooks.append(optimizer.register_step_post_hook(after))

    def detach(self) -> None:
        """Undo `attach`, and finish a step that only the next one would have finished."""
        while self._hooks:
            self._hooks.pop().remove()
        guard, self._guard = self._guard, None
        if guard is not None:
            self._finish(guard)

    __del__ = detach  # the garbage collector comes for a guard and its optimizers together

    def _before(self, optimizer: Optimizer, guard: StepJudge) -> None:
        if not is_first_run():
            raise ValueError(
                "an optimizer took a step inside of a backward pass (a hook of a parameter) or of a"
                " CUDA graph, but the guard judges all gradients together: call `step` outside"
            )
        if not unscale_(optimizer):
            return
        if self._stepped and (optimizer in self._stepped or self._is_unseen(optimizer)):
            self._finish(guard)  # the others do not step as often, or have another loss (a GAN)
        if not guard.is_judged:
            guard.before_step()
            self._stepped.add(optimizer)
            if len(self.all) > 1:
                seen = {g: version_of(g) for g in _gradients(self.groups)}
                self._seen = WeakTensorKeyDictionary(seen)

    def _is_unseen(self, optimizer: Optimizer) -> bool:
        """Return whether there are new gradients, or others became bad: unscaling is allowed."""
        gradients = _gradients(optimizer.param_groups)
        changed = [g for g in gradients if self._seen.get(g) != version_of(g)]
        is_new = any(g not in self._seen for g in changed)
        return is_new or (bool(changed) and not are_finite([norm_of(changed)]))

    def _finish(self, guard: StepJudge) -> None:
        self._stepped.clear()
        finish_step(guard)


def finish_step(guard: StepJudge) -> None:
    """Run the second half of a step that was judged, and log its events also if training ends."""
    if guard.is_judged:
        try:
            guard.after_step()
        finally:
            guard.log_events()


def _gradients(groups: list[dict[str, Any]]) -> list[Tensor]:
    return [p.grad for group in groups for p in group["params"] if p.grad is not None]


def _plain(given: Any) -> Iterator[Optimizer]:
    """Yield the optimizers in a list, torchtitan's container or accelerate's wrapper."""
    if isinstance(given, Iterable) and not isinstance(given, (Tensor, Mapping, str)):
        for optimizer in given:
            yield from _plain(optimizer)
        return
    has_hooks = hasattr(given, "_optimizer_step_pre_hooks")
    optimizer = given if has_hooks else getattr(given, "optimizer", None)
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise TypeError(f"expected an optimizer, or a list of them; got a {type(given).__name__}")
    yield cast(Optimizer, optimizer)


def _check_closure(optimizer: Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(
            f"{type(optimizer).__name__}.step needs a closure, whose losses the guard cannot "
            "check: use an optimizer whose step can be called without a closure, such as AdamW"
        )
