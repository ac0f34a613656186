"""Cross-entropy and divergence of tokens with their weighted gradient: a pass over the logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ssl_kd.divergences import Divergence
from ssl_kd.losses.chunked_logits import ChunkedLogits, GivenLogits
from ssl_kd.losses.rows import NOWHERE, Outside, log_softmax_, saturate_
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
CPU_ROWS = 256  # tokens on a CPU, at most: more are no quicker (measured)
ROW_BYTES = 1 << 20  # of logits that the arithmetic takes at once on a CPU: stays in its cache


def chunk_rows(vocabulary: int, device: torch.device | str) -> int:
    """Tokens whose logits exist at once: a chunk of the loss."""
    rows = max(1, CHUNK_BYTES // (4 * vocabulary))
    return max(rows, CHUNK_ROWS) if torch.device(device).type == "cuda" else min(rows, CPU_ROWS)


@dataclass(frozen=True)
class Wanted:
    """What to compute of some tokens."""

    targets: Tensor | None
    teachers: Sequence[TeacherOutput]
    shares: Sequence[float]  # of each teacher in the mean of their divergences
    temperature: float
    divergence: Divergence
    common: int  # the vocabulary that student and teachers share: the first entries
    outside: Outside | None  # entries among these that one of them leaves out
    chunk: int
    autocast: torch.dtype | None  # the dtype that products are in, instead of the inputs'
    exact: bool = True  # near 0 too, chunk by chunk: each of them waits for the device


def _top_k(
    teacher: TopKTeacher, log_q: Tensor, divergence: Divergence, gradient: bool, exact: bool
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
    objective: Wanted,
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
    teacher: TeacherOutput, log_q: Tensor, q: Tensor, objective: Wanted, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    if isinstance(teacher, TopKTeacher):
        return _top_k(teacher, log_q, objective.divergence, gradient, objective.exact)
    if isinstance(teacher, SampledTeacher):
        assert objective.divergence.from_samples is not None  # check_teacher
        weights, entropy = teacher.weights.to(q.dtype), teacher.entropy.to(q.dtype)
        indices = teacher.indices.long()
        return objective.divergence.from_samples(indices, weights, entropy, log_q, q, gradient)
    assert isinstance(teacher, LogitsTeacher)  # run_ has multiplied a LinearTeacher out
    logits = saturate_(teacher.logits[:, : objective.common].to(q.dtype, copy=True))
    log_p, p = log_softmax_(logits, objective.temperature, objective.outside)
    return objective.divergence.compute(log_p, p, log_q, q, gradient, objective.exact)


def student_of(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    objective: Wanted,
    needs: tuple[bool, ...],
) -> ChunkedLogits | GivenLogits:
    """The logits; `needs` says which of the three gets a gradient."""
    if weight is None:
        return GivenLogits(x, needs[0])
    return ChunkedLogits(x, weight, bias, objective.chunk, objective.autocast, needs)


def _multiplied(teacher: LinearTeacher, chunk: int, autocast: torch.dtype | None) -> ChunkedLogits:
    # In half precision by its own dtype: what fits bfloat16 may be beyond autocast's float16.
    if teacher.weight.itemsize == 2:
        autocast = None
    return ChunkedLogits(teacher.hidden, teacher.weight, teacher.bias, chunk, autocast)


def run_(
    student: ChunkedLogits | GivenLogits, objective: Wanted, weights: tuple[float, float]
) -> Tensor:
    """Both terms of each token, unweighted `[2, n]`; what they add to gradients is in `student`."""
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
            outside = objective.outside
            some = objective
            if outside is not None and outside.at is not None:
                some = replace(objective, outside=outside.of(place))
            terms[0, place], terms[1, place] = _terms_(
                scratch[: last - first].copy_(logits[first:last]),
                None if targets is None else targets[place],
                [rows_of(t, first, last) for t in here],
                some,
                weights,
                part,
            )
            if part is not None:
                student.gradient(start, stop)[first:last] = part
        if slope is not None:
            student.accumulate(start, stop)
    return terms
