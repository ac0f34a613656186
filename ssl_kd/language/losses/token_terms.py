"""Cross-entropy and distillation of tokens with closed-form gradients, one chunk at a time.

The logits `[n, vocab]` would be the largest tensor of a language model's training step, so they are
never in memory as a whole. `compute_terms` loops over chunks of tokens. For each chunk it computes
the logits of the student and of each `LinearTeacher` from hidden states and output weights, then
both loss terms and their gradient with respect to the student's logits. From this gradient it
accumulates the gradients of hidden states, weight and bias.

The backward pass only scales these gradients. It computes them again if the loss has other weights
than the forward pass expected, for example because the guard excluded one term.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from firstnan.finite import compute_dtype
from ssl_kd.core.logits import differentiated_once
from ssl_kd.language.losses.divergences import Divergence, with_tail
from ssl_kd.language.losses.rows import Outside, log_softmax_, saturated_copy
from ssl_kd.language.losses.teacher_output import (
    LinearTeacher,
    LogitsTeacher,
    SampledTeacher,
    TeacherOutput,
    TopKTeacher,
    select_rows,
)

GradientSink = Callable[[Tensor], None]
"""Takes a gradient; it is not copied, and may be changed later."""
CHUNK_BYTES = 64 << 20  # of logits in float32: fewer, larger products than at 16 MiB
# Tokens on a GPU, at least. A chunk reads the head's weight and adds to its float32 gradient, 14
# bytes an entry in bf16, and multiplies 6 times a token with it: as long on an H200 (990 TFLOP/s,
# 4.8 TB/s), on which 64 MiB of a vocabulary of 128,000 would be a third of that.
CHUNK_ROWS = 440
CPU_ROWS = 256  # tokens on a CPU, at most: more are no quicker (measured)
ROW_BYTES = 1 << 20  # of logits that the arithmetic takes at once on a CPU: stays in its cache
VOCABULARY_BLOCK = 8192  # rows of the output weights that a half-precision gradient takes at once


def chunk_rows(vocabulary: int, device: torch.device | str) -> int:
    """Return the number of tokens in a chunk, for a vocabulary size and a device."""
    rows = max(1, CHUNK_BYTES // (4 * vocabulary))
    return max(rows, CHUNK_ROWS) if torch.device(device).type == "cuda" else min(rows, CPU_ROWS)


@dataclass(frozen=True)
class TokenObjective:
    """Targets, teachers and options of the loss of n tokens."""

    targets: Tensor | None
    teachers: Sequence[TeacherOutput]
    shares: Sequence[float]  # of each teacher in the mean of their divergences; they sum to 1
    temperature: float
    divergence: Divergence
    common: int  # size of the vocabulary that student and teachers share, its first entries
    outside: Outside | None  # entries among these that one of them leaves out
    chunk: int
    autocast: torch.dtype | None  # dtype of the products; None: that of the inputs
    wait: bool = True  # whether the device may be waited for; a CPU never is


def _gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of d loss / d logits; float16 would round values below 6e-8 to 0."""
    return torch.float32 if dtype == torch.float16 else dtype


class ChunkedLogits:
    """Compute logits `hidden @ weight.T + bias` in chunks of rows, and accumulate gradients.

    `autocast` is the dtype of the products (None: that of `weight`); `needs` says whether hidden,
    weight and bias need a gradient.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        chunk: int,
        autocast: torch.dtype | None,
        needs: tuple[bool, ...] = (False, False, False),
    ) -> None:
        dtype = weight.dtype
        if autocast is not None and dtype != torch.float64:
            dtype = autocast
        self.hidden, self.weight = hidden.to(dtype), weight.to(dtype)
        self.bias = None if bias is None else bias.to(dtype)
        self.shape = (len(hidden), len(weight))
        self.dtype, self.device = compute_dtype(hidden), hidden.device
        size = (chunk, len(weight))
        self._logits = self._gradient = hidden.new_empty(size, dtype=dtype)
        if any(needs) and _gradient_dtype(dtype) != dtype:
            self._gradient = hidden.new_empty(size, dtype=_gradient_dtype(dtype))
        self.gradients: list[Tensor | None] = [
            x.new_zeros(x.shape, dtype=self.dtype) if x is not None and needed else None
            for x, needed in zip((hidden, weight, bias), needs, strict=True)
        ]

    def logits(self, start: int, stop: int) -> Tensor:
        """Return the logits `[stop - start, vocab]` of a chunk; the next call overwrites them."""
        out = self._logits[: stop - start]
        if self.bias is None:
            return torch.mm(self.hidden[start:stop], self.weight.T, out=out)
        return torch.addmm(self.bias, self.hidden[start:stop], self.weight.T, out=out)

    def gradient(self, start: int, stop: int) -> Tensor:
        """Return the buffer for the gradient of a chunk's logits; it may hold the logits."""
        return self._gradient[: stop - start]

    def accumulate(self, start: int, stop: int) -> None:
        """Add a chunk's part to the gradients of hidden, weight and bias."""
        rows, hidden = self._gradient[: stop - start], self.hidden[start:stop]
        d_hidden, d_weight, d_bias = self.gradients
        if d_bias is not None:
            d_bias += rows.sum(0, dtype=d_bias.dtype)
        needs_no_cast = rows.dtype == self.weight.dtype != torch.bfloat16
        step = len(self.weight) if needs_no_cast else VOCABULARY_BLOCK
        for first in range(0, len(self.weight), step):
            block = rows[:, first : first + step]
            if d_hidden is not None:
                weight = self.weight[first : first + step].to(rows.dtype)
                _add_product(d_hidden[start:stop], block, weight)
            if d_weight is not None:
                _add_product(d_weight[first : first + step], block.T, hidden.to(rows.dtype))


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


