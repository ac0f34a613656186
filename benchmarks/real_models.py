"""Distill SmolLM2-135M into students of fewer layers, with each loss at its best learning rate.

    python -m benchmarks.real_models --data FOLDER --out students.jsonl
    python -m benchmarks.real_models --data FOLDER --out students.jsonl --table

FOLDER holds `text/wikitext2_test.raw` (WikiText-2), `text/tinystories_{train,valid}.jsonl`
(TinyStories) and `gsm8k/{train,test}.jsonl` (GSM8K). Students learn from equal parts of the three,
the same rows in the same order, from a cache of the teacher's last hidden states, which is exact;
on-policy runs ask the teacher live.

Every method is trained with seed 0 at each of two learning rates; the rate with the lowest loss
on validation rows is then used for the other seeds. Scores are from test rows. The share of the gap
that a method closes is `(CE alone - method) / (CE alone - teacher)` in nats per token, with the
students of the same seed. --out is appended to, a line for each run, and a run that it holds is not
repeated.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.distillation import ALONE, best_evaluation, measure, spread
from benchmarks.turns import header, row
from ssl_kd.language.models.causal import load_causal_lm
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.text.blocks import make_blocks
from ssl_kd.language.text.dataset import open_text

KD = {"alpha_ce": 0.0, "alpha_kd": 1.0}
NEW = {"student_model": "fresh:3x576"}
METHODS: dict[str, dict[str, Any]] = {
    "CE alone": ALONE,
    "forward KL": KD,
    "CE and forward KL": {},
    "reverse KL": {**KD, "divergence": "reverse_kl"},
    "skew KL": {**KD, "divergence": "skew_kl"},
    "on-policy": {"on_policy": 0.5, "divergence": "reverse_kl", "teacher_cache": None},
    "CE alone, new weights": {**ALONE, **NEW},
    "forward KL, new weights": {**KD, **NEW},
}
SOURCES = ("WikiText-2", "TinyStories", "GSM8K")
PIECE = 1000  # characters of a document made of WikiText-2's lines
HELD_OUT = 100  # such documents that are held out
BATCH = 4  # rows of 256 tokens in a step
SOURCE_ROWS = 16  # held-out rows of each source that are scored apart
Run = dict[str, Any]


def wikitext(file: Path) -> list[str]:
    """Return consecutive lines of WikiText-2, joined to documents of about PIECE characters."""
    documents = [""]
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.strip():
            documents[-1] += line.strip() + "\n"
        if len(documents[-1]) >= PIECE:
            documents.append("")
    return documents


def records(file: Path, template: str) -> list[str]:
    """Return a text for each record of a JSON Lines file."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return [template.format(**json.loads(line)) for line in lines]


def write_texts(data: Path, folder: Path) -> None:
    """Write `train.jsonl`, and held-out texts: of each source, and `all.jsonl`."""
    wiki = wikitext(data / "text/wikitext2_test.raw")
    problem = "Question: {question}\nAnswer: {answer}"
    train = {
        "WikiText-2": wiki[:-HELD_OUT],
        "TinyStories": records(data / "text/tinystories_train.jsonl", "{text}"),
        "GSM8K": records(data / "gsm8k/train.jsonl", problem),
    }
    held_out = {
        "WikiText-2": wiki[-HELD_OUT:],
        "TinyStories": records(data / "text/tinystories_valid.jsonl", "{text}"),
        "GSM8K": records(data / "gsm8k/test.jsonl", problem),
    }
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "train.jsonl", mixed(list(train.values())))
    write(folder / "all.jsonl", mixed(list(held_out.values())))
    for name, texts in held_out.items():
        write(folder / f"{name}.jsonl", texts)


def mixed(sources: Sequence[Sequence[str]]) -> list[str]:
    """Return equal parts of all sources, by characters, in one random order."""
    size = min(sum(map(len, texts)) for texts in sources)
    texts = [text for source in sources for text in up_to(source, size)]
    random.Random(0).shuffle(texts)
    return texts


def up_to(texts: Sequence[str], size: int) -> list[str]:
    """Return the first texts, of about `size` characters together."""
    total, chosen = 0, list[str]()
    for text in texts:
        if total >= size:
            break
        chosen.append(text)
        total += len(text)
    return chosen


def write(file: Path, texts: Sequence[str]) -> None:
    """Write a JSON Lines file with a record for each text."""
    lines = "".join(f"{json.dumps({'text': text})}\n" for text in texts)
    file.write_text(lines, encoding="utf-8")


@torch.no_grad()
def losses_by_source(model: str | Path, texts: Path, rows: int, size: int) -> dict[str, float]:
    """Return a model's mean negative log-likelihood on each source, in nats per token."""
    lm = load_causal_lm(model)
    losses = {}
    for name in SOURCES:
        held_out = open_text(texts / f"{name}.jsonl", held_out=0.0)
        blocks = make_blocks(held_out, lm.tokenizer, size)
        batch = blocks.batch(range(min(rows, len(blocks))))
        logits = lm.model(**batch.model_inputs()).logits[:, :-1].float()
        counts = batch.counts[:, 1:]
        losses[name] = float(F.cross_entropy(logits[counts], batch.input_ids[:, 1:][counts].long()))
    return losses


def trained(settings: LanguageSettings, texts: Path) -> Run:
    """Train a student; return its scores, and those on each source."""

    def inspect(folder: Path) -> Run:
        sources = losses_by_source(folder / "student", texts, SOURCE_ROWS, settings.block_size)
        return best_evaluation(folder) | {"sources": sources}

    return measure(settings, inspect)


