"""Cross-entropy and distillation from hidden states and output weights, a chunk at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ssl_kd.divergences import divergence_named, near_0
from ssl_kd.guard.finite import compute_dtype
from ssl_kd.losses.checks import check_targets, check_teacher, shares_of
from ssl_kd.losses.legacy_clamp import LegacyClamp, clamped_distillation
from ssl_kd.losses.mutual_information import check_temperature
from ssl_kd.losses.rows import Outside, differentiated_once, outside_of
from ssl_kd.losses.teacher_output import LinearTeacher, LogitsTeacher, TeacherOutput, chosen
from ssl_kd.losses.token_terms import Wanted, chunk_rows, run_, student_of


def _are_free(device: torch.device) -> bool:
    """Whether numbers can be looked at whenever one likes."""
    return device.type == "cpu"


def _later(number: Tensor) -> Callable[[], int]:
    """A number of a device, to be asked for once that was waited for: then without a wait."""
    if number.device.type != "cuda":
        return lambda: int(number)
    sent = number.to("cpu", non_blocking=True)
    event = torch.cuda.current_stream(number.device).record_event()

    def get() -> int:
        event.synchronize()
        return int(sent)

    return get


def _exactly(
    close: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, objective: Wanted
) -> Tensor:
    """Exact divergences of the rows `close` `[k]`, where they are near 0."""
    if not len(close):
        return x.new_zeros(0, dtype=compute_dtype(x))
    teachers = [chosen(t, close) for t in objective.teachers]
    chunk = min(objective.chunk, len(close))
    outside = None if objective.outside is None else objective.outside.of(close)
    some = replace(objective, targets=None, teachers=teachers, chunk=chunk, outside=outside)
    some = replace(some, exact=True)
    student = student_of(x[close], weight, bias, some, (False, False, False))
    return run_(student, some, (0.0, 0.0))[1]


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


def _factor_there(incoming: Sequence[Tensor | None], weights: Sequence[float]) -> Tensor | float:
    """`_factor` without a wait, of what comes in at all; NaN where it is no multiple."""
    largest = max(range(len(weights)), key=lambda i: abs(weights[i]))
    if (most := incoming[largest]) is None or weights[largest] == 0:
        return 1.0
    factor = most / weights[largest]
    for i, got in enumerate(incoming):
        if i != largest and got is not None:
            expected = factor * weights[i]
            fits = (got - expected).abs() <= 1e-5 * expected.abs()
            factor = torch.where(fits, factor, torch.nan)
    return factor


class _Distillation(torch.autograd.Function):
    """The two sums; their gradient is computed in the same pass over the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        objective: Wanted,
        weights: tuple[float, float],
        needs: tuple[bool, bool, bool],
        late: list[Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # a term that was cut out shows without a wait
        ctx.near = None
        with torch.autocast(x.device.type, enabled=False):
            student = student_of(x, weight, bias, objective, needs)
            terms = run_(student, objective, weights)
            if objective.teachers and not objective.exact:
                near = near_0(terms[1] / objective.temperature**2)
                if late is None or not any(needs):
                    close = near.nonzero().flatten()
                    terms[1, close] = _exactly(close, x, weight, bias, objective)
                else:
                    late.append(terms.new_zeros(()))
                    ctx.near = terms[1], _later(near.sum()), late[-1]
        ctx.save_for_backward(x, weight, bias)
        ctx.objective, ctx.weights, ctx.needs = objective, weights, needs
        ctx.trusted = late is not None and not objective.exact
        ctx.gradients = student.gradients
        ce, kd = terms.sum(1)
        return ce, kd

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, *given: Tensor | None) -> Any:
        if all(g is None for g in given):
            return (None,) * 7
        x, weight, bias = ctx.saved_tensors
        # A term that is not there has no gradient, whatever comes in for it.
        there = ctx.objective.targets is not None, bool(ctx.objective.teachers)
        # Handed over, not kept: a gradient without another reference becomes .grad without a copy.
        gradients, ctx.gradients = ctx.gradients, None
        if ctx.trusted:
            kept = [g if real else None for g, real in zip(given, there, strict=True)]
            weights = tuple(0.0 if g is None else w for w, g in zip(ctx.weights, kept, strict=True))
            cut, factor = weights != ctx.weights, _factor_there(kept, weights)
        else:
            cut, factor, weights = _asked_for(given, there, ctx.weights)
        with torch.autocast(x.device.type, enabled=False):
            if ctx.near is not None:
                (found, count, late), ctx.near = ctx.near, None
                close = found.argsort()[: count()]
                more = _exactly(close, x, weight, bias, ctx.objective) - found[close]
                late += more.sum()
            if gradients is None or cut:  # a second backward, or a term was cut out
                objective = replace(
                    ctx.objective,
                    targets=ctx.objective.targets if weights[0] != 0 else None,
                    teachers=ctx.objective.teachers if weights[1] != 0 else (),
                    exact=False,  # no value is wanted
                )
                gradients = None  # frees the memory for the new ones
                student = student_of(x, weight, bias, objective, ctx.needs)
                run_(student, objective, (weights[0], weights[1]))
                gradients = student.gradients
        one = isinstance(factor, float) and factor == 1
        scaled = (
            None if g is None else (g if one else g.mul_(factor)).to(like.dtype)
            for g, like in zip(gradients, (x, weight, bias), strict=True)
        )
        return *scaled, None, None, None, None


