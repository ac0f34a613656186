"""Check a language model: its weights, loss and gradients, and ten steps on one batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from firstnan.parts import TooFewHealthyParts
from ssl_kd.core.errors import first_few
from ssl_kd.core.precision import promote_to_fp32
from ssl_kd.core.runs.schedule import learning_rate_at
from ssl_kd.core.seeds import seeded
from ssl_kd.doctor.finding import FOLLOW_MESSAGE, Finding, count
from ssl_kd.language.models.causal import CausalLM, load_causal_lm, positions, without_adapters
from ssl_kd.language.models.student import add_lora, stack_of
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.settings.groups import TextSettings
from ssl_kd.language.text.blocks import Batch, Blocks, isolates_documents, make_blocks
from ssl_kd.language.text.dataset import open_text
from ssl_kd.language.text.picture_blocks import make_picture_blocks
from ssl_kd.language.train.step import Distiller, precision_of

STEPS = 10
TEXT_BYTES = 1_000_000  # read of the text; ten steps need less
EXPLODED = 100.0  # times the median gradient norm of all parts
SCALE = 1024.0  # factor on the loss in float16
NOT_REPEATED = (
    "a second run of the same batch is finite, so the device gives different results: check its "
    "memory and its driver"
)


def open_model(student: str, text: TextSettings) -> tuple[CausalLM, Blocks]:
    """Load a model in the dtype of its file, and tokenize the beginning of the text."""
    lm = load_causal_lm(student, dtype=None)
    texts = open_text(text.data_path, "train", max_bytes=TEXT_BYTES)
    size = min(text.block_size, positions(lm.model) or text.block_size)
    if lm.processor is not None:
        return lm, make_picture_blocks(texts, lm.processor, size)
    packing = text.packing and isolates_documents(lm.model)
    return lm, make_blocks(texts, lm.tokenizer, size, packing=packing)


def gradients(settings: LanguageSettings, lm: CausalLM, blocks: Blocks) -> Iterator[Finding]:
    """Check the weights, and train ten steps in place by cross-entropy on the first blocks.

    The settings of teacher and router are ignored.
    """
    settings = settings.replace(
        teacher_model="none",
        teacher_cache=None,
        quantization=None,
        alpha_ce=1.0,
        alpha_kd=0.0,
        align="auto",
        router_mode="native",
        legacy_clamp=None,
    )
    precision, model = precision_of(settings), lm.model
    yield Finding("precision", str(precision))
    yield from _weights(model)
    if settings.lora_rank:
        model = add_lora(model, settings.lora_rank, **settings.lora_options)
    gpus = [precision.device] if precision.device.type == "cuda" else []
    with seeded(settings.seed, gpus):
        distiller = Distiller(model, settings, precision)
        batch = blocks.batch(range(min(settings.batch_size, len(blocks))), precision.device)
        if (yield from _forward(distiller, batch)):
            yield from _backward(distiller, batch)
            schedule = settings.rate_schedule
            rates = [learning_rate_at(step, STEPS, *schedule) for step in range(STEPS)]
            yield from _steps(distiller, batch, rates)


def _weights(model: nn.Module) -> Iterator[Finding]:
    """Convert the weights to float32, and check that they are finite and fit into float16."""
    n = sum(p.numel() for p in model.parameters())
    stored = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()}))
    yield Finding("model", f"{type(model).__name__}, {n:,} parameters, stored in {stored}")
    if (line := promote_to_fp32(model)) is not None:
        yield Finding("weights: promoted", line)
    peaks = {name: float(p.detach().abs().max()) for name, p in model.named_parameters()}
    sick = [name for name, peak in peaks.items() if not math.isfinite(peak)]
    yield Finding(
        "weights: finite",
        f"NaN or inf in {', '.join(first_few(sick, 5))}" if sick else "all of them",
        "the file is damaged, or the training before diverged: use an earlier checkpoint, or"
        " download it again"
        if sick
        else "",
    )
    largest, name = max(
        ((p, name) for name, p in peaks.items() if name not in sick), default=(0, "")
    )
    overflows = largest > torch.finfo(torch.float16).max
    change = "it overflows in float16: use --model_dtype bfloat16 or float32" if overflows else ""
    yield Finding("weights: range", f"largest {largest:.3g} in {name}", change, note=overflows)


def _forward(distiller: Distiller, batch: Batch) -> Generator[Finding, None, bool]:
    """Check the loss of the batch; return whether it is finite."""
    loss = float(_mean_loss(distiller, batch).detach())
    vocabulary = without_adapters(distiller.student).get_output_embeddings().weight.shape[0]
    guessing = math.log(vocabulary)
    result = f"{loss:.4g} nats a token; guessing among {vocabulary:,} tokens gives {guessing:.4g}"
    if not math.isfinite(loss):
        yield Finding("forward: loss", result, distiller.explain(batch) or NOT_REPEATED)
        return False
    worse = loss > 1.2 * guessing
    change = "worse than guessing: check that the tokenizer is the model's" if worse else ""
    yield Finding("forward: loss", result, change, note=worse)
    return True


def _mean_loss(distiller: Distiller, batch: Batch) -> Tensor:
    return distiller.terms(batch)["ce"] / max(int(batch.counts.sum()), 1)


def _backward(distiller: Distiller, batch: Batch) -> Iterator[Finding]:
    """Check the gradient norm of each part: embedding, each layer, head, the rest."""
    parts = _parts(distiller.student)
    trained = [p for parameters in parts.values() for p in parameters]
    scale = SCALE if distiller.precision.scale else 1.0
    loss = _mean_loss(distiller, batch) * scale
    grads = iter(torch.autograd.grad(loss, trained, allow_unused=True))
    norms: dict[str, float] = {}
    for part, parameters in parts.items():
        sizes = [grad.norm() for grad in (next(grads) for _ in parameters) if grad is not None]
        norms[part] = float(torch.stack(sizes).norm()) / scale if sizes else 0.0
    finite = sorted(norm for norm in norms.values() if math.isfinite(norm))
    median = finite[len(finite) // 2] if finite else math.nan
    for part, norm in norms.items():
        change, note = "", False
        if not math.isfinite(norm):
            change = distiller.explain(batch) or NOT_REPEATED
        elif norm == 0:
            change = "no gradient reaches this part: look for a detach, a clamp or an unused module"
        elif norm > EXPLODED * median:
            change = f"{norm / median:.0f} times the median of all parts: leave CLIP_GRAD on"
            note = True
        yield Finding(f"gradient: {part}", f"norm {norm:.3g}", change, note)
    yield Finding("gradient: all", f"norm {math.hypot(*norms.values()):.3g}")


def _parts(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Group the trained parameters of a causal language model: embedding, layers, head, rest."""
    causal: Any = without_adapters(model)
    inner, outer = causal.get_input_embeddings().weight, causal.get_output_embeddings().weight
    stack = f"{stack_of(causal)}."
    parts: dict[str, list[nn.Parameter]] = {}
    for name, p in causal.named_parameters():
        if not p.requires_grad:
            continue
        if p is inner:
            part = "embedding, also the head" if inner is outer else "embedding"
        elif p is outer:
            part = "head"
        elif name.startswith(stack):
            part = f"layer {name.removeprefix(stack).partition('.')[0]}"
        else:
            part = "the rest"
        parts.setdefault(part, []).append(p)
    return parts


