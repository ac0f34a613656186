"""The clamps of older scripts, to be compared with: what they allow, and the loss under them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ssl_kd.divergences import Divergence
from ssl_kd.errors import InputError
from ssl_kd.losses.rows import Outside, row_divergences, saturated
from ssl_kd.losses.teacher_output import LinearTeacher, LogitsTeacher, TeacherOutput, logits_of


@dataclass(frozen=True)
class LegacyClamp:
    """The clamps of older scripts: logits held in [-c, c], each token's terms in a window.

    They are here to be compared with. Values held have no gradient, and the lowest perplexity that
    clamped logits allow is far above 1 (`lowest_perplexity`).

    Args:
        logits: c, positive.
        low: lower end of the window of each token's cross-entropy and T^2 D; None for no window.
        high: upper end.

    Raises:
        ValueError: c that is not positive, half a window, or an empty one.
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
            ValueError: anything else.
        """
        try:
            numbers = [float(part) for part in text.split(":")]
        except ValueError:
            numbers = []
        if len(numbers) not in (1, 3):
            raise ValueError(f"legacy_clamp is {text!r}, expected LOGITS or LOGITS:LOW:HIGH")
        return cls(*numbers)

    def lowest_perplexity(self, vocab: int) -> float:
        """The best any model can do: the target at c, all others at -c.

        >>> round(LegacyClamp(2.5).lowest_perplexity(50257))
        340
        """
        return 1 + (vocab - 1) * math.exp(-2 * self.logits)

    def check(self, vocab: int) -> None:
        """Refuse a window that holds every possible loss: its gradient is 0 for every model.

        Raises:
            ValueError: names the lowest (or highest) cross-entropy that the clamp allows.
        """
        if self.low is None or self.high is None:
            return
        perplexity = self.lowest_perplexity(vocab)
        lowest = math.log(perplexity)
        highest = math.log1p((vocab - 1) * math.exp(2 * self.logits))
        if self.high <= lowest:
            raise InputError(
                f"logits held at +-{self.logits:g} allow no perplexity below {perplexity:.3g} "
                f"(cross-entropy {lowest:.3g}) with {vocab} tokens, and the loss is held at "
                f"{self.high:g} or less: it is the constant {self.high:g} for every model, and "
                "nothing is learned. Leave the clamp out, or raise the window's upper end"
            )
        if self.low >= highest:
            raise InputError(
                f"logits held at +-{self.logits:g} allow no cross-entropy above {highest:.3g} "
                f"with {vocab} tokens, and the loss is held at {self.low:g} or more: it is a "
                "constant, and nothing is learned. Leave the clamp out, or lower the window"
            )

    def held(self, logits: Tensor) -> Tensor:
        """The logits in [-c, c], in the dtype of the arithmetic."""
        return saturated(logits).clamp(-self.logits, self.logits)

    def in_window(self, terms: Tensor) -> Tensor:
        """Each token's term, held in the window if there is one."""
        return terms if self.high is None else terms.clamp(self.low, self.high)


def clamped_distillation(
    clamp: LegacyClamp,
    student_logits: Tensor,
    targets: Tensor | None,
    teachers: Sequence[TeacherOutput],
    shares: Sequence[float],
    temperature: float,
    divergence: Divergence,
    common: int,
    outside: Outside | None,
) -> Tensor:
    """`logits_distillation` as older scripts had it: by autograd, with all logits held at once.

    Args:
        clamp: the clamps.
        student_logits: `[n, vocab]`.
        targets: `[n]` int64, or None: no cross-entropy.
        teachers: any number.
        shares: of each in the mean of their divergences.
        temperature: of both softmaxes in the distillation.
        divergence: of teacher and student.
        common: size of the vocabulary that all share, its first part.
        outside: entries of it that one of them leaves out; None for none.

    Returns:
        `[2]`, the sum of cross-entropies, and of T^2 D averaged over the teachers.

    Raises:
        ValueError: nothing could be learned, or a teacher is given without its logits.
    """
    clamp.check(student_logits.shape[-1])
    z = clamp.held(student_logits)
    ce = kd = z[:0].sum()  # 0, on the graph
    if targets is not None:
        ce = clamp.in_window(F.cross_entropy(z, targets, reduction="none")).sum()
    student = z[:, :common]
    for teacher, share in zip(teachers, shares, strict=False):  # none where nothing is common
        logits = clamp.held(_logits(teacher).to(z.dtype))[:, :common]
        rows = row_divergences(student, logits, temperature, divergence, outside)
        kd = kd + clamp.in_window(rows).sum() * share
    return torch.stack([ce, kd])


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