def rates(method: str) -> tuple[float, float]:
    """Return the learning rates to try; new weights need higher ones."""
    return (1e-3, 3e-3) if NEW.items() <= METHODS[method].items() else (1e-3, 2e-3)


def missing(
    runs: Sequence[Run], methods: Sequence[str], seeds: int, wanted: Sequence[float] | None = None
) -> list[tuple[str, float, int]]:
    """Return the runs (method, learning rate, seed) that are still to be made, in their order."""
    done = {(run["method"], run["rate"], run["seed"]) for run in runs}
    first = [(method, rate, 0) for method in methods for rate in wanted or rates(method)]
    if todo := [run for run in first if run not in done]:
        return todo
    others = [(m, best_rate(runs, m), seed) for seed in range(1, seeds) for m in methods]
    return [run for run in others if run not in done]


def still_to_run(
    file: Path,
    shared: Run,
    methods: Sequence[str],
    seeds: int,
    wanted: Sequence[float] | None,
) -> Iterator[tuple[str, float, int]]:
    """Yield the runs (method, learning rate, seed) that the caller is to append to a file.

    Only runs of the file that have all entries of `shared` count.
    """

    def todo() -> list[tuple[str, float, int]]:
        runs = [run for run in read(file) if shared.items() <= run.items()]
        return missing(runs, methods, seeds, wanted)

    while left := todo():
        yield left[0]


def best_rate(runs: Sequence[Run], method: str) -> float:
    """Return the learning rate with the lowest validation loss of seed 0."""
    of_method = [run for run in runs if run["method"] == method and run["seed"] == 0]
    return min(of_method, key=lambda run: run["validation"])["rate"]


def print_table(runs: Sequence[Run], methods: Sequence[str]) -> None:
    """Print a table of the methods that were run, each at its best learning rate."""
    done = {run["method"] for run in runs}
    chosen = {
        m: [r for r in runs if r["method"] == m and r["rate"] == best_rate(runs, m)]
        for m in methods
        if m in done
    }
    alone = {run["seed"]: run["nll"] for run in chosen["CE alone"]}
    teacher = math.log(runs[0]["teacher"])
    columns = ("method", "learning rate", "seeds", "held-out perplexity", *SOURCES)
    header(*columns, "gap closed, %", "seconds")
    for method, rows in chosen.items():
        closed = [100 * (alone[r["seed"]] - r["nll"]) / (alone[r["seed"]] - teacher) for r in rows]
        row(
            *(method, f"{rows[0]['rate']:g}", f"{len(rows)}"),
            spread((r["perplexity"] for r in rows), ".1f"),
            *(f"{math.exp(fmean(r['sources'][name] for r in rows)):.1f}" for name in SOURCES),
            *(spread(closed, ".1f"), f"{fmean(r['seconds'] for r in rows):.0f}"),
        )
    print(f"\nteacher: perplexity {math.exp(teacher):.2f}")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of benchmarks that train students on these texts."""
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", type=Path, default=Path("data/real_models"))
    parser.add_argument("--teacher_model", default="smollm2")
    parser.add_argument("--model_dtype", default="bfloat16")
    parser.add_argument("--max_steps", type=int, default=40)
    parser.add_argument("--eval_rows", type=int, default=48)


def shared_settings(args: argparse.Namespace) -> LanguageSettings:
    """Return the settings that these flags give to every run."""
    return LanguageSettings(
        teacher_model=args.teacher_model,
        model_dtype=args.model_dtype,
        max_steps=args.max_steps,
        data_path=str(args.texts / "train.jsonl"),
        eval_path=str(args.texts / "all.jsonl"),
        batch_size=BATCH,
        train_rows=BATCH * args.max_steps,
        eval_rows=args.eval_rows,
        generations=0,
        report_to="none",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_flags(parser)
    parser.add_argument("--student_model", default="layers:3")
    parser.add_argument("--seeds", type=int, default=3)
    tried = "learning rates of seed 0; default: two, by method"
    parser.add_argument("--rates", type=float, nargs="*", help=tried)
    every = "all training rows, in several epochs, and an evaluation every tenth of the steps"
    parser.add_argument("--epochs", action="store_true", help=every)
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--table", action="store_true", help="print the table of --out only")
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    write_texts(args.data, args.texts)
    settings = shared_settings(args).replace(
        student_model=args.student_model,
        teacher_cache="auto",
        cache_method="hidden",
        eval_every=max(1, args.max_steps // (10 if args.epochs else 2)),
    )
    if args.epochs:
        settings = settings.replace(train_rows=None)
    todo = still_to_run(args.out, {}, args.methods, args.seeds, args.rates)
    for method, rate, seed in () if args.table else todo:
        changed = settings.replace(**METHODS[method], learning_rate=rate, seed=seed)
        run = {"method": method, "rate": rate, "seed": seed} | trained(changed, args.texts)
        append(args.out, run)
        print(f"{method}, {rate:g}, seed {seed}: {run['perplexity']:.1f}", flush=True)
    print_table(read(args.out), args.methods)


def append(file: Path, run: Run) -> None:
    """Write a run after those of earlier calls."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(f"{json.dumps(run)}\n")


def read(file: Path) -> list[Run]:
    """Return the runs of an earlier call."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


if __name__ == "__main__":
    main()
