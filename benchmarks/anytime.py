"""Quality against time: what our search has in hand at every moment, and when each peer answers.

    pip install evoc igraph leidenalg
    python -m benchmarks.anytime --sets digits,fashion10k --picture docs/anytime.png

All methods get the same embeddings and K, in one process; peers have run on small random data
before, so that nothing is imported or compiled in their time. Ours begins with nothing known, not
even neighbours. What it has in hand is the partition that it holds for the best, by its criterion;
its last point is the answer of `fit`, with trained heads. Labels are read for the scores alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from unittest import mock

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from benchmarks.peers import METHODS, OURS, installed, warm_up, without_noise
from benchmarks.quality import names_of
from benchmarks.sets import SETS, Sources, loaded
from ssl_kd import evaluate
from ssl_kd.graph import Partition, search
from ssl_kd.report.figures import PALETTE

MOMENTS = (1, 2, 5, 15, 60)
Answers = list[tuple[float, float]]
"""(seconds, ACC in percent), in order of time."""


def answers(name: str, x: NDArray, y: NDArray, seed: int) -> Answers:
    """The answers of one method over time; a peer has one."""
    n_clusters, seen, spent = len(np.unique(y)), [], 0.0
    began = time.perf_counter()

    def keep(keep: Callable, self: search._Search, part: Partition) -> None:
        nonlocal spent
        keep(self, part)
        seconds = time.perf_counter() - began - spent
        if self.n == len(x):  # halves are searched, too, to see how stable it is
            seen.append((seconds, self.found[0].clusters.copy()))
        spent = time.perf_counter() - began - seconds

    kept = search._Search._keep
    with mock.patch.object(search._Search, "_keep", lambda *args: keep(kept, *args)):
        last = METHODS[name].run(x, n_clusters, seed)
    seen.append((time.perf_counter() - began - spent, last))
    return [
        (seconds, 100 * (evaluate.accuracy(y, without_noise(x, clusters)) or 0.0))
        for seconds, clusters in seen
    ]


def at(found: Answers, moment: float) -> float | None:
    """The quality in hand at a moment, None before the first answer."""
    known = [acc for seconds, acc in found if seconds <= moment]
    return known[-1] if known else None


def table(runs: dict[str, list[Answers]]) -> str:
    """Median ACC of every method at the moments, over its seeds."""
    lines = [f"| method | {' | '.join(f'{m} s' for m in MOMENTS)} | done | ACC |"]
    lines.append("|---" * (len(MOMENTS) + 3) + "|")
    for name, some in runs.items():
        cells = []
        for moment in MOMENTS:
            known = [acc for found in some if (acc := at(found, moment)) is not None]
            cells.append(f"{median(known):.1f}" if len(known) == len(some) else "")
        done, acc = (median(found[-1][i] for found in some) for i in (0, 1))
        lines.append(f"| {METHODS[name].title} | {' | '.join(cells)} | {done:.1f} s | {acc:.1f} |")
    first = [found[0][0] for found in runs.get("evoc", [])]
    if first and OURS in runs:
        peer = median(found[-1][1] for found in runs["evoc"])
        later = [acc for found in runs[OURS] for seconds, acc in found if seconds >= min(first)]
        lines += ["", f"From EVoC's answer on ours has at least {min(later):.1f}, EVoC {peer:.1f}."]
    return "\n".join(lines)


def draw(sets: dict[str, dict[str, list[Answers]]]) -> Figure:
    """One plot for each set: our line, the peers' points."""
    figure = Figure(figsize=(5 * len(sets), 3.6), layout="constrained", facecolor="white")
    plots = np.atleast_1d(figure.subplots(1, len(sets)))
    for axes, (name, runs) in zip(plots, sets.items(), strict=True):
        for number, (method, some) in enumerate(runs.items()):
            title = METHODS[method].title.strip("*")
            colour = "black" if method == OURS else PALETTE[number]
            for found in some:
                seconds, acc = zip(*found, strict=True)
                if len(found) > 1:
                    axes.step(seconds, acc, where="post", color=colour, alpha=0.7)
                axes.plot(seconds[-1], acc[-1], "o", color=colour, label=title)
                title = None
        axes.set(title=name, xscale="log", xlabel="seconds", ylabel="ACC in percent")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower right")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description="Quality against time.", allow_abbrev=False)
    parser.add_argument("--sets", type=lambda text: names_of(SETS, text), default=["digits"])
    parser.add_argument(
        "--methods", type=lambda text: names_of(METHODS, text), default=list(METHODS)
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--picture", type=Path, help="PNG to write")
    Sources.add_flags(parser)
    args = parser.parse_args()
    methods = [name for name in installed(args.methods) if METHODS[name].given]
    for name in methods:
        warm_up(name, 5)
    sets: dict[str, dict[str, list[Answers]]] = {}
    for name, x, y in loaded({name: SETS[name] for name in args.sets}, Sources.of(args)):
        sets[name] = {method: [] for method in methods}
        for seed in range(args.seeds):  # in turn, so that none has the machine's best minute
            for method in methods:
                sets[name][method].append(answers(method, x, y, seed))
        print(f"### {name}: {len(x):,} x {x.shape[-1]:,}\n\n{table(sets[name])}\n", flush=True)
    if args.picture and sets:
        draw(sets).savefig(args.picture, dpi=110)


if __name__ == "__main__":
    main()
