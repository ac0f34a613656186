"""Print the rooms of ssl_kd and the explorer: floors from the contracts, contents from docstrings.

`python .ci/house.py --write` writes the tables into CONTRIBUTING.md.
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
PACKAGES = (ROOT / "ssl_kd", ROOT / "ssl_kd" / "core", ROOT / "explore" / "ssl_kd_explore")
PRODUCTS = (ROOT / "ssl_kd" / "vision", ROOT / "ssl_kd" / "language")
BEGIN, END = "<!-- rooms: python .ci/house.py --write -->\n", "<!-- end of rooms -->\n"


def summary(room, package):
    """Return the first sentence of the docstring of a package or a module."""
    file = package / room / "__init__.py"
    file = file if file.exists() else package / f"{room}.py"
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(re.split(r"\.(?:\s|$)|\n\n", text, maxsplit=1)[0].split())


def dotted(package):
    """Return the import path of a package."""
    place = package.relative_to(ROOT)
    return ".".join(place.parts[1:] if place.parts[0] == "explore" else place.parts)


def product(package):
    """Return a row for each folder of a product."""
    rooms = sorted(file.parent.name for file in package.glob("*/__init__.py"))
    lines = [f"| folder of `{dotted(package)}` | contents |", "|---|---|"]
    lines += [f"| `{room}` | {summary(room, package)} |" for room in rooms]
    return "\n".join(lines) + "\n"


def table(package):
    """Return a row for each room of a package, from the highest floor to the lowest."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    (layers,) = (c["layers"] for c in contracts if c.get("containers") == [dotted(package)])
    lines = [f"| floor | room of `{dotted(package)}` | contents |", "|---|---|---|"]
    for depth, rooms in enumerate(layers):
        for room in rooms.split(" | "):
            contents = summary(room, package)
            lines.append(f"| {len(layers) - depth} | `{room}` | {contents} |")
    return "\n".join(lines) + "\n"


def tables():
    """Return the tables of all packages and products."""
    return "\n".join([*map(table, PACKAGES), *map(product, PRODUCTS)])


def main(argv):
    """Print the tables, or write them into CONTRIBUTING.md."""
    if "--write" in argv:
        page = ROOT / "CONTRIBUTING.md"
        before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        page.write_text(f"{before}{BEGIN}\n{tables()}\n{END}{after}", encoding="utf-8")
    else:
        print(tables(), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