def _asked_for(
    given: Sequence[Tensor | None], there: Sequence[bool], weights: tuple[float, float]
) -> tuple[bool, float, tuple[float, ...]]:
    """What the gradients that come in ask for, by a wait for the device.

    Returns:
        Whether it is another proportion than `weights`; a factor, and the weights times it.
    """
    some = next(g for g in given if g is not None)
    numbers = torch.stack([some.new_zeros(()) if g is None else g for g in given]).tolist()
    incoming = tuple(g if real else 0.0 for g, real in zip(numbers, there, strict=True))
    if (factor := _factor(incoming, weights)) is not None:
        return False, factor, weights
    # One term left is to the bit what it would have been alone: its own weight, one factor.
    left = tuple(w if g else 0.0 for w, g in zip(weights, incoming, strict=True))
    if (factor := _factor(incoming, left)) is not None:
        return True, factor, left
    return True, 1.0, incoming


def _common(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, teachers: Sequence[TeacherOutput]
) -> tuple[int, Outside | None]:
    """The vocabulary that all share, its first entries; those that one of them leaves out."""
    vocab = x.shape[-1] if weight is None else len(weight)
    heads = [t.weight for t in teachers if isinstance(t, LinearTeacher)]
    given = [t.logits for t in teachers if isinstance(t, LogitsTeacher)]
    common = min([vocab, *(len(w) for w in heads), *(z.shape[-1] for z in given)])
    biases = [bias, *(t.bias for t in teachers if isinstance(t, LinearTeacher))]
    sides = [(x, False)] if weight is None else []
    sides += [(y.unsqueeze(0), False) for y in biases if y is not None]
    sides += [(z, True) for z in given]
    sides = [(y[:, :common], answered) for y, answered in sides if len(x)]
    return common, outside_of(sides) if teachers else None


def distillation_terms(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    targets: Tensor | None,
    teachers: Sequence[TeacherOutput] = (),
    *,
    temperature: float,
    divergence: str = "forward_kl",
    weights: tuple[float, float] = (1.0, 1.0),
    legacy_clamp: LegacyClamp | None = None,
    chunk_tokens: int | None = None,
    teacher_weights: Sequence[float] | None = None,
    late: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """As `linear_distillation`, or without a `weight` `logits_distillation`, of two numbers.

    With a list `late` and linear heads without bias there is no wait for the device here, nor in a
    backward pass before which the sums were read. Of that pass the terms that are differentiated at
    all must come in the proportion of `weights`: else the gradient is NaN. The list may get a
    number, which the backward pass makes what the second sum lacks to be exact near 0.
    """
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
    common, outside = _common(x, weight, bias, teachers)
    if outside is not None and outside.at is None and len(outside.entries) == common:
        teachers, outside = (), None  # no entry is left to compare: nothing to distil
    if legacy_clamp is not None:
        z = x if weight is None else F.linear(x, weight, bias)
        some = targets, teachers, shares, temperature, kind, common, outside
        ce, kd = clamped_distillation(legacy_clamp, z, *some)
        return ce, kd
    device = x.device.type
    objective = Wanted(
        targets,
        teachers,
        shares,
        temperature,
        kind,
        common,
        outside,
        min(chunk_tokens or chunk_rows(vocab, x.device), max(1, n)),
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
        _are_free(x.device),
    )
    weights = (weights[0] if targets is not None else 0.0, weights[1] if teachers else 0.0)
    needs = tuple(
        torch.is_grad_enabled() and y is not None and y.requires_grad for y in (x, weight, bias)
    )
    return _Distillation.apply(x, weight, bias, objective, weights, needs, late)  # pyright: ignore


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
        ValueError: names the argument that does not fit. Targets and a teacher's indices on a GPU
            that are no tokens are found by CUDA's own assertion instead.

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
    terms = distillation_terms(
        student_hidden,
        student_weight,
        student_bias,
        targets,
        teachers,
        temperature=temperature,
        divergence=divergence,
        weights=weights,
        legacy_clamp=legacy_clamp,
        chunk_tokens=chunk_tokens,
        teacher_weights=teacher_weights,
    )
    return torch.stack(terms)


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

    An entry that is -inf in every row is outside the vocabulary. The other arguments and
    the result are those of `linear_distillation`.
    """
    if student_logits.ndim != 2:
        raise ValueError(f"student_logits {tuple(student_logits.shape)}, expected [n, vocab]")
    terms = distillation_terms(
        student_logits,
        None,
        None,
        targets,
        teachers,
        temperature=temperature,
        divergence=divergence,
        weights=weights,
        legacy_clamp=legacy_clamp,
        chunk_tokens=chunk_tokens,
        teacher_weights=teacher_weights,
    )
    return torch.stack(terms)
