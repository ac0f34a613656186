"""Compare whole trainings with TRL's trainers: on text, on student samples, with a server.

    pip install trl
    python -m benchmarks.trl_trainer --vocabulary 4096 32000 128000 --threads 1 2 --shape 8x128
    python -m benchmarks.trl_trainer --kinds off --threads 1 --vocabulary 4096
    python -m benchmarks.trl_trainer --kinds off --models smollm2 layers:3 --shape 4x128

Every trainer trains a copy of one random student on the same random teacher and tokens (--models:
of a real one, on the source of the standard library), in fp32 on the CPU, through `train()`: TRL's
with the unchanged transformers loop (data loading, clipping, AdamW, logging), ours with its guard.
Our cross-entropy is computed and logged but has weight 0; TRL's trainers have none.

- `off`: forward KL, off policy. TRL's DistillationTrainer gets the completions instead of
  generating them.
- `on`: reverse KL. The student continues the first 16 tokens of each row to its end, sampled at
  temperature 1 from all tokens with transformers' `generate`. Ours is the loop of `ssl_kd distill`.
- `served`: forward KL to the 20 likeliest tokens and the remaining mass. A server in another
  process returns vLLM's `prompt_logprobs` and caches them, so only the clients are measured. TRL's
  client requires vLLM without using it here; the check for it is patched. Ours is the loop of
  `ssl_kd distill`, because our DistillationTrainer has no client for a server.

All trainers alternate; ratios are medians over rounds (middle half in parentheses), of the time and
of the CPU time, which other programs disturb less. Memory is the increase of the peak resident set
in a separate process, with and without the gradients and the two states of AdamW; `passes` is the
increase in the forward and backward passes of the second step alone, beyond the gradients. Losses
are from the first step, before any update, and from the last one; for `on`, from a separate greedy
training, so that all trainers see the same text.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import logging
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from benchmarks.step_cost import versions
from benchmarks.turns import header, in_turns, memory, middle_half, number_of, row
from ssl_kd.core.memory import give_back_memory
from ssl_kd.core.precision import Precision
from ssl_kd.hf_trainer import DistillationTrainer
from ssl_kd.language.hf_trainer.distillation import collate
from ssl_kd.language.models.causal import CausalLM, load_causal_lm
from ssl_kd.language.models.frozen import FrozenTeacher
from ssl_kd.language.models.student import build_student
from ssl_kd.language.rollouts import RolloutBatches, Sampler
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.teachers.live import Live
from ssl_kd.language.teachers.served import Served, ServedTeacher
from ssl_kd.language.teachers.server import CompletionServer
from ssl_kd.language.text.blocks import Blocks, make_blocks
from ssl_kd.language.text.dataset import open_text
from ssl_kd.language.train.loop import train
from ssl_kd.language.train.step import Distiller
from tests.served import Server

RATE = 1e-4
SIZES = {"prompt": 16, "top_k": 20}  # tokens
Row = dict[str, Tensor]
Times = tuple[float, float]
"""Seconds of time, and of CPU time."""
Run = Callable[[bool], tuple[list[Times], list[float]]]
"""Trains once, greedily if the argument is true; returns the steps' end times and losses."""


def random_llama(size: str, vocabulary: int, seed: int) -> CausalLM:
    """Return a randomly initialized Llama and a placeholder tokenizer of two words."""
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
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return CausalLM.of(model, tokenizer, size)


def models(args: argparse.Namespace) -> tuple[CausalLM, CausalLM]:
    """Return teacher and student; they practically never sample EOS, so texts are equally long."""
    if args.models:
        teacher = load_causal_lm(args.models[0])
        return teacher, build_student(args.models[1], teacher, seed=1)
    return random_llama("4x256", args.vocabulary, 0), random_llama("2x128", args.vocabulary, 1)


def rows_of(args: argparse.Namespace, teacher: CausalLM) -> Tensor:
    """Return text `[batch, length]`, random for random models; IDs below 3 are special tokens."""
    if args.models:
        return make_blocks(open_text("stdlib"), teacher.tokenizer, args.length).ids[: args.batch]
    torch.manual_seed(0)
    return torch.randint(3, teacher.model.config.vocab_size, (args.batch, args.length))


def now() -> Times:
    """Return the time and this process's CPU time."""
    return time.perf_counter(), time.process_time()


class Pace(TrainerCallback):
    """Records the time at which each step ended."""

    def __init__(self) -> None:
        self.ends: list[Times] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Record the time after a synchronization with the device."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(now())


