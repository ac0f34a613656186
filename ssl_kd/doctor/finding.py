"""What a check found, and the table of it: a way out per fault."""

from __future__ import annotations

import functools
import shutil
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table.

    Attributes:
        tried: what was looked at.
        seen: what was found there.
        change: what to change; with one it is a fault.
        note: no fault all the same: advice, or why something was not checked.
    """

    tried: str
    seen: str
    change: str = ""
    note: bool = False

    @property
    def status(self) -> str:
        """`ok`, `note` or `FAULT`."""
        return "note" if self.note else "FAULT" if self.change else "ok"


def table(title: str, findings: Iterable[Finding], width: int) -> str:
    """The findings as text: what was tried, what was seen, and below a fault what to change."""
    findings = list(findings)
    first = max(len(finding.tried) for finding in findings) + 2
    lines = [title]
    for finding in findings:
        head = f"  {finding.status:<6}{finding.tried:<{first}}"
        indent = " " * len(head)
        wrap = functools.partial(
            textwrap.wrap, width=max(width, len(head) + 30), subsequent_indent=indent
        )
        lines += wrap(finding.seen, initial_indent=head)
        if finding.change:
            lines += wrap("-> " + finding.change, initial_indent=indent)
    return "\n".join(lines)


def report(title: str, checks: Iterable[Iterator[Finding]], verbose: bool) -> int:
    """Run the checks, print their table, and return 1 where there is a fault, else 0."""
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
                change = "see the faults above; if there are none, report"
                findings.append(Finding(name, seen, change))
    print(table(title, findings, width=shutil.get_terminal_size().columns))

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
