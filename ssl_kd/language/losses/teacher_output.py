"""Types of teacher output at n positions: hidden states, logits, top-k or sampled tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch.nn.functional as F
from torch import Tensor

from ssl_kd.language.losses.divergences import DIVERGENCES, selects_by_student


@dataclass(frozen=True)
class LinearTeacher:
    """Hidden states and output layer of a teacher, from which logits are computed in chunks."""

    hidden: Tensor  # `[n, teacher_dim]`, the last hidden states
    weight: Tensor  # `[vocab, teacher_dim]`; may be padded differently from the student's
    bias: Tensor | None = None  # `[vocab]`; -inf excludes an entry from the vocabulary


@dataclass(frozen=True)
class LogitsTeacher:
    """Logits `[n, vocab]` of a teacher; entries that are -inf in all rows are excluded."""

    logits: Tensor


@dataclass(frozen=True)
class TopKTeacher:
    """The k likeliest tokens of a teacher, and the total probability of all other tokens.

    The loss compares k + 1 outcomes: the k tokens, and "any other token".
    """

    indices: Tensor  # `[n, k]`, integer, IDs of the tokens
    log_probs: Tensor  # `[n, k]`, logarithms of `softmax(logits / temperature)` at the tokens
    log_tail: Tensor  # `[n]`, logarithm of the probability of all other tokens; may be -inf


@dataclass(frozen=True)
class SampledTeacher:
    """Tokens sampled from a teacher, for an unbiased estimate of `forward_kl`."""

    indices: Tensor  # `[n, k]`, integer, IDs of the sampled tokens; may be repeated
    weights: Tensor  # `[n, k]`: the expected sum of a token's weights is its probability
    entropy: Tensor  # `[n]`, entropy of `softmax(logits / temperature)`, in nats


TeacherOutput: TypeAlias = LinearTeacher | LogitsTeacher | TopKTeacher | SampledTeacher


def logits_of(teacher: LinearTeacher | LogitsTeacher, rows: slice = slice(None)) -> Tensor:
    """Return the teacher's logits `[n, vocab]` at the selected rows."""
    if isinstance(teacher, LogitsTeacher):
        return teacher.logits[rows]
    return F.linear(teacher.hidden[rows], teacher.weight, teacher.bias)


def select_rows(teacher: TeacherOutput, rows: slice | Tensor) -> TeacherOutput:
    """Return the teacher's output at the selected positions."""
    if isinstance(teacher, LinearTeacher):
        return replace(teacher, hidden=teacher.hidden[rows])
    return type(teacher)(*(x[rows] for x in vars(teacher).values()))


def check_teacher(teacher: TeacherOutput, n: int, vocab: int, divergence: str) -> None:
    """Raise ValueError or TypeError if a teacher's output does not fit a student's `n` tokens."""
    kind = type(teacher).__name__
    if not isinstance(teacher, (LinearTeacher, LogitsTeacher, TopKTeacher, SampledTeacher)):
        raise TypeError(
            f"a teacher is of type {kind}; expected a type such as LogitsTeacher(logits)"
        )
    for name, value in vars(teacher).items():
        if name not in ("weight", "bias") and len(value) != n:
            raise ValueError(
                f"{kind}.{name} has {len(value)} rows; expected {n}, as the student has"
            )
    estimated = [name for name, entry in DIVERGENCES.items() if entry.from_samples]
    if isinstance(teacher, SampledTeacher) and divergence not in estimated:
        raise ValueError(
            f"the divergence is {divergence!r}; sampled tokens can estimate "
            f"{', '.join(estimated)} only: use that, or store the top k tokens instead"
        )
    if isinstance(teacher, TopKTeacher) and selects_by_student(divergence):
        raise ValueError(
            f"the divergence is {divergence!r}, and a TopKTeacher has no probabilities of the "
            "student's likeliest tokens: use 'reverse_kl', or a teacher with all its logits"
        )
    if isinstance(teacher, (TopKTeacher, SampledTeacher)):
        indices = teacher.indices
        # On a GPU this would wait for the device, whose own assertion finds wrong indices.
        on_cpu = n and indices.device.type == "cpu"
        if on_cpu and not 0 <= indices.min() <= indices.max() < vocab:
            raise ValueError(
                f"{kind}.indices go from {indices.min()} to {indices.max()}; expected 0 to "
                f"{vocab - 1}, the student's vocabulary: use a teacher with the same tokenizer"
            )
