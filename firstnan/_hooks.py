"""Follow a model by hooks that keep nothing alive, and see in-place operations on its tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


class weakly:
    """A hook that holds its object by a weak reference; no-op while compiling or in a copy."""

    def __init__(self, method: Callable[..., Any] | None = None, *first: object) -> None:
        self._reference, self._first = method and weakref.WeakMethod(method), first

    def __call__(self, *args: object) -> object:
        """Call the method with the hook's arguments."""
        if self._reference is None or torch.compiler.is_compiling():
            return None
        method = self._reference()
        return method and method(*self._first, *args)

    def __reduce__(self) -> tuple[type[weakly], tuple[()]]:
        return weakly, ()


def nodes(losses: Iterable[Tensor]) -> Iterator[Any]:
    """Yield each autograd node that a backward pass of `losses` runs, not in their order."""
    ahead: list[Any] = [
        torch.autograd.graph.get_gradient_edge(x).node for x in losses if x.requires_grad
    ]
    visited = {*ahead}
    while ahead:
        node = ahead.pop()
        yield node
        new = {following for following, _ in node.next_functions if following is not None}
        ahead += new - visited
        visited |= new


def version_of(x: Tensor | None) -> int:
    """Return a number that each in-place operation on a tensor increases."""
    return -1 if x is None or x.is_inference() else x._version
