"""The command `recipes`: list the recipes of publications, or show one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ssl_kd.cli.flags import FlagParser
from ssl_kd.core.errors import OK, InputError
from ssl_kd.core.settings import nearest

if TYPE_CHECKING:
    from ssl_kd.core.settings.recipes import Recipe

_DESCRIPTION = """Lists the recipes: settings of publications, for --recipe NAME of ssl_kd train,
evaluate, distill and sweep. With a name, it shows the whole recipe and the command that it stands
for."""


def recipes(argv: Sequence[str]) -> int:
    """Print a table of all recipes, one recipe, or all of them as Markdown."""
    parser = FlagParser(prog="ssl_kd recipes", description=_DESCRIPTION)
    parser.add_argument("name", metavar="NAME", nargs="?", help="recipe to show; default: all")
    parser.add_argument("--markdown", action="store_true", help="print all recipes as Markdown")
    flags = parser.parse_args(argv)
    known = all_recipes()
    if flags.name is not None and flags.name not in known:
        hint = nearest(flags.name, known)
        raise InputError(f"There is no recipe {flags.name!r}: {', '.join(known)}.{hint}")
    if flags.markdown:
        shown = known if flags.name is None else {flags.name: known[flags.name]}
        print(markdown(shown), end="")
    elif flags.name is not None:
        print(whole(flags.name, known[flags.name]), end="")
    else:
        _print_table(known)
    return OK


def all_recipes() -> Mapping[str, Recipe]:
    """Return the recipes of both modes by name."""
    from ssl_kd.language.settings.recipes import RECIPES as LANGUAGE
    from ssl_kd.vision.recipes import RECIPES as VISION

    return {**VISION, **LANGUAGE}


def whole(name: str, recipe: Recipe) -> str:
    """Return all that is known about a recipe, a line for each fact, and its command."""
    facts = [
        ("paper", str(recipe.paper)),
        ("expected", f"{recipe.expected} ({recipe.reported})"),
        ("values from", recipe.source),
        *(("differs", sentence) for sentence in recipe.differs),
        *(("needs", f"--{needed}: {what}") for needed, what in recipe.needs.items()),
    ]
    lines = [f"{name}: ssl_kd {recipe.command} --recipe {name}"]
    lines += [f"{title + ':':<12} {text}" for title, text in facts]
    return "\n".join([*lines, "the same, without --recipe:", recipe.command_line, ""])


def markdown(shown: Mapping[str, Recipe]) -> str:
    """Return a table of recipes and a section for each, as Markdown."""
    rows = ["| recipe | command | paper | expected |", "|---|---|---|---|"]
    sections = []
    for name, recipe in shown.items():
        link = f"[{recipe.paper.arxiv}](https://arxiv.org/abs/{recipe.paper.arxiv})"
        paper = f"{recipe.paper.authors}, {recipe.paper.year}, {link}"
        rows.append(f"| [`{name}`](#{name}) | {recipe.command} | {paper} | {recipe.expected} |")
        sections += [
            f"\n### {name}\n",
            f"{recipe.paper.authors}, *{recipe.paper.title}*, {recipe.paper.year}, {link}.\n",
            f"```sh\n{recipe.command_line}\n```\n",
            f"- **Expected**: {recipe.expected} ({recipe.reported})",
            f"- **Values from**: {recipe.source}",
            *(f"- **Needs** `--{needed}`: {what}" for needed, what in recipe.needs.items()),
            *(f"- {sentence}" for sentence in recipe.differs),
        ]
    return "\n".join([*rows, *sections, ""])


def _print_table(shown: Mapping[str, Recipe]) -> None:
    from ssl_kd.cli.screen import result_console
    from ssl_kd.core.pages.tables import new_table

    table = new_table(None, "recipe")
    for title in ("command", "paper", "expected"):
        table.add_column(title)
    for name, recipe in shown.items():
        paper = f"{recipe.paper.authors}, {recipe.paper.year}, arXiv {recipe.paper.arxiv}"
        table.add_row(name, f"ssl_kd {recipe.command}", paper, recipe.expected)
    result_console().print(table)
    print("ssl_kd recipes NAME shows one of them: command, sources, and what differs here.")