def through(trainer: Any, args: argparse.Namespace, rows: Any, collator: Any) -> Run:
    """Return a run of a Trainer that uses the same rows in each step."""
    trainer.add_callback(pace := Pace())
    trainer.remove_callback(PrinterCallback)
    trainer.get_train_dataloader = lambda: trainer.accelerator.prepare(
        DataLoader(rows, args.batch, collate_fn=collator)
    )

    def run(greedy: bool) -> tuple[list[Times], list[float]]:
        if hasattr(trainer, "generation_config"):
            trainer.generation_config.do_sample = not greedy
        pace.ends.clear()
        trainer.train()
        return pace.ends, [x["loss"] for x in trainer.state.log_history if "loss" in x]

    return run


def arguments(args: argparse.Namespace, cls: type = TrainingArguments, **options: Any) -> Any:
    """Return the training arguments that all trainers share."""
    return cls(
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
        use_cpu=args.device == "cpu",
        **options,
    )


def plain_rows(ids: Tensor) -> list[Row]:
    """Return the samples in the format of any Trainer."""
    return [{"input_ids": row, "labels": row} for row in ids]


def completions(rows: list[Row]) -> Row:
    """Collate rows in TRL's format, as prompts of one token with completions."""
    ids = collate(rows)["input_ids"]
    halves = {"prompt": ids[:, :1], "completion": ids[:, 1:]}
    masks = {f"{name}_mask": torch.ones_like(half) for name, half in halves.items()}
    real = torch.tensor(float(halves["completion"].numel()))
    ids_of = {f"{name}_ids": half for name, half in halves.items()}
    return {**ids_of, **masks, "num_items_in_batch": real}


def ours(args: argparse.Namespace, teacher: CausalLM, student: CausalLM) -> Run:
    """Return a run of this library's Trainer."""
    trainer = DistillationTrainer(
        student.model, teacher.model, arguments(args), alpha_kd=1.0, alpha_ce=0.0
    )
    return through(trainer, args, plain_rows(rows_of(args, teacher)), collate)


def our_loop(args: argparse.Namespace, teacher: CausalLM, student: CausalLM, kind: str) -> Run:
    """Return a run of `ssl_kd distill`'s loop on one kind of text and teacher."""
    changes: dict[str, Any] = {"alpha_kd": 1.0, "alpha_ce": 0.0}
    if kind == "on":
        changes |= {"on_policy": 1.0, "divergence": "reverse_kl"}
    if kind == "served":
        server = CompletionServer(args.url, "teacher")
        target = Served(ServedTeacher(server, args.top_k, teacher.model.config.vocab_size))
    else:
        target = Live(FrozenTeacher(teacher.model, device=args.device))
    ids, n = rows_of(args, teacher), args.length - args.prompt
    counts = torch.zeros_like(ids, dtype=torch.bool)
    counts[:, args.prompt if kind == "on" else 1 :] = True
    documents = torch.ones_like(ids, dtype=torch.int32)
    blocks = Blocks(ids, counts, documents, torch.ones(len(ids)), (), "rows")
    changes |= {"batch_size": args.batch, "block_size": args.length, "max_new_tokens": n}
    settings = LanguageSettings(**changes, learning_rate=RATE, log_every=1)
    precision = Precision.for_device(args.device, False)
    distiller = Distiller(student.model, settings, precision, target)
    ends = [student.tokenizer.eos_token_id]
    rollouts = Sampler(student.model, ends, batch_size=args.batch)
    batches = RolloutBatches(settings, blocks, rollouts, ends, seed=settings.seed)
    batches = batches if settings.on_policy else None

    def run(greedy: bool) -> tuple[list[Times], list[float]]:
        stamps, losses = [], []
        rollouts.temperature = 0.0 if greedy else 1.0

        def record(step: int, result: Any) -> None:
            stamps.append(now())
            losses.append(result.kd)

        train(distiller, blocks, args.steps + 1, rollouts=batches, on_step=record)
        return stamps, losses

    return run


def _of_trl(cls: type, config: Any, student: CausalLM, **teacher: Any) -> Any:
    from datasets import Dataset

    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    return cls(
        model=student.model,
        args=config,
        train_dataset=Dataset.from_list([{"messages": messages, "prompt": "a"}]),  # unused
        processing_class=student.tokenizer,
        **teacher,
    )


def trl_gkd(args: argparse.Namespace, teacher: CausalLM, student: CausalLM, policy: int) -> Run:
    """Return a run of TRL's GKDTrainer at lmbda 0 (off policy) or 1 (the student generates)."""
    from trl.experimental.gkd import GKDConfig, GKDTrainer  # pyright: ignore[reportMissingImports]

    def prompts(rows: list[Row]) -> Row:
        batch = collate(rows)
        labels = batch["input_ids"].clone()
        labels[:, : args.prompt] = -100  # the rest is as long as the generated text
        ids, mask = (batch[name][:, : args.prompt] for name in ("input_ids", "attention_mask"))
        return {**batch, "labels": labels, "prompts": ids, "prompt_attention_mask": mask}

    options = {"beta": float(policy), "lmbda": float(policy), "temperature": 1.0}
    config = arguments(args, GKDConfig, max_new_tokens=args.length - args.prompt, **options)
    trainer = _of_trl(GKDTrainer, config, student, teacher_model=teacher.model)
    rows = plain_rows(rows_of(args, teacher))
    return through(trainer, args, rows, prompts if policy else collate)


