"""What a distillation is given: does it fit together?"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ssl_kd.divergences import DIVERGENCES
from ssl_kd.losses.teacher_output import (
    LinearTeacher,
    LogitsTeacher,
    SampledTeacher,
    TeacherOutput,
    TopKTeacher,
)


def check_targets(targets: Tensor, n: int, vocab: int) -> None:
    """Raise ValueError or TypeError where targets are not `n` tokens of the vocabulary."""
    if targets.shape != (n,):
        raise ValueError(f"targets {tuple(targets.shape)} do not fit {n} tokens, expected ({n},)")
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise TypeError(f"targets are {targets.dtype}, expected the ids of tokens, int64")
    # On a GPU looking would wait for it, and its own assertion finds these.
    if n and targets.device.type == "cpu" and not 0 <= targets.min() <= targets.max() < vocab:
        raise ValueError(
            f"targets go from {targets.min()} to {targets.max()}, expected 0 to {vocab - 1}: "
            "leave out the positions that do not count (next_token_targets)"
        )


def check_teacher(teacher: TeacherOutput, n: int, vocab: int, divergence: str) -> None:
    """Raise ValueError or TypeError where a teacher does not fit `n` tokens of a student."""
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
        looks = n and teacher.indices.device.type == "cpu"  # as at targets
        if looks and not 0 <= teacher.indices.min() <= teacher.indices.max() < vocab:
            raise ValueError(
                f"{kind}.indices go from {teacher.indices.min()} to {teacher.indices.max()}, the "
                f"student's vocabulary to {vocab - 1}: not the same tokenizer"
            )


def shares_of(
    teachers: Sequence[TeacherOutput], weights: Sequence[float] | None
) -> tuple[Sequence[TeacherOutput], Sequence[float]]:
    """The teachers that count, and the share of each in their mean: they sum to 1.

    Raises:
        ValueError: a weight is negative or not finite, none is above 0, or there are more or fewer
            than teachers.
    """
    if weights is None:
        return teachers, [1 / len(teachers)] * len(teachers) if teachers else []
    if len(weights) != len(teachers):
        raise ValueError(f"teacher_weights has {len(weights)} numbers for {len(teachers)} teachers")
    if any(not 0 <= weight < math.inf for weight in weights) or (teachers and not any(weights)):
        raise ValueError(
            f"teacher_weights are {list(weights)}, expected finite numbers of at least 0, and one "
            "above"
        )
    counted = [(t, w) for t, w in zip(teachers, weights, strict=True) if w > 0]
    total = sum(weight for _, weight in counted)
    return [teacher for teacher, _ in counted], [weight / total for _, weight in counted]
