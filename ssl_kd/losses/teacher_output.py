"""What a teacher answers at n positions: hidden states with a head, logits, or parts of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch.nn.functional as F
from torch import Tensor

from ssl_kd.divergences import DIVERGENCES


@dataclass(frozen=True)
class LinearTeacher:
    """A teacher by its last hidden states and output weights; logits exist a chunk at a time.

    Args:
        hidden: `[n, teacher_dim]`.
        weight: `[vocab, teacher_dim]`; the vocabulary may be padded differently from the student's.
        bias: `[vocab]` or None; an entry of -inf is outside the vocabulary.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class LogitsTeacher:
    """A teacher by its logits `[n, vocab]`; an entry that is -inf in every row is outside."""

    logits: Tensor


@dataclass(frozen=True)
class TopKTeacher:
    """A teacher by its k likeliest tokens; all others are one more outcome, on both sides.

    Args:
        indices: `[n, k]`, integer.
        log_probs: `[n, k]`, of `softmax(logits / temperature)`.
        log_tail: `[n]`, the log of the mass of all others; may be -inf.
    """

    indices: Tensor
    log_probs: Tensor
    log_tail: Tensor


@dataclass(frozen=True)
class SampledTeacher:
    """A teacher by importance-sampled tokens: an unbiased estimate of some divergences.

    Of those that have `from_samples` in `ssl_kd.divergences`: `forward_kl`.

    Args:
        indices: `[n, k]`, integer; a token may occur more than once.
        weights: `[n, k]`, of each draw, so that the expected weight of a token is its probability.
        entropy: `[n]`, of `softmax(logits / temperature)`, in nats.
    """

    indices: Tensor
    weights: Tensor
    entropy: Tensor


TeacherOutput: TypeAlias = LinearTeacher | LogitsTeacher | TopKTeacher | SampledTeacher


def logits_of(teacher: LinearTeacher | LogitsTeacher, rows: slice = slice(None)) -> Tensor:
    """Return the logits `[n, vocab]` of some rows."""
    if isinstance(teacher, LogitsTeacher):
        return teacher.logits[rows]
    return F.linear(teacher.hidden[rows], teacher.weight, teacher.bias)


def select_rows(teacher: TeacherOutput, rows: slice | Tensor) -> TeacherOutput:
    """Return the teacher's answer at some of the positions."""
    if isinstance(teacher, LinearTeacher):
        return replace(teacher, hidden=teacher.hidden[rows])
    return type(teacher)(*(x[rows] for x in vars(teacher).values()))


def check_teacher(teacher: TeacherOutput, n: int, vocab: int, divergence: str) -> None:
    """Raise ValueError or TypeError if a teacher does not fit `n` tokens of a student."""
    kind = type(teacher).__name__
    if not isinstance(teacher, (LinearTeacher, LogitsTeacher, TopKTeacher, SampledTeacher)):
        raise TypeError(f"a teacher is a {kind}, expected LogitsTeacher(logits) or another of them")
    for name, value in vars(teacher).items():
        if name not in ("weight", "bias") and len(value) != n:
            raise ValueError(f"{kind}.{name} has {len(value)} rows, the student {n}")
    estimated = [name for name, entry in DIVERGENCES.items() if entry.from_samples]
    if isinstance(teacher, SampledTeacher) and divergence not in estimated:
        raise ValueError(
            f"sampled tokens estimate {', '.join(estimated)}, not {divergence}: store the top k "
            "for that"
        )
    if isinstance(teacher, (TopKTeacher, SampledTeacher)):
        indices = teacher.indices
        # On a GPU this would wait for the device, whose own assertion finds wrong indices.
        on_cpu = n and indices.device.type == "cpu"
        if on_cpu and not 0 <= indices.min() <= indices.max() < vocab:
            raise ValueError(
                f"{kind}.indices go from {indices.min()} to {indices.max()}, the student's "
                f"vocabulary to {vocab - 1}: not the same tokenizer"
            )
