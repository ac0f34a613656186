"""`python -m tests.faults`: run the fault matrix and print it, a line a row.

`--markdown` prints the page `docs/faults.md`: it as a table, and below it the guard's table of
faults; other words go to pytest (`-m "not slow"`, `-k 39`, `-x`). The exit code is 1 if any row
failed.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.matrix import GROUPS, KINDS, ROWS

FOLDER, IMPORT = Path(__file__).parent, "faults.matrix import row"
HEADER = """\
# The fault matrix

What `python -m tests.faults --markdown` printed: each row is injected by as many tests as the
number in brackets says. A known fault is a test that is expected to fail until its cause is fixed.
Below it is the guard's table of faults, each with the rows that show it.
"""
WORDS = {
    "passed": "passed",
    "failed": "FAILED",
    "xfailed": "known fault",
    "skipped": "skipped here",
}


class Results:
    """A pytest plugin that remembers what became of each row's tests.

    Attributes:
        outcomes: row -> a word of `WORDS` for each of its tests.
    """

    def __init__(self) -> None:
        self.outcomes: dict[int, list[str]] = {}
        self._rows: dict[str, set[int]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Note which test is of which row; of other folders these alone are run."""
        items[:] = [i for i in items if i.path.parent == FOLDER or i.get_closest_marker("fault")]
        for item in items:
            marks = item.iter_markers("fault")
            self._rows[item.nodeid] = {number for mark in marks for number in mark.args}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test's outcome; a fault in its set-up or tear-down counts as a failure."""
        if report.when != "call" and report.outcome == "passed":
            return
        expected = report.outcome == "skipped" and hasattr(report, "wasxfail")
        for number in self._rows.get(report.nodeid, ()):
            self.outcomes.setdefault(number, []).append("xfailed" if expected else report.outcome)

    def kind(self, number: int) -> str:
        """What became of a row, in one word or two."""
        if ROWS[number].later:
            return "later"
        seen = self.outcomes.get(number)
        if not seen:
            return "not run"
        worst = ("failed", "xfailed", "passed", "skipped")
        return WORDS[next(outcome for outcome in worst if outcome in seen)]

    def of(self, number: int) -> str:
        """The same with the number of tests that say so, or why there is none."""
        kind, seen = self.kind(number), self.outcomes.get(number, [])
        if kind == "later":
            return f"later: {ROWS[number].later}"
        if kind == "not run":
            return kind
        count = sum(WORDS[outcome] == kind for outcome in seen)
        all_passed = kind == "passed" and count == len(seen)
        return f"passed ({count})" if all_passed else f"{kind} ({count} of {len(seen)})"


def lines(results: Results, markdown: bool = False) -> Iterator[str]:
    """The matrix, a line a row, and a closing count."""
    if markdown:
        yield HEADER
        yield "| # | fault | right behaviour | result |"
        yield "|---|---|---|---|"
    for number, row in ROWS.items():
        if number in GROUPS:
            yield f"| | **{GROUPS[number]}** | | |" if markdown else f"\n{GROUPS[number]}"
        fault = f"{row.fault} ({row.how})" if row.how else row.fault
        if markdown:
            yield f"| {number} | {fault} | {row.outcome} | {results.of(number)} |"
        else:
            yield f"{number:>2} | {fault} | {row.outcome} | {results.of(number)}"
    kinds = Counter(results.kind(number) for number in ROWS)
    order = [*WORDS.values(), "not run", "later"]
    yield ""
    yield f"{len(ROWS)} rows: " + ", ".join(f"{kinds[k]} {k}" for k in order if kinds[k])


def kinds() -> Iterator[str]:
    """The guard's table of faults, a line a kind."""
    yield "| kind | what is seen | what is done at once | what to change | rows |"
    yield "|---|---|---|---|---|"
    for stage in KINDS:
        kind = stage.kind
        change = "; ".join(filter(None, [kind.advice, kind.remedy]))
        rows = ", ".join(str(number) for number, row in ROWS.items() if stage in row.kinds)
        seen = re.sub(r"{(\w+).*?}", r"*\1*", kind.reason)
        cells = [stage.name.lower(), seen, kind.action, change, rows]
        yield "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def marked_elsewhere() -> list[Path]:
    """Files of other folders with tests of rows."""
    files = sorted(FOLDER.parent.rglob("test_*.py"))
    return [f for f in files if f.parent != FOLDER and IMPORT in f.read_text(encoding="utf-8")]


def main(words: list[str]) -> int:
    """Run the tests of the rows with further words for pytest; the exit code."""
    markdown = "--markdown" in words
    words = [word for word in words if word != "--markdown"]
    results = Results()
    # With --markdown the table alone is on stdout, to be kept by `>`.
    screen = sys.stderr if markdown else sys.stdout
    with contextlib.redirect_stdout(screen):
        options = ["-q", "--no-header", "--tb=short", "-rfE", "-p", "no:cacheprovider"]
        code = pytest.main(
            [str(FOLDER), *map(str, marked_elsewhere()), *options, *words], plugins=[results]
        )
    print("\n".join(lines(results, markdown)))
    if markdown:
        print("", *kinds(), sep="\n")
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
