"""Train SmolLM2 in fp16 and bf16 with the loop of many scripts; say what goes wrong first.

    python -m benchmarks.fp16 --model smollm2 --steps 12

SmolLM2-135M, or with --student layers:N a part of its layers, learns from SmolLM2 on the source of
Python's standard library. Weights, softmax and AdamW are in fp16 or bf16, without a loss scale,
with the learning rate, temperature and weights of the older scripts. The first operation with a
non-finite output is read from the graph of the loss by `firstnan`. The largest value of each module
in a forward pass in fp32 says how far from 65,504 the model is before training.
"""

from __future__ import annotations

import argparse
import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.turns import header, row
from firstnan.diagnosis import diagnose
from firstnan.graph import origin_of
from ssl_kd.language.models.causal import CausalLM, load_causal_lm
from ssl_kd.language.models.finite import in_words
from ssl_kd.language.models.student import build_student
from ssl_kd.language.settings.presets import PRESETS
from ssl_kd.language.text.blocks import Blocks, make_blocks
from ssl_kd.language.text.dataset import open_text

OLDER = {k: v for k, v in PRESETS["stable"].items() if k not in ("batch_size", "block_size")}
HALVES = (torch.float16, torch.bfloat16)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--student", default="layers:30")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--block_size", type=int, default=64)
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    teacher = load_causal_lm(args.model)
    blocks = make_blocks(open_text("stdlib"), teacher.tokenizer, args.block_size)
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
