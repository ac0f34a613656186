"""What the checks found, as a table with a remedy for each fault."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

AS_SAID = "do what that message says"
STYLES = {"ok": "green", "note": "yellow", "FAULT": "bold red"}


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table.

    Attributes:
        tried: what was checked.
        seen: what was found there.
        change: what to change; a finding with one is a fault.
        note: not a fault all the same, but advice, or why something was not checked.
    """

    tried: str
    seen: str
    change: str = ""
    note: bool = False

    @property
    def status(self) -> str:
        """`ok`, `note` or `FAULT`."""
        return "note" if self.note else "FAULT" if self.change else "ok"


def table(findings: Iterable[Finding]) -> Table:
    """What was tried, what was seen, and below a fault what to change."""
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column("status", no_wrap=True, min_width=7)
    rows.add_column("tried", overflow="fold", max_width=40)
    rows.add_column("seen", overflow="fold", ratio=1)
    for finding in findings:
        seen = f"{finding.seen}\n-> {finding.change}" if finding.change else finding.seen
        status = Text(f"  {finding.status}", STYLES[finding.status])
        rows.add_row(status, Text(finding.tried), Text(seen))  # Text: brackets are no markup
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
            except Exception as error:  # a check that cannot run is the fault it was looking for
                name = getattr(check, "__name__", "check").strip("_").replace("_", " ")
                seen = f"{type(error).__name__}: {error}"
                change = "fix the faults above first; if there are none, report this as a bug"
                findings.append(Finding(name, seen, change))
    print(title)
    Console().print(table(findings))

    statuses = Counter(finding.status for finding in findings)
    counts = [count(len(findings), "check"), count(statuses["FAULT"], "fault")]
    counts += [count(statuses["note"], "note")] if statuses["note"] else []
    if caught and verbose:
        print("Warnings")
        seen = Counter(f"{w.category.__name__}: {' '.join(str(w.message).split())}" for w in caught)
        for warning, times in seen.most_common():
            print(f"  {times} x {warning}")
    elif caught:
        counts.append(f"{count(len(caught), 'warning')} (--verbose lists them)")
    print(f"{', '.join(counts)}.")
    return 1 if statuses["FAULT"] else 0


def count(n: int, what: str) -> str:
    """`1 fault`, `2 faults`."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"
