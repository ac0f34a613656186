"""Run the fault matrix and print it, one row per line: `python -m tests.faults`.

`--markdown` prints the page `docs/faults.md`: the matrix as a table, followed by the guard's table
of faults. Other arguments are passed to pytest (`-m "not slow"`, `-k 39`, `-x`). The exit code is 1
if a row failed.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from ssl_kd.core.faults import CHANGES
from tests.faults.matrix import GROUPS, KINDS, ROWS

FOLDER, ROOT = Path(__file__).parent, Path(__file__).parents[2]
IMPORT = "faults.matrix import row"
HEADER = """\
# The fault matrix

The output of `python -m tests.faults --markdown`. The count in parentheses says how many tests
inject the fault of a row. A known fault is a test that is expected to fail until its cause is
fixed. The last table lists the faults that the guard detects, each with the rows that test it.
"""
# The outcome of a row is the first of these that occurs in its tests.
OUTCOMES = {
    "failed": "FAILED",
    "xfailed": "known fault",
    "passed": "passed",
    "skipped": "skipped here",
}


class Results:
    """A pytest plugin that collects the outcomes of each row's tests.

    Attributes:
        outcomes: Keys of `OUTCOMES`, one per test, by row.
    """

    def __init__(self) -> None:
        self.outcomes: dict[int, list[str]] = {}
        self._rows: dict[str, set[int]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Record the rows of each test; outside this folder, keep only tests with a row."""
        items[:] = [i for i in items if i.path.parent == FOLDER or i.get_closest_marker("fault")]
        for item in items:
            marks = item.iter_markers("fault")
            self._rows[item.nodeid] = {number for mark in marks for number in mark.args}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a test's outcome; an error in setup or teardown counts as a failure."""
        if report.when != "call" and report.outcome == "passed":
            return
        expected = report.outcome == "skipped" and hasattr(report, "wasxfail")
        for number in self._rows.get(report.nodeid, ()):
            self.outcomes.setdefault(number, []).append("xfailed" if expected else report.outcome)

    def kind(self, number: int) -> str:
        """Return the outcome of a row in one or two words."""
        outcomes = self.outcomes.get(number, ())
        return next((word for outcome, word in OUTCOMES.items() if outcome in outcomes), "not run")

    def of(self, number: int) -> str:
        """Return the outcome of a row with its test count."""
        kind, outcomes = self.kind(number), self.outcomes.get(number)
        if not outcomes:
            return kind
        count = sum(OUTCOMES[outcome] == kind for outcome in outcomes)
        all_passed = kind == "passed" and count == len(outcomes)
        return f"passed ({count})" if all_passed else f"{kind} ({count} of {len(outcomes)})"


def lines(results: Results, markdown: bool = False) -> Iterator[str]:
    """Yield the matrix, one row per line, and the row count of each outcome."""
    if markdown:
        yield HEADER
        yield "| # | fault | expected behavior | result |"
        yield "|---|---|---|---|"
    for number, row in ROWS.items():
        if number in GROUPS:
            yield f"| | **{GROUPS[number]}** | | |" if markdown else f"\n{GROUPS[number]}"
        fault = f"{row.fault} ({row.how})" if row.how else row.fault
        line = f"{number:>2} | {fault} | {row.outcome} | {results.of(number)}"
        yield f"| {line.lstrip()} |" if markdown else line
    kinds = Counter(results.kind(number) for number in ROWS)
    order = [*OUTCOMES.values(), "not run"]
    yield ""
    yield f"{len(ROWS)} rows: " + ", ".join(f"{kinds[k]} {k}" for k in order if kinds[k])


def kinds() -> Iterator[str]:
    """Yield the guard's table of faults, one kind per line."""
    yield "| kind | symptom | immediate action | remedy | rows |"
    yield "|---|---|---|---|---|"
    for stage in KINDS:
        kind = stage.kind
        rows = ", ".join(str(number) for number, row in ROWS.items() if stage in row.kinds)
        name = stage.name.lower()
        cells = [name, kind.reason, kind.action, CHANGES.get(name, ""), rows]
        yield "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def marked_elsewhere() -> list[Path]:
    """Return the test files outside this folder with tests of rows."""
    files = sorted([*FOLDER.parent.rglob("test_*.py"), *ROOT.glob("firstnan/tests/test_*.py")])
    return [f for f in files if f.parent != FOLDER and IMPORT in f.read_text(encoding="utf-8")]


def main(arguments: list[str]) -> int:
    """Run the tests of the rows and print the matrix; return pytest's exit code."""
    markdown = "--markdown" in arguments
    arguments = [argument for argument in arguments if argument != "--markdown"]
    results = Results()
    # With --markdown, stdout has only the page, so that `>` can write it to a file.
    with contextlib.redirect_stdout(sys.stderr if markdown else sys.stdout):
        options = ["-q", "--no-header", "--tb=short", "-rfE", "-p", "no:cacheprovider"]
        code = pytest.main(
            [str(FOLDER), *map(str, marked_elsewhere()), *options, *arguments], plugins=[results]
        )
    print("\n".join(lines(results, markdown)))
    if markdown:
        print("", *kinds(), sep="\n")
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
