"""The clamps of older scripts, for comparison: what they allow, and the loss under them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ssl_kd.errors import InputError
from ssl_kd.losses.rows import row_divergences, saturated
from ssl_kd.losses.teacher_output import LinearTeacher, LogitsTeacher, TeacherOutput, logits_of
from ssl_kd.losses.token_terms import TokenObjective


@dataclass(frozen=True)
class LegacyClamp:
    """Logits clamped to [-c, c], and each token's loss terms to a window.

    Clamped values have no gradient, and the lowest perplexity that clamped logits allow is far
    above 1 (`lowest_perplexity`).

    Args:
        logits: c, positive.
        low: lower end of the window of each token's cross-entropy and T^2 D; None for no window.
        high: upper end.

    Raises:
        ValueError: c is not positive, or the window has one end only or is empty.
    """

    logits: float
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.logits < math.inf:
            raise ValueError(f"the clamp of the logits is {self.logits!r}, expected more than 0")
        if (self.low is None) != (self.high is None):
            raise ValueError(f"the loss window is {self.low!r} to {self.high!r}: give both ends")
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ValueError(f"the loss window is {self.low!r} to {self.high!r}, and is empty")

    @classmethod
    def parse(cls, text: str) -> LegacyClamp:
        """Read `"2.5"` (logits) or `"2.5:0.1:5.0"` (logits, and the loss window).

        Raises:
            ValueError: the text has neither form.
        """
        try:
            numbers = [float(part) for part in text.split(":")]
        except ValueError:
            numbers = []
        if len(numbers) not in (1, 3):
            raise ValueError(f"legacy_clamp is {text!r}, expected LOGITS or LOGITS:LOW:HIGH")
        return cls(*numbers)

    def lowest_perplexity(self, vocab: int) -> float:
        """Return the perplexity of the best model: the target's logit is c, all others -c.

        >>> round(LegacyClamp(2.5).lowest_perplexity(50257))
        340
        """
        return 1 + (vocab - 1) * math.exp(-2 * self.logits)

    def check(self, vocab: int) -> None:
        """Refuse a window that contains no loss these logits can have: its gradient is always 0.

        Raises:
            InputError: names the cross-entropies that the clamp allows.
        """
        if self.low is None or self.high is None:
            return
        perplexity = self.lowest_perplexity(vocab)
        lowest = math.log(perplexity)
        highest = math.log1p((vocab - 1) * math.exp(2 * self.logits))
        if self.low >= highest or self.high <= lowest:
            constant = self.high if self.high <= lowest else self.low
            raise InputError(
                f"logits clamped to +-{self.logits:g} allow no perplexity below {perplexity:.3g} "
                f"with {vocab} tokens, so cross-entropies from {lowest:.3g} to {highest:.3g}; "
                f"clamped to {self.low:g} to {self.high:g} they are the constant {constant:g} for "
                "every model, and nothing is learned. Leave the clamp out, or widen the window"
            )


def clamped_distillation(
    clamp: LegacyClamp, student_logits: Tensor, objective: TokenObjective
) -> tuple[Tensor, Tensor]:
    """Compute the terms of `logits_distillation` as older scripts did, from all logits at once."""
    clamp.check(student_logits.shape[-1])

    def in_window(terms: Tensor) -> Tensor:
        return terms if clamp.high is None else terms.clamp(clamp.low, clamp.high)

    z = saturated(student_logits).clamp(-clamp.logits, clamp.logits)
    ce = kd = z[:0].sum()  # 0, on the graph
    if objective.targets is not None:
        ce = in_window(F.cross_entropy(z, objective.targets, reduction="none")).sum()
    common, outside, t = objective.common, objective.outside, objective.temperature
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
            f"legacy_clamp needs the teacher's logits, and a {type(teacher).__name__} has none: "
            "use the live teacher, or leave the clamp out"
        )
    # In half precision by its own dtype: what fits bfloat16 may be beyond autocast's float16.
    kind, half = teacher.weight.device.type, teacher.weight.itemsize == 2
    with torch.autocast(kind, enabled=torch.is_autocast_enabled(kind) and not half):
        return logits_of(teacher)
