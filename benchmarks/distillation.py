"""Compare students trained by cross-entropy alone, by distillation, and by the older presets.

    python -m benchmarks.distillation --teacher_model FOLDER --data_path FILE.jsonl --seeds 3
    python -m benchmarks.distillation --equal-time --teacher_model FOLDER --data_path FILE.jsonl
    python -m benchmarks.distillation --grid --teacher_model FOLDER --data_path FILE.jsonl
    python -m benchmarks.distillation --caches --teacher_model FOLDER --data_path FILE.jsonl
    python -m benchmarks.distillation --offline --teacher_model FOLDER --data_path FILE.jsonl

Each row is a complete run with the same initialization, batches and steps; its held-out perplexity
is that of its best evaluation. The `clamp` rows clamp the logits as the older scripts did, to show
the cost. Without --teacher_model, a teacher is trained on the standard library first.

A distilled step takes longer, because the teacher runs in it. `--equal-time` also trains with
cross-entropy alone for as many steps as fit in the seconds of the distilled run of the same seed.

`--grid` distills the student and trains it with cross-entropy alone, at every learning rate of the
grid and with every seed. For each of the two, the learning rate with the lowest validation
perplexity wins (best evaluation of a run, geometric mean over seeds); its perplexity on separate
test rows is reported. A winner at an end of the grid is marked, because the grid is too short then.

`--caches` compares students that learn from a live teacher with students that learn from a cache of
it (CACHE_METHOD). Its third column is the perplexity relative to the live teacher's run of the same
seed: the geometric mean over the seeds, and its 95 % interval by Student's t.

`--offline` trains a student on the teacher's text (TEACHER_TEXT) after --prompts prompts, the first
60 characters of records, and from there for as many steps again: on this text, on its own text with
the teacher live (ON_POLICY), and on its own frozen text with cached answers (STUDENT_TEXT). The KL
is from the student to the teacher on fresh samples that continue held-out text. Seconds are those
of training, and of the student's text and the cache.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch
from scipy.stats import t as students_t

from benchmarks.turns import header, row
from ssl_kd.language.models.causal import load_causal_lm
from ssl_kd.language.rollouts import continue_rows, sampler
from ssl_kd.language.run import run
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.settings.presets import PRESETS
from ssl_kd.language.teachers.caching import cache_teacher
from ssl_kd.language.teachers.load import trained_teacher
from ssl_kd.language.text.blocks import make_blocks
from ssl_kd.language.text.rows import texts_of
from ssl_kd.language.train.step import precision_of

ALONE = {"alpha_ce": 1.0, "alpha_kd": 0.0}


def old(name: str) -> dict[str, Any]:
    """Return a preset's learning settings; batch and block size stay those of the other runs."""
    names = ("learning_rate", "temperature", "alpha_kd", "alpha_ce", "clip_grad")
    return {key: value for key, value in PRESETS[name].items() if key in names}


VARIANTS: dict[str, dict[str, Any]] = {
    "CE alone": ALONE,
    "distilled": {},
    "preset balanced": old("balanced"),
    "preset stable": old("stable"),
    "preset ultra_stable": old("ultra_stable"),
    "distilled, clamp 5": {"legacy_clamp": "5"},
    "distilled, clamp 2.5": {"legacy_clamp": "2.5"},
}
REVERSE = {"alpha_ce": 0.0, "alpha_kd": 1.0, "divergence": "reverse_kl"}
FIRST = "the teacher's text"
STAGES: dict[str, dict[str, Any]] = {
    FIRST: {"teacher_text": 1.0, **ALONE},
    "more of the teacher's text": {"teacher_text": 1.0, **ALONE},
    "on-policy, live": {"on_policy": 1.0, **REVERSE},
    "on-policy, offline": {"student_text": 1.0, "cache_method": "topk", **REVERSE},
}
PROMPTS = 128  # held-out, continued by each student of --offline
CACHES = ("hidden", "sample:128", "sample", "sample:32", "sample:8", "topk:32", "topk:8")
GRID = (1e-3, 3e-3, 1e-2, 3e-2)
SETTINGS = ("teacher_model", "data_path", "eval_path", "max_steps", "batch_size", "block_size")
SETTINGS += ("eval_rows", "learning_rate", "temperature", "alpha_kd", "alpha_ce")
SETTINGS += ("student_model", "max_new_tokens")
WAYS: dict[str, dict[str, Any]] = {"distilled": {}, "CE alone": ALONE}

