"""Print the rooms of ssl_kd: floors from the import contract, contents from the docstrings.

`python .ci/house.py --write` writes the table into CONTRIBUTING.md.
"""

import ast
import re
import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10; tomli comes with pytest there
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- rooms: python .ci/house.py --write -->\n", "<!-- end of rooms -->\n"


def summary(room, package):
    """Return the first sentence of the docstring of a package or a module."""
    file = package / room / "__init__.py"
    file = file if file.exists() else package / f"{room}.py"
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(re.split(r"\.(?:\s|$)|\n\n", text, maxsplit=1)[0].split())


def table(root=ROOT):
    """Return a row for each room, from the highest floor to the lowest."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    contract = project["tool"]["importlinter"]["contracts"][0]
    layers = contract["layers"]
    lines = ["| floor | room | contents |", "|---|---|---|"]
    for depth, rooms in enumerate(layers):
        for room in rooms.split(" | "):
            contents = summary(room, root / "ssl_kd")
            lines.append(f"| {len(layers) - depth} | `{room}` | {contents} |")
    return "\n".join(lines) + "\n"


def main(argv):
    """Print the table, or write it into CONTRIBUTING.md."""
    if "--write" in argv:
        page = ROOT / "CONTRIBUTING.md"
        before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        page.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")
    else:
        print(table(), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
