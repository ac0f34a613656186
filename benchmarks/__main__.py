"""What there is to measure, as the table in docs/benchmarks.md: from the docstrings.

python -m benchmarks          # prints the table
python -m benchmarks --write  # puts it into the page
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "docs" / "benchmarks.md"
BEGIN = "<!-- table: python -m benchmarks --write -->\n\n"


def benchmarks() -> dict[str, str]:
    """Name -> docstring of every file that is a command."""
    found = {}
    for file in sorted(FOLDER.glob("[a-z]*.py")):
        source = file.read_text(encoding="utf-8")
        if "__main__" in source:
            found[file.stem] = ast.get_docstring(ast.parse(source)) or ""
    return found


def commands(name: str, docstring: str) -> list[str]:
    """Its commands: the lines of the docstring that call it, without what they say behind #."""
    wanted = rf"^\s*((?:python|torchrun)\b.*\bbenchmarks[./]{name}\b.*?)(?:\s*#.*)?$"
    return re.findall(wanted, docstring, re.M) or [f"python -m benchmarks.{name}"]


def table() -> str:
    """A row for each: how to run it, and the first line of what it says of itself."""
    rows = ["| what it measures | command |", "|---|---|"]
    for name, docstring in benchmarks().items():
        first, *more = docstring.splitlines()
        needs = [line.strip() for line in more if line.strip().startswith("pip install")]
        calls = "<br>".join(f"`{command}`" for command in [*needs, *commands(name, docstring)])
        rows.append(f"| {first.replace('|', chr(92) + '|')} | {calls} |")
    return "\n".join(rows) + "\n"


def page() -> str:
    """The page with the table of today."""
    head, _, _ = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return head + BEGIN + table()


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(table(), end="")
