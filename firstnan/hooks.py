"""Follow a model by hooks that keep nothing alive, and see in-place operations on its tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
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


def version_of(x: Tensor | None) -> int:
    """Return a number that each in-place operation on a tensor increases."""
    return -1 if x is None or x.is_inference() else x._version