def trl_distillation(
    args: argparse.Namespace, teacher: CausalLM, student: CausalLM, policy: int
) -> Run:
    """Return a run of TRL's DistillationTrainer, on fixed completions or generating (policy 1)."""
    from trl.trainer.distillation_config import DistillationConfig  # pyright: ignore[reportMissingImports]
    from trl.trainer.distillation_trainer import (  # pyright: ignore[reportMissingImports]
        DistillationTrainer as TRLTrainer,
    )

    options = {"max_completion_length": args.length - args.prompt} if policy else {}
    options |= {"beta": float(policy), "temperature": 1.0, "top_k": 0}
    config = arguments(args, DistillationConfig, **options)
    trainer = _of_trl(TRLTrainer, config, student, teacher_model=teacher.model)
    rows = rows_of(args, teacher)
    if policy:
        trainer._tokenize_prompts = lambda prompts: (prompts, None, {})
        prompts = [{"prompt": row[: args.prompt].tolist()} for row in rows]
        return through(trainer, args, prompts, list)
    trainer._prepare_inputs = lambda batch: batch  # generate nothing
    return through(trainer, args, plain_rows(rows), completions)


def trl_served(args: argparse.Namespace, teacher: CausalLM, student: CausalLM) -> Run:
    """Return a run of TRL's ServerDistillationTrainer on fixed completions."""
    from trl.experimental.server_distillation import (  # pyright: ignore[reportMissingImports]
        ServerDistillationConfig,
        ServerDistillationTrainer,
    )

    url = args.url.removesuffix("/v1")
    options = {"beta": 0.0, "temperature": 1.0, "loss_top_k": args.top_k}
    config = arguments(args, ServerDistillationConfig, teacher_model_server_url=url, **options)
    with patch("trl.generation.vllm_client.is_vllm_available", lambda *_, **__: True):
        trainer = _of_trl(ServerDistillationTrainer, config, student)
    trainer._prepare_inputs = lambda batch: batch  # generate nothing
    return through(trainer, args, plain_rows(rows_of(args, teacher)), completions)


METHODS: dict[str, dict[str, Callable[..., Run]]] = {
    "off": {
        "ours, DistillationTrainer": ours,
        "TRL, GKDTrainer": partial(trl_gkd, policy=0),
        "TRL, DistillationTrainer": partial(trl_distillation, policy=0),
        "ours, ssl_kd distill": partial(our_loop, kind="off"),
    },
    "on": {
        "ours, ssl_kd distill": partial(our_loop, kind="on"),
        "TRL, GKDTrainer": partial(trl_gkd, policy=1),
        "TRL, DistillationTrainer": partial(trl_distillation, policy=1),
    },
    "served": {
        "ours, ssl_kd distill": partial(our_loop, kind="served"),
        "TRL, ServerDistillationTrainer": trl_served,
    },
}


class CachingServer(Server):
    """A server that caches its responses."""

    @cache  # noqa: B019
    def _entries(self, prompt: tuple[int, ...], k: int) -> Any:
        return super().entries(list(prompt), k)

    def entries(self, prompt: Any, k: int) -> Any:
        """Return the response to a prompt, from the cache if possible."""
        return self._entries(tuple(prompt), k)


def _serve(args: argparse.Namespace, pipe: Any) -> None:
    with CachingServer(models(args)[0].model, room=args.length + 1) as server:
        pipe.send(server.url)
        pipe.recv()


