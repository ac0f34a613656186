"""Native, all, KA or SAR? One mixture-of-experts teacher, taught in each way to a dense student.

    python -m benchmarks.experts --seeds 3
    python -m benchmarks.experts --only KA --ka_lambda 0.05 0.3 --ka_forwards 1 2 4

Each row is whole runs on the same steps, batches and start, by one divergence. Agreement and KL are
those to the teacher as it came, two experts active, whatever became of its router in the run.
Without --teacher_model a teacher of 8 experts is trained on the text first, once.
"""

from __future__ import annotations

import argparse
import json
import logging
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.distillation import ALONE, add_settings, measure, spread, with_teacher
from ssl_kd.evaluate.language import judge_tokens
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.step import precision_of
from ssl_kd.language.task import Task, prepare
from ssl_kd.teachers.causal import load_causal_lm
from ssl_kd.teachers.mixture import Mixture, Routing

SWEPT = {"ka_lambda": float, "ka_forwards": int, "router_lr": float, "router_beta": float}


def variants(swept: dict[str, list[Any]]) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """The rows of each method: what is swept makes one for each combination."""
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {
        "CE": [("CE alone", ALONE)],
        "native": [("native KD", {"router_mode": "native"})],
        "ALL": [("ALL", {"router_mode": "all"})],
        "KA": [],
        "SAR": [],
        "joint": [],
    }
    for lam, m in product(swept["ka_lambda"], swept["ka_forwards"]):
        chosen = {"router_mode": "ka", "ka_lambda": lam, "ka_forwards": m}
        found["KA"].append((f"KA, λ {lam:g}, M {m}", chosen))
    for rate, beta in product(swept["router_lr"], swept["router_beta"]):
        chosen = {"router_mode": "sar", "router_lr": rate, "router_beta": beta}
        found["SAR"].append((f"SAR, router_lr {rate:g}, β {beta:g}", chosen))
    for rate in swept["router_lr"]:  # the joint step has a load balance of its own
        chosen = {"router_mode": "sar", "router_lr": rate, "router_joint": True}
        found["joint"].append((f"SAR, joint, router_lr {rate:g}", chosen))
    return found


def look(folder: Path, task: Task, rows: int) -> dict[str, Any]:
    """The saved student beside the teacher as it came, and where the router went."""
    student = load_causal_lm(str(folder / "student")).model
    scores = judge_tokens(student, task.eval_blocks, teacher=task.frozen, batch_size=rows)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    drift = [line["router_drift"] for line in lines if line.get("router_drift") is not None]
    return {"agreement": scores.agreement, "kl": scores.kl, "drift": drift[-1] if drift else None}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first_seed", type=int, default=0)
    methods = ("CE", "native", "ALL", "KA", "SAR", "joint")
    parser.add_argument("--only", nargs="+", choices=methods, default=methods)
    for name, kind in SWEPT.items():
        default = [getattr(LanguageSettings, name)]
        parser.add_argument(f"--{name}", nargs="+", type=kind, default=default)
    add_settings(
        parser,
        *("teacher_model", "teacher_size", "teacher_steps", "data_path", "eval_path"),
        *("max_steps", "batch_size", "block_size", "eval_rows", "vocabulary"),
        *("learning_rate", "temperature", "alpha_kd", "alpha_ce", "router_drift", "router_renorm"),
        teacher_experts=8,
        student_model="llama:2x96",
        divergence="reverse_kl",
    )
    given = vars(parser.parse_args())
    seeds, first, only = (given.pop(name) for name in ("seeds", "first_seed", "only"))
    rows = variants({name: given.pop(name) for name in SWEPT})
    logging.basicConfig(level=logging.ERROR)
    settings = with_teacher(
        LanguageSettings(
            **given,
            eval_every=max(1, given["max_steps"] // 5),
            generations=0,
            answer_prompts=0,
        )
    )
    task = prepare(settings, precision_of(settings), lambda *progress: None)
    assert task.frozen is not None
    mixture, batch = Mixture(task.frozen.model), settings.batch_size
    print(
        f"{settings.max_steps} steps of {batch} x {settings.block_size} tokens, {seeds} seeds, "
        f"divergence {settings.divergence}, T {settings.temperature:g}, kd {settings.alpha_kd:g}, "
        f"ce {settings.alpha_ce:g}\n"
    )
    columns = ["run", "held-out perplexity", "agreement with the teacher", "KL to the teacher"]
    print(f"| {' | '.join([*columns, 'drift of the router', 'seconds'])} |\n|{'---|' * 6}")
    with mixture.using(Routing("all")):
        every = judge_tokens(task.frozen, task.eval_blocks, teacher=None, batch_size=batch)
    plain = judge_tokens(task.frozen, task.eval_blocks, batch_size=batch)
    print(f"| teacher, its own experts | {plain.perplexity:.3f} | | | | |")
    print(f"| teacher, all experts | {every.perplexity:.3f} | | | | |", flush=True)
    for name, chosen in (row for method in only for row in rows[method]):
        found = [
            measure(settings.replace(**chosen, seed=seed), lambda path: look(path, task, batch))
            for seed in range(first, first + seeds)
        ]
        drift = [row["drift"] for row in found if row["drift"] is not None]
        cells = [
            spread(row["perplexity"] for row in found),
            f"{median(100 * row['agreement'] for row in found):.1f} %",
            spread((row["kl"] for row in found), ".4f"),
            f"{median(drift):.2g} nats" if drift else "",
            f"{median(row['seconds'] for row in found):.0f}",
        ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
