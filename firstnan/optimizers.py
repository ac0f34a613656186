"""Treat all optimizers of a model as one, and guard each of their steps by hooks."""

from __future__ import annotations

import atexit
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from firstnan.hooks import version_of
from firstnan.norms import are_finite, norm_of
from firstnan.recorder import is_first_run

if TYPE_CHECKING:
    from firstnan.loop import Guard

_ATTACHED: weakref.WeakSet[Optimizers] = weakref.WeakSet()
atexit.register(lambda: [optimizers.detach() for optimizers in [*_ATTACHED]])


class _NoGroups(list[dict[str, Any]]):
    """Parameter groups that no loop over them sees, but whose settings can be read by index."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(())

    def __len__(self) -> int:
        return 0


def stand_in(optimizer: Optimizer, is_left_out: Callable[[], bool]) -> Optimizer:
    """Return an optimizer with the same attributes, but without groups while a step is left out.

    A Muon that stacks its gradients fails if one is missing, and others move weights without a
    gradient by momentum. Only the step sees it, so nothing has to be put back after an exception.
    """
    owner = weakref.ref(optimizer)

    def groups(_: Optimizer) -> list[dict[str, Any]]:
        here = cast(Optimizer, owner()).param_groups
        return _NoGroups({**group, "params": []} for group in here) if is_left_out() else here

    kind = type(optimizer)
    shared = property(groups, lambda _, new: setattr(owner(), "param_groups", new))
    members = {"param_groups": shared, "is_stand_in": True}
    other = object.__new__(type(kind.__name__, (kind,), members))
    other.__dict__ = optimizer.__dict__
    return other


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


def withhold(weights: Iterable[Tensor]) -> list[tuple[Tensor, Tensor | None]]:
    """Take gradients away, so that a step changes nothing, not even by momentum or decay."""
    withheld = [(p, p.grad) for p in weights]
    for p, _ in withheld:
        p.grad = None
    return withheld


def give_back(withheld: list[tuple[Tensor, Tensor | None]]) -> None:
    """Set gradients that a step was not to see to 0; a CUDA graph goes on to write into them."""
    while withheld:
        p, gradient = withheld.pop()
        p.grad = None if gradient is None else gradient.zero_()


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
        self._guard: Guard | None = None  # while attached
        self._hooks: list[Any] = []
        self.all = [*dict.fromkeys(_plain(given))]
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

    def step(self, guard: Guard) -> None:
        """Call `step` of each optimizer, also without any gradient: a scheduler expects it."""
        for optimizer in self.all:
            if not guard.skips:
                optimizer.step()
                continue
            other = stand_in(optimizer, lambda: True)
            hook = optimizer.register_step_pre_hook(lambda _, a, k, o=other: ((o, *a[1:]), k))
            try:
                optimizer.step()
            finally:
                hook.remove()

    def attach(self, guard: Guard) -> None:
        """Let each optimizer call the guard before and after its `step`, and keep it alive."""
        for other in [*_ATTACHED]:
            if {*other.all} & {*self.all}:
                other.detach()
        _ATTACHED.add(self)
        self._guard = guard
        others = {optimizer: stand_in(optimizer, lambda: guard.skips) for optimizer in self.all}

        def before(optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
            if hasattr(optimizer, "is_stand_in"):  # its step calls `super().step()`
                return None
            judge = partial(self._before, optimizer, guard)
            return judged_first(others[optimizer], judge, args, kwargs)

        def after(optimizer: Optimizer, *_: Any) -> None:
            if self._stepped and not hasattr(optimizer, "is_stand_in"):
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

    def _before(self, optimizer: Optimizer, guard: Guard) -> None:
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

    def _finish(self, guard: Guard) -> None:
        self._stepped.clear()
        finish_step(guard)


def finish_step(guard: Guard) -> None:
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
    found = given if hasattr(given, "_optimizer_step_pre_hooks") else getattr(given, "optimizer", 0)
    if not hasattr(found, "_optimizer_step_pre_hooks"):
        raise TypeError(f"expected an optimizer, or a list of them; got a {type(given).__name__}")
    yield found  # pyright: ignore[reportReturnType]


def _check_closure(optimizer: Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(
            f"{type(optimizer).__name__}.step needs a closure, whose losses the guard cannot "
            "check: use an optimizer whose step can be called without a closure, such as AdamW"
        )
