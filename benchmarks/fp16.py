"""Train SmolLM2 in fp16 and bf16 with the loop of many scripts; say what goes wrong first.

    python -m benchmarks.fp16 --model smollm2 --steps 12
    python -m benchmarks.fp16 --model smollm2 --long 200

SmolLM2-135M, or with --student layers:N a part of its layers, learns from SmolLM2 on the source of
Python's standard library. Weights, softmax and AdamW are in fp16 or bf16, without a loss scale,
with the learning rate, temperature and weights of the older scripts. The first operation with a
non-finite output is read from the graph of the loss by `firstnan`. The largest value of each module
in a forward pass in fp32 says how far from 65,504 the model is before training.

`--long` trains the model itself for that many steps under the guard, with the settings of the older
scripts (with their bounds on logits and gradient) and with the defaults, and compares perplexities
on held-out text. The older scripts' bounds on the loss, 0.1 to 5, are refused: with logits clamped
to 2.5 and 49,152 tokens, no loss is below 5.8. CPUs without fp16 arithmetic are very slow at fp16
matrix products, so these are computed in fp32 and rounded to fp16, as tensor cores do.
"""

from __future__ import annotations

import argparse
import logging
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from benchmarks.turns import header, row
from firstnan._graph import origin_of
from firstnan.diagnosis import diagnose
from firstnan.parts import TooFewHealthyParts
from ssl_kd.core.precision import Precision
from ssl_kd.language.models.causal import CausalLM, load_causal_lm
from ssl_kd.language.models.finite import in_words
from ssl_kd.language.models.frozen import FrozenTeacher
from ssl_kd.language.models.student import build_student
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.settings.presets import PRESETS
from ssl_kd.language.teachers.live import Live
from ssl_kd.language.text.blocks import Blocks, make_blocks
from ssl_kd.language.text.dataset import open_text
from ssl_kd.language.train.loop import train
from ssl_kd.language.train.step import Distiller

OLDER = {k: v for k, v in PRESETS["stable"].items() if k not in ("batch_size", "block_size")}
BOUNDS = {"legacy_clamp": "2.5", "grad_norm_threshold": 2.0}
HALVES = (torch.float16, torch.bfloat16)
CPU = Precision.for_device("cpu")
PRECISIONS = {
    "float32": replace(CPU, student=torch.float32, teacher=torch.float32, scale=False),
    "bfloat16": replace(CPU, student=torch.bfloat16, teacher=torch.bfloat16, scale=False),
    "float16": replace(CPU, student=torch.float16, teacher=torch.float16, scale=True),
}
HELD_OUT = 64  # rows


def largest_values(model: nn.Module, blocks: Blocks) -> list[tuple[str, float]]:
    """Return the modules with the largest outputs in a forward pass, the largest first."""
    largest: dict[str, float] = {}

    def watch(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                largest[name] = float(output.abs().max())

        return hook

    hooks = [m.register_forward_hook(watch(name)) for name, m in model.named_modules()]
    with torch.no_grad():
        model(**blocks.batch(range(4)).model_inputs())
    for hook in hooks:
        hook.remove()
    return sorted(largest.items(), key=lambda item: -item[1])


def divergence_of(p: Tensor, logits: Tensor, *, by_log_softmax: bool) -> Tensor:
    """Return the mean forward KL, from the logits or with a small number under the logarithms."""
    if by_log_softmax:
        return F.kl_div(logits.log_softmax(-1), p, reduction="none").sum(-1).mean()
    return (p * ((p + 1e-12).log() - (logits.softmax(-1) + 1e-12).log())).sum(-1).mean()


def plain_loop(
    student: CausalLM,
    teacher: CausalLM,
    blocks: Blocks,
    dtype: torch.dtype,
    *,
    by_log_softmax: bool,
) -> str:
    """Train without a guard, all in one dtype; return what happened first."""
    model = student.model.to(dtype).train()
    frozen = teacher.model.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), OLDER["learning_rate"], eps=1e-8)
    t = OLDER["temperature"]
    for step in range(len(blocks)):
        batch = blocks.batch([step])
        inputs = batch.model_inputs()
        with torch.no_grad():
            p = (frozen(**inputs).logits / t).softmax(-1)
        logits = model(**inputs).logits
        divergence = divergence_of(p, logits / t, by_log_softmax=by_log_softmax)
        targets = batch.input_ids[:, 1:].flatten()
        cross_entropy = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets)
        loss = OLDER["alpha_ce"] * cross_entropy + OLDER["alpha_kd"] * t**2 * divergence
        origin = None if loss.isfinite() else origin_of([loss], lambda _: False)
        optimizer.zero_grad()
        loss.backward()
        bad = [name for name, p in model.named_parameters() if not p.grad.isfinite().all()]
        if not loss.isfinite() or bad:
            why = ""
            if origin is not None:
                fault = origin.fault
                values = f"{fault.inputs[0]} -> {fault.outputs[0]}" if fault.inputs else ""
                why = f"; first {in_words(fault, diagnose(fault))} ({values})"
            return (
                f"step {step + 1}: loss {float(loss.detach()):.3g}, {len(bad)} bad gradients{why}"
            )
        optimizer.step()
        if bad := [n for n, p in model.named_parameters() if not p.isfinite().all()]:
            return f"step {step + 1}: {len(bad)} weights not finite after AdamW, first {bad[0]}"
    return f"no bad value in {len(blocks)} steps"


