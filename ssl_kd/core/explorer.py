"""Find the commands and objects of the explorer, the distribution `ssl_kd_explore`.

It declares them as entry points; nothing in `ssl_kd` imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import entry_points
from typing import Any, Literal

from ssl_kd.core.errors import MissingPackage


def load(group: Literal["commands", "objects"], name: str, what: str) -> Any:
    """Return the object of the entry point `name` in the group `ssl_kd.commands` or `.objects`.

    Raises:
        MissingPackage: the explorer is not installed; the message says that `what` needs it.
    """
    for entry in entry_points(group=f"ssl_kd.{group}", name=name):
        return entry.load()
    raise MissingPackage(
        f"{what} needs the package ssl_kd_explore: pip install 'ssl_kd[explore]', or in a clone of "
        "the repository: pip install -e explore"
    )


def command(name: str) -> Callable[[Sequence[str]], int]:
    """Return a command of the explorer, which is loaded when it is called."""
    return partial(_call, name)


def _call(name: str, argv: Sequence[str]) -> int:
    return load("commands", name, f"ssl_kd {name}")(argv)
