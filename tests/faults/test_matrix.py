"""The matrix itself: no row without a test or a reason, no test of a row that is not there."""

import importlib
import itertools
from dataclasses import replace
from pathlib import Path

from tests.faults.__main__ import Results, kinds, lines, marked_elsewhere
from tests.faults.matrix import GROUPS, KINDS, ROWS

FILES = sorted(Path(__file__).parent.glob("test_*.py"))


def _tested():
    """Row -> the tests that carry it, read from the modules and not from this session's choice."""
    found = {}
    for file in [*FILES, *marked_elsewhere()]:
        module = ".".join(file.relative_to(Path(__file__).parents[2]).with_suffix("").parts)
        for name, test in vars(importlib.import_module(module)).items():
            for mark in getattr(test, "pytestmark", []) if name.startswith("test_") else []:
                for number in mark.args if mark.name == "fault" else []:
                    found.setdefault(number, []).append(name)
    return found


def test_every_row_has_a_test_or_a_reason_and_not_both():
    assert list(ROWS) == list(range(1, len(ROWS) + 1)) and set(GROUPS) <= set(ROWS)
    tested = _tested()
    assert set(tested) == {number for number, row in ROWS.items() if not row.later}


def test_every_kind_of_fault_has_a_row_that_is_tested():
    """A new kind is one member of the guard's table, one detector and one row."""
    shown = {kind for row in ROWS.values() if not row.later for kind in row.kinds}
    assert shown == set(KINDS)
    table = list(kinds())
    assert [line.split(" | ")[0] for line in table[2:]] == [f"| {k.name.lower()}" for k in KINDS]
    assert all(line.replace(r"\|", "").count("|") == 6 for line in table)


def test_every_test_here_carries_a_row():
    for file in FILES:
        for name, test in vars(importlib.import_module(f"tests.faults.{file.stem}")).items():
            if name.startswith("test_") and file.stem != "test_matrix":
                marks = {mark.name for mark in getattr(test, "pytestmark", [])}
                assert "fault" in marks, f"{file.name}: {name}"


def test_the_page_begins_as_the_generator_says():
    page = (Path(__file__).parents[2] / "docs" / "faults.md").read_text(encoding="utf-8")
    head = "\n".join(itertools.islice(lines(Results(), markdown=True), 3))
    assert page.startswith(head) and head.startswith("# The fault matrix\n")


def test_the_printed_matrix_counts_every_row_once(monkeypatch):
    monkeypatch.setitem(ROWS, 46, replace(ROWS[46], later="comes with distribution"))
    results = Results()
    results.outcomes = {1: ["passed"] * 2, 2: ["passed", "failed"], 3: ["xfailed"], 4: ["skipped"]}
    told = [results.of(number) for number in (1, 2, 3, 4, 5, 46)]
    assert told[:2] == ["passed (2)", "FAILED (1 of 2)"]
    assert told[2:4] == ["known fault (1 of 1)", "skipped here (1 of 1)"]
    assert told[4:] == ["not run", "later: comes with distribution"]
    text = list(lines(results))
    assert sum(" | " in line for line in text) == len(ROWS)
    later = sum(bool(row.later) for row in ROWS.values())
    assert text[-1] == (
        f"{len(ROWS)} rows: 1 passed, 1 FAILED, 1 known fault, 1 skipped here, "
        f"{len(ROWS) - 4 - later} not run, {later} later"
    )
    assert sum(line.startswith("| ") for line in lines(results, markdown=True)) >= len(ROWS)
