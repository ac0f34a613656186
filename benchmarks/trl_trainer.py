"""Whole trainings by `DistillationTrainer`, beside TRL's two trainers on the same rows.

    pip install trl
    python -m benchmarks.trl_trainer

Each trains a copy of one student towards the same teacher by forward KL at temperature 1, off
policy, in fp32 on the CPU, through `train()`: the loop of transformers with data loading, clipping,
AdamW and log lines as each comes, and ours with its guard and a cross-entropy that is computed and
shown, but has no weight, as theirs have none. TRL's DistillationTrainer is given the completions
that it would otherwise generate. They take turns, and each ratio is the median over rounds (in
brackets the middle half of them). Memory is by how much a training of two steps, in a process of
its own, raises the peak resident set. Losses are those of the first step, before any update.
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

from benchmarks.distillation_step import made_up
from benchmarks.step_cost import peak_mib, versions
from ssl_kd.hf_trainer import DistillationTrainer
from ssl_kd.hf_trainer.batches import collate
from ssl_kd.teachers.causal import CausalLM

RATE = 1e-4
Row = dict[str, Tensor]


def arguments(args: argparse.Namespace, of: type = TrainingArguments, **options: Any) -> Any:
    """What all three are given."""
    return of(
        output_dir=tempfile.gettempdir(),
        per_device_train_batch_size=args.batch,
        max_steps=args.steps + 1,
        learning_rate=RATE,
        logging_steps=1,
        save_strategy="no",
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )


def ours(args: argparse.Namespace, teacher: CausalLM, student: CausalLM) -> Any:
    """This library's."""
    return DistillationTrainer(
        student.model, teacher.model, arguments(args), alpha_kd=1.0, alpha_ce=0.0
    )


def _of_trl(of: type, config: Any, student: CausalLM, teacher: CausalLM) -> Any:
    from datasets import Dataset

    says = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    return of(
        model=student.model,
        teacher_model=teacher.model,
        args=config,
        train_dataset=Dataset.from_list([{"messages": says, "prompt": "a"}]),  # not read
        processing_class=student.tokenizer,
    )


def trl_gkd(args: argparse.Namespace, teacher: CausalLM, student: CausalLM) -> Any:
    """TRL's GKDTrainer at lmbda 0: off policy, the loss from whole logits."""
    from trl.experimental.gkd import GKDConfig, GKDTrainer  # pyright: ignore[reportMissingImports]

    config = arguments(args, GKDConfig, beta=0.0, temperature=1.0, lmbda=0.0)
    return _of_trl(GKDTrainer, config, student, teacher)


def trl_distillation(args: argparse.Namespace, teacher: CausalLM, student: CausalLM) -> Any:
    """TRL's DistillationTrainer with the completions given: the loss by chunks."""
    from trl.trainer.distillation_config import DistillationConfig  # pyright: ignore[reportMissingImports]
    from trl.trainer.distillation_trainer import (  # pyright: ignore[reportMissingImports]
        DistillationTrainer as TRLTrainer,
    )

    config = arguments(args, DistillationConfig, beta=0.0, temperature=1.0)
    trainer = _of_trl(TRLTrainer, config, student, teacher)
    trainer._prepare_inputs = lambda batch: batch  # nothing is generated
    return trainer


def completions(rows: list[Row]) -> Row:
    """Rows as prompts of a token with their completions."""
    ids = collate(rows)["input_ids"]
    halves = {"prompt": ids[:, :1], "completion": ids[:, 1:]}
    masks = {f"{name}_mask": torch.ones_like(half) for name, half in halves.items()}
    real = torch.tensor(float(halves["completion"].numel()))
    given = {f"{name}_ids": half for name, half in halves.items()}
    return {**given, **masks, "num_items_in_batch": real}


METHODS: dict[str, tuple[Callable[..., Any], Callable[[list[Row]], Row]]] = {
    "ours, DistillationTrainer": (ours, collate),
    "TRL, GKDTrainer": (trl_gkd, collate),
    "TRL, DistillationTrainer": (trl_distillation, completions),
}


