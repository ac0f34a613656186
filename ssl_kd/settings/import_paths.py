"""Classes by import path: a head or a teacher of a user's own, from wherever it lies."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import traceback
from collections.abc import Collection
from typing import Any, TypeVar

from ssl_kd.errors import InputError, MissingPackage

logger = logging.getLogger(__name__)

T = TypeVar("T")

IMPORT_PATH = ("package.module.Class", r"[^\W\d]\w*(\.[^\W\d]\w*)+")
"""The form of an import path: as shown, and as an expression."""


def explain(error: BaseException) -> str:
    """Describe an exception of a user's code in one line: type, message, file and line."""
    words = f"{type(error).__name__}: {error}"
    if isinstance(error, SystemExit):
        words = f"it ends the process by sys.exit({error.code!r})"
    frames = traceback.extract_tb(error.__traceback__)
    return f"{words} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else words


def check_installed(names: Collection[str], extra: str) -> None:
    """Raise MissingPackage where one of these packages is not installed; none is imported."""

    def is_there(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is not None
        except ImportError:  # of a finder that refuses it
            return False

    if missing := [name for name in names if not is_there(name)]:
        packages = "s" if len(missing) > 1 else ""
        raise MissingPackage(
            f"what was asked for needs the package{packages} {', '.join(missing)}: "
            f"pip install 'ssl_kd[{extra}]'"
        )


def import_class(path: str, base: type[T], what: str) -> type[T]:
    """The class behind an import path such as `heads.cosine_head.CosineHead`.

    Args:
        path: package.module.Class, as an import statement would find it.
        base: what it must be a subclass of.
        what: what it is used as, for the messages: `head`, `teacher`.

    Raises:
        ValueError: not a dotted path, not found, another kind of thing, or its module fails.
    """
    module, _, name = path.rpartition(".")
    if not module:
        raise InputError(f"{what} {path!r}: expected an import path, package.module.Class")
    known = module in sys.modules
    try:
        imported = importlib.import_module(module)
        if not known:
            file = getattr(imported, "__file__", None)
            logger.info("%s %s: imported the module from %s", what, path, file)
        found: Any = getattr(imported, name)
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"{what} {path!r} cannot be imported: {error}; expected package.module.Class, in an "
            "installed package or in a folder of the one that you start from"
        ) from error
    except (Exception, SystemExit) as error:
        raise InputError(f"{what} {path!r} cannot be imported: {explain(error)}") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        expected = f"{base.__module__}.{base.__qualname__}"
        raise InputError(f"{what} {path!r} is {found!r}, expected a subclass of {expected}")
    return found


def path_of_file(
    found: Any, named: str | None, own: Collection[str], *, what: str, file: object, way: str
) -> str:
    """The import path to follow where a file names one: this library's own, or the caller's.

    An import runs the code of what is imported, and a file from somebody else can name any module.

    Args:
        found: what the file names.
        named: what the caller names instead; None: nothing.
        own: the paths that may be followed unasked.
        what: what it is used as, for the message: `head`, `loss`.
        file: the file.
        way: how the caller would name it, up to the path itself: `--head `.

    Raises:
        ValueError: the file names another one, and the caller none.
    """
    if named is not None:
        return named
    if found not in list(own):
        raise InputError(
            f"{file} names the {what} {found!r}, which is not one of ssl_kd's: to import it would "
            f"run its code, so nothing was imported. If you trust it, name it yourself: {way}"
        )
    return found
