"""Does distilling pay? One student by cross-entropy alone, distilled, and by the older presets.

python -m benchmarks.distillation --teacher_model FOLDER --data_path FILE.jsonl --seeds 3

Each row is a whole run on the same steps, batches and start; the held-out perplexity is of the best
look at held-out text. `clamp` rows hold the logits as older scripts did, to show what that costs.
Without flags a teacher is trained on the standard library first.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from statistics import median
from typing import Any

from ssl_kd.language.run import run
from ssl_kd.language.settings import PRESETS, LanguageSettings

ALONE = {"alpha_ce": 1.0, "alpha_kd": 0.0}


def old(name: str) -> dict[str, Any]:
    """What a preset says of learning; rows and their length stay those of the others."""
    kept = ("student_lr", "temperature", "alpha_kd", "alpha_ce", "max_grad_norm")
    return {key: value for key, value in PRESETS[name].items() if key in kept}


VARIANTS: dict[str, dict[str, Any]] = {
    "CE alone": ALONE,
    "distilled": {},
    "preset balanced": old("balanced"),
    "preset stable": old("stable"),
    "preset ultra_stable": old("ultra_stable"),
    "distilled, clamp 5": {"legacy_clamp": "5"},
    "distilled, clamp 2.5": {"legacy_clamp": "2.5"},
}


def measure(settings: LanguageSettings) -> dict[str, Any]:
    """One run; the student's row and what it began with."""
    with tempfile.TemporaryDirectory() as folder:
        path = run(settings.replace(runs_dir=folder))
        metrics = json.loads((path / "metrics.json").read_text())
    rows = {row["name"]: row for row in metrics["table"]}
    return rows["student"] | {
        "before": rows["student before"]["perplexity"],
        "teacher": rows.get("teacher", {}).get("perplexity"),
        "success_rate": metrics["success_rate"],
        "seconds": metrics["seconds"]["train"],
    }


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first_seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--student_model", default="fresh:2x96")
    for name in ("teacher_model", "data_path", "eval_path"):
        parser.add_argument(f"--{name}", default=getattr(LanguageSettings, name))
    for name in ("train_steps", "per_device_batch_size", "block_size", "eval_rows"):
        parser.add_argument(f"--{name}", type=int, default=getattr(LanguageSettings, name))
    for name in ("student_lr", "temperature", "alpha_kd", "alpha_ce"):
        parser.add_argument(f"--{name}", type=float, default=getattr(LanguageSettings, name))
    given = vars(parser.parse_args())
    seeds, first, only = (given.pop(name) for name in ("seeds", "first_seed", "only"))
    logging.basicConfig(level=logging.ERROR)
    settings = LanguageSettings(
        **given, eval_steps=max(1, given["train_steps"] // 5), generations=0, answer_prompts=0
    )
    print("| run | held-out perplexity | agreement with the teacher | KL to the teacher | seconds |")
    print("|---|---|---|---|---|")
    for name in only:
        rows = [
            measure(settings.replace(**VARIANTS[name], seed=seed))
            for seed in range(first, first + seeds)
        ]
        if name == only[0]:
            print(f"| teacher | {rows[0]['teacher']:.3f} | | | |")
            print(f"| student, as it begins | {median(r['before'] for r in rows):.1f} | | | |")
        found = sorted(row["perplexity"] for row in rows)
        cells = [
            f"{median(found):.3f} ({found[0]:.3f} to {found[-1]:.3f})",
            f"{median(100 * row['agreement'] for row in rows):.1f} %",
            f"{median(row['kl'] for row in rows):.3f}",
            f"{median(row['seconds'] for row in rows):.0f}",
        ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
