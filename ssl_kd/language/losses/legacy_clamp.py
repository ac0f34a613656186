"""Reproduce the clamps of older scripts on logits and losses, for comparison only."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ssl_kd.core.errors import InputError
from ssl_kd.core.logits import saturated
from ssl_kd.language.losses.rows import row_divergences
from ssl_kd.language.losses.teacher_output import (
    LinearTeacher,
    LogitsTeacher,
    TeacherOutput,
    logits_of,
)
from ssl_kd.language.losses.token_terms import TokenObjective


@dataclass(frozen=True)
class LegacyClamp:
    """Bounds [-c, c] of logits, and optionally [low, high] of each token's cross-entropy and T^2 D.

    Clamped values have no gradient, and a model with clamped logits cannot reach a low perplexity.
    """

    logits: float
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.logits < math.inf:
            raise ValueError(
                f"the clamp of logits is {self.logits!r}; expected a finite number above 0"
            )
        low, high = self.low, self.high
        if low is None and high is None:
            return
        if low is None or high is None or not low < high:
            raise ValueError(f"the loss window is {low!r} to {high!r}; expected LOW < HIGH")

    @classmethod
    def parse(cls, text: str) -> LegacyClamp:
        """Parse `"C"`, such as `"2.5"`, or `"C:LOW:HIGH"`, such as `"2.5:0.1:5.0"`."""
        try:
            numbers = [float(part) for part in text.split(":")]
        except ValueError:
            numbers = []
        if len(numbers) not in (1, 3):
            raise ValueError(
                f"legacy_clamp is {text!r}; expected C or C:LOW:HIGH, such as 2.5:0.1:5"
            )
        return cls(*numbers)

    def lowest_perplexity(self, vocab: int) -> float:
        """Return the lowest perplexity: the target's logit is c, all other logits are -c."""
        return 1 + (vocab - 1) * math.exp(-2 * self.logits)

    def check(self, vocab: int) -> None:
        """Raise InputError if the clamped loss is constant, with gradient 0, for all models."""
        if self.low is None or self.high is None:
            return
        perplexity = self.lowest_perplexity(vocab)
        lowest = math.log(perplexity)
        highest = math.log1p((vocab - 1) * math.exp(2 * self.logits))
        if self.low >= highest or self.high <= lowest:
            constant = self.high if self.high <= lowest else self.low
            raise InputError(
                f"logits clamped to +-{self.logits:g} allow no perplexity below {perplexity:.3g} "
                f"with {vocab} tokens (cross-entropies from {lowest:.3g} to {highest:.3g}). The "
                f"loss window {self.low:g} to {self.high:g} makes the loss the constant "
                f"{constant:g}, so nothing is learned: remove the clamp, or widen the window"
            )


def clamped_distillation(
    clamp: LegacyClamp, student_logits: Tensor, objective: TokenObjective
) -> tuple[Tensor, Tensor]:
    """Compute the sums of cross-entropies and of T^2 D with clamped logits and clamped terms."""
    clamp.check(student_logits.shape[-1])

    def in_window(terms: Tensor) -> Tensor:
        return terms if clamp.high is None else terms.clamp(clamp.low, clamp.high)

    z = saturated(student_logits).clamp(-clamp.logits, clamp.logits)
    ce = kd = z[:0].sum()  # 0, on the graph
    if objective.targets is not None:
        ce = in_window(F.cross_entropy(z, objective.targets, reduction="none")).sum()
    common = objective.common
    outside = objective.outside
    t = objective.temperature
    for teacher, share in zip(objective.teachers, objective.shares, strict=False):
        logits = saturated(_logits(teacher).to(z.dtype)).clamp(-clamp.logits, clamp.logits)
        rows = row_divergences(z[:, :common], logits[:, :common], t, objective.divergence, outside)
        kd = kd + in_window(rows).sum() * share
    return ce, kd


@torch.no_grad()
def _logits(teacher: TeacherOutput) -> Tensor:
    if isinstance(teacher, LogitsTeacher):
        return teacher.logits
    if not isinstance(teacher, LinearTeacher):
        raise ValueError(
            f"legacy_clamp needs all logits of the teacher, and a {type(teacher).__name__} has not "
            "all of them: use a teacher without cache, or remove the clamp"
        )
    # In half precision by its own dtype: what fits bfloat16 may be beyond autocast's float16.
    kind, half = teacher.weight.device.type, teacher.weight.itemsize == 2
    with torch.autocast(kind, enabled=torch.is_autocast_enabled(kind) and not half):
        return logits_of(teacher)