Results = dict[tuple[str, float], list[dict[str, Any]]]
"""(way, learning rate) -> a row for each seed."""


def spread(values: Iterable[float], form: str = ".3f") -> str:
    """Return `median (lowest to highest)`."""
    ordered = sorted(values)
    return f"{median(ordered):{form}} ({ordered[0]:{form}} to {ordered[-1]:{form}})"


def with_teacher(settings: LanguageSettings) -> LanguageSettings:
    """Train the teacher, if the settings ask for it, once for all runs and seeds."""
    if settings.to_train is None:
        return settings
    folder = trained_teacher(
        settings, texts_of(settings)[0], precision_of(settings), lambda *progress: None
    )
    return settings.replace(teacher_model=str(folder))


def measure(
    settings: LanguageSettings, inspect: Callable[[Path], dict[str, Any]] = lambda folder: {}
) -> dict[str, Any]:
    """Run once; return the scores of student, start and teacher, and those of `inspect(folder)`."""
    with tempfile.TemporaryDirectory() as folder:
        path = run(settings.replace(runs_dir=folder))
        metrics = json.loads((path / "metrics.json").read_text())
        extra = inspect(path)
    rows = {row["name"]: row for row in metrics["table"]}
    return {
        **rows["student"],
        **extra,
        "before": rows["student before"]["perplexity"],
        "teacher": rows.get("teacher", {}).get("perplexity"),
        "success_rate": metrics["success_rate"],
        "seconds": metrics["seconds"]["train"],
    }


def best_evaluation(folder: Path) -> dict[str, Any]:
    """Return the lowest validation loss of a run, in nats per token."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    losses = [line["eval"]["nll"] for line in lines if "eval" in line]
    return {"validation": min((loss for loss in losses if loss is not None), default=math.inf)}


def best_rate(results: Results, way: str) -> float:
    """Return the learning rate with the lowest validation loss."""
    rates = [rate for name, rate in results if name == way]
    return min(rates, key=lambda rate: fmean(row["validation"] for row in results[way, rate]))


def comparison(results: Results, grid: Sequence[float]) -> list[str]:
    """Return each way's test perplexity at its best rate, and their ratio over paired seeds."""
    best = {way: best_rate(results, way) for way in WAYS}
    lines = []
    for way, rate in best.items():
        rows = results[way, rate]
        edge = " (an end of the grid)" if rate in (min(grid), max(grid)) else ""
        perplexity = spread((row["perplexity"] for row in rows), ".2f")
        lines.append(f"{way}, best at {rate:g}{edge}: {perplexity}")
    ours, alone = (results[way, rate] for way, rate in best.items())
    pairs = zip(ours, alone, strict=True)
    ratios = spread((a["perplexity"] / b["perplexity"] for a, b in pairs), ".3f")
    return [*lines, f"distilled / CE alone, each at its best, paired by seed: {ratios}"]


def search(settings: LanguageSettings, grid: Sequence[float], seeds: int) -> None:
    """Print a table of both ways at each learning rate and compare their best."""
    results: Results = {}
    header("way", "learning rate", "validation perplexity", "test perplexity", "seconds")
    for way, changes in WAYS.items():
        for rate in grid:
            changed = settings.replace(**changes, learning_rate=rate)
            rows = [measure(changed.replace(seed=seed), best_evaluation) for seed in range(seeds)]
            results[way, rate] = rows
            row(
                *(way, f"{rate:g}"),
                spread((math.exp(r["validation"]) for r in rows), ".2f"),
                spread((r["perplexity"] for r in rows), ".2f"),
                f"{fmean(r['seconds'] for r in rows):.0f}",
            )
    print("", *comparison(results, grid), sep="\n")


