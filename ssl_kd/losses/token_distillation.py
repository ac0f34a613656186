"""Losses of language models: distillation of logits, or of hidden states with an output head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ssl_kd.divergences import divergence_named
from ssl_kd.guard.memory import to_device_async
from ssl_kd.losses.legacy_clamp import LegacyClamp, clamped_distillation
from ssl_kd.losses.mutual_information import check_temperature
from ssl_kd.losses.rows import Outside, outside_of, row_divergences, saturated
from ssl_kd.losses.teacher_output import (
    LinearTeacher,
    LogitsTeacher,
    TeacherOutput,
    check_teacher,
)
from ssl_kd.losses.token_terms import TokenObjective, chunk_rows, summed_terms

REDUCTIONS = ("mean", "sum", "none")


def token_kd(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float = 2.0,
    divergence: str = "forward_kl",
    reduction: Literal["mean", "sum", "none"] = "mean",
    num_items_in_batch: float | Tensor | None = None,
) -> Tensor:
    r"""Return the mean of `T^2 D(p, q)` over real tokens, teacher p and student q at temperature T.

    A vocabulary entry that is -inf at every real token on either side is outside the common
    vocabulary: both sides are normalised without it; where none is left the loss is 0. Any other
    logit beyond +-65504, infinite or not, is an overflow and counts as that, with the gradient of
    that value. A NaN in a real token stays a NaN.

    The logits of a filtered teacher (top-k, top-p) are -inf at most entries of a token, at others
    in each token. Each token then has its own support, whatever else is in the batch: no entry is
    dropped, the teacher's probability of an entry that is -inf is 0 (its `exp(-65504 / T)` up to
    T = 600), and the student is normalised over the whole vocabulary. `forward_kl`, `js`,
    `skew_kl`, `skew_reverse_kl` and `tvd` are exact there. `reverse_kl` would be infinite: what the
    student puts on an entry outside the support costs 65504 / T nats more than the teacher's other
    entries do, and its gradient moves that mass away. A token counts as filtered where more than
    half of its entries are -inf, or where most of a batch's -inf entries are so at some tokens
    only.

    Args:
        student_logits: `[batch, token, vocab]`, any floating dtype.
        teacher_logits: the same batch and tokens; no gradient flows into it. The shorter vocabulary
            counts: the longer one is cut to it.
        mask: `[batch, token]`, 1 or True for real tokens; the others may hold anything. None: all
            are real.
        temperature: in [1e-4, 1e4].
        divergence: D, a name in `ssl_kd.divergences.DIVERGENCES`, where each has its formula.
        reduction: `mean` or `sum` over real tokens, or `none`, which keeps the gradient of all
            logits until the backward pass.
        num_items_in_batch: what the mean divides by, in place of the real tokens of this call: the
            real tokens of all batches that are accumulated to one step, as a transformers Trainer
            passes them to `compute_loss`. The gradients then add up to those of one large batch.

    Returns:
        A scalar, float32 (float64 for float64 input); 0, still attached to the graph, where every
        token is masked. With `none` `[batch, token]`, 0 where a token is masked.

    Raises:
        ValueError: names the argument that is out of range, or the shapes that do not fit.

    References:
        Hinton et al., Distilling the Knowledge in a Neural Network, 2015 (T^2). Ko et al.,
        DistiLLM: Towards Streamlined Distillation for Large Language Models, ICML 2024: skew
        divergences KL(p, a p + (1 - a) q) and KL(q, (1 - a) p + a q), with a = 0.1.

    >>> import torch
    >>> logits = torch.zeros(1, 3, 4)
    >>> token_kd(logits, logits)
    tensor(0.)
    """
    shape = student_logits.shape[:-1]
    fits = teacher_logits.shape[:-1] == shape and (mask is None or mask.shape == shape)
    if student_logits.ndim != 3 or not fits:
        raise ValueError(
            f"student_logits {tuple(student_logits.shape)}, teacher_logits "
            f"{tuple(teacher_logits.shape)} and mask {None if mask is None else tuple(mask.shape)} "
            "do not fit: expected [batch, token, vocab] twice and [batch, token]"
        )
    for name, logits in (("student_logits", student_logits), ("teacher_logits", teacher_logits)):
        if not logits.is_floating_point() or not logits.shape[-1]:
            raise ValueError(
                f"{name} {tuple(logits.shape)} are {logits.dtype}: expected a floating dtype, and "
                "a vocabulary of one entry or more"
            )
    check_temperature("temperature", temperature)
    _check_reduction(reduction, num_items_in_batch)
    student = student_logits.flatten(0, 1)
    teacher = teacher_logits.detach().flatten(0, 1)
    rows = None
    if mask is not None and not mask.all():
        rows = mask.flatten().nonzero().flatten()
        student, teacher = student[rows], teacher[rows]
    if reduction == "none":
        values = _row_losses(student, teacher, temperature, divergence)
        if rows is not None:
            values = values.new_zeros(shape.numel()).index_copy(0, rows, values)
        return values.view(shape)
    options: dict[str, Any] = {"temperature": temperature, "divergence": divergence}
    total = distillation_terms(student, None, None, None, [LogitsTeacher(teacher)], **options)[1]
    if reduction == "sum":
        return total
    if isinstance(num_items_in_batch, Tensor):  # 0 where all tokens of a step are masked
        return total / num_items_in_batch.clamp(min=1)
    return total / (max(1, len(student)) if num_items_in_batch is None else num_items_in_batch)


def _check_reduction(reduction: str, items: float | Tensor | None) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}, expected one of {', '.join(REDUCTIONS)}")
    if items is not None and reduction != "mean":
        raise ValueError(
            f"num_items_in_batch is {items} and reduction {reduction!r}: only the mean divides by "
            "num_items_in_batch"
        )
    if isinstance(items, Tensor):  # reading its value would wait for the device
        valid = items.ndim == 0
    else:
        valid = items is None or (isinstance(items, Real) and 0 < items < math.inf)
    if not valid:
        raise ValueError(
            f"num_items_in_batch is {items!r}, expected the number of real tokens, finite and > 0"
        )


def _row_losses(student: Tensor, teacher: Tensor, temperature: float, divergence: str) -> Tensor:
    """Compute `T^2 D` of each row `[n]`, over the entries that neither side leaves out."""
    kind = divergence_named(divergence)
    common = min(student.shape[-1], teacher.shape[-1])
    student, teacher = student[:, :common], teacher[:, :common]
    outside = outside_of([(student, False), (teacher, True)])
    student, teacher = saturated(student), saturated(teacher)
    if not len(student) or (outside and outside.at is None and len(outside.entries) == common):
        return student[:, :0].sum(-1)
    return row_divergences(student, teacher, temperature, kind, outside)


def next_token_targets(input_ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions that predict a token that counts, and that token: labels are shifted.

    Args:
        input_ids: `[batch, token]`, integer.
        counts: `[batch, token]` bool: whether the token itself counts as a target. The first of a
            row never does: no token precedes it. If it is on the CPU, there is no wait for the
            device of `input_ids`.

    Returns:
        rows: `[n]` int64, into hidden states flattened to `[batch * token, dim]`.
        targets: `[n]` int64, the next token of each of these positions.

    Raises:
        ValueError: shapes that do not fit.

    >>> import torch
    >>> next_token_targets(torch.tensor([[5, 6, 7]]), torch.tensor([[True, False, True]]))
    (tensor([1]), tensor([7]))
    """
    if input_ids.ndim != 2 or counts.shape != input_ids.shape:
        raise ValueError(
            f"input_ids {tuple(input_ids.shape)} and counts {tuple(counts.shape)} do not fit: "
            "expected [batch, token] twice"
        )
    batch, position = counts[:, 1:].bool().nonzero(as_tuple=True)
    rows = to_device_async(batch * input_ids.shape[1] + position, input_ids.device)
    return rows, input_ids.flatten()[rows + 1].long()


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
    """Compute cross-entropy and distillation of logits `hidden @ weight.T + bias`, in chunks.

    The sums over n tokens of `-log softmax(z)[target]` and of `T^2 D(p, q)`, the latter averaged
    over the teachers. Both equal the unchunked ones within float32 rounding. Gradients are computed
    in the same pass, for the given `weights`; a backward pass in another proportion (a guard cut
    one term out) makes a second pass, in which a term of weight 0 is not computed.

    Args:
        student_hidden: `[n, dim]`; the product is in its dtype (or autocast's), all else float32.
        student_weight: `[vocab, dim]`, of the same dtype.
        student_bias: `[vocab]` or None. An entry of -inf is outside the vocabulary for the
            distillation, as a teacher's is. Logits beyond +-65504 count as that.
        targets: `[n]` int64, or None: no cross-entropy (see `next_token_targets`).
        teachers: any number; where their vocabularies are shorter or longer than the student's,
            the common first part counts. No gradient flows into them. The logits of one in half
            precision are in its own dtype, also under autocast.
        temperature: of both softmaxes in the distillation, in [1e-4, 1e4].
        divergence: as in `token_kd`; of a `SampledTeacher` one that has `from_samples`.
        weights: of cross-entropy and distillation in the loss that will be differentiated, up to
            a common factor. They do not scale the returned sums.
        legacy_clamp: the clamps of older scripts on logits and on each token's terms; for
            comparison only, with the logits of all tokens in memory.
        chunk_tokens: tokens whose logits exist at once; None: `chunk_rows` of the vocabulary.
        teacher_weights: of each teacher's divergence in their mean, at least 0; they are scaled to
            sum to 1. A teacher of weight 0 is not used. None: all alike. The mean of divergences is
            not the divergence to the mixture of the teachers.

    Returns:
        `[2]`, float32 (float64 for float64): the sum of cross-entropies, and of T^2 D.

    Raises:
        ValueError: names the argument that does not fit. Targets and teacher indices outside the
            vocabulary that are on a GPU are found by CUDA's own assertion instead.

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
    **options: Any,
) -> Tensor:
    """Compute `linear_distillation` for a head that is not linear, from its logits `[n, vocab]`.

    An entry that is -inf in every row is outside the vocabulary. Options and result are those of
    `linear_distillation`.
    """
    return torch.stack(distillation_terms(student_logits, None, None, targets, teachers, **options))


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
    corrections: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return both sums of `linear_distillation`, or of `logits_distillation` if `weight` is None.

    With a list of `corrections` and linear heads without bias, nothing waits for a GPU: neither
    this call, nor a backward pass after the sums were read. The gradients of the two sums must then
    be in the proportion of `weights`, or None for a term that was cut out; otherwise they are NaN.
    A number may be appended to the list; the backward pass fills it with what must be added to the
    second sum to make it exact near 0.
    """
    n, vocab = len(x), x.shape[-1] if weight is None else len(weight)
    kind = divergence_named(divergence)
    check_temperature("temperature", temperature)
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens!r}, expected 1 or more, or None")
    for teacher in teachers:
        check_teacher(teacher, n, vocab, divergence)
    teachers, shares = _weighted(teachers, teacher_weights)
    if targets is not None:
        _check_targets(targets, n, vocab)
    common, outside = _common_vocabulary(x, weight, bias, teachers)
    if outside is not None and outside.at is None and len(outside.entries) == common:
        teachers, outside = (), None  # no entry is left to compare: nothing to distil
    device = x.device.type
    objective = TokenObjective(
        targets,
        teachers,
        shares,
        temperature,
        kind,
        common,
        outside,
        min(chunk_tokens or chunk_rows(vocab, x.device), max(1, n)),
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
        exact=_reads_are_free(x.device),
    )
    if legacy_clamp is not None:
        logits = x if weight is None else F.linear(x, weight, bias)
        return clamped_distillation(legacy_clamp, logits, objective)
    weights = (weights[0] if targets is not None else 0.0, weights[1] if teachers else 0.0)
    return summed_terms(x, weight, bias, objective, weights, corrections)


