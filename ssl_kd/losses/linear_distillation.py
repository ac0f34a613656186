"""Cross-entropy and distillation from hidden states and output weights, a chunk at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ssl_kd.divergences import Divergence, divergence_named, near_0
from ssl_kd.losses.checks import check_targets, check_teacher, shares_of
from ssl_kd.losses.chunked_logits import ChunkedLogits, GivenLogits
from ssl_kd.losses.legacy_clamp import LegacyClamp, clamped_distillation
from ssl_kd.losses.mutual_information import check_temperature
from ssl_kd.losses.rows import NOWHERE, differentiated_once, log_softmax_, saturate_
from ssl_kd.losses.teacher_output import (
    LinearTeacher,
    LogitsTeacher,
    SampledTeacher,
    TeacherOutput,
    TopKTeacher,
    rows_of,
)

CHUNK_BYTES = 64 << 20  # of logits in float32: fewer, larger products than at 16 MiB
# Tokens on a GPU, at least. A chunk reads the head's weight and adds to its float32 gradient, 14
# bytes an entry in bf16, and multiplies 6 times a token with it: as long on an H200 (990 TFLOP/s,
# 4.8 TB/s), on which 64 MiB of a vocabulary of 128,000 would be a third of that.
CHUNK_ROWS = 440
ROW_BYTES = 1 << 20  # of logits that the arithmetic takes at once on a CPU: stays in its cache


def chunk_rows(vocabulary: int, device: torch.device | str) -> int:
    """Tokens whose logits exist at once: a chunk of the loss."""
    rows = max(1, CHUNK_BYTES // (4 * vocabulary))
    return max(rows, CHUNK_ROWS) if torch.device(device).type == "cuda" else rows


@dataclass(frozen=True)
class _Objective:
    targets: Tensor | None
    teachers: Sequence[TeacherOutput]
    shares: Sequence[float]  # of each teacher in the mean of their divergences
    temperature: float
    divergence: Divergence
    common: int  # the vocabulary that student and teachers share: the first entries
    outside: Tensor | None  # entries among these that one of them leaves out
    chunk: int
    autocast: torch.dtype | None  # the dtype that products are in, instead of the inputs'
    exact: bool = True  # near 0 too, chunk by chunk: each of them waits for the device


def _top_k(
    teacher: TopKTeacher,
    log_q: Tensor,
    divergence: Divergence,
    gradient: bool,
    exact: bool,
) -> tuple[Tensor, Tensor | None]:
    """The divergence over k + 1 outcomes; the tail's gradient is shared out as q has it."""
    indices = teacher.indices.long()
    # By logarithms: a tail that q has emptied beyond its least number is to be filled again.
    tail = log_q.scatter(-1, indices, 2 * NOWHERE)
    largest = tail.amax(-1, keepdim=True)
    total = tail.sub_(largest).exp_().sum(-1, keepdim=True)
    coarse_q = torch.cat([log_q.gather(-1, indices), total.log() + largest], -1)
    coarse_p = torch.cat([teacher.log_probs, teacher.log_tail.unsqueeze(-1)], -1)
    coarse_p = saturate_(coarse_p.to(log_q.dtype, copy=True))
    pairs = coarse_p, coarse_p.exp(), coarse_q, coarse_q.exp()
    value, slope = divergence.compute(*pairs, gradient, exact)
    if slope is None:
        return value, None
    return value, tail.mul_(slope[:, -1:] / total).scatter_(-1, indices, slope[:, :-1])


