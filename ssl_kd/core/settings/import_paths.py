"""Import users' classes by import path: a head, a teacher or a loss."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import traceback
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

from ssl_kd.core.errors import InputError, MissingPackage

logger = logging.getLogger(__name__)

T = TypeVar("T")

IMPORT_PATH = ("package.module.Class", r"[^\W\d]\w*(\.[^\W\d]\w*)+")
"""The form of an import path: as messages show it, and as a regular expression."""


def explain(error: BaseException) -> str:
    """Describe an exception from a user's code in one line: type, message, file and line."""
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, SystemExit):
        message = f"it ends the process by sys.exit({error.code!r})"
    frames = traceback.extract_tb(error.__traceback__)
    return f"{message} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else message


def check_installed(names: Collection[str], extra: str, what: str = "This") -> None:
    """Raise MissingPackage if a package is not installed; no package is imported.

    The message names the extra of `ssl_kd` with the packages, and `what` needs them.
    """
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        plural = "s" if len(missing) > 1 else ""
        raise MissingPackage(
            f"{what} needs the package{plural} {', '.join(missing)}: pip install 'ssl_kd[{extra}]'"
        )


def package_folder(module: str) -> Path | None:
    """Return the folder of an installed package, which is not imported; None if it is missing."""
    spec = importlib.util.find_spec(module)
    folders = None if spec is None else spec.submodule_search_locations
    return Path(next(iter(folders))) if folders else None


def import_class(path: str, base: type[T], what: str) -> type[T]:
    """Import the class of an import path such as `heads.cosine_head.CosineHead`.

    It must be a subclass of `base`; `what` is its role in messages, such as `head`.
    """
    module, _, name = path.rpartition(".")
    if not module:
        raise InputError(f"{what} {path!r}: expected an import path, package.module.Class")
    is_new = module not in sys.modules
    try:
        imported = importlib.import_module(module)
        if is_new:
            file = getattr(imported, "__file__", None)
            logger.info("%s %s: imported the module from %s", what, path, file)
        value: Any = getattr(imported, name)
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"{what} {path!r} cannot be imported: {error}; expected package.module.Class, in an "
            "installed package or below the current folder"
        ) from error
    except (Exception, SystemExit) as error:
        raise InputError(f"{what} {path!r} cannot be imported: {explain(error)}") from error
    if not (isinstance(value, type) and issubclass(value, base)):
        expected = f"{base.__module__}.{base.__qualname__}"
        raise InputError(f"{what} {path!r} is {value!r}, expected a subclass of {expected}")
    return value


def path_of_file(
    recorded: Any, trusted: str | None, own: Collection[str], *, what: str, file: object, way: str
) -> str:
    """Return the import path of a class that a file names, if it is safe to import.

    An import executes code, and a file from elsewhere can name any module. So only the library's
    `own` classes are imported, and the `trusted` one that the caller names. `what`, `file` and
    `way`, the argument for a trusted class such as `--head heads.mine.Head`, are for the message.
    """
    if trusted is not None:
        return trusted
    if recorded not in list(own):
        raise InputError(
            f"{file} names the {what} {recorded!r}, which is not part of ssl_kd. Importing it would"
            f" execute its code, so nothing was imported. If you trust it, use {way}"
        )
    return recorded
