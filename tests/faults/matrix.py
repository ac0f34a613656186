"""Read the fault matrix from matrix.md: one fault and its expected behavior per row.

`@row(15)` assigns a test to a row; `python -m tests.faults` runs all rows and prints the matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from firstnan.faults import Kinds, Stage
from ssl_kd.core.faults import OwnStage

row = pytest.mark.fault
"""Marks the test of a row, or of several: `@row(15)`, `@row(4, 5)`."""

KINDS = [stage for stage in (*Stage, *OwnStage) if stage.kind.reason]
"""The kinds of faults that the guard detects; the other stages are its actions."""


@dataclass(frozen=True)
class Row:
    """A row of the matrix."""

    fault: str
    outcome: str  # the expected behavior
    how: str = ""  # how the fault is injected, if that is not obvious
    kinds: tuple[Kinds, ...] = ()  # the guard's kinds of faults that the row tests


def _read(path: Path) -> tuple[dict[int, Row], dict[int, str]]:
    rows: dict[int, Row] = {}
    groups: dict[int, str] = {}
    heading, by_name = "", {kind.name: kind for kind in KINDS}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        number, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if number.isdigit():
            fault, outcome, how, kinds = cells
            if heading not in groups.values():
                groups[int(number)] = heading
            rows[int(number)] = Row(fault, outcome, how, tuple(by_name[k] for k in kinds.split()))
    return rows, groups


ROWS, GROUPS = _read(Path(__file__).with_name("matrix.md"))
"""The rows by number, and the name of each group by its first row."""