class Pace(TrainerCallback):
    """When each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the time."""
        self.ends.append(time.perf_counter())


def trainer_of(
    name: str, args: argparse.Namespace, teacher: CausalLM, student: CausalLM
) -> tuple[Any, Pace]:
    """A trainer on the rows of this measurement, and its clock."""
    make, collator = METHODS[name]
    generator = torch.Generator().manual_seed(0)
    high = teacher.model.config.vocab_size  # from 3, since what is special is not text
    ids = torch.randint(3, high, (args.batch, args.length), generator=generator)
    rows: Any = [{"input_ids": row, "labels": row} for row in ids]
    trainer, pace = make(args, teacher, student), Pace()
    trainer.add_callback(pace)
    trainer.remove_callback(PrinterCallback)
    trainer.get_train_dataloader = lambda: trainer.accelerator.prepare(
        DataLoader(rows, args.batch, collate_fn=collator)
    )
    return trainer, pace


def seconds_of(trainer: Any, pace: Pace) -> float:
    """Seconds a step of one training, its first step left out."""
    pace.ends.clear()
    trainer.train()
    return (pace.ends[-1] - pace.ends[0]) / (len(pace.ends) - 1)


def memory(name: str) -> float:
    """MiB by which a training raises the peak, in a process of its own."""
    words = [sys.executable, "-m", "benchmarks.trl_trainer", *sys.argv[1:], "--memory_of", name]
    said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    return float(said.split()[-1])


def table(args: argparse.Namespace, teacher: CausalLM, student: CausalLM) -> None:
    """Measure, and print."""
    trainers = {n: trainer_of(n, args, teacher, copy.deepcopy(student)) for n in args.methods}
    losses: dict[str, float] = {}
    for name, (trainer, pace) in trainers.items():  # warms up
        seconds_of(trainer, pace)
        losses[name] = next(x["loss"] for x in trainer.state.log_history if "loss" in x)
    taken: dict[str, list[float]] = {name: [] for name in trainers}
    for turn in range(args.rounds):
        order = list(trainers)  # who goes first alternates
        for name in order if turn % 2 else reversed(order):
            taken[name].append(seconds_of(*trainers[name]))
    columns = ["trainer", "ms a step", "tokens per second", "times the time of ours"]
    columns += ["extra peak MiB", "first loss"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name, seconds in taken.items():
        ratios = [a / b for a, b in zip(seconds, taken[args.methods[0]], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        median = statistics.median(seconds)
        print(
            f"| {name} | {1000 * median:.0f} | {args.batch * (args.length - 1) / median:,.0f} "
            f"| {middle:.2f} ({low:.2f} to {high:.2f}) | {memory(name):.0f} | {losses[name]:.6f} |"
        )


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--teacher_size", default="4x256", help="LAYERSxDIM")
    parser.add_argument("--student_size", default="2x128", help="LAYERSxDIM")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5, help="timed, after one to warm up")
    parser.add_argument("--steps", type=int, default=2, help="timed of each training")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--memory_of", choices=METHODS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")  # TRL on its own experimental state
    teacher = made_up(args.teacher_size, args.vocabulary, 0)
    student = made_up(args.student_size, args.vocabulary, 1)
    if args.memory_of:
        trainer, pace = trainer_of(args.memory_of, args, teacher, student)
        before = peak_mib()
        seconds_of(trainer, pace)
        print(peak_mib() - before)
        return
    print(
        f"teacher {args.teacher_size}, student {args.student_size}, vocabulary "
        f"{args.vocabulary:,}, batch {args.batch} x {args.length}, fp32, CPU, {args.threads} "
        f"threads, {args.rounds} rounds of {args.steps} steps; {versions('trl', 'transformers')}\n"
    )
    table(args, teacher, student)


if __name__ == "__main__":
    main()
