"""Token-level distillation: the loss on whole logits, and the shifted targets."""

from __future__ import annotations

import math
from numbers import Real
from typing import Literal

import torch
from torch import Tensor

from ssl_kd.divergences import divergence_named
from ssl_kd.guard.memory import to_device_async
from ssl_kd.losses.linear_distillation import logits_distillation
from ssl_kd.losses.mutual_information import check_temperature
from ssl_kd.losses.rows import outside_of, row_divergences, saturated
from ssl_kd.losses.teacher_output import LogitsTeacher

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
    r"""Mean over real tokens of `T^2 D(p, q)`, with teacher p and student q at temperature T.

    A vocabulary entry that is -inf at every real token on either side is outside the common
    vocabulary: both sides are normalised without it; where none is left the loss is 0. Any other
    logit beyond +-65504, infinite or not, is an overflow and counts as that, with the gradient of
    that value. A NaN in a real token stays one.

    A teacher's logits that were filtered (top-k, top-p) are -inf at most entries of a token, at
    others in each token. Each token then has its own support, whatever stands beside it in the
    batch: no entry is dropped, the teacher's probability of an entry that is -inf is 0 (its
    `exp(-65504 / T)` up to T = 600), and the student is normalised over the whole vocabulary.
    `forward_kl`, `js`, `skew_kl`, `skew_reverse_kl` and `tvd` are exact there. `reverse_kl` would
    be infinite: what the student puts on an entry outside the support costs 65504 / T nats more
    than the teacher's other entries do, and its gradient moves that mass away. A token counts as
    filtered where more than half of the entries are -inf; with less, tokens do where most of their
    -inf entries are not the same.

    Args:
        student_logits: `[batch, token, vocab]`, any floating dtype.
        teacher_logits: `[batch, token, vocab]`; the vocabularies may be padded differently, and
            the common first part counts. No gradient flows into it.
        mask: `[batch, token]`, 1 or True for real tokens; the others may hold anything. None: all
            are real.
        temperature: in [1e-4, 1e4].
        divergence: D, a name in `ssl_kd.divergences.DIVERGENCES`, where each has its formula.
        reduction: `mean` or `sum` over real tokens, or `none`, which holds the gradient of all
            logits until the backward pass.
        num_items_in_batch: what the mean divides by, in place of the real tokens here: those of
            all batches that are accumulated to one step, as a transformers Trainer hands them to
            `compute_loss`. Then the gradients add up to those of one large batch.

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
        values = _of_each(student, teacher, temperature, divergence)
        if rows is not None:
            values = values.new_zeros(shape.numel()).index_copy(0, rows, values)
        return values.view(shape)
    total = logits_distillation(
        student, None, [LogitsTeacher(teacher)], temperature=temperature, divergence=divergence
    )[1]
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
            f"num_items_in_batch is {items} and reduction {reduction!r}: the mean alone divides by "
            "it"
        )
    if isinstance(items, Tensor):  # its value would be waited for
        known = items.ndim == 0 and items.dtype != torch.bool and not items.is_complex()
        given = f"a tensor {tuple(items.shape)} of {items.dtype}"
    else:
        known = items is None or (
            isinstance(items, Real) and not isinstance(items, bool) and 0 < items < math.inf
        )
        given = repr(items)
    if not known:
        raise ValueError(
            f"num_items_in_batch is {given}, expected the number of real tokens, finite and > 0"
        )


def _of_each(student: Tensor, teacher: Tensor, temperature: float, divergence: str) -> Tensor:
    """`T^2 D` of each row `[n]`, of the entries that neither side leaves out."""
    check_temperature("temperature", temperature)
    kind = divergence_named(divergence)
    common = min(student.shape[-1], teacher.shape[-1])
    student, teacher = student[:, :common], teacher[:, :common]
    outside = outside_of([(student, False), (teacher, True)])
    student, teacher = saturated(student), saturated(teacher)
    if not len(student) or (outside and outside.at is None and len(outside.entries) == common):
        return student[:, :0].sum(-1)
    return row_divergences(student, teacher, temperature, kind, outside)


def next_token_targets(input_ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Positions that predict a token that counts, and that token: labels are shifted here, once.

    Args:
        input_ids: `[batch, token]`, integer.
        counts: `[batch, token]` bool: whether the token itself counts as a target. The first of a
            row never does: nothing comes before it. Where it is on the CPU, nothing waits for the
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