def _terms_(
    logits: Tensor,
    targets: Tensor | None,
    teachers: Sequence[TeacherOutput],
    objective: _Objective,
    weights: tuple[float, float],
    gradient: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy and T^2 * divergence of each row, and their weighted gradient.

    Args:
        logits: `[r, vocab]`, in the dtype of the arithmetic; overwritten.
        targets: `[r]` or None.
        teachers: these rows of each teacher.
        objective: what to compute.
        weights: of the two gradients; that of a term with weight 0 is not looked at.
        gradient: `[r, vocab]`, gets the gradient; None for values alone.
    """
    saturate_(logits)
    ce = kd = logits.new_zeros(len(logits))
    written = False
    if targets is not None:
        column = targets.unsqueeze(-1)
        log_q, q = log_softmax_(logits, 1.0)  # shifts the logits, which changes no softmax
        ce = -log_q.gather(-1, column).squeeze(-1)
        if gradient is not None and weights[0] != 0:
            q.scatter_add_(-1, column, q.new_full(column.shape, -1))
            torch.mul(q, weights[0], out=gradient)
            written = True
    if gradient is not None and not written:
        gradient.zero_()
    if teachers:
        t, wanted = objective.temperature, gradient is not None and weights[1] != 0
        log_q, q = log_softmax_(logits[:, : objective.common], t, objective.outside)
        for teacher, share in zip(teachers, objective.shares, strict=True):
            value, slope = _divergence_of(teacher, log_q, q, objective, wanted)
            kd = kd + value * (t**2 * share)
            if slope is not None and gradient is not None:
                scale = weights[1] * t * share
                gradient[:, : objective.common].add_(slope, alpha=scale)
    return ce, kd


def _divergence_of(
    teacher: TeacherOutput, log_q: Tensor, q: Tensor, objective: _Objective, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    if isinstance(teacher, TopKTeacher):
        return _top_k(teacher, log_q, objective.divergence, gradient, objective.exact)
    if isinstance(teacher, SampledTeacher):
        assert objective.divergence.from_samples is not None  # check_teacher
        weights, entropy = teacher.weights.to(q.dtype), teacher.entropy.to(q.dtype)
        indices = teacher.indices.long()
        return objective.divergence.from_samples(indices, weights, entropy, log_q, q, gradient)
    assert isinstance(teacher, LogitsTeacher)  # _run has multiplied a LinearTeacher out
    logits = saturate_(teacher.logits[:, : objective.common].to(q.dtype, copy=True))
    log_p, p = log_softmax_(logits, objective.temperature, objective.outside)
    return objective.divergence.compute(log_p, p, log_q, q, gradient, objective.exact)


def _student(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    objective: _Objective,
    needs: tuple[bool, ...],
) -> ChunkedLogits | GivenLogits:
    if weight is None:
        return GivenLogits(x, needs[0])
    return ChunkedLogits(x, weight, bias, objective.chunk, objective.autocast, needs)


def _multiplied(teacher: LinearTeacher, chunk: int, autocast: torch.dtype | None) -> ChunkedLogits:
    # In half precision by its own dtype: what fits bfloat16 may be beyond autocast's float16.
    if teacher.weight.itemsize == 2:
        autocast = None
    return ChunkedLogits(teacher.hidden, teacher.weight, teacher.bias, chunk, autocast)


def _run(
    student: ChunkedLogits | GivenLogits, objective: _Objective, weights: tuple[float, float]
) -> Tensor:
    """Both terms of each token, `[2, n]`; what they add to the gradients is left in `student`."""
    n, vocab = student.shape
    chunk, targets = objective.chunk, objective.targets
    terms = torch.zeros((2, n), dtype=student.exact, device=student.device)
    if targets is None and not objective.teachers:
        return terms
    rows = chunk
    if student.device.type == "cpu":
        rows = min(chunk, max(1, ROW_BYTES // (vocab * student.exact.itemsize)))
    scratch = torch.empty((rows, vocab), dtype=student.exact, device=student.device)
    slope = torch.empty_like(scratch) if any(x is not None for x in student.gradients) else None
    teachers = [
        _multiplied(t, chunk, objective.autocast) if isinstance(t, LinearTeacher) else t
        for t in objective.teachers
    ]
    for start in range(0, n, chunk):
        stop = min(start + chunk, n)
        logits = student.logits(start, stop)
        here = [
            LogitsTeacher(t.logits(start, stop))
            if isinstance(t, ChunkedLogits)
            else rows_of(t, start, stop)
            for t in teachers
        ]
        for first in range(0, stop - start, rows):
            last = min(first + rows, stop - start)
            place = slice(start + first, start + last)
            part = None if slope is None else slope[: last - first]
            terms[0, place], terms[1, place] = _terms_(
                scratch[: last - first].copy_(logits[first:last]),
                None if targets is None else targets[place],
                [rows_of(t, first, last) for t in here],
                objective,
                weights,
                part,
            )
            if part is not None:
                student.gradient(start, stop)[first:last] = part
        if slope is not None:
            student.accumulate(start, stop)
    return terms


def _are_free(device: torch.device) -> bool:
    """Whether numbers can be looked at whenever one likes."""
    return device.type == "cpu"


def _again_near_0_(
    terms: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, objective: _Objective
) -> None:
    """Exact divergences in `terms` `[2, n]` where they are near 0: one wait for the device."""
    close = near_0(terms[1] / objective.temperature**2)
    if not len(close):
        return
    teachers = [
        replace(t, hidden=t.hidden[close])
        if isinstance(t, LinearTeacher)
        else type(t)(*(part[close] for part in vars(t).values()))
        for t in objective.teachers
    ]
    chunk = min(objective.chunk, len(close))
    some = replace(objective, targets=None, teachers=teachers, chunk=chunk, exact=True)
    student = _student(x[close], weight, bias, some, (False, False, False))
    terms[1, close] = _run(student, some, (0.0, 0.0))[1]


def _factor(incoming: tuple[float, ...], weights: tuple[float, ...]) -> float | None:
    """By how much `incoming` is a multiple of `weights` (within rounding); None where it is not."""
    largest = max(range(len(weights)), key=lambda i: abs(weights[i]))
    if weights[largest] == 0 or incoming[largest] == 0:
        return None
    factor = incoming[largest] / weights[largest]
    fits = all(
        math.isclose(got, factor * weight, rel_tol=1e-6)
        for got, weight in zip(incoming, weights, strict=True)
    )
    return factor if fits else None


class _Distillation(torch.autograd.Function):
    """The two sums; their gradient is computed in the same pass over the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        objective: _Objective,
        weights: tuple[float, float],
        needs: tuple[bool, bool, bool],
    ) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            student = _student(x, weight, bias, objective, needs)
            terms = _run(student, objective, weights)
            if objective.teachers and not objective.exact:
                _again_near_0_(terms, x, weight, bias, objective)
        ctx.save_for_backward(x, weight, bias)
        ctx.objective, ctx.weights, ctx.needs = objective, weights, needs
        ctx.gradients = student.gradients
        return terms.sum(1)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        ce, kd = grad.tolist()
        # A term that is not there has no gradient, whatever comes in for it.
        incoming = (
            ce if ctx.objective.targets is not None else 0.0,
            kd if ctx.objective.teachers else 0.0,
        )
        # Handed over, not kept: a gradient that nobody else holds becomes .grad without a copy.
        gradients, ctx.gradients = ctx.gradients, None
        factor, weights = _factor(incoming, ctx.weights), ctx.weights
        cut = factor is None
        if factor is None:
            # One term left is to the bit what it would have been alone: its own weight, one factor.
            weights = tuple(w if g else 0.0 for w, g in zip(ctx.weights, incoming, strict=True))
            factor = _factor(incoming, weights)
        if factor is None:
            factor, weights = 1.0, incoming
        if gradients is None or cut:  # a second backward, or a term was cut out
            objective = replace(
                ctx.objective,
                targets=ctx.objective.targets if weights[0] != 0 else None,
                teachers=ctx.objective.teachers if weights[1] != 0 else (),
                exact=False,  # no value is wanted
            )
            gradients = None  # frees the memory for the new ones
            student = _student(x, weight, bias, objective, ctx.needs)
            with torch.autocast(x.device.type, enabled=False):
                _run(student, objective, (weights[0], weights[1]))
            gradients = student.gradients
        scaled = (
            None if g is None else (g if factor == 1 else g.mul_(factor)).to(like.dtype)
            for g, like in zip(gradients, (x, weight, bias), strict=True)
        )
        return *scaled, None, None, None


