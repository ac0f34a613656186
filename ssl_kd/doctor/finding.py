"""The findings of the checks, as a table with a remedy for each fault."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

FOLLOW_MESSAGE = "do what that message says"
_STYLES = {"ok": "green", "note": "yellow", "FAULT": "bold red"}


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table.

    Attributes:
        check: what was checked.
        result: what came out.
        change: what to change; a finding with a change is a fault.
        note: not a fault but advice, or the reason why something was not checked.
    """

    check: str
    result: str
    change: str = ""
    note: bool = False

    @property
    def status(self) -> str:
        """`ok`, `note` or `FAULT`."""
        return "note" if self.note else "FAULT" if self.change else "ok"


def table(findings: Iterable[Finding]) -> Table:
    """Return a table of checks and results, with what to change below a fault."""
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
    """Run the checks, print their table, and return 1 if there is a fault, else 0."""
    findings: list[Finding] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for check in checks:
            try:
                for finding in check:
                    findings.append(finding)
            except Exception as error:  # a check that fails is a fault by itself
                name = getattr(check, "__name__", "check").replace("_", " ")
                change = "fix the faults above first; if there are none, report this as a bug"
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
    """Return `1 fault` or `2 faults`."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
