"""CONTRIBUTING.md lists the packages as they are, and functions that exist."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

pytest.importorskip("tomllib", reason="Python 3.11 brought it")

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PLACES = sorted(set(re.findall(r"`(\w[\w/]*\.py):([\w.]+)`", TEXT)))


def without_counts(text):
    """Numbers of lines change with each commit, and need not be written each time."""
    return re.sub(r"about [\d,]+ lines", "lines", text)


def test_the_table_of_rooms_is_that_of_the_contract_and_the_docstrings():
    spec = importlib.util.spec_from_file_location("house", ROOT / ".ci" / "house.py")
    assert spec is not None and spec.loader is not None
    house = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(house)
    for name, make in house.PARTS.items():
        part = f"{house.begin(name)}\n{make()}\n{house.end(name)}"
        assert without_counts(part) in without_counts(TEXT), "run: python .ci/house.py --write"
    for package in house.PACKAGES:
        rooms = {path.stem for path in package.glob("*.py")} - {"__init__"}
        rooms |= {path.parent.name for path in package.glob("*/__init__.py")}
        assert set(re.findall(r"\| `(\w+)` \|", house.table(package))) == rooms


@pytest.mark.parametrize(("file", "name"), PLACES, ids=[":".join(place) for place in PLACES])
def test_each_function_of_the_walks_exists(file, name):
    body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
    for part in name.split("."):
        found = [node for node in body if getattr(node, "name", None) == part]
        assert found, f"{file} has no {name}"
        body = found[0].body


def test_files_that_the_page_links_to_exist():
    for link in re.findall(r"\]\(([\w./]+)\)", TEXT):
        assert (ROOT / link).exists(), link
