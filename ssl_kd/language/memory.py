"""How much memory a training step will need, by part, before the first one; and what lowers it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ssl_kd.guard.precision import DeviceInfo
from ssl_kd.losses.token_terms import ROW_BYTES, chunk_rows
from ssl_kd.settings import SettingsError
from ssl_kd.teachers.causal import without_adapters
from ssl_kd.teachers.frozen import FrozenTeacher, linear_head

if TYPE_CHECKING:
    from ssl_kd.language.settings import LanguageSettings

LOWERED_BY = {
    "teacher": ("TEACHER_CACHE", "TEACHER_OFFLOAD", "TEACHER_QUANTIZATION", "MODEL_DTYPE"),
    "cache": ("CACHE_METHOD", "CACHE_K", "BATCH_SIZE", "BLOCK_SIZE"),
    "student": ("STUDENT_MODEL", "LORA_QUANTIZATION"),
    "optimizer": ("LORA_RANK", "STUDENT_MODEL"),
    "guard": ("LORA_RANK", "STUDENT_MODEL"),
    "router": ("GRADIENT_CHECKPOINTING", "BATCH_SIZE", "BLOCK_SIZE", "ROUTER_MODE"),
    "activations": ("GRADIENT_CHECKPOINTING", "BATCH_SIZE", "BLOCK_SIZE", "MODEL_DTYPE"),
    "loss": ("BATCH_SIZE", "BLOCK_SIZE", "LORA_RANK"),
    "features": ("LAYER_MAP", "BATCH_SIZE", "BLOCK_SIZE"),
}
ALIGNED_BYTES = 20  # of a token's logit in `uld` and `chunks`, with what is made of it
_FP32 = 4  # bytes
MIB = 1 << 20


@dataclass(frozen=True)
class MemoryEstimate:
    """What each part adds to the peak of a step.

    Attributes:
        parts: MiB of `teacher`, its `cache` (answers to a batch, and an output head), `student`
            (weights, with copies in half precision), `optimizer` (gradients and AdamW's two
            moments), `guard` (the last good state, on the CPU: a GPU's is in the host's memory),
            `router` (what a router that learns keeps of the teacher's activations), `activations`,
            `loss` and `features` (hidden states and attention).
        lowered_by: the settings that lower each part.
    """

    parts: Mapping[str, float]
    lowered_by: Mapping[str, tuple[str, ...]]

    @property
    def total(self) -> float:
        """MiB at the peak."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        """A table, the largest part first."""
        lines = ["part              MiB  lowered by"]
        there = [(name, size) for name, size in self.parts.items() if size]
        for name, size in sorted(there, key=lambda item: -item[1]):
            lines.append(f"{name:11s}{size:10,.1f}  {', '.join(self.lowered_by[name])}".rstrip())
        return "\n".join([*lines, f"{'total':11s}{self.total:10,.1f}"])


def refused(settings: LanguageSettings, device: torch.device) -> set[str]:
    """The settings of LOWERED_BY whose change to lower memory would be refused beside the others.

    TEACHER_CACHE with ALIGN, TEACHER_OFFLOAD with SHARD, a BATCH_SIZE below 1, and the like: the
    settings themselves are asked. And MODEL_DTYPE on a device that is slow in half precision, where
    it is not used.
    """
    tried = {
        "teacher_cache": "cache",
        "teacher_offload": True,
        "teacher_quantization": "nf4",
        "lora_quantization": "nf4",
        "lora_rank": 8,
        "gradient_checkpointing": True,
        "router_mode": "native",
        "batch_size": settings.batch_size // 2,
        "block_size": settings.block_size // 2,
    }
    found = set()
    for name, value in tried.items():
        try:
            settings.replace(**{name: value})
        except SettingsError:
            found.add(name.upper())
    if device.type == "cpu":  # bitsandbytes saves nothing there
        found |= {"TEACHER_QUANTIZATION", "LORA_QUANTIZATION"}
    return found if DeviceInfo.of(device).halves()[0] else found | {"MODEL_DTYPE"}


def estimate_memory(
    student: Any,
    teacher: FrozenTeacher | None = None,
    *,
    batch_size: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    accumulation_steps: int = 1,
    gradient_checkpointing: bool = False,
    device: str | torch.device = "cpu",
    align: str = "auto",
    cached: int = 0,
    features: int = 0,
) -> MemoryEstimate:
    """Estimate the peak memory of a training step.

    With n = batch * block tokens, h the width, f the width of the feed-forward layers, a heads of
    attention, e bytes of `dtype`, V tokens of vocabulary, C tokens of a chunk of the loss:

    - activations kept for the backward pass, of one layer: `n * (24 h + e * (4 h + 4 f))` bytes
      (norms and residuals in float32, queries, keys, values and the answer, a gated feed-forward
      layer), and `n * a * block * (2 + e)` where attention keeps its matrix: eager attention, or
      dropout in it on a CPU (with dropout thrice that);
    - of all layers together; with gradient checkpointing each layer's input, `4 n h`, and one
      layer;
    - gradients on their way: `4 n (h + 2 f)`; embeddings and last norm: `12 n h`;
    - router: as activations, with the feed-forward layers of all experts; with gradient
      checkpointing also their gradients on the way, `2 e n f` an expert;
    - loss: gradients of the head's weight and of the hidden states, `4 V h + 4 n h`, and buffers
      of C logits of student and teacher; with ALIGN `uld` or `chunks` also `20 n` bytes a token of
      either vocabulary.

    On a CPU, against the allocator's own peak, it was between 0.89 and 1.40 times the truth (Llama,
    GPT-2, OPT, GPT-NeoX and Gemma 2 of 3 to 6 layers, width 192 to 256 and vocabularies of 4096 and
    32000; with and without checkpointing and adapters; fp32 and bf16; 4 x 256 tokens). A GPU's
    context, fragments in its cache, and what evaluation needs are not in it.

    Args:
        student: the model to be trained, with its adapters if it has any.
        teacher: the live teacher; None without, or with its cache. Its router learns where any
            parameter wants a gradient.
        batch_size: rows of a forward pass.
        block_size: tokens of a row.
        dtype: of the student's products (autocast).
        accumulation_steps: forward passes of a step. Gradients of the first pass are there during
            the second; with one pass they take the place of activations.
        gradient_checkpointing: whether it is used.
        device: where the step runs.
        align: ALIGN.
        cached: bytes that the answers of the teacher's cache take on the device, its output head
            included (`TeacherCache.on_device`).
        features: bytes that the terms of ALPHA_HIDDEN and ALPHA_ATTENTION hold (their `held`).
    """
    on_cpu = torch.device(device).type == "cpu"
    n, e = batch_size * block_size, dtype.itemsize
    half = dtype != torch.float32
    weights = sum(p.numel() * p.element_size() for p in student.parameters())
    trained = sum(p.numel() for p in student.parameters() if p.requires_grad)
    if half:  # autocast keeps a copy of each float32 matrix until the forward pass ends
        matrices = (p for p in student.parameters() if p.ndim == 2 and p.dtype == torch.float32)
        weights += e * sum(p.numel() for p in matrices)
    layer, fixed, entrance = _activations(student, batch_size, block_size, e, on_cpu)
    depth = _text_config(student).num_hidden_layers
    activations = fixed + (depth * entrance + layer if gradient_checkpointing else depth * layer)
    loss = _loss(student, teacher, n, dtype, on_cpu)
    if teacher is not None and align in ("uld", "chunks"):
        heads = [without_adapters(m).get_output_embeddings() for m in (student, teacher.model)]
        loss += n * ALIGNED_BYTES * sum(len(head.weight) for head in heads)
    router = _router(teacher, batch_size, block_size, gradient_checkpointing, on_cpu)
    gradients = _FP32 * trained
    if accumulation_steps == 1:
        gradients = max(0, gradients - activations - loss)

    parts = {
        "teacher": _teacher(teacher, n, activations + loss),
        "cache": cached,
        "student": weights,
        "optimizer": 2 * _FP32 * trained + gradients,
        "guard": 3 * _FP32 * trained if on_cpu else 0,
        "router": router,
        "activations": activations,
        "loss": loss,
        "features": features,
    }
    used = set()
    if gradient_checkpointing:
        used.add("GRADIENT_CHECKPOINTING")
    if on_cpu or (teacher is not None and teacher.offload):
        used.add("TEACHER_OFFLOAD")
    if half:
        used.add("MODEL_DTYPE")
    if student is not without_adapters(student):
        used.add("LORA_RANK")
    return MemoryEstimate(
        {name: size / MIB for name, size in parts.items()},
        {name: tuple(s for s in LOWERED_BY[name] if s not in used) for name in parts},
    )


def _teacher(teacher: FrozenTeacher | None, n: int, later: float) -> float:
    """Weights and last hidden states; where offloaded, what its own pass needs beyond `later`."""
    if teacher is None:
        return 0
    model = teacher.model
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    h, f, _ = _widths(model)
    answer = n * h * model.dtype.itemsize
    passing = n * (3 * h + 3 * f) * model.dtype.itemsize
    if not teacher.offload:
        return weights + answer + max(0, passing - later)
    head = without_adapters(model).get_output_embeddings().weight
    stays = head.numel() * head.element_size() + answer
    return max(stays, weights + passing - later)


def _router(
    teacher: FrozenTeacher | None,
    batch_size: int,
    block_size: int,
    gradient_checkpointing: bool,
    on_cpu: bool,
) -> float:
    if teacher is None or not any(p.requires_grad for p in teacher.model.parameters()):
        return 0
    config, e = _text_config(teacher.model), teacher.model.dtype.itemsize
    names = ("num_local_experts", "num_experts")
    experts = next(n for name in names if (n := getattr(config, name, None)))
    f = experts * (getattr(config, "moe_intermediate_size", None) or config.intermediate_size)
    layer, _, entrance = _activations(teacher.model, batch_size, block_size, e, on_cpu, f)
    if gradient_checkpointing:
        passing = 2 * e * batch_size * block_size * f
        return config.num_hidden_layers * entrance + layer + passing
    return config.num_hidden_layers * layer


def _activations(
    model: Any, batch_size: int, block_size: int, e: int, on_cpu: bool, width: int | None = None
) -> tuple[float, float, float]:
    """Bytes of one layer, of what is there only once, and of one layer's input.

    With `width` in place of the feed-forward layer's own.
    """
    n = batch_size * block_size
    h, f, heads = _widths(model)
    f = width or f
    config = _text_config(model)
    layer = n * (6 * _FP32 * h + e * (4 * h + 4 * f))
    dropout = any(getattr(config, name, 0) for name in ("attn_pdrop", "attention_dropout"))
    eager = getattr(config, "_attn_implementation", None) == "eager"
    if eager or (dropout and on_cpu):
        layer += n * heads * block_size * (2 + e) * (3 if dropout else 1)
    return layer, n * _FP32 * (3 * h + h + 2 * f), n * _FP32 * h


def _loss(
    student: Any, teacher: FrozenTeacher | None, n: int, dtype: torch.dtype, on_cpu: bool
) -> float:
    e = dtype.itemsize
    head = without_adapters(student).get_output_embeddings().weight
    vocabulary, h = head.shape
    if linear_head(student) is None:  # logits, their float32 copy and gradients
        return n * vocabulary * (2 * e + 3 * _FP32)
    chunk = min(n, chunk_rows(vocabulary, "cpu" if on_cpu else "cuda"))
    logits = chunk * vocabulary * (2 * e + (_FP32 if dtype == torch.float16 else 0))
    if teacher is not None and not teacher.linear:
        logits += n * vocabulary * teacher.model.dtype.itemsize * 2
    arithmetic = 8 * (ROW_BYTES if on_cpu else chunk * vocabulary * _FP32)
    weight = head.numel() * (_FP32 if head.requires_grad else 0)
    copy = head.numel() * e if dtype != head.dtype else 0
    return logits + arithmetic + weight + copy + n * h * (_FP32 + e)


def _text_config(model: nn.Module) -> Any:
    return without_adapters(model).config.get_text_config()


def _widths(model: nn.Module) -> tuple[int, int, int]:
    """Width of the model, of its feed-forward layers, and how many heads it has."""
    config = _text_config(model)
    names = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    widths = (getattr(config, name, None) for name in names)
    h = config.hidden_size
    return h, next((width for width in widths if width), 4 * h), config.num_attention_heads
