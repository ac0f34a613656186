"""Describe settings that follow a publication: its values, its number, and what differs here.

The recipes are data in `ssl_kd.vision.recipes` and `ssl_kd.language.settings.recipes`.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ssl_kd.core.settings import Settings


@dataclass(frozen=True)
class Paper:
    """A publication."""

    authors: str
    title: str
    year: int
    arxiv: str  # number, such as 2303.17896

    def __str__(self) -> str:
        return f"{self.authors} ({self.year}), {self.title}, arXiv {self.arxiv}"


@dataclass(frozen=True)
class Recipe:
    """Settings that follow a publication.

    Attributes:
        command: the command of `ssl_kd` that follows the recipe.
        paper: the publication of the method.
        values: the settings that the recipe sets, by lower-case names.
        expected: the published number and its metric, or "not stated".
        reported: where the number is from, or why there is none.
        source: where `values` are from.
        differs: sentences on what this library does in another way than the publication, and on
            what was not run.
        flags: flags of the command that are no settings -> their values.
        needs: settings that the user must give -> what is expected there.
    """

    command: Literal["train", "evaluate", "distill"]
    paper: Paper
    values: Mapping[str, Any]
    expected: str
    reported: str
    source: str
    differs: tuple[str, ...]
    flags: Mapping[str, str] = field(default_factory=dict)
    needs: Mapping[str, str] = field(default_factory=dict)

    @property
    def command_line(self) -> str:
        """The command that the recipe stands for, with NAME as the value of a needed setting."""
        words = ["ssl_kd", self.command]
        for name in self.needs:
            words += [f"--{name}", name.upper()]
        for name, value in {**self.values, **self.flags}.items():
            words += [f"--{name}", str(value)]
        return shlex.join(words)


def recipe_help(names: Iterable[str]) -> str:
    """Return the help of the setting RECIPE."""
    return (
        f"publication whose settings to use: {' | '.join(names)} (ssl_kd recipes shows them); None:"
        " none; flags, and the other lines of a settings file, override them"
    )


def log_recipe(
    settings: Settings,
    logger: logging.Logger,
    flags: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Log a line each on paper, number and differences of the recipe that the settings name.

    The last line names the settings, and the `flags` of the command, that do not have the recipe's
    values.
    """
    name = vars(settings).get("recipe")
    if name is None:
        return
    recipe = settings.recipes[name]
    changed = [n for n, value in recipe.values.items() if getattr(settings, n) != value]
    changed += [n for n, value in recipe.flags.items() if flags[n] != value]
    lines = [f"recipe {name}: {recipe.paper}", f"expected: {recipe.expected} ({recipe.reported})"]
    lines += [f"differs: {sentence}" for sentence in recipe.differs]
    if changed:
        names = ", ".join(n.upper() for n in changed)
        lines.append(f"changed: {names}, so the expected number is not that of this run")
    for line in lines:
        logger.info("%s", line)
