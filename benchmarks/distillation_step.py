"""Tokens per second and memory of one distillation step, beside TRL's two trainers.

    python -m benchmarks.distillation_step
    python -m benchmarks.distillation_step --teacher_model FOLDER --student_model FOLDER

All train copies of one student towards the same teacher on the same batch by forward KL, off
policy, in fp32, on the CPU or on --device: forward passes, loss, backward pass, clipping and AdamW
as each comes, data loading left out. TRL's DistillationTrainer is given the completions that it
would otherwise generate. The three take turns, and each ratio is the median over rounds (in
brackets the middle half of them), so that a machine whose speed drifts does not matter. Memory is
the growth of the peak resident set over two steps, each in a process of its own.
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.step_cost import peak_growth, versions
from benchmarks.turns import header, in_turns, middle_half, number_of, row
from ssl_kd.datasets.blocks import Batch
from ssl_kd.guard import Precision
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.sources import Plain
from ssl_kd.language.step import Distiller
from ssl_kd.teachers.causal import CausalLM, load_causal_lm
from ssl_kd.teachers.frozen import FrozenTeacher

RATE = 1e-4
Step = Callable[[], float]
"""One step; the loss before it."""


def made_up(size: str, vocabulary: int, seed: int) -> CausalLM:
    """A Llama with new weights, and a tokenizer of two words, which nobody asks."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    layers, dim = map(int, size.split("x"))
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=dim,
        intermediate_size=8 * dim // 3,
        num_hidden_layers=layers,
        num_attention_heads=max(1, dim // 64),
        num_key_value_heads=max(1, dim // 64),
        tie_word_embeddings=True,
    )
    words = Tokenizer(WordLevel({"<pad>": 0, "</s>": 2}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<pad>"
    )
    return CausalLM.of(LlamaForCausalLM(config), tokenizer, size)


def models(args: argparse.Namespace) -> tuple[CausalLM, CausalLM]:
    """Teacher and student."""
    return (
        load_causal_lm(args.teacher_model)
        if args.teacher_model
        else made_up(args.teacher_size, args.vocabulary, 0),
        load_causal_lm(args.student_model)
        if args.student_model
        else made_up(args.student_size, args.vocabulary, 1),
    )


def tokens(args: argparse.Namespace, vocabulary: int) -> torch.Tensor:
    """The batch; ids from 3, since what is special is not text."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocabulary, (args.batch, args.length), generator=generator)
    return ids.to(args.device)


def ours(args: argparse.Namespace, teacher: CausalLM, student: CausalLM) -> Step:
    """The guarded step of this library."""
    ids = tokens(args, teacher.model.config.vocab_size)
    counts = torch.ones(ids.shape, dtype=torch.bool)
    counts[:, 0] = False
    batch = Batch(
        input_ids=ids,
        position_ids=torch.arange(args.length, device=args.device).expand_as(ids),
        counts=counts,
        documents=torch.ones_like(ids, dtype=torch.int32),
        rows=torch.arange(args.batch),
        characters=0,
        packed=False,
    )
    settings = LanguageSettings(alpha_kd=1.0, alpha_ce=0.0, temperature=1.0, learning_rate=RATE)
    precision = Precision.for_device(args.device, False)
    source = Plain(FrozenTeacher(teacher.model, device=precision.device))
    distiller = Distiller(student.model, settings, precision, source)

    def step() -> float:
        found = distiller.step([batch], RATE)
        assert found.updated and found.kd is not None
        return found.kd

    return step


def _trainer(
    of: type,
    config: type,
    device: str,
    student: CausalLM,
    teacher: CausalLM,
    **options: Any,
) -> Any:
    """A trainer of TRL as `train` would have it before its first step."""
    from datasets import Dataset

    says = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    trainer = of(
        model=student.model,
        teacher_model=teacher.model,
        args=config(
            output_dir=tempfile.gettempdir(),
            beta=0.0,  # forward KL
            temperature=1.0,
            learning_rate=RATE,
            max_grad_norm=1.0,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            use_cpu=device == "cpu",
            **options,
        ),
        train_dataset=Dataset.from_list([{"messages": says, "prompt": "a"}]),
        processing_class=student.tokenizer,
    )
    trainer.create_optimizer_and_scheduler(num_training_steps=10_000)
    trainer.model, trainer.optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    trainer.model_wrapped = trainer.model
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def _stepped(trainer: Any, inputs: dict[str, torch.Tensor], real: int) -> Step:
    """What the loop of transformers' Trainer does with a batch."""
    n = torch.tensor(float(real))

    def step() -> float:
        loss = trainer.training_step(trainer.model, dict(inputs), n)
        trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm)
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
        trainer.model.zero_grad()
        return float(loss)

    return step


def trl_gkd(args: argparse.Namespace, teacher: CausalLM, student: CausalLM) -> Step:
    """TRL's GKDTrainer at lmbda 0: off policy, the loss from whole logits."""
    from trl.experimental.gkd import GKDConfig, GKDTrainer  # pyright: ignore[reportMissingImports]

    ids = tokens(args, teacher.model.config.vocab_size)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    trainer = _trainer(GKDTrainer, GKDConfig, args.device, student, teacher, lmbda=0.0)
    return _stepped(trainer, inputs, ids[:, 1:].numel())


def trl_distillation(args: argparse.Namespace, teacher: CausalLM, student: CausalLM) -> Step:
    """TRL's DistillationTrainer with the completions given: the loss by chunks."""
    from trl.trainer.distillation_config import DistillationConfig  # pyright: ignore[reportMissingImports]
    from trl.trainer.distillation_trainer import DistillationTrainer  # pyright: ignore[reportMissingImports]

    ids = tokens(args, teacher.model.config.vocab_size)
    prompt, completion = ids[:, :1], ids[:, 1:]
    real = torch.tensor(float(completion.numel()))
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": torch.ones_like(prompt),
        "completion_ids": completion,
        "completion_mask": torch.ones_like(completion),
        "num_items_in_batch": real,
    }
    trainer = _trainer(DistillationTrainer, DistillationConfig, args.device, student, teacher)
    trainer._prepare_inputs = lambda batch: batch  # nothing is generated
    return _stepped(trainer, inputs, completion.numel())


