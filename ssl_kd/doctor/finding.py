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
    """The result of one check: a row of the doctor's table."""

    check: str
    result: str
    change: str = ""  # what to change; a finding with a change is a fault, unless it is a note
    note: bool = False  # only advice, or the reason why something was not checked

    @property
    def status(self) -> str:
        """The word in the first column: `ok`, `note` or `FAULT`."""
        return "note" if self.note else "FAULT" if self.change else "ok"


def report(title: str, checks: Iterable[Iterator[Finding]]) -> int:
    """Run the checks, print a table of their findings, and return 1 if there is a fault, else 0."""
    findings: list[Finding] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for check in checks:
            try:
                for finding in check:
                    findings.append(finding)
            except Exception as error:  # a check that fails is a fault by itself
                name = getattr(check, "__name__", "check").replace("_", " ")
                change = "fix the faults above first; without any, please report this as a bug"
                findings.append(Finding(name, f"{type(error).__name__}: {error}", change))
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column("status", no_wrap=True, min_width=7)
    rows.add_column("check", overflow="fold", max_width=40)
    rows.add_column("result", overflow="fold", ratio=1)
    for finding in findings:
        change = f"\n-> {finding.change}" if finding.change else ""
        status = Text(f"  {finding.status}", _STYLES[finding.status])
        # As Text, in which brackets are not markup.
        rows.add_row(status, Text(finding.check), Text(finding.result + change))
    print(title)
    Console().print(rows)
    statuses = Counter(finding.status for finding in findings)
    counts = [count(len(findings), "check"), count(statuses["FAULT"], "fault")]
    counts += [count(statuses["note"], "note")] if statuses["note"] else []
    print(f"{', '.join(counts)}.")
    return 1 if statuses["FAULT"] else 0


def count(n: int, noun: str) -> str:
    """Return a number with its noun in the right form: `1 fault`, `2 faults`."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
