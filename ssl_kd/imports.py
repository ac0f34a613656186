"""Classes by import path: a head or a teacher of a user's own, from wherever it lies."""

from __future__ import annotations

import importlib
from typing import Any, TypeVar

from ssl_kd.errors import InputError

T = TypeVar("T")

IMPORT_PATH = ("package.module.Class", r"[^\W\d]\w*(\.[^\W\d]\w*)+")
"""The form of an import path: as shown, and as an expression."""


def import_class(path: str, base: type[T], what: str) -> type[T]:
    """The class behind an import path such as `heads.cosine_head.CosineHead`.

    Args:
        path: package.module.Class, as an import statement would find it.
        base: what it must be a subclass of.
        what: what it is used as, for the messages: `head`, `teacher`.

    Raises:
        ValueError: not a dotted path, not found, or another kind of thing.
    """
    module, _, name = path.rpartition(".")
    if not module:
        raise InputError(f"{what} {path!r}: expected an import path, package.module.Class")
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"{what} {path!r} cannot be imported: {error}; expected package.module.Class, in an "
            "installed package or in a folder of the one that you start from"
        ) from error
    if not (isinstance(found, type) and issubclass(found, base)):
        expected = f"{base.__module__}.{base.__qualname__}"
        raise InputError(f"{what} {path!r} is {found!r}, expected a subclass of {expected}")
    return found
