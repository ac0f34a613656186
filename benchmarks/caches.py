"""Compare students that learn from a live teacher with students that learn from a cache of it.

    python -m benchmarks.caches --teacher_model FOLDER --data_path FILE.jsonl --seeds 6

All runs of a seed have the same initialization, batches and steps. The third column is the held-out
perplexity relative to the live teacher's run of the same seed: the geometric mean over the seeds,
and its 95 % interval by Student's t. `none` is cross-entropy alone.
"""

from __future__ import annotations

import argparse
import logging
import math
import tempfile
from statistics import fmean, stdev
from typing import Any

from scipy.stats import t as students_t

from benchmarks.distillation import ALONE, add_settings, measure, spread, with_teacher
from benchmarks.turns import header, row
from ssl_kd.language.caching import cache_teacher
from ssl_kd.language.settings import LanguageSettings

METHODS = ("hidden", "sample:128", "sample", "sample:32", "sample:8", "topk:32", "topk:8")


def relative(runs: list[dict[str, Any]], live: list[dict[str, Any]]) -> str:
    """Return the ratio of perplexities over paired seeds, with its 95 % interval."""
    pairs = zip(runs, live, strict=True)
    logs = [math.log(a["perplexity"] / b["perplexity"]) for a, b in pairs]
    half = students_t.ppf(0.975, len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    low, middle, high = (math.exp(fmean(logs) + x) for x in (-half, 0, half))
    return f"{middle:.4f} ({low:.4f} to {high:.4f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--methods", nargs="*", default=METHODS, help="CACHE_METHOD of each")
    names = ("teacher_model", "data_path", "eval_path", "batch_size", "block_size", "eval_rows")
    add_settings(parser, *names, "learning_rate", max_steps=100, student_model="fresh:2x96")
    flags = vars(parser.parse_args())
    seeds, methods = range(flags.pop("seeds")), flags.pop("methods")
    logging.basicConfig(level=logging.ERROR)
    settings = LanguageSettings(**flags, eval_every=flags["max_steps"], generations=0)
    settings = with_teacher(settings)

    def runs(**changes: Any) -> list[dict[str, Any]]:
        return [measure(settings.replace(**changes, seed=seed)) for seed in seeds]

    header("teacher", "held-out perplexity", "relative to live", "bytes per token")
    live = runs()
    row("live", spread(x["perplexity"] for x in live), "1", "")
    for method in methods:
        with tempfile.TemporaryDirectory() as folder:
            cached = {"teacher_cache": folder, "cache_method": method}
            size = cache_teacher(settings.replace(**cached)).facts()["bytes_per_token"]
            found = runs(**cached)
        perplexity = spread(x["perplexity"] for x in found)
        row(method, perplexity, relative(found, live), f"{size:.0f}")
    alone = runs(**ALONE)
    row("none", spread(x["perplexity"] for x in alone), relative(alone, live), "")


if __name__ == "__main__":
    main()
