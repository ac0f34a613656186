"""Let an optimizer take a step that changes nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from torch import Tensor
from torch.optim import Optimizer


class _EmptyGroups(list[dict[str, Any]]):
    """Parameter groups whose settings can be read by index, but that a loop does not visit.

    An optimizer may read `param_groups[0]["lr"]` before it loops over the groups.
    """

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(())

    def __len__(self) -> int:
        return 0


def skipping(optimizer: Optimizer, is_skipped: Callable[[], bool]) -> Optimizer:
    """Return an optimizer with the state of another one, whose `step` changes nothing if skipped.

    Taking the gradients away is not enough: a Muon that stacks the gradients of a group fails if
    one is missing, and an optimizer with momentum may move weights that have no gradient. So the
    step runs without parameter groups. The groups of `optimizer` itself are never touched, hence
    nothing has to be put back after an exception.

    Args:
        optimizer: its class is subclassed, and its attributes are shared.
        is_skipped: called when the step reads the parameter groups.
    """
    owner = weakref.ref(optimizer)

    def read(_: Optimizer) -> list[dict[str, Any]]:
        groups = cast(Optimizer, owner()).param_groups
        return _EmptyGroups({**group, "params": []} for group in groups) if is_skipped() else groups

    def write(_: Optimizer, groups: list[dict[str, Any]]) -> None:
        cast(Optimizer, owner()).param_groups = groups

    kind = type(optimizer)
    members = {"param_groups": property(read, write), "_is_skipping": True}
    other = object.__new__(type(kind.__name__, (kind,), members))
    other.__dict__ = optimizer.__dict__
    return other


def is_skipping(optimizer: object) -> bool:
    """Return whether `skipping` made this optimizer: its `step` runs inside of another one."""
    return hasattr(optimizer, "_is_skipping")


def withhold(weights: Iterable[Tensor]) -> list[tuple[Tensor, Tensor | None]]:
    """Take gradients away, so that a step changes nothing, not even by momentum or decay."""
    withheld = [(p, p.grad) for p in weights]
    for p, _ in withheld:
        p.grad = None
    return withheld


def give_back(withheld: list[tuple[Tensor, Tensor | None]]) -> None:
    """Set the gradients that a step did not see to 0; a CUDA graph goes on to write into them."""
    while withheld:
        p, gradient = withheld.pop()
        p.grad = None if gradient is None else gradient.zero_()
