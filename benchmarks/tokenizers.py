"""A teacher with another tokenizer: cross-entropy alone, and each way to follow it.

    python -m benchmarks.tokenizers --seeds 3
    python -m benchmarks.tokenizers --teacher_model FOLDER --student_model FOLDER --data_path FILE

All rows learn from the same tokens in the same order; bits per character on held-out text are the
only measure that compares tokenizers. Without flags a teacher is trained on the text first, once,
and the student is new, with a smaller tokenizer of the same text. The share of a step that
alignment takes is measured inside the step, by a clock around the function that aligns a batch.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from benchmarks.distillation import (
    ALONE,
    add_settings,
    measure,
    spread,
    training_text,
    with_teacher,
)
from benchmarks.turns import header, middle_half, row
from ssl_kd.datasets.aligned import AlignedBatch
from ssl_kd.datasets.new_tokenizer import train_tokenizer
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.step import precision_of
from ssl_kd.language.task import make_distiller, prepare
from ssl_kd.language.train import rows_of_step
from ssl_kd.teachers.student import build_student, save_student

WAYS = ("hidden", "uld", "chunks")


def new_student(settings: LanguageSettings, vocabulary: int, folder: Path) -> str:
    """A new Llama with a tokenizer of its own, of the text; the folder it was saved in."""
    tokenizer = train_tokenizer(training_text(settings), vocabulary)
    student = build_student(settings.student_model, None, tokenizer, seed=settings.seed)
    path = folder / f"seed_{settings.seed}"
    save_student(student.model, tokenizer, path, "A new student.")
    return str(path)


@contextmanager
def clock(spent: list[float]) -> Iterator[None]:
    """Note the seconds of each alignment of a batch."""

    def timed(align: Callable[[AlignedBatch], Any]) -> Callable[[AlignedBatch], Any]:
        def run(batch: AlignedBatch) -> Any:
            began = time.perf_counter()
            found = align(batch)
            spent.append(time.perf_counter() - began)
            return found

        return run

    with ExitStack() as stack:
        stack.enter_context(patch.object(AlignedBatch, "groups", timed(AlignedBatch.groups)))
        yield


def share_of_alignment(settings: LanguageSettings, steps: int) -> list[float]:
    """The share of each of some steps that alignment took, after one to warm up."""
    task = prepare(settings, precision_of(settings), lambda *progress: None)
    distiller, shares = make_distiller(settings, task), []
    for step in range(steps + 1):
        rows = rows_of_step(step, settings.batch_size, len(task.blocks), settings.seed)
        batch: Any = task.blocks.batch(rows, task.precision.device)
        spent: list[float] = []
        with clock(spent):
            began = time.perf_counter()
            distiller.step([batch], settings.peak_lr)
            shares.append(sum(spent) / (time.perf_counter() - began))
    return shares[1:]


def look(folder: Path) -> dict[str, Any]:
    """How well the tokenizers fit."""
    return {"alignment": json.loads((folder / "metrics.json").read_text())["alignment"]}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first_seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--timed_steps", type=int, default=20, help="to time alignment, a way each")
    parser.add_argument(
        "--student_vocabulary", type=int, default=512, help="of a student llama:LAYERSxDIM"
    )
    for way in WAYS:
        parser.add_argument(f"--alpha_{way}", type=float, help="ALPHA_KD of this row alone")
    add_settings(
        parser,
        *("teacher_model", "teacher_size", "teacher_steps", "data_path", "eval_path"),
        *("max_steps", "batch_size", "block_size", "eval_rows", "vocabulary"),
        *("learning_rate", "temperature", "alpha_kd", "alpha_ce", "divergence"),
        student_model="llama:2x96",
    )
    given = vars(parser.parse_args())
    seeds, first, only = (given.pop(name) for name in ("seeds", "first_seed", "only"))
    timed_steps, vocabulary = given.pop("timed_steps"), given.pop("student_vocabulary")
    weights = {way: given.pop(f"alpha_{way}") for way in WAYS}
    logging.basicConfig(level=logging.ERROR)
    settings = with_teacher(
        LanguageSettings(
            **given,
            eval_every=max(1, given["max_steps"] // 5),
            generations=0,
            answer_prompts=0,
        )
    )
    # Where it is None it would go by the student's folder.
    settings = settings.replace(learning_rate=settings.peak_lr)
    with tempfile.TemporaryDirectory() as folder:
        each = [settings.replace(seed=seed) for seed in range(first, first + seeds)]
        if settings.student_model.startswith("llama:"):
            made = [new_student(one, vocabulary, Path(folder)) for one in each]
            each = [one.replace(student_model=m) for one, m in zip(each, made, strict=True)]

        def runs(**chosen: Any) -> list[dict[str, Any]]:
            return [measure(one.replace(**chosen), look) for one in each]

        alone = runs(align=WAYS[-1], **ALONE)
        fit = alone[0]["alignment"]
        print(
            f"{settings.max_steps} steps, {seeds} seeds; {100 * fit['coverage']:.1f} % of the "
            f"characters in a group, {100 * fit['one_to_one']:.1f} % one token against one, "
            f"{100 * fit['matched']:.1f} % of the same text; "
            f"{fit['student_tokens_per_group']:.2f} tokens of the student and "
            f"{fit['teacher_tokens_per_group']:.2f} of the teacher in a group\n"
        )
        columns = ["run", "bits per character", "of CE alone", "better in", "alignment's share"]
        header(*columns, "seconds")
        before = median(one["before_bits"] for one in alone)
        row("student, as it begins", f"{before:.4f}", *[""] * 4)
        for way in (None, *only):
            found, share = alone, ""
            if way is not None:
                weight = settings.alpha_kd if weights[way] is None else weights[way]
                chosen = {"align": way, "alpha_kd": weight}
                found = runs(**chosen)
                shares = share_of_alignment(each[0].replace(**chosen), timed_steps)
                share = middle_half((100 * one for one in shares), unit=" %")
            pairs = [
                (a["bits_per_character"], b["bits_per_character"])
                for a, b in zip(found, alone, strict=True)
            ]
            row(
                way or "CE alone",
                spread((bits for bits, _ in pairs), ".4f"),
                spread((bits / other for bits, other in pairs), ".4f"),
                f"{sum(bits < other for bits, other in pairs)} of {seeds}" if way else "",
                share,
                f"{median(one['seconds'] for one in found):.0f}",
            )


if __name__ == "__main__":
    main()
