"""Measure methods alternately, so that drifts in a machine's speed cancel out; write tables."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
README = Path(__file__).parents[1] / "README.md"
PAGE = README.parent / "docs" / "results.md"


def in_turns(methods: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Call each method once per round, in alternating order; return the results by method."""
    results: dict[str, list[T]] = {name: [] for name in methods}
    for turn in range(rounds):
        order = list(methods)
        for name in order if turn % 2 else reversed(order):
            results[name].append(methods[name]())
    return results


def in_pairs(
    base: Callable[[], float], way: Callable[[], float], pairs: int
) -> tuple[list[float], list[float], list[float]]:
    """Measure two ways in turns after a warm-up; return both results and `way / base` by pair."""
    base()
    way()
    of_base, of_way = in_turns({"base": base, "way": way}, pairs).values()
    return of_base, of_way, [y / x for x, y in zip(of_base, of_way, strict=True)]


def middle_half(values: Iterable[float], form: str = ".2f", unit: str = "") -> str:
    """Return `median (first to third quartile)`."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:{form}}{unit} ({low:{form}}{unit} to {high:{form}}{unit})"


def table_line(cells: Sequence[str]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def table_head(columns: Sequence[str]) -> str:
    """Return the header of a Markdown table."""
    return f"{table_line(columns)}\n{'|---' * len(columns)}|"


def header(*columns: str) -> None:
    """Print the header of a Markdown table."""
    print(table_head(columns), flush=True)


def row(*cells: str) -> None:
    """Print a row of a Markdown table."""
    print(table_line(cells), flush=True)


def section_pattern(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=<!-- {name}: )([^\n]+ -->\n\n)(.*?)(?=\n<!-- end -->)", re.S)


def section_of(name: str, page: str) -> str:
    """Return the named section of a page, from `<!-- NAME: COMMAND -->` to `<!-- end -->`.

    Raises:
        ValueError: If the page does not have exactly one section of this name.
    """
    sections = section_pattern(name).findall(page)
    if len(sections) != 1:
        raise ValueError(f"the page has {len(sections)} sections named {name!r}, expected 1")
    return sections[0][1]


def with_section(name: str, section: str, page: str) -> str:
    """Return the page with the named section replaced, see `section_of`."""
    section_of(name, page)
    return section_pattern(name).sub(lambda match: match[1] + section, page)


def write_section(name: str, section: str, page: Path = PAGE) -> None:
    """Replace the named section of a page, docs/results.md if not given."""
    page.write_text(with_section(name, section, page.read_text(encoding="utf-8")), encoding="utf-8")


def memory(process: int | str = "self") -> dict[str, float]:
    """Return the sizes in /proc/PROCESS/status in MiB, such as `VmHWM` (peak resident set)."""
    text = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace")
    return {name: int(kib) / 1024 for name, kib in re.findall(r"(\w+):\s+(\d+) kB", text)}


def number_of(module: str, *flags: str) -> float:
    """Run a benchmark in another process with more flags; return the last number it prints."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *sys.argv[1:], *flags]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(output.split()[-1])
