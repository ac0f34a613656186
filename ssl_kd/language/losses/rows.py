"""Exclude vocabulary entries, and compute divergences of rows of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ssl_kd.core.logits import SATURATION, differentiated_once, saturate_
from ssl_kd.language.losses.divergences import NOWHERE, Divergence


def saturated_copy(logits: Tensor, out: Tensor) -> Tensor:
    """Write logits, clamped to +-65504, into `out`, in the same or a wider dtype."""
    if logits.dtype == out.dtype:
        return torch.clamp(logits, -SATURATION, SATURATION, out=out)  # one pass less
    return saturate_(out.copy_(logits))


@dataclass(frozen=True)
class Outside:
    """Vocabulary entries that are excluded from the comparison of two models."""

    entries: Tensor  # `[k]`, indices of the excluded entries
    at: Tensor | None = None  # `[n, k]` bool, whether excluded at the token; None: at every token

    def of(self, tokens: slice | Tensor) -> Outside:
        """Return the excluded entries of a subset of the tokens."""
        return self if self.at is None else Outside(self.entries, self.at[tokens])

    def fill_(self, logits: Tensor, value: float) -> None:
        """Set the excluded entries of logits `[n, vocab]` to `value`, in place."""
        if self.at is None:
            logits.index_fill_(-1, self.entries, value)
        else:
            logits[:, self.entries] = logits[:, self.entries].masked_fill_(self.at, value)


def outside_of(sides: Sequence[tuple[Tensor, bool]]) -> Outside | None:
    """Find the vocabulary entries outside the common vocabulary of several models, or None.

    Each side is `(logits [n, vocab] or output bias [1, vocab], whether it is a teacher's logits)`.
    In a padded vocabulary, the logits of a few entries are -inf at every token; these entries are
    excluded. A top-k or top-p filter sets most logits to -inf, at different entries for each token;
    these entries stay in the vocabulary with probability 0. A teacher's logits count as filtered at
    a token if more than half of them are -inf there, and at all tokens if most of the -inf entries
    are -inf at some tokens only.
    """
    masks = [logits.amax(0) == -torch.inf for logits, _ in sides if len(logits)]
    if not masks:
        return None
    entries = torch.stack(masks).any(0).nonzero().flatten()
    if not len(entries):
        return None
    at = entries.new_zeros((1, 1), dtype=torch.bool)
    for mask, (logits, may_be_filtered) in zip(masks, sides, strict=True):
        left_out = mask[entries]
        if may_be_filtered:
            missing = (logits == -torch.inf).sum(1)
            unfiltered = 2 * missing <= len(mask)
            shared = 2 * left_out.sum() * unfiltered.sum() >= missing[unfiltered].sum()
            left_out = (unfiltered & shared | (missing == len(mask))).unsqueeze(1) & left_out
        at = at | left_out
    if bool(at.all()):
        return Outside(entries)
    if len(entries) == len(masks[0]):  # a token without any entry could not be compared
        at = at & ~at.all(1, keepdim=True)
    return Outside(entries, at) if bool(at.any()) else None


def log_softmax_(
    logits: Tensor, temperature: float, outside: Outside | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `log softmax(logits / temperature)` in place; return it and the probabilities.

    The maximum is subtracted before the division, because differences of large logits are exact and
    differences of their quotients are not. `outside` entries get log-probability -1e9.
    """
    if outside is not None:
        outside.fill_(logits, -torch.inf)
    logits.sub_(logits.amax(-1, keepdim=True))
    if temperature != 1:
        logits.mul_(1 / temperature)
    if outside is not None:
        outside.fill_(logits, NOWHERE)
    probs = logits.exp()
    total = probs.sum(-1, keepdim=True)
    return logits.sub_(total.log()), probs.mul_(total.reciprocal_())


def lifted(values: Tensor) -> Tensor:
    """Replace negative values, which are rounding errors, by 0; the gradient does not change."""
    return values + values.detach().neg().clamp(min=0)


class _RowDivergences(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        teacher: Tensor,
        temperature: float,
        divergence: Divergence,
        outside: Outside | None,
    ) -> Tensor:
        # A class that one model has no output for is -inf there: never predicted, but finite.
        teacher = teacher.to(student.dtype).clamp(min=-SATURATION)
        log_p, p = log_softmax_(teacher, temperature, outside)
        log_q, q = log_softmax_(student.clamp(min=-SATURATION), temperature, outside)
        value, gradient = divergence.compute(log_p, p, log_q, q, ctx.needs_input_grad[0])
        if gradient is not None:
            ctx.save_for_backward(gradient.mul_(temperature))  # T^2 / T
        return value * temperature**2

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, grad_output: Tensor) -> Any:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        # A term that the guard cut out has a gradient of 0, and 0 times its NaN would spread.
        scale = grad_output.unsqueeze(-1)
        return (gradient * scale).masked_fill_(scale == 0, 0), None, None, None, None


def row_divergences(
    student_logits: Tensor,
    teacher_logits: Tensor,
    temperature: float,
    divergence: Divergence,
    outside: Outside | None = None,
) -> Tensor:
    """Compute `T^2 D(p, q)` `[n]` from logits `[n, vocab]`, with a closed-form gradient."""
    return _RowDivergences.apply(student_logits, teacher_logits, temperature, divergence, outside)  # pyright: ignore[reportReturnType]
