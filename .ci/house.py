"""Print what to read first and the rooms of the packages, with contents from docstrings.

`python .ci/house.py --write` writes both into CONTRIBUTING.md.
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
# The order in which to read the part of each product that matters most.
READ_FIRST = {
    "ssl_kd/vision": """
        stages train/objectives/base train/objectives/temi
        train/losses/mutual_information train/losses/self_distillation
        train/heads/temi train/heads/bank train/pairs train/step train/rows train/convergence
        graph/criterion graph/spectral graph/layout graph/levels graph/ensemble""",
    "ssl_kd/language": """
        losses/plain losses/divergences losses/teacher_output losses/token_distillation
        losses/token_terms losses/rows losses/cross_tokenizer losses/routing
        train/objective train/rows_left_out train/step train/loop""",
}


def begin(name):
    """Return the line before a part of CONTRIBUTING.md that this script writes."""
    return f"<!-- {name}: python .ci/house.py --write -->\n"


def end(name):
    """Return the line after that part."""
    return f"<!-- end of {name} -->\n"


def summary(room, package):
    """Return the first sentence of the docstring of a package or a module."""
    file = package / room / "__init__.py"
    file = file if file.exists() else package / f"{room}.py"
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(re.split(r"\.(?:\s|$)|\n\n", text, maxsplit=1)[0].split())


def first_reading():
    """Return a table for each product: the files to read first, in order."""
    parts = []
    for package, names in READ_FIRST.items():
        files = [ROOT / package / f"{name}.py" for name in names.split()]
        n_lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
        lines = [f"| `{package}`, about {round(n_lines, -2):,} lines | what it does |", "|---|---|"]
        for name, file in zip(names.split(), files, strict=True):
            contents = summary(file.stem, file.parent)
            lines.append(f"| [`{name}.py`]({package}/{name}.py) | {contents} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


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


PARTS = {"reading": first_reading, "rooms": tables}


def main(argv):
    """Print the tables, or write them into CONTRIBUTING.md."""
    page = ROOT / "CONTRIBUTING.md"
    for name, make in PARTS.items():
        if "--write" not in argv:
            print(make())
            continue
        before, _, rest = page.read_text(encoding="utf-8").partition(begin(name))
        after = rest.partition(end(name))[2]
        text = f"{before}{begin(name)}\n{make()}\n{end(name)}{after}"
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
