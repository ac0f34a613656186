"""Collect the findings of checks, and print them as a table with a remedy for each fault."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

FOLLOW_MESSAGE = "follow the advice in this message"
_STYLES = {"ok": "green", "note": "yellow", "FAULT": "bold red"}


@dataclass(frozen=True)
class Finding:
    """The result of one check: a row of the doctor's table.

    Attributes:
        check: the name of the check.
        result: the result in words.
        change: what to change; a finding with a change is a fault, unless it is a note.
        note: whether this is only advice, or says why something was not checked.
    """

    check: str
    result: str
    change: str = ""
    note: bool = False

    @property
    def status(self) -> str:
        """The word in the first column: `ok`, `note` or `FAULT`."""
        return "note" if self.note else "FAULT" if self.change else "ok"


def table(findings: Iterable[Finding]) -> Table:
    """Return a table of checks and results, with the remedy below each fault."""
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column("status", no_wrap=True, min_width=7)
    rows.add_column("check", overflow="fold", max_width=40)
    rows.add_column("result", overflow="fold", ratio=1)
    for finding in findings:
        change = f"\n-> {finding.change}" if finding.change else ""
        status = Text(f"  {finding.status}", _STYLES[finding.status])
        # As Text, in which brackets are not markup.
        rows.add_row(status, Text(finding.check), Text(finding.result + change))
    return rows


def report(title: str, checks: Iterable[Iterator[Finding]], verbose: bool) -> int:
    """Run the checks, print a table of their findings, and return 1 if there is a fault, else 0.

    Args:
        title: the line above the table.
        checks: generators of findings.
        verbose: print each distinct warning with its count, not only the number of warnings.
    """
    findings: list[Finding] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for check in checks:
            try:
                for finding in check:
                    findings.append(finding)
            except Exception as error:  # a check that fails is a fault by itself
                name = getattr(check, "__name__", "check").replace("_", " ")
                change = "fix the faults above first; without any, please report this as a bug"
                findings.append(Finding(name, f"{type(error).__name__}: {error}", change))
    print(title)
    Console().print(table(findings))

    statuses = Counter(finding.status for finding in findings)
    counts = [count(len(findings), "check"), count(statuses["FAULT"], "fault")]
    counts += [count(statuses["note"], "note")] if statuses["note"] else []
    if caught and verbose:
        print("Warnings")
        lines = (f"{w.category.__name__}: {' '.join(str(w.message).split())}" for w in caught)
        for warning, times in Counter(lines).most_common():
            print(f"  {times} x {warning}")
    elif caught:
        counts.append(f"{count(len(caught), 'warning')} (--verbose lists them)")
    print(f"{', '.join(counts)}.")
    return 1 if statuses["FAULT"] else 0


def count(n: int, noun: str) -> str:
    """Return a number with its noun in the right form: `1 fault`, `2 faults`."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