METHODS: dict[str, Callable[[argparse.Namespace, CausalLM, CausalLM], Step]] = {
    "ours": ours,
    "TRL, GKDTrainer": trl_gkd,
    "TRL, DistillationTrainer": trl_distillation,
}


def seconds_of(step: Step, steps: int) -> float:
    """Seconds of one of some steps."""
    began = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - began) / steps


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--teacher_model", help="folder or hub name; else a new Llama")
    parser.add_argument("--student_model", help="folder or hub name; else a new Llama")
    parser.add_argument("--teacher_size", default="4x256", help="LAYERSxDIM")
    parser.add_argument("--student_size", default="2x128", help="LAYERSxDIM")
    parser.add_argument("--vocabulary", type=int, default=32_000, help="of new models")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=10, help="timed, after one to warm up")
    parser.add_argument("--steps", type=int, default=2, help="of each method in a round")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--device", default="cpu", help="cpu or cuda; memory is the host's")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--memory_of", choices=METHODS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")  # TRL on its own experimental state

    teacher, student = models(args)
    if args.memory_of:
        step = METHODS[args.memory_of](args, teacher, student)
        print(peak_growth(lambda: lambda _: step(), None))
        return

    steps = {name: METHODS[name](args, teacher, copy.deepcopy(student)) for name in args.methods}
    losses = {name: step() for name, step in steps.items()}  # warms up
    seconds = in_turns(
        {name: lambda step=step: seconds_of(step, args.steps) for name, step in steps.items()},
        args.rounds,
    )
    parameters = [sum(p.numel() for p in lm.model.parameters()) / 1e6 for lm in (teacher, student)]
    print(
        f"teacher {parameters[0]:.1f} M, student {parameters[1]:.1f} M, vocabulary "
        f"{teacher.model.config.vocab_size:,}, batch {args.batch} x {args.length}, fp32, "
        f"{args.device}, {args.threads} threads, {args.rounds} rounds of {args.steps} steps; "
        f"{versions('trl', 'transformers')}\n"
    )
    columns = ["step", "ms", "tokens per second", "times the time of ours", "extra peak MiB"]
    header(*columns, "first loss")
    real = args.batch * (args.length - 1)
    for name, taken in seconds.items():
        median = statistics.median(taken)
        memory = number_of("distillation_step", "--memory_of", name)
        row(
            *(name, f"{1000 * median:.0f}", f"{real / median:,.0f}"),
            middle_half(a / b for a, b in zip(taken, seconds[args.methods[0]], strict=True)),
            *(f"{memory:.0f}", f"{losses[name]:.4f}"),
        )


if __name__ == "__main__":
    main()
