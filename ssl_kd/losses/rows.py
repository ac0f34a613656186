"""Rows of logits: saturation of overflows, softmax over part of a vocabulary, row divergences."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ssl_kd.divergences import Divergence
from ssl_kd.guard.finite import SHORT, compute_dtype

SATURATION = 65504.0  # the largest finite float16: logits beyond it are clamped to it
NOWHERE = -1e9  # log-probability of an entry outside the vocabulary: finite, and exp of it is 0


def along_clusters(function: Callable[..., Tensor], logits: Tensor) -> Tensor:
    """Apply a softmax to logits `[head, ..., cluster]`, along clusters.

    Where clusters are few, samples are last in memory, as in the logits of `TEMIHead.stacked`: this
    is faster.
    """
    if logits.ndim > 2 and logits.shape[-1] < SHORT:
        return function(logits.movedim(-1, 1), dim=1).movedim(1, -1)
    return function(logits, dim=-1)


def rolled_views(values: Tensor, shift: int) -> Tensor:
    """Return `values.roll(shift, dims=1)` in the memory layout of `values`."""
    rolled = torch.empty_like(values)
    rolled[:, shift:] = values[:, :-shift]
    rolled[:, :shift] = values[:, -shift:]
    return rolled


class _Final(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:  # type: ignore[override]
        raise RuntimeError(
            "the gradient of this loss is in closed form and cannot be differentiated again "
            "(a gradient penalty, a Hessian): take the second derivative of other terms alone"
        )


def differentiated_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make the second derivative of an autograd function's `backward` an error.

    PyTorch's `once_differentiable` raises only if the incoming gradient requires one itself; under
    `create_graph=True` its result looks constant.
    """

    @functools.wraps(backward)
    def wrapped(ctx: Any, *incoming: Tensor) -> Any:
        with torch.no_grad():
            gradients = backward(ctx, *incoming)
        if not torch.is_grad_enabled():  # no create_graph
            return gradients
        return tuple(
            _Final.apply(g.detach().requires_grad_()) if isinstance(g, Tensor) else g
            for g in gradients
        )

    return wrapped


def saturate_(logits: Tensor) -> Tensor:
    """Clamp logits to +-65504, in place; a NaN stays a NaN."""
    return logits.clamp_(-SATURATION, SATURATION)


@dataclass(frozen=True)
class Outside:
    """Entries that are outside the common vocabulary.

    Attributes:
        entries: `[k]`, their indices.
        at: boolean `[n, k]`, the tokens at which each is outside; None: all.
    """

    entries: Tensor
    at: Tensor | None = None

    def of(self, tokens: slice | Tensor) -> Outside:
        """Return the same for some of the tokens."""
        return self if self.at is None else Outside(self.entries, self.at[tokens])

    def fill_(self, logits: Tensor, value: float) -> None:
        """Overwrite these entries of logits `[n, vocab]`."""
        if self.at is None:
            logits.index_fill_(-1, self.entries, value)
        else:
            logits[:, self.entries] = logits[:, self.entries].masked_fill_(self.at, value)


def outside_of(sides: Sequence[tuple[Tensor, bool]]) -> Outside | None:
    """Return the entries that a side leaves out (-inf) at every token, except in filtered tokens.

    A padded vocabulary lacks the same few entries at every token. A top-k or top-p filter lacks
    most entries, different ones at each token: these are in the vocabulary, with probability 0. So
    a teacher's token that keeps less than half of the entries leaves none out; nor does any token
    if most of the -inf entries are -inf at some tokens only.

    Args:
        sides: logits `[n, vocab]` or the bias `[1, vocab]` of each model, and whether they are a
            teacher's logits, which may be filtered.

    Returns:
        None where nothing is left out.
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
    """Return `log softmax(logits / temperature)`, in the memory of the logits, and its exponential.

    The maximum is subtracted before the division: a difference of large logits is exact, that of
    their quotients is not. Entries `outside` get log-probability -1e9 and probability 0.
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


class _Saturated(torch.autograd.Function):
    """Clamp to +-65504 and pass the gradient on, so that training can correct an overflow."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, infinities: bool) -> Tensor:
        held = x.clamp(-SATURATION, SATURATION)
        return held if infinities else torch.where(x.isinf(), x, held)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad_output, None


def saturated(logits: Tensor, *, infinities: bool = True) -> Tensor:
    """Return logits clamped to +-65504, in the dtype of the arithmetic, for autograd.

    Without `infinities`, infinite logits stay: for a guard to find, or as a mask of -inf.
    """
    return _Saturated.apply(logits.to(compute_dtype(logits)), infinities)  # pyright: ignore[reportReturnType]


def lifted(values: Tensor) -> Tensor:
    """Replace values that rounding made negative by 0; the gradient does not change."""
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
    """Compute `T^2 D(p, q)` `[n]` of logits `[n, vocab]`, with the gradient in closed form."""
    return _RowDivergences.apply(student_logits, teacher_logits, temperature, divergence, outside)  # pyright: ignore[reportReturnType]
