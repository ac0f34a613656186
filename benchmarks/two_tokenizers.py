"""Distill a language model into a student with another tokenizer, by each ALIGN.

    python -m benchmarks.two_tokenizers --data FOLDER --out pairs.jsonl --cut_from GEMMA

GEMMA is a folder or GGUF file of a model with another tokenizer, such as Gemma-3-270M. The student
is `layers:3` of it and keeps its tokenizer. The texts are those of `benchmarks.real_models`, the
same rows for all methods. Scores are bits per byte of held-out text, which models of different
tokenizers have in common. Every method is trained with seed 0 at each of --rates; the rate with the
lowest validation loss is shown, and used for the other --seeds. --out is appended to, a line for
each run, and a run that it holds is not repeated.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.distillation import ALONE, best_evaluation, measure, spread
from benchmarks.real_models import (
    Run,
    add_flags,
    append,
    best_rate,
    read,
    shared_settings,
    still_to_run,
    write_texts,
)
from benchmarks.turns import header, row
from ssl_kd.language.models.causal import load_causal_lm
from ssl_kd.language.models.student import build_student, save_student

METHODS: dict[str, dict[str, Any]] = {
    "CE alone": {**ALONE, "align": "chunks"},  # the rows of the others
    "CE and ALIGN chunks": {"align": "chunks"},
    "CE and ALIGN uld": {"align": "uld"},
}


def cut_student(source: str, layers: str, folder: Path) -> Path:
    """Save some layers of a model with its tokenizer; return the folder."""
    if not folder.exists():
        lm = build_student(layers, load_causal_lm(source), seed=0)
        save_student(lm.model, lm.tokenizer, folder, f"{layers} of {source}")
    return folder


def bits_per_byte(folder: Path) -> Run:
    """Return the scores of a run's teacher and of its student before training."""
    table = json.loads((folder / "metrics.json").read_text())["table"]
    bits = {scores["name"]: scores["bits_per_byte"] for scores in table}
    return {"bits_before": bits["student before"], "bits_of_teacher": bits.get("teacher")}


def print_table(runs: list[Run]) -> None:
    """Print a row for each teacher, student and method, at the method's best learning rate."""
    columns = ("teacher", "student", "method", "learning rate", "seeds")
    header(*columns, "bits per byte", "before", "seconds")
    of_key: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        of_key.setdefault((run["teacher_model"], run["student_model"]), []).append(run)
    for (teacher, student), own in of_key.items():
        for method in dict.fromkeys(run["method"] for run in own):
            rate = best_rate(own, method)
            rows = [run for run in own if run["method"] == method and run["rate"] == rate]
            row(
                *(teacher, student, method, f"{rate:g}", f"{len(rows)}"),
                spread((run["bits_per_byte"] for run in rows), ".3f"),
                f"{rows[0]['bits_before']:.3f}",
                f"{fmean(run['seconds'] for run in rows):.0f}",
            )
    teachers = {
        run["teacher_model"]: run["bits_of_teacher"] for run in runs if run["bits_of_teacher"]
    }
    for teacher, bits in teachers.items():
        print(f"\n{teacher}: {bits:.3f} bits per byte")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_flags(parser)
    parser.add_argument("--cut_from", required=True)
    parser.add_argument("--layers", default="layers:3")
    parser.add_argument("--rates", type=float, nargs="+", default=[5e-4, 1e-3])
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    write_texts(args.data, args.texts)
    teacher, source = Path(args.teacher_model).name, Path(args.cut_from).name
    student = f"{args.layers} of {source}"
    settings = shared_settings(args).replace(
        student_model=str(cut_student(args.cut_from, args.layers, args.texts / student)),
        eval_every=args.max_steps,
    )
    pair = {"teacher_model": teacher, "student_model": student, "steps": args.max_steps}
    todo = still_to_run(args.out, pair, list(METHODS), args.seeds, args.rates)
    for method, rate, seed in todo:
        scores = measure(
            settings.replace(**METHODS[method], learning_rate=rate, seed=seed),
            lambda folder: best_evaluation(folder) | bits_per_byte(folder),
        )
        append(args.out, {**pair, "method": method, "rate": rate, "seed": seed} | scores)
    print_table(read(args.out))


if __name__ == "__main__":
    main()