def _outside(x: Tensor | None, common: int) -> Tensor | None:
    """`[common]` bool, entries that are -inf in every row; None where there are no rows."""
    if x is None or not x.numel():
        return None
    return x.reshape(-1, x.shape[-1])[:, :common].amax(0) == -torch.inf


def _distil(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    targets: Tensor | None,
    teachers: Sequence[TeacherOutput],
    temperature: float,
    divergence: str,
    weights: tuple[float, float],
    clamp: LegacyClamp | None,
    chunk_tokens: int | None,
    teacher_weights: Sequence[float] | None,
) -> Tensor:
    n, vocab = len(x), x.shape[-1] if weight is None else len(weight)
    kind = divergence_named(divergence)
    check_temperature("temperature", temperature)
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens!r}, expected 1 or more, or None")
    for teacher in teachers:
        check_teacher(teacher, n, vocab, divergence)
    teachers, shares = shares_of(teachers, teacher_weights)
    if targets is not None:
        check_targets(targets, n, vocab)
    heads = [t.weight for t in teachers if isinstance(t, LinearTeacher)]
    given = [t.logits for t in teachers if isinstance(t, LogitsTeacher)]
    common = min([vocab, *(len(w) for w in heads), *(z.shape[-1] for z in given)])
    leave_out = [t.bias for t in teachers if isinstance(t, LinearTeacher)] + given
    masks = [_outside(y, common) for y in [x if weight is None else bias, *leave_out]]
    indices = None
    if teachers and any(mask is not None for mask in masks):
        anywhere = torch.stack([mask for mask in masks if mask is not None]).any(0)
        indices = anywhere.nonzero().flatten() if anywhere.any() else None
        if indices is not None and len(indices) == common:
            teachers, indices = (), None  # no entry is left to compare: nothing to distil
    if clamp is not None:
        logits = x if weight is None else F.linear(x, weight, bias)
        return clamped_distillation(
            clamp, logits, targets, teachers, shares, temperature, kind, common, indices
        )
    device = x.device.type
    objective = _Objective(
        targets,
        teachers,
        shares,
        temperature,
        kind,
        common,
        indices,
        min(chunk_tokens or chunk_rows(vocab, x.device), max(1, n)),
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
        _are_free(x.device),
    )
    weights = (weights[0] if targets is not None else 0.0, weights[1] if teachers else 0.0)
    needs = tuple(
        torch.is_grad_enabled() and y is not None and y.requires_grad for y in (x, weight, bias)
    )
    return _Distillation.apply(x, weight, bias, objective, weights, needs)  # pyright: ignore


