"""Test the matrix itself: every row has a test, and every test has an existing row."""

import importlib
import itertools
from pathlib import Path

from tests.faults.__main__ import Results, kinds, lines, marked_elsewhere
from tests.faults.matrix import GROUPS, KINDS, ROWS

FILES = sorted(Path(__file__).parent.glob("test_*.py"))


def test_every_row_has_a_test_and_every_test_here_a_row():
    """Read the marks from the modules, independent of the selected tests."""
    tested = set()
    for file in [*FILES, *marked_elsewhere()]:
        module = ".".join(file.relative_to(Path(__file__).parents[2]).with_suffix("").parts)
        for name, test in vars(importlib.import_module(module)).items():
            if name.startswith("test_"):
                marks = [m for m in getattr(test, "pytestmark", []) if m.name == "fault"]
                assert marks or file not in FILES or file.stem == "test_matrix", f"{module}: {name}"
                tested |= {number for mark in marks for number in mark.args}
    assert list(ROWS) == sorted(ROWS) and set(GROUPS) <= set(ROWS)
    assert tested == set(ROWS)


def test_every_kind_of_fault_has_a_row():
    """Check that every kind of fault has a detector and a row."""
    assert {kind for row in ROWS.values() for kind in row.kinds} == set(KINDS)
    table = list(kinds())
    assert [line.split(" | ")[0] for line in table[2:]] == [f"| {k.name.lower()}" for k in KINDS]
    assert all(line.replace(r"\|", "").count("|") == 6 for line in table)


def test_the_page_starts_with_the_generated_text():
    page = (Path(__file__).parents[2] / "docs" / "faults.md").read_text(encoding="utf-8")
    head = "\n".join(itertools.islice(lines(Results(), markdown=True), 3))
    assert page.startswith(head) and head.startswith("# The fault matrix\n")


def test_the_printed_matrix_counts_every_row_once():
    results = Results()
    results.outcomes = {1: ["passed"] * 2, 2: ["passed", "failed"], 3: ["xfailed"], 4: ["skipped"]}
    assert [results.of(number) for number in range(1, 6)] == [
        "passed (2)",
        "FAILED (1 of 2)",
        "known fault (1 of 1)",
        "skipped here (1 of 1)",
        "not run",
    ]
    text = list(lines(results))
    assert sum(" | " in line for line in text) == len(ROWS)
    counts = f"1 FAILED, 1 known fault, 1 passed, 1 skipped here, {len(ROWS) - 4} not run"
    assert text[-1] == f"{len(ROWS)} rows: {counts}"
    assert sum(line.startswith("| ") for line in lines(results, markdown=True)) >= len(ROWS)