class RoundedProducts(TorchDispatchMode):
    """Compute matrix products of fp16 in fp32, and round the results to fp16."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op, options = func.overloadpacket, kwargs or {}
        if op.__name__ not in ("mm", "bmm", "addmm", "baddbmm") or args[0].dtype != torch.float16:
            return func(*args, **options)
        out = options.pop("out", None)
        product = op(*tree_map_only(Tensor, Tensor.float, args), **options).half()
        return product if out is None else out.copy_(product)


@torch.no_grad()
def perplexity(model: nn.Module, blocks: Blocks) -> float:
    """Return the perplexity of a model in fp32."""
    total = count = 0.0
    for first in range(0, len(blocks), 8):
        batch = blocks.batch(range(first, min(first + 8, len(blocks))))
        logits = model(**batch.model_inputs()).logits[:, :-1].float()
        counts = batch.counts[:, 1:]
        targets = batch.input_ids[:, 1:][counts].long()
        total += float(F.cross_entropy(logits[counts], targets, reduction="sum"))
        count += len(targets)
    return math.exp(total / count)


def guarded(model: str, settings: LanguageSettings, precision: str, blocks: Blocks) -> list[str]:
    """Train a model under the guard, distilled from itself; return the cells of its row."""
    held_out, training = blocks.part(slice(HELD_OUT)), blocks.part(slice(HELD_OUT, None))
    student = load_causal_lm(model).model
    chosen = PRECISIONS[precision]
    teacher = Live(FrozenTeacher(load_causal_lm(model).model, dtype=chosen.teacher))
    before = perplexity(student, held_out)
    distiller = Distiller(student, settings, chosen, teacher)
    updated = 0

    def count(step: int, result: Any) -> None:
        nonlocal updated
        updated += result.updated

    end = "all steps"
    try:
        with sdpa_kernel(SDPBackend.MATH), RoundedProducts():
            train(distiller, training, settings.max_steps, on_step=count)
    except TooFewHealthyParts as error:
        end = str(error).partition(":")[0]
    reasons = Counter(e.reason for e in distiller.guard.events.events)
    faults = "; ".join(f"{reason} ({n} times)" for reason, n in reasons.most_common(3))
    return [f"{before:.2f}", f"{perplexity(student, held_out):.2f}", f"{updated}", end, faults]


def print_long(model: str, blocks: Blocks, steps: int) -> None:
    """Print what each combination of settings and precision makes of a model in `steps` steps."""
    usual = LanguageSettings(
        teacher_model=model, student_model=model, max_steps=steps, batch_size=1, stop_after=None
    )
    older = usual.replace(**OLDER, **BOUNDS)
    header("settings", "products", "before", "after", "updates", "trained to", "faults")
    for name, settings, precisions in (
        ("older scripts", older, ["float16"]),
        ("older scripts, any norm", older.replace(grad_norm_threshold=None), ["float16"]),
        ("defaults", usual, PRECISIONS),
    ):
        for precision in precisions:
            chosen = settings.replace(model_dtype=precision)
            row(name, precision, *guarded(model, chosen, precision, blocks))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--student", default="layers:30")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--block_size", type=int, default=64)
    parser.add_argument("--long", type=int, metavar="STEPS")
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    teacher = load_causal_lm(args.model)
    blocks = make_blocks(open_text("stdlib"), teacher.tokenizer, args.block_size)
    if args.long is not None:
        return print_long(args.model, blocks, args.long)
    header("module", "largest value", "of 65,504")
    for name, value in largest_values(teacher.model, blocks)[:5]:
        row(name or "the model", f"{value:,.0f}", f"{value / 65_504:.0%}")
    print()
    header("plain loop", "dtype", "what happened first")
    for name, by_log_softmax in (("log(softmax + 1e-12)", False), ("log_softmax", True)):
        for dtype in HALVES:
            student = build_student(args.student, teacher, seed=0)
            chosen = blocks.part(slice(args.steps))
            options = {"dtype": dtype, "by_log_softmax": by_log_softmax}
            first = plain_loop(student, load_causal_lm(args.model), chosen, **options)
            row(name, str(dtype).removeprefix("torch."), first)


if __name__ == "__main__":
    main()
