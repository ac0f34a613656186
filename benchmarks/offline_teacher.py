"""Does a cached teacher teach as well as a live one? The same student from both, at equal steps.

    python -m benchmarks.offline_teacher --seeds 3

The teacher is asked once about the whole text, and each cache then stands in for it in runs of
their own: `top-k` keeps the k most likely tokens and the mass of the rest, `sampled` k draws.
Perplexity of a cache is compared with the live run of the same seed. Without --teacher_model a
teacher is trained on the text first, once.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.distillation import ALONE, add_settings, measure, spread, with_teacher
from ssl_kd.language.caching import cache_teacher
from ssl_kd.language.settings import LanguageSettings


def look(folder: Path) -> dict[str, Any]:
    """What the run says of its cache."""
    return {"cache": json.loads((folder / "metrics.json").read_text())["cache"]}


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
        *("max_steps", "batch_size", "block_size", "eval_rows", "vocabulary"),
        *("learning_rate", "temperature", "alpha_kd", "alpha_ce"),
        student_model="fresh:2x96",
    )
    given = vars(parser.parse_args())
    seeds, first = given.pop("seeds"), given.pop("first_seed")
    methods = [(method, k) for method in ("topk", "sample") for k in given.pop(method)]
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

    columns = ["teacher", "held-out perplexity", "of the live teacher's", "bytes a token"]
    columns += ["tail mass", "fidelity KL", "seconds to cache", "seconds to train"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")

    def row(name: str, found: list[dict[str, Any]], live: list[dict[str, Any]], *about: str):
        perplexity = [run["perplexity"] for run in found]
        ratios = [a / b["perplexity"] for a, b in zip(perplexity, live, strict=True)]
        cells = [name, spread(perplexity), spread(ratios, ".4f"), *(about or ("",) * 4)]
        cells.append(f"{median(run['seconds'] for run in found):.0f}")
        print(f"| {' | '.join(cells)} |", flush=True)

    live = runs()
    row("live", live, live)
    row("none: CE alone", runs(**ALONE), live)
    for method, k in methods:
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            cached = {"teacher_cache": folder, "cache_method": method, "cache_k": k}
            cache_teacher(settings.replace(**cached))
            took = time.perf_counter() - began
            found = runs(**cached)
        cache = found[0]["cache"]
        about = [f"{cache['bytes_per_token']:.0f}", f"{100 * cache['tail_mass']:.2f} %"]
        about += [f"{cache['fidelity_kl']:.4f}", f"{took:.0f}"]
        row({"topk": "top-k", "sample": "sampled"}[method] + f", k {k}", found, live, *about)


if __name__ == "__main__":
    main()
