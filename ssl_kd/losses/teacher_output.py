"""What a teacher gives at some positions: hidden states with a head, logits, or parts of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch.nn.functional as F
from torch import Tensor


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
        indices: `[n, k]`, integer; a token may come up more than once.
        weights: `[n, k]`, of each draw, so that the expected weight of a token is its probability.
        entropy: `[n]`, of `softmax(logits / temperature)`, in nats.
    """

    indices: Tensor
    weights: Tensor
    entropy: Tensor


TeacherOutput: TypeAlias = LinearTeacher | LogitsTeacher | TopKTeacher | SampledTeacher


def logits_of(teacher: LinearTeacher | LogitsTeacher, rows: slice = slice(None)) -> Tensor:
    """Logits `[n, vocab]` of some rows."""
    if isinstance(teacher, LogitsTeacher):
        return teacher.logits[rows]
    return F.linear(teacher.hidden[rows], teacher.weight, teacher.bias)


def chosen(teacher: TeacherOutput, tokens: slice | Tensor) -> TeacherOutput:
    """What a teacher gives at some of the tokens."""
    if isinstance(teacher, LinearTeacher):
        return replace(teacher, hidden=teacher.hidden[tokens])
    return type(teacher)(*(x[tokens] for x in vars(teacher).values()))


def rows_of(teacher: TeacherOutput, start: int, stop: int) -> TeacherOutput:
    """Rows `start` to `stop` of a teacher."""
    return chosen(teacher, slice(start, stop))
