"""Does a cached teacher teach as well as a live one? The same student from both, at equal steps.

    python -m benchmarks.offline_teacher --seeds 6

The teacher is asked once about the whole text, and each cache then stands in for it in runs of
their own: `top-k` keeps the k most likely tokens and the mass of the rest, `sampled` k draws, and
`hidden` the last hidden states with the output head. The held-out loss of a cache is compared with
the live run of the same seed; the interval is Student's t of these differences, 95 %, as the ratio
of the perplexities. Without --teacher_model a teacher is trained on the text first, once.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from scipy.stats import t as students_t

from benchmarks.distillation import ALONE, add_settings, measure, spread, with_teacher
from ssl_kd.language.caching import cache_teacher
from ssl_kd.language.settings import LanguageSettings


def look(folder: Path) -> dict[str, Any]:
    """What the run says of its cache."""
    return {"cache": json.loads((folder / "metrics.json").read_text())["cache"]}


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """Low end, mean and high end of e to the mean of some differences in nats, 95 %."""
    n, mean = len(differences), fmean(differences)
    half = 0.0
    if n > 1:
        half = students_t.ppf(0.975, n - 1) * stdev(differences) / math.sqrt(n)
    return math.exp(mean - half), math.exp(mean), math.exp(mean + half)


def against(found: Sequence[dict[str, Any]], live: Sequence[dict[str, Any]]) -> list[str]:
    """Two cells: perplexity as a share of the live teacher's, and whether it is within 1 %."""
    differences = [a["nll"] - b["nll"] for a, b in zip(found, live, strict=True)]
    low, middle, high = interval(differences)
    inside = "yes" if 0.99 <= low and high <= 1.01 else "no" if high < 0.99 or low > 1.01 else "?"
    return [f"{middle:.4f} ({low:.4f} to {high:.4f})", inside]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first_seed", type=int, default=0)
    parser.add_argument("--topk", type=int, nargs="*", default=[8, 32, 64], help="k of each cache")
    parser.add_argument("--sample", type=int, nargs="*", default=[8, 32, 64], help="draws of each")
    add_settings(
        parser,
        *("teacher_model", "teacher_size", "teacher_steps", "data_path", "eval_path"),
        *("max_megabytes", "max_steps", "batch_size", "block_size", "eval_rows", "vocabulary"),
        *("learning_rate", "temperature", "alpha_kd", "alpha_ce"),
        student_model="fresh:2x96",
    )
    given = vars(parser.parse_args())
    seeds, first = given.pop("seeds"), given.pop("first_seed")
    methods: list[tuple[str, dict[str, Any]]] = [("hidden", {})]
    methods += [(kept, {"cache_k": k}) for kept in ("sample", "topk") for k in given.pop(kept)]
    logging.basicConfig(level=logging.ERROR)
    settings = with_teacher(
        LanguageSettings(
            **given,
            eval_every=max(1, given["max_steps"] // 5),
            generations=0,
            answer_prompts=0,
        )
    )

    def runs(**chosen: Any) -> list[dict[str, Any]]:
        changed = settings.replace(**chosen)
        return [measure(changed.replace(seed=first + i), look) for i in range(seeds)]

    columns = ["teacher", "held-out perplexity", "of the live teacher's", "within 1 %"]
    columns += ["bytes a token", "tail mass", "fidelity KL", "seconds to cache", "seconds to train"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")

    def row(name: str, found: list[dict[str, Any]], live: list[dict[str, Any]], *about: str):
        cells = [name, spread(run["perplexity"] for run in found), *against(found, live)]
        cells += about or ("",) * 4
        cells.append(f"{median(run['seconds'] for run in found):.0f}")
        print(f"| {' | '.join(cells)} |", flush=True)

    live = runs()
    row("live", live, live)
    row("none: CE alone", runs(**ALONE), live)
    for method, chosen in methods:
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            cached = {"teacher_cache": folder, "cache_method": method, **chosen}
            cache_teacher(settings.replace(**cached))
            took = time.perf_counter() - began
            found = runs(**cached)
        cache = found[0]["cache"]
        about = [f"{cache['bytes_per_token']:.0f}", f"{100 * cache['tail_mass']:.2f} %"]
        about += [f"{cache['fidelity_kl']:.4f}", f"{took:.0f}"]
        row(f"{method} {cache.get('k', cache.get('stored'))}", found, live, *about)


if __name__ == "__main__":
    main()