def _reads_are_free(device: torch.device) -> bool:
    """Return whether reading a number of a tensor waits for nothing."""
    return device.type == "cpu"


def _check_targets(targets: Tensor, n: int, vocab: int) -> None:
    if targets.shape != (n,):
        raise ValueError(f"targets {tuple(targets.shape)} do not fit {n} tokens, expected ({n},)")
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise TypeError(f"targets are {targets.dtype}, expected the ids of tokens, int64")
    # On a GPU this would wait for the device, whose own assertion finds wrong targets.
    if n and targets.device.type == "cpu" and not 0 <= targets.min() <= targets.max() < vocab:
        raise ValueError(
            f"targets go from {targets.min()} to {targets.max()}, expected 0 to {vocab - 1}: "
            "leave out the positions that do not count (next_token_targets)"
        )


def _weighted(
    teachers: Sequence[TeacherOutput], weights: Sequence[float] | None
) -> tuple[Sequence[TeacherOutput], Sequence[float]]:
    """Return the teachers of weight above 0, and the share of each in their mean."""
    if weights is None:
        return teachers, [1 / len(teachers)] * len(teachers) if teachers else []
    if len(weights) != len(teachers):
        raise ValueError(f"teacher_weights has {len(weights)} numbers for {len(teachers)} teachers")
    if any(not 0 <= weight < math.inf for weight in weights) or (teachers and not any(weights)):
        raise ValueError(
            f"teacher_weights are {list(weights)}, expected finite numbers of at least 0, and one "
            "above 0"
        )
    used = [(t, w) for t, w in zip(teachers, weights, strict=True) if w > 0]
    total = sum(weight for _, weight in used)
    return [teacher for teacher, _ in used], [weight / total for _, weight in used]


def _common_vocabulary(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, teachers: Sequence[TeacherOutput]
) -> tuple[int, Outside | None]:
    """Return the size of the common vocabulary, and the entries in it that any model excludes."""
    linear = [t for t in teachers if isinstance(t, LinearTeacher)]
    logits = [t.logits for t in teachers if isinstance(t, LogitsTeacher)]
    vocab = x.shape[-1] if weight is None else len(weight)
    common = min([vocab, *(len(t.weight) for t in linear), *(z.shape[-1] for z in logits)])
    if not teachers or not len(x):
        return common, None
    sides = [(x, False)] if weight is None else []
    sides += [(b.unsqueeze(0), False) for b in (bias, *(t.bias for t in linear)) if b is not None]
    sides += [(z, True) for z in logits]
    return common, outside_of([(side[:, :common], answered) for side, answered in sides])