def compare_equal_time(settings: LanguageSettings, seeds: int) -> None:
    """Print a table of both ways after equal steps, and of cross-entropy after equal seconds."""
    names = [*WAYS, "CE alone, for the seconds of distilled"]
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for seed in range(seeds):
        own = settings.replace(seed=seed)
        for way, changes in WAYS.items():
            results[way].append(measure(own.replace(**changes)) | {"steps": own.max_steps})
        ours, alone = (results[way][-1]["seconds"] for way in WAYS)
        steps = round(own.max_steps * ours / alone)
        longer = own.replace(**ALONE, max_steps=steps, eval_every=max(1, steps // 5))
        results[names[-1]].append(measure(longer) | {"steps": steps})
    header("run", "steps", "held-out perplexity", "seconds")
    for name, rows in results.items():
        steps, seconds = (spread((r[key] for r in rows), ".0f") for key in ("steps", "seconds"))
        row(name, steps, spread((r["perplexity"] for r in rows), ".2f"), seconds)


def relative(runs: list[dict[str, Any]], live: list[dict[str, Any]]) -> str:
    """Return the ratio of perplexities over paired seeds, with its 95 % interval."""
    pairs = zip(runs, live, strict=True)
    logs = [math.log(a["perplexity"] / b["perplexity"]) for a, b in pairs]
    half = students_t.ppf(0.975, len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    low, middle, high = (math.exp(fmean(logs) + x) for x in (-half, 0, half))
    return f"{middle:.4f} ({low:.4f} to {high:.4f})"


def compare_caches(settings: LanguageSettings, methods: Sequence[str], seeds: int) -> None:
    """Print a table of the students of a live teacher, of caches of it, and of none."""
    settings = settings.replace(eval_every=settings.max_steps)

    def runs(**changes: Any) -> list[dict[str, Any]]:
        return [measure(settings.replace(**changes, seed=seed)) for seed in range(seeds)]

    header("teacher", "held-out perplexity", "relative to live", "bytes per token")
    live = runs()
    row("live", spread(x["perplexity"] for x in live), "1", "")
    for method in methods:
        with tempfile.TemporaryDirectory() as folder:
            cached = {"teacher_cache": folder, "cache_method": method}
            size = cache_teacher(settings.replace(**cached)).facts()["bytes_per_token"]
            students = runs(**cached)
        perplexity = spread(x["perplexity"] for x in students)
        row(method, perplexity, relative(students, live), f"{size:.0f}")
    alone = runs(**ALONE)
    row("none", spread(x["perplexity"] for x in alone), relative(alone, live), "")


@torch.no_grad()
def on_own_text(settings: LanguageSettings, copy: str, folder: Path) -> dict[str, Any]:
    """Copy the student of a run; return its KL to the teacher on its own text, per token."""
    shutil.copytree(folder / "student", copy)
    student, teacher = map(load_causal_lm, (copy, settings.teacher_model))
    text, size = texts_of(settings)[1], settings.block_size
    blocks = make_blocks(text, student.tokenizer, size, packing=False)
    sample = sampler(settings, student.model, student.tokenizer, PROMPTS)
    most, seeds = settings.max_new_tokens, range(settings.seed, settings.seed + PROMPTS)
    own, _ = continue_rows(blocks, range(PROMPTS), seeds, sample, max_new_tokens=most)
    batch = own.batch(range(PROMPTS))
    logits = (lm.model(**batch.model_inputs()).logits[:, :-1] for lm in (student, teacher))
    log_q, log_p = (x[batch.counts[:, 1:]].log_softmax(-1) for x in logits)
    tokens = json.loads((folder / "metrics.json").read_text())["tokens"]
    return {
        "kl on own text": float((log_q.exp() * (log_q - log_p)).sum(-1).mean()),
        "scored": tokens if settings.alpha_kd else 0,
    }


def compare_offline(settings: LanguageSettings, prompts: int, seeds: int) -> None:
    """Print a table of live and offline on-policy distillation after training on text."""
    results: dict[str, list[dict[str, Any]]] = {way: [] for way in STAGES}
    for name in ("teacher_model", "data_path", "eval_path"):
        if Path(value := getattr(settings, name) or "").exists():
            settings = settings.replace(**{name: str(Path(value).resolve())})
    beginnings = [(e.text or e.prompt or "")[:60] for e in texts_of(settings)[0].examples[:prompts]]
    os.chdir(tempfile.mkdtemp())  # for students, caches and generated text
    Path("prompts.jsonl").write_text("\n".join(json.dumps({"prompt": p}) for p in beginnings))
    settings = settings.replace(data_path="prompts.jsonl")
    for seed in range(seeds):
        for way, changes in STAGES.items():
            own = settings.replace(**changes, seed=seed)
            own = own if way == FIRST else own.replace(student_model=f"{FIRST} {seed}")
            start, extra = time.perf_counter(), dict[str, Any]()
            if own.student_text:
                own = own.replace(teacher_cache=f"cache {seed}")
                extra["scored"] = cache_teacher(own).manifest["statistics"]["tokens"]
            cached = time.perf_counter() - start
            scores = measure(own, partial(on_own_text, own, f"{way} {seed}")) | extra
            results[way].append(scores | {"seconds": scores["seconds"] + cached})
    header("trained on", "KL on its own text", "held-out perplexity", "teacher tokens", "seconds")
    for way, rows in results.items():
        kl, perplexity = (spread(r[key] for r in rows) for key in ("kl on own text", "perplexity"))
        scored, seconds = (median(r[key] for r in rows) for key in ("scored", "seconds"))
        row(way, kl, perplexity, f"{scored:,.0f}", f"{seconds:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--grid", type=float, nargs="*", help=f"learning rates; default: {GRID}")
    parser.add_argument("--caches", nargs="*", help=f"CACHE_METHOD of each; default: {CACHES}")
    parser.add_argument("--offline", action="store_true")
    parser.add_argument("--equal-time", action="store_true")
    parser.add_argument("--prompts", type=int, default=120)
    defaults = {"student_model": "fresh:2x96"}
    for name in SETTINGS:
        default = defaults.get(name, getattr(LanguageSettings, name))
        kind = partial(LanguageSettings.parse, name)
        parser.add_argument(f"--{name}", default=default, type=kind)
    flags = vars(parser.parse_args())
    names = ("seeds", "only", "grid", "caches", "offline", "prompts", "equal_time")
    seeds, only, grid, caches, offline, prompts, equal_time = map(flags.pop, names)
    logging.basicConfig(level=logging.ERROR)
    settings = LanguageSettings(**flags, eval_every=max(1, flags["max_steps"] // 5), generations=0)
    if offline:
        return compare_offline(settings, prompts, seeds)
    if equal_time:
        return compare_equal_time(with_teacher(settings), seeds)
    if caches is not None:
        return compare_caches(with_teacher(settings), caches or CACHES, seeds)
    if grid is not None:
        return search(with_teacher(settings), grid or GRID, seeds)
    header("run", "held-out perplexity", "agreement with teacher", "KL to teacher", "seconds")
    for name in only:
        changed = settings.replace(**VARIANTS[name])
        rows = [measure(changed.replace(seed=seed)) for seed in range(seeds)]
        if name == only[0]:
            print(f"| teacher | {rows[0]['teacher']:.3f} | | | |")
            print(f"| student, before training | {median(r['before'] for r in rows):.1f} | | | |")
        row(
            name,
            spread(r["perplexity"] for r in rows),
            f"{median(100 * r['agreement'] for r in rows):.1f} %",
            f"{median(r['kl'] for r in rows):.3f}",
            f"{median(r['seconds'] for r in rows):.0f}",
        )


if __name__ == "__main__":
    main()