def _steps(distiller: Distiller, batch: Batch, rates: list[float]) -> Iterator[Finding]:
    """Train on one batch, one step per learning rate, and check that the loss falls."""
    results, stopped = [], ""
    try:
        for rate in rates:
            results.append(distiller.step([batch], rate))
    except TooFewHealthyParts as error:
        stopped = str(error)
    losses = [result.ce for result in results]
    with torch.no_grad():
        losses.append(float(_mean_loss(distiller, batch)))
    updated, peak = sum(result.updated for result in results), max(rates)
    yield Finding(
        f"{count(len(rates), 'step')} on one batch",
        f"loss {losses[0]:.4g} to {losses[-1]:.4g}, {updated} of {len(results)} steps taken, peak"
        f" learning rate {peak:g}",
        ""
        if losses[-1] < losses[0]
        else f"the loss does not fall: try --learning_rate {peak / 10:.1g}",
    )
    if stopped:
        yield Finding("steps: stopped", stopped, FOLLOW_MESSAGE)
    events = distiller.guard.events.events
    # In the first steps the loss scale is still being adjusted.
    adjusting = distiller.precision.scale and updated > 0
    for event, times in Counter(f"{e.part}: {e.reason}; {e.action}" for e in events).items():
        yield Finding("steps: guard", f"{times} x {event}", "" if adjusting else "see above", True)
