"""The fault matrix: what may go wrong and the right behavior, a row each, read from matrix.md.

A test carries its row by `@row(15)`; `python -m tests.faults` runs them all and prints the matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from ssl_kd.guard.faults import Stage

row = pytest.mark.fault
"""`@row(15)` on a test, or `@row(4, 5)` where it injects more than one row's fault."""

KINDS = [stage for stage in Stage if stage.kind.reason]
"""The kinds of faults that the guard detects; the other stages are its actions."""


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        fault: what is injected.
        outcome: the right behavior.
        how: how it is injected, where that is not obvious.
        kinds: of the guard's table of faults, which it shows.
    """

    fault: str
    outcome: str
    how: str = ""
    kinds: tuple[Stage, ...] = ()


def _read(path: Path) -> tuple[dict[int, Row], dict[int, str]]:
    rows: dict[int, Row] = {}
    groups: dict[int, str] = {}
    heading = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        number, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if number.isdigit():
            fault, outcome, how, kinds = cells
            if heading not in groups.values():
                groups[int(number)] = heading
            rows[int(number)] = Row(fault, outcome, how, tuple(Stage[k] for k in kinds.split()))
    return rows, groups


ROWS, GROUPS = _read(Path(__file__).with_name("matrix.md"))
"""The rows by number, and the name of each group by its first row."""
