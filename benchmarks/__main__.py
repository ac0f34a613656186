"""List the benchmarks with their summaries and commands.

python -m benchmarks          # prints the table
python -m benchmarks --write  # writes it to docs/results.md
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from benchmarks.turns import write_section

FOLDER = Path(__file__).parent


def benchmarks() -> dict[str, str]:
    """Return the docstring of every runnable benchmark, keyed by module name."""
    docstrings = {}
    for file in sorted(FOLDER.glob("[a-z]*.py")):
        source = file.read_text(encoding="utf-8")
        if "__main__" in source:
            docstrings[file.stem] = ast.get_docstring(ast.parse(source)) or ""
    return docstrings


def commands(name: str, docstring: str) -> list[str]:
    """Return the commands in a benchmark's docstring, without their comments."""
    pattern = rf"^\s*((?:python|torchrun)\b.*\bbenchmarks[./]{name}\b.*?)(?:\s*#.*)?$"
    return re.findall(pattern, docstring, re.M) or [f"python -m benchmarks.{name}"]


def table() -> str:
    """Return a Markdown table with the summary line and the commands of each benchmark."""
    rows = ["| what it measures | command |", "|---|---|"]
    for name, docstring in benchmarks().items():
        first, *more = docstring.splitlines()
        needs = [line.strip() for line in more if line.strip().startswith("pip install")]
        calls = "<br>".join(f"`{command}`" for command in [*needs, *commands(name, docstring)])
        rows.append(f"| {first.replace('|', chr(92) + '|')} | {calls} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write_section("benchmarks", table())
    else:
        print(table(), end="")