class WholeLogits:
    """Precomputed logits `[n, vocab]` with the interface of `ChunkedLogits`."""

    def __init__(self, logits: Tensor, needed: bool) -> None:
        self._logits = logits
        self.shape = (logits.shape[0], logits.shape[1])
        self.dtype, self.device = compute_dtype(logits), logits.device
        gradient = logits.new_zeros(logits.shape, dtype=_gradient_dtype(logits.dtype))
        self.gradients: list[Tensor | None] = [gradient if needed else None, None, None]

    def logits(self, start: int, stop: int) -> Tensor:
        """Return the logits `[stop - start, vocab]` of a chunk."""
        return self._logits[start:stop]

    def gradient(self, start: int, stop: int) -> Tensor:
        """Return the part of `gradients` for a chunk's logits."""
        return self.gradients[0][start:stop]  # pyright: ignore[reportOptionalSubscript]

    def accumulate(self, start: int, stop: int) -> None:
        """Do nothing, because the gradient of the logits is the result."""


def compute_terms(
    student: ChunkedLogits | WholeLogits, objective: TokenObjective, weights: tuple[float, float]
) -> Tensor:
    """Return cross-entropy and `T^2 D` of each token `[2, n]`; add to `student.gradients`."""
    n, vocab = student.shape
    chunk, targets = objective.chunk, objective.targets
    terms = torch.zeros((2, n), dtype=student.dtype, device=student.device)
    if targets is None and not objective.teachers:
        return terms
    n_rows = chunk
    if student.device.type == "cpu":
        n_rows = min(chunk, max(1, ROW_BYTES // (vocab * student.dtype.itemsize)))
    scratch = torch.empty((n_rows, vocab), dtype=student.dtype, device=student.device)
    needed = any(x is not None for x in student.gradients)
    is_narrow = needed and student.gradient(0, 0).dtype != student.dtype
    wide = torch.empty_like(scratch) if is_narrow else None
    teachers = [
        _chunked_teacher(t, objective) if isinstance(t, LinearTeacher) else t
        for t in objective.teachers
    ]
    for start in range(0, n, chunk):
        stop = min(start + chunk, n)
        logits = student.logits(start, stop)
        answers = [
            LogitsTeacher(t.logits(start, stop))
            if isinstance(t, ChunkedLogits)
            else select_rows(t, slice(start, stop))
            for t in teachers
        ]
        for first in range(0, stop - start, n_rows):
            last = min(first + n_rows, stop - start)
            tokens, part = slice(start + first, start + last), slice(first, last)
            goal = student.gradient(start, stop)[part] if needed else None
            outside = objective.outside
            terms[0, tokens], terms[1, tokens] = _chunk_terms(
                saturated_copy(logits[part], scratch[: last - first]),
                replace(
                    objective,
                    targets=None if targets is None else targets[tokens],
                    teachers=[select_rows(answer, part) for answer in answers],
                    outside=None if outside is None else outside.of(tokens),
                ),
                weights,
                goal if wide is None else wide[: last - first],
            )
            if goal is not None and wide is not None:
                goal.copy_(wide[: last - first])
        if needed:
            student.accumulate(start, stop)
    return terms


def _chunked_teacher(teacher: LinearTeacher, objective: TokenObjective) -> ChunkedLogits:
    # In half precision by its own dtype: what fits bfloat16 may be beyond autocast's float16.
    autocast = None if teacher.weight.itemsize == 2 else objective.autocast
    return ChunkedLogits(teacher.hidden, teacher.weight, teacher.bias, objective.chunk, autocast)


def _chunk_terms(
    logits: Tensor,
    objective: TokenObjective,
    weights: tuple[float, float],
    gradient: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return cross-entropy and `T^2 D` of each row, and write their weighted gradient.

    The logits `[r, vocab]`, saturated and float32 or float64, are overwritten, as is `gradient`
    `[r, vocab]` (None to compute none). A term of weight 0 has no part in the gradient.
    """
    ce = kd = logits.new_zeros(len(logits))
    t = objective.temperature
    outside = objective.outside
    common = objective.common
    log_q = q = logits  # replaced below
    is_shared = is_written = False
    if objective.targets is not None:
        column = objective.targets.unsqueeze(-1)
        log_q, q = log_softmax_(logits, 1.0)  # shifts the logits, which changes no softmax
        is_shared = t == 1 and outside is None and common == logits.shape[1]
        ce = -log_q.gather(-1, column).squeeze(-1)
        if gradient is not None and weights[0] != 0:
            torch.mul(q, weights[0], out=gradient)
            gradient.scatter_add_(-1, column, gradient.new_full(column.shape, -weights[0]))
            is_written = True
    if objective.teachers:
        needed = gradient is not None and weights[1] != 0
        if not is_shared:
            log_q, q = log_softmax_(logits[:, :common], t, outside)
        for teacher, share in zip(objective.teachers, objective.shares, strict=True):
            value, slope = _divergence(teacher, log_q, q, objective, needed)
            kd = kd + value * (t**2 * share)
            if slope is not None and gradient is not None:
                scale = weights[1] * t * share
                if is_written:
                    gradient[:, :common].add_(slope, alpha=scale)
                else:
                    torch.mul(slope, scale, out=gradient[:, :common])
                    gradient[:, common:].zero_()
                is_written = True
    if gradient is not None and not is_written:
        gradient.zero_()
    return ce, kd


def _divergence(
    teacher: TeacherOutput, log_q: Tensor, q: Tensor, objective: TokenObjective, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Return D of each row `[r]`, and its gradient with respect to the logits divided by T."""
    divergence = objective.divergence
    if isinstance(teacher, TopKTeacher):
        return _top_k_divergence(teacher, log_q, q, divergence, gradient, objective.wait)
    if isinstance(teacher, SampledTeacher):
        assert divergence.from_samples is not None  # check_teacher
        weights, entropy = teacher.weights.to(q.dtype), teacher.entropy.to(q.dtype)
        return divergence.from_samples(teacher.indices.long(), weights, entropy, log_q, q, gradient)
    assert isinstance(teacher, LogitsTeacher)  # compute_terms has multiplied a LinearTeacher out
    logits = teacher.logits[:, : objective.common]
    logits = saturated_copy(logits, torch.empty_like(logits, dtype=q.dtype))
    log_p, p = log_softmax_(logits, objective.temperature, objective.outside)
    return divergence.compute(log_p, p, log_q, q, gradient, objective.wait)


def _top_k_divergence(
    teacher: TopKTeacher,
    log_q: Tensor,
    q: Tensor,
    divergence: Divergence,
    gradient: bool,
    exact_near_0: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute D over k + 1 outcomes: the teacher's k tokens, and any other token."""
    indices = teacher.indices.long()
    coarse_q, shares = with_tail(log_q, q, indices)
    coarse_p = torch.cat([teacher.log_probs, teacher.log_tail.unsqueeze(-1)], -1)
    coarse_p = saturated_copy(coarse_p, torch.empty_like(coarse_p, dtype=log_q.dtype))
    pairs = coarse_p, coarse_p.exp(), coarse_q, coarse_q.exp()
    value, slope = divergence.compute(*pairs, gradient, exact_near_0)
    if slope is None:
        return value, None
    return value, shares.mul_(slope[:, -1:]).scatter_(-1, indices, slope[:, :-1])


# --- autograd -------------------------------------------------------------------------------------


def _student_logits(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    objective: TokenObjective,
    needs: tuple[bool, ...],
) -> ChunkedLogits | WholeLogits:
    if weight is None:
        return WholeLogits(x, needs[0])
    return ChunkedLogits(x, weight, bias, objective.chunk, objective.autocast, needs)


def summed_terms(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    objective: TokenObjective,
    weights: tuple[float, float],
    give_weight_gradient: GradientSink | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the sums of cross-entropies and of `T^2 D` of `x`, for autograd.

    `x` are hidden states `[n, dim]`, or logits `[n, vocab]` if `weight` is None. If it is given,
    `give_weight_gradient` gets the gradient of `weight`, and autograd gets none.
    """
    needs = tuple(
        torch.is_grad_enabled() and y is not None and y.requires_grad for y in (x, weight, bias)
    )
    arguments = x, weight, bias, objective, weights, needs, give_weight_gradient
    return _Distillation.apply(*arguments)  # pyright: ignore


class _Distillation(torch.autograd.Function):
    """Compute `summed_terms`, with the gradients in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        objective: TokenObjective,
        weights: tuple[float, float],
        needs: tuple[bool, bool, bool],
        give_weight_gradient: GradientSink | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # a term that was cut out has the gradient None
        with torch.autocast(x.device.type, enabled=False):
            student = _student_logits(x, weight, bias, objective, needs)
            terms = compute_terms(student, objective, weights)
        ctx.save_for_backward(x, weight, bias)
        ctx.objective = objective
        ctx.weights = weights
        ctx.needs = needs
        ctx.give_weight_gradient = give_weight_gradient
        ctx.gradients = student.gradients
        ce, kd = terms.sum(1)
        return ce, kd

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, *incoming: Tensor | None) -> Any:
        if all(g is None for g in incoming):
            return (None,) * 7
        x, weight, bias = ctx.saved_tensors
        # A term that was not computed has no gradient, whatever comes in for it.
        computed = ctx.objective.targets is not None, bool(ctx.objective.teachers)
        incoming = tuple(g if c else None for g, c in zip(incoming, computed, strict=True))
        # Handed over, not kept: a gradient without another reference becomes .grad without a copy.
        gradients, ctx.gradients = ctx.gradients, None
        scale = _scale if ctx.objective.wait else _scale_without_wait
        weights, factor = scale(incoming, ctx.weights)
        with torch.autocast(x.device.type, enabled=False):
            if gradients is None or weights != ctx.weights:  # a second backward, or a term cut out
                objective = replace(
                    ctx.objective,
                    targets=ctx.objective.targets if weights[0] != 0 else None,
                    teachers=ctx.objective.teachers if weights[1] != 0 else (),
                    wait=False,  # values are not used
                )
                gradients = None  # frees the memory for the new ones
                student = _student_logits(x, weight, bias, objective, ctx.needs)
                compute_terms(student, objective, (weights[0], weights[1]))
                gradients = student.gradients
        unscaled = isinstance(factor, float) and factor == 1
        scaled = [
            None if g is None else (g if unscaled else g.mul_(factor)).to(like.dtype)
            for g, like in zip(gradients, (x, weight, bias), strict=True)
        ]
        if ctx.give_weight_gradient is not None and scaled[1] is not None:
            ctx.give_weight_gradient(scaled[1])
            scaled[1] = None
        return *scaled, None, None, None, None


def _scale(
    incoming: Sequence[Tensor | None], weights: tuple[float, ...]
) -> tuple[tuple[float, ...], float]:
    """Split the incoming gradients into weights and a common factor; this waits for the device.

    If they are proportional to `weights` (0 for excluded terms), those are used: a single remaining
    term then gets, to the bit, the same gradient as if it were the only term.
    """
    given = [g for g in incoming if g is not None]
    values = iter(torch.stack(given).tolist() if given else ())
    numbers = tuple(0.0 if g is None else next(values) for g in incoming)
    left = tuple(w if number else 0.0 for w, number in zip(weights, numbers, strict=True))
    largest = max(range(len(left)), key=lambda i: abs(left[i]))
    if left[largest] == 0:
        return numbers, 1.0
    factor = numbers[largest] / left[largest]
    pairs = zip(numbers, left, strict=True)
    if all(math.isclose(number, factor * weight, rel_tol=1e-6) for number, weight in pairs):
        return left, factor
    return numbers, 1.0


def _scale_without_wait(
    incoming: Sequence[Tensor | None], weights: tuple[float, ...]
) -> tuple[tuple[float, ...], Tensor | float]:
    """Write the incoming gradients as `weights` times a factor, without waiting for the device.

    A term is excluded if its gradient is None. The factor is NaN if the gradients do not fit.
    """
    left = tuple(0.0 if g is None else w for w, g in zip(weights, incoming, strict=True))
    largest = max(range(len(left)), key=lambda i: abs(left[i]))
    if (most := incoming[largest]) is None or left[largest] == 0:
        return left, 1.0
    factor = most / left[largest]
    for i, got in enumerate(incoming):
        if i != largest and got is not None:
            expected = factor * left[i]
            fits = (got - expected).abs() <= 1e-5 * expected.abs()
            factor = torch.where(fits, factor, torch.nan)
    return left, factor
