"""Rows of logits: what an overflow counts as, their log-probabilities, the distance of two."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ssl_kd.divergences import Divergence
from ssl_kd.guard.finite import SHORT, compute_dtype

SATURATION = 65504.0  # the largest finite float16: what an overflowed logit is taken for
NOWHERE = -1e9  # log-probability of an entry outside the vocabulary: finite, and exp of it is 0


def along_clusters(function: Callable[..., Tensor], logits: Tensor) -> Tensor:
    """`function(logits, dim=-1)`, a softmax, with the samples last in memory if clusters are few.

    Logits `[head, ..., cluster]` of `TEMIHead.stacked` come like this; so does what is returned.
    """
    if logits.ndim > 2 and logits.shape[-1] < SHORT:
        return function(logits.movedim(-1, 1), dim=1).movedim(1, -1)
    return function(logits, dim=-1)


def rolled_views(values: Tensor, shift: int) -> Tensor:
    """`values.roll(shift, dims=1)`, which lies in memory as `values` does."""
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
    """For the `backward` of a function: differentiating its result raises an error.

    `once_differentiable` says so only where the incoming gradient requires one itself; under
    `create_graph=True` it lets a gradient through that looks constant.
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
    """Hold logits in +-65504, in place; a NaN stays a NaN."""
    return logits.clamp_(-SATURATION, SATURATION)


@dataclass(frozen=True)
class Outside:
    """Entries that are outside the common vocabulary.

    Attributes:
        entries: `[k]`, which.
        at: boolean `[n, k]`, at which tokens each is; None: at all.
    """

    entries: Tensor
    at: Tensor | None = None

    def of(self, tokens: slice | Tensor) -> Outside:
        """The same for some of the tokens."""
        return self if self.at is None else Outside(self.entries, self.at[tokens])

    def fill_(self, logits: Tensor, value: float) -> None:
        """Overwrite these entries of logits `[n, vocab]`."""
        if self.at is None:
            logits.index_fill_(-1, self.entries, value)
        else:
            logits[:, self.entries] = logits[:, self.entries].masked_fill_(self.at, value)


def outside_of(sides: Sequence[tuple[Tensor, bool]]) -> Outside | None:
    """The entries that some side leaves out at every token, but for tokens that were filtered.

    A vocabulary lacks the same few entries at every token. A top-k or top-p filter lacks most of
    them, others at each token: there an entry is no less part of the vocabulary, its probability is
    0. So a token of a teacher that keeps less than half of the entries leaves none out; nor does
    any, where most of what is -inf is so at some tokens only.

    Args:
        sides: logits `[n, vocab]` of each, or its bias `[1, vocab]`; and whether these are what a
            teacher answered, which may be filtered.

    Returns:
        None where there are none.
    """
    masks = [logits.amax(0) == -torch.inf for logits, _ in sides if len(logits)]
    if not masks:
        return None
    entries = torch.stack(masks).any(0).nonzero().flatten()
    if not len(entries):
        return None
    at = entries.new_zeros((1, 1), dtype=torch.bool)
    for mask, (logits, answered) in zip(masks, sides, strict=True):
        here = mask[entries]
        if answered:
            missing = (logits == -torch.inf).sum(1)
            whole = 2 * missing <= len(mask)
            shared = 2 * here.sum() * whole.sum() >= missing[whole].sum()
            here = (whole & shared | (missing == len(mask))).unsqueeze(1) & here
        at = at | here
    if bool(at.all()):
        return Outside(entries)
    if len(entries) == len(masks[0]):  # where none were left, nothing could be compared
        at = at & ~at.all(1, keepdim=True)
    return Outside(entries, at) if bool(at.any()) else None


def log_softmax_(
    logits: Tensor, temperature: float, outside: Outside | None = None
) -> tuple[Tensor, Tensor]:
    """`log softmax(logits / temperature)` and its exponential.

    The maximum goes before the division: a difference of large logits is exact, their quotients'
    difference is not.

    Args:
        logits: `[n, vocab]`, float32 or float64; overwritten by the log-probabilities.
        temperature: positive.
        outside: entries that get no mass: log-probability about -1e9, probability 0.

    Returns:
        Log-probabilities and probabilities, `[n, vocab]`.
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
    """What is beyond +-65504 becomes that; its gradient passes: an overflow can be unlearned."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, infinities: bool) -> Tensor:
        held = x.clamp(-SATURATION, SATURATION)
        return held if infinities else torch.where(x.isinf(), x, held)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad_output, None


def saturated(logits: Tensor, *, infinities: bool = True) -> Tensor:
    """Logits held in +-65504, in the dtype of the arithmetic, for autograd.

    Without `infinities` these stay what they are: for a guard to find, or as a mask of -inf.
    """
    return _Saturated.apply(logits.to(compute_dtype(logits)), infinities)  # pyright: ignore[reportReturnType]


def lifted(values: Tensor) -> Tensor:
    """Values that rounding took below 0 become 0; the gradient is what it was."""
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
        # A class that one model has no output for is -inf there: as good as never, but finite.
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
        # A term that the guard cut out comes with 0, and 0 times its NaN would spread.
        scale = grad_output.unsqueeze(-1)
        return (gradient * scale).masked_fill_(scale == 0, 0), None, None, None, None


def row_divergences(
    student_logits: Tensor,
    teacher_logits: Tensor,
    temperature: float,
    divergence: Divergence,
    outside: Outside | None = None,
) -> Tensor:
    """`T^2 D(p, q)` of each row of logits `[n, vocab]`, with the gradient in closed form; `[n]`."""
    return _RowDivergences.apply(student_logits, teacher_logits, temperature, divergence, outside)  # pyright: ignore[reportReturnType]
