"""Compare students that learn from a live teacher with students that learn from a cache of it.

    python -m benchmarks.caches --teacher_model FOLDER --data_path FILE.jsonl --seeds 6

All runs of a seed have the same initialization, batches and steps. The third column is the held-out
perplexity relative to the live teacher's run of the same seed: the geometric mean over the seeds
and its 95 % interval (Student's t). The last column is the time that one thread takes to read a
batch from the cache.
"""

from __future__ import annotations

import argparse
import logging
import math
import tempfile
import time
from statistics import fmean, median, stdev
from typing import Any

import torch
from scipy.stats import t as students_t

from benchmarks.distillation import ALONE, add_settings, measure, spread, with_teacher
from benchmarks.turns import header, row
from ssl_kd.datasets.blocks import Batch
from ssl_kd.language.caching import cache_teacher
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.teacher_cache import TeacherCache

METHODS = ("hidden", "sample:128", "sample", "sample:32", "sample:8", "topk:32", "topk:8")


def relative(runs: list[dict[str, Any]], live: list[dict[str, Any]]) -> str:
    """Return the ratio of perplexities over paired seeds, with its 95 % interval."""
    pairs = zip(runs, live, strict=True)
    logs = [math.log(a["perplexity"] / b["perplexity"]) for a, b in pairs]
    half = students_t.ppf(0.975, len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    low, middle, high = (math.exp(fmean(logs) + x) for x in (-half, 0, half))
    return f"{middle:.4f} ({low:.4f} to {high:.4f})"


def microseconds(cache: TeacherCache, rows: int = 8, rounds: int = 9) -> float:
    """Return the time per token of reading a batch on one thread."""
    ids = torch.zeros(rows, cache.fingerprint.block_size, dtype=torch.int64)
    everything = torch.arange(ids.numel())
    batch = Batch(ids, ids, ids > 0, ids.int(), torch.arange(rows), 0, False)
    times = []
    for _ in range(rounds):
        start = time.thread_time()
        cache(batch, everything)
        times.append(time.thread_time() - start)
    return 1e6 * median(times) / ids.numel()


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

    header("teacher", "held-out perplexity", "relative to live", "bytes per token", "µs to read")
    live = runs()
    row("live", spread(x["perplexity"] for x in live), "1", "", "")
    for method in methods:
        with tempfile.TemporaryDirectory() as folder:
            cached = {"teacher_cache": folder, "cache_method": method}
            cache = cache_teacher(settings.replace(**cached))
            found = runs(**cached)
            torch.set_num_threads(1)
            read = f"{microseconds(cache):.1f}"
            size = f"{cache.facts()['bytes_per_token']:.0f}"
        row(method, spread(x["perplexity"] for x in found), relative(found, live), size, read)
    alone = runs(**ALONE)
    row("none", spread(x["perplexity"] for x in alone), relative(alone, live), "", "")


if __name__ == "__main__":
    main()
