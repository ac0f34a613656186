"""Does distilling pay at the best learning rate of each? Both over one grid, at an equal budget.

python -m benchmarks.learning_rates --teacher_model FOLDER --data_path FILE.jsonl --seeds 3

Distilled and by cross-entropy alone the same student sees the same batches for the same steps, with
every learning rate of the grid and every seed. Each way's learning rate is the one with the lowest
perplexity on validation rows (the best look at them in a run, geometric mean over seeds); what is
reported of it is the perplexity on test rows, which no choice is made on. A best one at the end of
the grid is marked: the grid should then be longer. Without flags a teacher is trained on the
standard library first.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.distillation import ALONE, add_settings, measure, spread, with_teacher
from ssl_kd.language.settings import LanguageSettings

GRID = (1e-3, 3e-3, 1e-2, 3e-2)
WAYS: dict[str, dict[str, Any]] = {"distilled": {}, "CE alone": ALONE}

Found = dict[tuple[str, float], list[dict[str, Any]]]
"""Way and learning rate -> a row for each seed."""


def best_look(folder: Path) -> dict[str, Any]:
    """The lowest loss on validation rows of all looks at them in a run, nats a token."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    losses = [line["eval"]["nll"] for line in lines if "eval" in line]
    return {"validation": min((loss for loss in losses if loss is not None), default=math.inf)}


def chosen(found: Found, way: str) -> float:
    """The learning rate of a way that the validation rows choose."""
    means = {
        rate: fmean(row["validation"] for row in rows)
        for (name, rate), rows in found.items()
        if name == way
    }
    return min(means, key=means.__getitem__)


def comparison(found: Found, grid: list[float]) -> list[str]:
    """The best of each way on test rows, and how far apart they are, seed by seed."""
    best = {way: chosen(found, way) for way in WAYS}
    lines = []
    for way, rate in best.items():
        rows = found[way, rate]
        edge = " (an end of the grid)" if rate in (min(grid), max(grid)) else ""
        perplexity = spread((row["perplexity"] for row in rows), ".2f")
        lines.append(f"{way}, best at {rate:g}{edge}: {perplexity}")
    ours, alone = (found[way, rate] for way, rate in best.items())
    pairs = zip(ours, alone, strict=True)
    ratios = spread((a["perplexity"] / b["perplexity"] for a, b in pairs), ".3f")
    return [*lines, f"distilled / CE alone, each at its best, seed by seed: {ratios}"]


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--grid", type=float, nargs="+", default=list(GRID))
    add_settings(
        parser,
        *("teacher_model", "data_path", "eval_path"),
        *("max_steps", "batch_size", "block_size", "eval_rows"),
        *("temperature", "alpha_kd", "alpha_ce"),
        student_model="fresh:2x96",
    )
    given = vars(parser.parse_args())
    seeds, grid = given.pop("seeds"), given.pop("grid")
    logging.basicConfig(level=logging.ERROR)
    settings = with_teacher(
        LanguageSettings(
            **given, eval_every=max(1, given["max_steps"] // 5), generations=0, answer_prompts=0
        )
    )
    found: Found = {}
    print("| way | learning rate | validation perplexity | test perplexity | seconds |")
    print("|---|---|---|---|---|")
    for way, changes in WAYS.items():
        for rate in grid:
            rows = [
                measure(settings.replace(**changes, learning_rate=rate, seed=seed), best_look)
                for seed in range(seeds)
            ]
            found[way, rate] = rows
            cells = [
                spread((math.exp(row["validation"]) for row in rows), ".2f"),
                spread((row["perplexity"] for row in rows), ".2f"),
                f"{fmean(row['seconds'] for row in rows):.0f}",
            ]
            print(f"| {way} | {rate:g} | {' | '.join(cells)} |", flush=True)
    print("", *comparison(found, grid), sep="\n")


if __name__ == "__main__":
    main()
