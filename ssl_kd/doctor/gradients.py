"""The user's language model: one forward and backward pass, then ten steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ssl_kd.datasets.blocks import Batch, Blocks, isolates_documents, make_blocks
from ssl_kd.datasets.picture_blocks import make_picture_blocks
from ssl_kd.datasets.text import first_few, open_text
from ssl_kd.doctor.finding import AS_SAID, Finding, count
from ssl_kd.guard.parts import TooFewHealthyParts
from ssl_kd.guard.precision import promote_to_fp32
from ssl_kd.guard.seeds import seeded
from ssl_kd.language.setting_groups import TextSettings
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.step import Distiller, precision_of
from ssl_kd.settings import SettingsError
from ssl_kd.teachers.causal import CausalLM, load_causal_lm, positions, without_adapters
from ssl_kd.teachers.layers import stack_of
from ssl_kd.teachers.student import add_lora
from ssl_kd.training.schedule import learning_rate_at

STEPS = 10
TEXT_BYTES = 1_000_000  # of the text: more than ten steps can see
LARGE_LOGIT = 1e4  # float16 ends at 65504, and intermediate sums are larger still
EXPLODED = 100.0  # times the median norm of the parts
SCALE = 1024.0  # of the loss in float16, as the guard would have it
HALF = torch.finfo(torch.float16)
SHOWN = 5
NOT_AGAIN = (
    "a second run of the same batch is finite, so the device does not compute the same twice: "
    "check its memory and its driver"
)


def open_model(student: str, settings: TextSettings) -> tuple[CausalLM, Blocks]:
    """Load a model in the dtype that it is stored in, and lay out some of the text.

    Args:
        student: STUDENT_MODEL.
        settings: the text, and the length of its rows.

    Raises:
        SettingsError: STUDENT_MODEL names no existing model.
        FileNotFoundError, CausalLMUnavailable, ValueError: as by `load_causal_lm`, `open_text` and
            `make_blocks`.
    """
    if student.startswith(("fresh:", "layers:", "llama:")):
        raise SettingsError(
            f"STUDENT_MODEL is {student!r}, which is made during a run: name an existing model, "
            "--model FOLDER or its name on the Hugging Face Hub."
        )
    stored: Any = "auto"  # the dtype in the file, which load_causal_lm passes on
    lm = load_causal_lm(student, dtype=stored)
    texts = open_text(settings.data_path, "train", max_bytes=TEXT_BYTES)
    size = min(settings.block_size, positions(lm.model) or settings.block_size)
    if lm.processor is not None:
        return lm, make_picture_blocks(texts, lm.processor, size)
    packing = settings.packing and isolates_documents(lm.model)
    return lm, make_blocks(texts, lm.tokenizer, size, packing=packing)


def gradients(settings: LanguageSettings, lm: CausalLM, blocks: Blocks) -> Iterator[Finding]:
    """What training by cross-entropy would meet in its first steps; the model is changed."""
    settings = settings.replace(
        teacher_model="none",
        teacher_cache=None,
        quantization=None,
        alpha_ce=1.0,
        alpha_kd=0.0,
        alpha_hidden=0.0,
        schedule=None,
        align="auto",
        router_mode="native",
        legacy_clamp=None,
    )
    precision = precision_of(settings)
    yield Finding("precision", str(precision))
    yield from _weights(lm.model)
    model = lm.model
    if settings.lora_rank:
        model = add_lora(model, settings.lora_rank, settings.lora_alpha)
    gpus = [precision.device] if precision.device.type == "cuda" else []
    with seeded(settings.seed, gpus):
        distiller = Distiller(model, settings, precision)
        rows = range(min(settings.batch_size, len(blocks)))
        batch = blocks.batch(rows, precision.device)
        if not (yield from _forward(distiller, batch)):
            return
        yield from _backward(distiller, batch)
        yield from _steps(distiller, batch)


def _weights(model: nn.Module) -> Iterator[Finding]:
    """Promote the weights to float32, and look at their range."""
    n = sum(p.numel() for p in model.parameters())
    stored = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()}))
    yield Finding("model", f"{type(model).__name__}, {n:,} parameters, stored in {stored}")
    if (line := promote_to_fp32(model)) is not None:
        yield Finding("weights: promoted", line)
    sick, largest, where, over, lost = [], 0.0, "", 0, 0
    for name, p in model.named_parameters():
        size = p.detach().abs()
        if not size.isfinite().all():
            sick.append(name)
            continue
        if (peak := float(size.max())) > largest:
            largest, where = peak, name
        over += int((size > HALF.max).sum())
        lost += int(((size > 0) & (size < HALF.smallest_normal * HALF.eps)).sum())
    yield Finding(
        "weights: finite",
        f"NaN or inf in {', '.join(first_few(sick, SHOWN))}" if sick else "all of them",
        "the file is damaged, or its training diverged: take an earlier checkpoint, or download it"
        " again"
        if sick
        else "",
    )
    yield Finding(
        "weights: range",
        f"largest {largest:.3g} in {where or 'none'}; in float16 {over:,} of {n:,} would overflow,"
        f" and {lost:,} underflow to zero",
        "use --model_dtype bfloat16 or float32" if over else "",
        note=bool(over),
    )


def _forward(distiller: Distiller, batch: Batch) -> Generator[Finding, None, bool]:
    """Loss and logits; returns whether the loss is finite, so that a backward pass makes sense."""
    with torch.no_grad(), distiller.precision.autocast():
        logits = distiller.student(**batch.model_inputs(), use_cache=False).logits
    largest, way = float(logits.abs().amax()), ""  # NaN where one is
    if math.isfinite(largest) and largest > LARGE_LOGIT:
        way = "float16 ends at 65504: use --model_dtype bfloat16 or float32"
    seen = f"{list(logits.shape)}, largest {largest:.3g}"
    yield Finding("forward: logits", seen, way, note=bool(way))

    ce = float(_mean_loss(distiller, batch).detach())
    guessing = math.log(logits.shape[-1])
    seen = f"{ce:.4g} nats a token; guessing among {logits.shape[-1]:,} tokens gives {guessing:.4g}"
    if not math.isfinite(ce):
        why = distiller.explain(batch) or NOT_AGAIN
        yield Finding("forward: loss", seen, why)
        return False
    worse = ce > 1.2 * guessing
    way = "worse than guessing: does the tokenizer belong to this model?" if worse else ""
    yield Finding("forward: loss", seen, way, note=worse)
    return True


def _mean_loss(distiller: Distiller, batch: Batch) -> Tensor:
    return distiller.terms(batch)["ce"] / max(int(batch.counts.sum()), 1)


def _backward(distiller: Distiller, batch: Batch) -> Iterator[Finding]:
    """The gradient's norm by part: embedding, each layer, head, the rest."""
    parts = _parts(distiller.student)
    trained = [p for some in parts.values() for p in some]
    scale = SCALE if distiller.precision.scale else 1.0
    loss = _mean_loss(distiller, batch) * scale
    found = iter(torch.autograd.grad(loss, trained, allow_unused=True))
    norms: dict[str, float] = {}
    for part, some in parts.items():
        sizes = [g.norm() for g in (next(found) for _ in some) if g is not None]
        norms[part] = float(torch.stack(sizes).norm()) / scale if sizes else 0.0
    finite = sorted(norm for norm in norms.values() if math.isfinite(norm))
    median = finite[len(finite) // 2] if finite else math.nan
    for part, norm in norms.items():
        way, note = "", False
        if not math.isfinite(norm):
            way = distiller.explain(batch) or NOT_AGAIN
        elif norm == 0:
            way = "no gradient reaches it: look for a detach, a clamp or an unused module"
        elif norm > EXPLODED * median:
            way, note = f"{norm / median:.0f} times the median part: leave CLIP_GRAD on", True
        yield Finding(f"gradient: {part}", f"norm {norm:.3g}", way, note)
    total = math.hypot(*norms.values())
    limit = distiller.settings.clip_grad
    clipped = limit is not None and total > limit
    yield Finding(
        "gradient: all", f"norm {total:.3g}{f', clipped to {limit:g} in training' * clipped}"
    )


def _parts(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Trained parameters by where they stand in a causal language model."""
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


def _steps(distiller: Distiller, batch: Batch) -> Iterator[Finding]:
    """Ten steps on one batch, as a run takes them."""
    settings, results, stopped = distiller.settings, [], ""
    try:
        for step in range(STEPS):
            how = settings.peak_lr, settings.warmup_fraction, settings.lr_schedule
            rate = learning_rate_at(step, STEPS, *how)
            results.append(distiller.step([batch], rate))
    except TooFewHealthyParts as error:
        stopped = str(error)
    losses = [result.ce for result in results]
    with torch.no_grad():
        losses.append(float(_mean_loss(distiller, batch)))
    updated = sum(result.updated for result in results)
    fell = losses[-1] < losses[0]
    yield Finding(
        f"{count(STEPS, 'step')} on one batch",
        f"loss {losses[0]:.4g} to {losses[-1]:.4g}, {updated} of {len(results)} steps taken, peak"
        f" learning rate {settings.peak_lr:g}",
        "" if fell else f"the loss does not fall: try --learning_rate {settings.peak_lr / 10:.1g}",
    )
    if stopped:
        yield Finding("steps: stopped", stopped, AS_SAID)
    events = distiller.guard.events.events
    # The loss scale is still settling: that is what the first steps are for.
    settling = distiller.precision.scale and updated > 0
    for reason, times in Counter(f"{e.part}: {e.reason}; {e.action}" for e in events).items():
        yield Finding("steps: guard", f"{times} x {reason}", "" if settling else "see above", True)
