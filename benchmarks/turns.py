"""Measure methods alternately, so that a drift in the machine's speed cancels out."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping


def in_turns(methods: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Call each method once per round, in alternating order; return the results by method."""
    results: dict[str, list[float]] = {name: [] for name in methods}
    for turn in range(rounds):
        order = list(methods)
        for name in order if turn % 2 else reversed(order):
            results[name].append(methods[name]())
    return results


def middle_half(values: Iterable[float], form: str = ".2f", unit: str = "") -> str:
    """Return `median (first to third quartile)`."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:{form}}{unit} ({low:{form}}{unit} to {high:{form}}{unit})"


def header(*columns: str) -> None:
    """Print the header of a Markdown table."""
    row(*columns)
    print(f"|{'---|' * len(columns)}", flush=True)


def row(*cells: str) -> None:
    """Print a row of a Markdown table."""
    print(f"| {' | '.join(cells)} |", flush=True)


def number_of(module: str, *flags: str) -> float:
    """Run a benchmark in another process with more flags; return the last number it prints."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *sys.argv[1:], *flags]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(output.split()[-1])