def linear_distillation(
    student_hidden: Tensor,
    student_weight: Tensor,
    student_bias: Tensor | None,
    targets: Tensor | None,
    teachers: Sequence[TeacherOutput] = (),
    *,
    temperature: float,
    divergence: str = "forward_kl",
    weights: tuple[float, float] = (1.0, 1.0),
    legacy_clamp: LegacyClamp | None = None,
    chunk_tokens: int | None = None,
    teacher_weights: Sequence[float] | None = None,
) -> Tensor:
    """Cross-entropy and distillation of the logits `hidden @ weight.T + bias`, never held whole.

    The sums over n tokens of `-log softmax(z)[target]` and of `T^2 D(p, q)`, the latter averaged
    over the teachers. Both equal the unchunked ones within float32 rounding. Gradients are computed
    in the same pass, for the `weights` given; a backward pass that asks for another proportion (a
    guard cut one term out) makes a second pass, in which a term of weight 0 is not touched.

    Args:
        student_hidden: `[n, dim]`; the product is in its dtype (or autocast's), all else float32.
        student_weight: `[vocab, dim]`, of the same dtype.
        student_bias: `[vocab]` or None. An entry of -inf is outside the vocabulary for the
            distillation, as a teacher's is. Logits beyond +-65504 count as that.
        targets: `[n]` int64, or None: no cross-entropy (see `next_token_targets`).
        teachers: any number; where their vocabularies are shorter or longer than the student's,
            the common first part counts. No gradient flows into them. The logits of one in half
            precision are in its own dtype, whatever autocast is around.
        temperature: of both softmaxes in the distillation, in [1e-4, 1e4].
        divergence: as in `token_kd`; of a `SampledTeacher` one that has `from_samples`.
        weights: of cross-entropy and distillation in the loss that will be differentiated, up to
            a common factor. They do not scale what is returned.
        legacy_clamp: the old clamps of logits and of each token's terms; for comparison only, with
            all logits held at once.
        chunk_tokens: tokens whose logits exist at once; None: as many as `chunk_rows` says.
        teacher_weights: of each teacher's divergence in their mean, at least 0, in any proportion:
            they are made to sum to 1. One of weight 0 is not looked at. None: all alike. The mean
            of divergences is not the divergence to the mixture of the teachers.

    Returns:
        `[2]`, float32 (float64 for float64): the sum of cross-entropies, and of T^2 D.

    Raises:
        ValueError: names the argument that does not fit. Targets on a GPU that are no tokens are
            found by CUDA's own assertion instead.

    >>> hidden, weight = torch.zeros(3, 4), torch.zeros(8, 4)
    >>> teacher = LinearTeacher(hidden, weight)
    >>> linear_distillation(hidden, weight, None, torch.zeros(3).long(), [teacher], temperature=2.0)
    tensor([6.2383, 0.0000])
    """
    if student_hidden.ndim != 2 or student_weight.shape[1:] != student_hidden.shape[1:]:
        raise ValueError(
            f"student_hidden {tuple(student_hidden.shape)} and student_weight "
            f"{tuple(student_weight.shape)} do not fit: expected [n, dim] and [vocab, dim]"
        )
    dtypes = student_hidden.dtype, student_weight.dtype
    if dtypes[0] != dtypes[1] and not torch.is_autocast_enabled(student_hidden.device.type):
        raise ValueError(
            f"student_hidden is {dtypes[0]} and student_weight {dtypes[1]}: cast one of them, or "
            "compute under autocast"
        )
    return _distil(
        student_hidden,
        student_weight,
        student_bias,
        targets,
        teachers,
        temperature,
        divergence,
        weights,
        legacy_clamp,
        chunk_tokens,
        teacher_weights,
    )


def logits_distillation(
    student_logits: Tensor,
    targets: Tensor | None,
    teachers: Sequence[TeacherOutput] = (),
    *,
    temperature: float,
    divergence: str = "forward_kl",
    weights: tuple[float, float] = (1.0, 1.0),
    legacy_clamp: LegacyClamp | None = None,
    chunk_tokens: int | None = None,
    teacher_weights: Sequence[float] | None = None,
) -> Tensor:
    """`linear_distillation` for a head that is not linear: from its logits `[n, vocab]`.

    An entry that is -inf in every row is outside the vocabulary. Everything else as there.
    """
    if student_logits.ndim != 2:
        raise ValueError(f"student_logits {tuple(student_logits.shape)}, expected [n, vocab]")
    return _distil(
        student_logits,
        None,
        None,
        targets,
        teachers,
        temperature,
        divergence,
        weights,
        legacy_clamp,
        chunk_tokens,
        teacher_weights,
    )