@contextmanager
def serving(args: argparse.Namespace) -> Iterator[str]:
    """Start a server in another process and yield its address."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    context.Process(target=_serve, args=(args, there), daemon=True).start()
    there.close()  # recv then raises if the server dies before it sends its address
    yield here.recv()
    here.send(None)


@contextmanager
def peaks_of_passes(peaks: list[float]) -> Iterator[None]:
    """Append the increase of the peak resident set in each step's passes, in MiB, to `peaks`."""

    def measured(passes: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            before = forget_peak()
            result = passes(*args, **kwargs)
            peaks.append(memory()["VmHWM"] - before)
            return result

        return run

    steps = [(Trainer, "training_step"), (DistillationTrainer, "training_step")]
    with ExitStack() as patches:
        for cls, name in [*steps, (Distiller, "_accumulate")]:
            patches.enter_context(patch.object(cls, name, measured(getattr(cls, name))))
        yield


def forget_peak() -> float:
    """Return free memory to the system, start a new peak, and return the resident set in MiB."""
    give_back_memory()
    Path("/proc/self/clear_refs").write_text("5")
    return memory()["VmRSS"]


def memory_of(args: argparse.Namespace, kind: str, name: str, what: str) -> float:
    """Return the increase of the peak memory in MiB: of the `training`, or of its `passes`."""
    torch.set_num_threads(args.threads)
    teacher, student = models(args)
    run = METHODS[kind][name](args, teacher, student)
    for lm in (teacher, student):  # weights are in memory only once they have been read
        sum(float(weight.sum()) for weight in lm.model.parameters())
    before, peaks = forget_peak(), list[float]()
    with peaks_of_passes(peaks) if what == "passes" else nullcontext():
        run(False)
    if what == "training":
        return memory()["VmHWM"] - before
    gradients = sum(4 * p.numel() for p in student.model.parameters()) / 2**20
    return peaks[1] - gradients


def seconds_of(run: Run, greedy: bool = False) -> Times:
    """Return the time and CPU time per step of one training, excluding its first step."""
    ends, _ = run(greedy)
    wall, cpu = ((b - a) / (len(ends) - 1) for a, b in zip(ends[0], ends[-1], strict=True))
    return wall, cpu


def measure(kind: str, args: argparse.Namespace) -> None:
    """Measure one kind of training and print its rows of the table."""
    torch.set_num_threads(args.threads)
    teacher, student = models(args)
    runs = {
        name: make(args, teacher, copy.deepcopy(student)) for name, make in METHODS[kind].items()
    }
    losses = {name: run(True)[1] for name, run in runs.items()}  # warms up
    ours = next(iter(losses.values()))
    times = in_turns(
        {name: lambda run=run: seconds_of(run) for name, run in runs.items()}, args.rounds
    )
    shape = ["--shape", args.shape, "--threads", str(args.threads)]
    shape += ["--vocabulary", str(args.vocabulary), "--url", args.url, "--memory_of"]
    peaks = {name: number_of("trl_trainer", *shape, kind, name, "training") for name in runs}
    passes = {name: number_of("trl_trainer", *shape, kind, name, "passes") for name in runs}
    trained = sum(p.numel() for p in student.model.parameters())
    state = 3 * 4 * trained / 2**20  # a gradient and two states of AdamW in float32
    first, peak = next(iter(times.values())), next(iter(peaks.values()))
    for name, seconds in times.items():
        turns = zip(seconds, first, strict=True)
        ratios = [(wall / base[0], cpu / base[1]) for (wall, cpu), base in turns]
        row(
            *(f"{teacher.model.config.vocab_size:,}", f"{args.threads}", args.shape, kind, name),
            f"{1000 * statistics.median(wall for wall, _ in seconds):.0f}",
            *(middle_half(clock) for clock in zip(*ratios, strict=True)),
            *(f"{peaks[name]:.0f}", f"{peaks[name] / peak:.2f}", f"{peaks[name] - state:.0f}"),
            f"{passes[name]:.0f}",
            *(f"{losses[name][0]:.6f}", f"{losses[name][-1]:.6f}"),
            f"{max(abs(a / b - 1) for a, b in zip(losses[name], ours, strict=True)):.0e}",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[32_000])
    parser.add_argument("--threads", type=int, nargs="+", default=[os.cpu_count()])
    parser.add_argument("--shape", nargs="+", default=["8x256"], help="rows x tokens in each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu", help="cpu; `off` also runs on cuda")
    parser.add_argument("--kinds", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--models", nargs=2, metavar=("TEACHER", "STUDENT"), help="real ones")
    parser.add_argument("--steps", type=int, default=2, help="timed steps after a warm-up")
    parser.add_argument("--url", default="", help=argparse.SUPPRESS)
    parser.add_argument("--memory_of", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(namespace=argparse.Namespace(**SIZES))
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")  # TRL warns that its trainers are experimental
    if not args.memory_of:
        print(f"fp32, {args.device}, {args.rounds} rounds of {args.steps} steps;", end=" ")
        print(f"{versions('trl', 'transformers')}\n")
        columns = ["vocabulary", "threads", "batch", "kind", "trainer", "ms per step"]
        columns += ["time relative to ours", "CPU time relative to ours", "extra peak MiB"]
        columns += ["relative to ours", "beyond gradients and AdamW", "passes"]
        header(*columns, "first loss", "last loss", "largest relative difference of a loss")
    cells = itertools.product(args.vocabulary, args.threads, args.shape)
    for args.vocabulary, args.threads, args.shape in cells:
        args.batch, args.length = map(int, args.shape.split("x"))
        if args.memory_of:
            print(memory_of(args, *args.memory_of))
            return
        for kind in args.kinds:
            with serving(args) if kind == "served" else nullcontext("") as args.url:
                measure(kind, args)


if __name__ == "__main__":
    main()
