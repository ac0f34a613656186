"""Does it pay that the student writes what it learns from? Off-policy and on-policy, equal tokens.

    python -m benchmarks.on_policy
    python -m benchmarks.on_policy --teacher_model FOLDER --student_model layers:2 --data_path FILE

One student a seed learns the text by cross-entropy first, as GKD's do. From there each row learns
by the teacher's distributions alone, by one divergence, from about as many tokens: of the text, or
of what the student writes after its beginnings. `KL on its own text` is KL(student, teacher), nats
a token, of samples at temperature 1 after held-out prompts; `repeated` is the share of 4-grams that
came before in the same text, of these samples and of the likeliest tokens. Without flags a teacher
is trained on the standard library first.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from benchmarks.distillation import add_settings, with_teacher
from ssl_kd.datasets.blocks import Blocks
from ssl_kd.evaluate.generation import end_tokens
from ssl_kd.evaluate.language import judge_tokens
from ssl_kd.language.rollouts import Generated, continued, prompt_length, writer
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.step import precision_of
from ssl_kd.language.task import Task, make_distiller, prepare
from ssl_kd.language.train import train
from ssl_kd.losses import token_kd
from ssl_kd.teachers.student import save_student

VARIANTS: dict[str, dict[str, Any]] = {
    "off-policy": {},
    "on-policy 0.5": {"on_policy": 0.5},
    "on-policy 1": {"on_policy": 1.0},
}
COLUMNS = ("tokens", "kl", "repeated", "repeated, greedy", "perplexity", "seconds")


def repeated(texts: Sequence[Sequence[int]], n: int = 4) -> float:
    """The share of n-grams of tokens that came earlier in the same text."""
    grams = [[tuple(t[i : i + n]) for i in range(len(t) - n + 1)] for t in texts]
    return 1 - sum(len(set(g)) for g in grams) / max(1, sum(map(len, grams)))


def own_text(
    model: Any, task: Task, settings: LanguageSettings, temperature: float = 1.0
) -> tuple[Blocks, float]:
    """What a model writes after the held-out prompts, and how much it repeats itself."""
    ends, rows = end_tokens(model, task.student.tokenizer), range(len(task.eval_blocks))
    rollouts = Generated(model, ends, temperature=temperature, batch_size=32)
    blocks, new = continued(task.eval_blocks, list(rows), list(rows), rollouts, settings)
    return blocks, repeated(new)


@torch.no_grad()
def scores(model: Any, task: Task, settings: LanguageSettings) -> dict[str, float]:
    """What the table says of a student."""
    assert task.frozen is not None
    blocks, again = own_text(model.eval(), task, settings)
    total = tokens = 0.0
    for start in range(0, len(blocks), 16):
        batch = blocks.batch(range(start, min(start + 16, len(blocks))))
        logits = [m(**batch.model_inputs()).logits[:, :-1] for m in (model, task.frozen.model)]
        mask = batch.counts[:, 1:]
        options: dict[str, Any] = {"temperature": 1.0, "divergence": "reverse_kl"}
        total += float(token_kd(*logits, mask=mask, reduction="sum", **options))
        tokens += int(mask.sum())
    found = judge_tokens(model, task.eval_blocks).perplexity
    greedy = own_text(model, task, settings, temperature=0.0)[1]
    row = {"kl": total / tokens, "repeated": again, "repeated, greedy": greedy}
    return row | {"perplexity": found or float("nan")}


def learned(settings: LanguageSettings, tokens: int | None = None) -> tuple[Task, dict[str, float]]:
    """A student trained as the settings say, for MAX_STEPS or about so many tokens."""
    task = prepare(settings, precision_of(settings), lambda *progress: None)
    distiller, blocks = make_distiller(settings, task), task.blocks
    assert isinstance(blocks, Blocks)
    steps = settings.max_steps
    if tokens is not None:
        rooms = [
            min(settings.rollout_tokens, blocks.ids.shape[1] - n)
            for n in (prompt_length(blocks, i, settings.prompt_tokens) for i in range(len(blocks)))
        ]
        share, text = settings.on_policy, float(blocks.counts.sum()) / len(blocks)
        steps = round(tokens / settings.batch_size / ((1 - share) * text + share * mean(rooms)))
    began = time.perf_counter()
    train(distiller, blocks, steps, written=writer(distiller, blocks, task.student.tokenizer))
    seconds = time.perf_counter() - began
    row = {"tokens": float(distiller.tokens), "seconds": seconds}
    return task, row | scores(task.student.model, task, settings)


def cells(rows: Sequence[dict[str, float]]) -> str:
    """Mean and standard deviation of each column."""
    words = []
    for name in COLUMNS:
        values = [row[name] for row in rows if name in row]
        if not values:
            words.append("")
            continue
        form = ".0f" if name in ("tokens", "seconds") else ".3f"
        around = f" ± {stdev(values):{form}}" if len(values) > 1 else ""
        words.append(f"{mean(values):{form}}{around}")
    return " | ".join(words)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=100_000, help="each student learns from")
    parser.add_argument("--warm_steps", type=int, default=300, help="by cross-entropy, before")
    parser.add_argument("--warm_lr", type=float, default=None)
    add_settings(
        parser,
        *("teacher_model", "data_path", "eval_path", "rollout_temperature", "rollout_top_p"),
        *("batch_size", "max_megabytes"),
        student_model="fresh:2x64",
        divergence="reverse_kl",
        learning_rate=5e-4,
        block_size=64,
        prompt_tokens=8,
        rollout_tokens=56,
        eval_rows=64,
        teacher_size="2x128",
        teacher_steps=600,
        vocabulary=512,
    )
    given = vars(parser.parse_args())
    seeds, tokens, warm, warm_lr = (
        given.pop(name) for name in ("seeds", "tokens", "warm_steps", "warm_lr")
    )
    logging.basicConfig(level=logging.ERROR)
    base = LanguageSettings(**given, packing=False, alpha_ce=0.0, alpha_kd=1.0, device="cpu")
    base = with_teacher(base)
    heads = "KL on its own text | repeated | repeated, greedy | held-out perplexity | seconds |"
    print(f"| student | tokens | {heads}")
    print("|---|---|---|---|---|---|---|")
    rows: dict[str, list[dict[str, float]]] = {"teacher": [], "before": []}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(seeds):
            first = base.replace(seed=seed, alpha_ce=1.0, alpha_kd=0.0, divergence="auto")
            task, row = learned(first.replace(learning_rate=warm_lr, max_steps=warm))
            rows["before"].append(row)
            assert task.frozen is not None
            rows["teacher"].append(scores(task.frozen.model, task, base))
            start = Path(folder) / str(seed)
            save_student(task.student.model, task.student.tokenizer, start, "A student to begin.")
            for name, changes in VARIANTS.items():
                own = base.replace(seed=seed, student_model=str(start), **changes)
                rows.setdefault(name, []).append(learned(own, tokens)[1])
            for name, found in rows.items():
                print(f"seed {seed}: {name}: {cells(found[-1:])}", file=sys.stderr, flush=True)
    for name, found in rows.items():
        print(f"| {name} | {cells(found)} |", flush=True)


if __name__ == "__main__":
    main()
