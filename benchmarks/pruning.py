"""Which part of a teacher should a student be? Layers by count, by importance, or less width.

    python -m benchmarks.pruning --seeds 3
    python -m benchmarks.pruning --teacher_model FOLDER --data_path FILE.jsonl --layers 8

`layers:N` keeps N evenly spaced layers, `prune:N` the N of the largest block influence, and the
last row all layers with fewer channels of the MLP, so many that the student has the parameters of
the others. Each is judged on held-out text as it begins and after the same steps of distilling.
Without flags a teacher is trained on the standard library first.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.distillation import add_settings, measure, spread, with_teacher
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.teachers.causal import load_causal_lm
from ssl_kd.teachers.layers import decoder_layers


def students(teacher_model: str, layers: int) -> list[str]:
    """Students of about the size of `layers:N`."""
    model = load_causal_lm(teacher_model).model
    stack: list[Any] = decoder_layers(model)
    whole, mlp = (sum(p.numel() for p in part.parameters()) for part in (stack[0], stack[0].mlp))
    depth, width = len(stack), model.config.intermediate_size
    share = (layers * whole - depth * (whole - mlp)) / (depth * mlp)
    found = [f"layers:{layers}", f"prune:{layers}"]
    return [*found, f"prune:{depth}x{round(share * width)}"] if share * width >= 1 else found


def parameters(path: Path) -> dict[str, Any]:
    """How large the student of a run is."""
    return {"parameters": json.loads((path / "config.json").read_text())["student"]["parameters"]}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=2)
    add_settings(
        parser,
        *("teacher_model", "teacher_steps", "data_path", "eval_path", "max_megabytes"),
        *("batch_size", "block_size", "eval_rows", "learning_rate"),
        max_steps=200,
        teacher_size="6x128",
    )
    given = vars(parser.parse_args())
    seeds, layers = (given.pop(name) for name in ("seeds", "layers"))
    logging.basicConfig(level=logging.ERROR)
    settings = LanguageSettings(
        **given, eval_every=max(1, given["max_steps"] // 5), generations=0, answer_prompts=0
    )
    settings = with_teacher(settings)
    print("| student | parameters | perplexity as it begins | after distilling |")
    print("|---|---|---|---|")
    for spec in students(settings.teacher_model, layers):
        own = settings.replace(student_model=spec)
        rows = [measure(own.replace(seed=seed), parameters) for seed in range(seeds)]
        if spec.startswith("layers"):
            print(f"| teacher | | {rows[0]['teacher']:.2f} | |")
        cells = [
            f"{rows[0]['parameters']:,}",
            f"{median(row['before'] for row in rows):.4g}",
            spread((row["perplexity"] for row in rows), ".2f"),
        ]
        print(f"| {spec} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
