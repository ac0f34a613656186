"""Distillation losses of language models, from logits or from hidden states and output weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ssl_kd.core.logits import check_temperature
from ssl_kd.core.memory import to_device_async
from ssl_kd.language.losses.divergences import divergence_named
from ssl_kd.language.losses.legacy_clamp import LegacyClamp, clamped_distillation
from ssl_kd.language.losses.rows import Outside, outside_of
from ssl_kd.language.losses.teacher_output import (
    LinearTeacher,
    LogitsTeacher,
    TeacherOutput,
    check_teacher,
)
from ssl_kd.language.losses.token_terms import (
    GradientSink,
    TokenObjective,
    chunk_rows,
    summed_terms,
)


def token_kd(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float = 2.0,
    divergence: str = "forward_kl",
    num_items_in_batch: float | Tensor | None = None,
) -> Tensor:
    r"""Return the mean of `T^2 D(p, q)` over real tokens, teacher p and student q at temperature T.

    If the student's or the teacher's logits of a vocabulary entry are -inf at all real tokens, the
    entry is excluded and both distributions are normalized over the other entries. If no entry
    remains, the loss is 0. All other logits beyond +-65504, including infinite ones, are clamped to
    it as overflows, with an unchanged gradient. A NaN at a real token makes the loss NaN.

    A filtered teacher (top-k, top-p) has logits of -inf at most entries, and at different entries
    for each token. These entries are not excluded: their teacher probability is 0 (more precisely
    `exp(-65504 / T)`, which is 0 up to T = 600), and the student is normalized over the whole
    vocabulary. The result does not depend on other tokens of the batch. All divergences are exact
    except `reverse_kl`, which would be infinite: the student's probability of an entry with teacher
    probability 0 costs about 65504 / T nats, so that its gradient reduces that probability. A token
    counts as filtered if more than half of its teacher logits are -inf; all tokens do, if most of
    the -inf entries of the batch are -inf at some tokens only.

    Args:
        student_logits: `[batch, token, vocab]`, any floating dtype.
        teacher_logits: `[batch, token, vocab]`; no gradient flows into it. If the vocabularies
            differ in size, the larger one is cut to the size of the smaller one.
        mask: `[batch, token]`, 1 or True for real tokens; values at other tokens are ignored. None
            if all tokens are real.
        temperature: T, in [1e-4, 1e4].
        divergence: name of D in `ssl_kd.losses.DIVERGENCES`, or `js:BETA`.
        num_items_in_batch: divisor of the mean, in place of the number of real tokens in this call;
            1 gives the sum. For gradient accumulation, pass the number of real tokens in all
            batches of the step (a transformers Trainer passes it to `compute_loss`); the
            accumulated gradient then equals that of one large batch.

    Returns:
        A scalar, float32 (float64 for float64 input); if all tokens are masked, it is 0 and has a
        gradient of 0.

    Raises:
        ValueError: an argument is out of range, or shapes do not fit; the message names them.

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
            "do not fit; expected [batch, token, vocab], [batch, token, vocab] and [batch, token]"
        )
    for name, logits in (("student_logits", student_logits), ("teacher_logits", teacher_logits)):
        if not logits.is_floating_point() or not logits.shape[-1]:
            raise ValueError(
                f"{name} have shape {tuple(logits.shape)} and dtype {logits.dtype}; expected a "
                "floating dtype and a vocabulary of one entry or more"
            )
    check_temperature("temperature", temperature)
    items = num_items_in_batch
    if isinstance(items, Tensor):  # reading its value would wait for the device
        valid = items.ndim == 0
    else:
        valid = items is None or (isinstance(items, Real) and 0 < items < math.inf)
    if not valid:
        raise ValueError(
            f"num_items_in_batch is {items!r}; expected the number of real tokens, finite and > 0"
        )
    student, teacher = (
        rearrange(logits, "batch token vocab -> (batch token) vocab")
        for logits in (student_logits, teacher_logits.detach())
    )
    if mask is not None and not mask.all():
        rows = mask.flatten().nonzero().flatten()
        student, teacher = student[rows], teacher[rows]
    options: dict[str, Any] = {"temperature": temperature, "divergence": divergence}
    total = distillation_terms(student, None, None, None, [LogitsTeacher(teacher)], **options)[1]
    if isinstance(items, Tensor):  # 0 where all tokens of a step are masked
        return total / items.clamp(min=1)
    return total / (max(1, len(student)) if items is None else items)


def next_token_targets(input_ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the target tokens, and the positions that predict them (one position earlier).

    Args:
        input_ids: `[batch, token]`, integer.
        counts: `[batch, token]` bool, whether the token is a target. The first token of a row is
            never a target, because no token precedes it. With `counts` on the CPU, this function
            does not wait for the device of `input_ids`.

    Returns:
        rows: `[n]` int64, indices into hidden states flattened to `[batch * token, dim]`.
        targets: `[n]` int64, the token after each of these positions.

    Raises:
        ValueError: `input_ids` and `counts` differ in shape.

    >>> import torch
    >>> next_token_targets(torch.tensor([[5, 6, 7]]), torch.tensor([[True, False, True]]))
    (tensor([1]), tensor([7]))
    """
    if input_ids.ndim != 2 or counts.shape != input_ids.shape:
        raise ValueError(
            f"input_ids {tuple(input_ids.shape)} and counts {tuple(counts.shape)} do not fit; "
            "expected equal shapes [batch, token]"
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
    """Compute cross-entropy and distillation of a linear head, without logits of the whole batch.

    With logits `z = hidden @ weight.T + bias`, the result is the sum over n tokens of
    `-log softmax(z)[target]`, and the sum of `T^2 D(p, q)`, averaged over the teachers. Logits are
    computed in chunks of tokens; the result is the same up to float32 rounding.

    The forward pass also computes the gradient of the two sums, weighted by `weights`. If the
    backward pass needs other weights (for example because the guard excluded one sum), it computes
    the gradient again.

    Args:
        student_hidden: `[n, dim]`, in the dtype of the matrix product; under autocast the product
            has autocast's dtype. All other arithmetic is float32.
        student_weight: `[vocab, dim]`, in the dtype of `student_hidden`.
        student_bias: `[vocab]` or None. An entry of -inf is excluded from the distillation. Logits
            beyond +-65504 are clamped to it.
        targets: `[n]` int64, from `next_token_targets`; None for no cross-entropy.
        teachers: outputs of any number of teachers. If vocabularies differ in size, only their
            common first entries are compared. No gradient flows into the teachers. A teacher in
            half precision keeps its dtype under autocast.
        temperature: T, temperature of student and teacher in the distillation, in [1e-4, 1e4].
        divergence: name of D in `ssl_kd.losses.DIVERGENCES`, or `js:BETA`; with a
            `SampledTeacher`, `forward_kl` only.
        weights: weights of cross-entropy and distillation in the loss that will be differentiated,
            up to a common factor. They do not scale the returned sums.
        legacy_clamp: clamps of older scripts on logits and on each token's terms, for comparison
            only; the logits of all tokens are then in memory.
        chunk_tokens: number of tokens in a chunk; None chooses it from the vocabulary size.
        teacher_weights: weight of each teacher in the mean, at least 0, scaled to sum to 1. A
            teacher of weight 0 is not used. None for equal weights. The mean of the divergences
            differs from the divergence to the mean of the teachers' distributions.

    Returns:
        `[2]`, float32 (float64 for float64 input): the sum of cross-entropies and the sum of T^2 D.

    Raises:
        ValueError: an argument is out of range or has the wrong shape; the message names it.
            Targets and teacher indices on a GPU are not checked here: CUDA's own assertion fails
            if one is outside the vocabulary.

    >>> hidden, weight = torch.zeros(3, 4), torch.zeros(8, 4)
    >>> teacher = LinearTeacher(hidden, weight)
    >>> linear_distillation(hidden, weight, None, torch.zeros(3).long(), [teacher], temperature=2.0)
    tensor([6.2383, 0.0000])
    """
    if student_hidden.ndim != 2 or student_weight.shape[1:] != student_hidden.shape[1:]:
        raise ValueError(
            f"student_hidden {tuple(student_hidden.shape)} and student_weight "
            f"{tuple(student_weight.shape)} do not fit; expected [n, dim] and [vocab, dim]"
        )
    dtypes = student_hidden.dtype, student_weight.dtype
    if dtypes[0] != dtypes[1] and not torch.is_autocast_enabled(student_hidden.device.type):
        raise ValueError(
            f"student_hidden has dtype {dtypes[0]} and student_weight {dtypes[1]}; expected equal "
            "dtypes: cast one of them, or call this function under autocast"
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
    """Compute cross-entropy and distillation from a student's logits `[n, vocab]`.

    Use this instead of `linear_distillation`, which saves memory, if the output head is not linear.
    `options` and the result are the same. An entry that is -inf in every row is excluded.
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
    wait: bool = True,
    give_weight_gradient: GradientSink | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the sums of `linear_distillation`, or of `logits_distillation` if `weight` is None.

    With `wait`, divergences near 0 are exact, and any incoming gradients are accepted; on a GPU,
    both passes wait for the device. Without it, this call does not wait if all heads are
    linear and have no bias, nor does the backward pass. Divergences below 0.002 nats then have an
    error of about 1e-6 nats in float32. The incoming gradients of the two sums must be proportional
    to `weights`, or None for an excluded sum; otherwise the gradients are NaN. On a CPU, reading a
    value is free, so `wait` changes nothing. If `give_weight_gradient` is given, the backward pass
    calls it with the gradient of `weight` instead of handing this gradient to autograd.
    """
    n, vocab = len(x), x.shape[-1] if weight is None else len(weight)
    kind = divergence_named(divergence)
    check_temperature("temperature", temperature)
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens!r}; expected 1 or more, or None")
    for teacher in teachers:
        check_teacher(teacher, n, vocab, divergence)
    teachers, shares = _weighted(teachers, teacher_weights)
    if targets is not None:
        _check_targets(targets, n, vocab)
    common, outside = _common_vocabulary(x, weight, bias, teachers)
    if outside is not None and outside.at is None and len(outside.entries) == common:
        teachers, outside = (), None  # no entry is left to compare: nothing to distill
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
        wait=wait or _reads_are_free(x.device),
    )
    if legacy_clamp is not None:
        logits = x if weight is None else F.linear(x, weight, bias)
        return clamped_distillation(legacy_clamp, logits, objective)
    weights = (weights[0] if targets is not None else 0.0, weights[1] if teachers else 0.0)
    return summed_terms(x, weight, bias, objective, weights, give_weight_gradient)


def _reads_are_free(device: torch.device) -> bool:
    """Return whether reading a tensor's value on this device does not wait for computations."""
    return device.type == "cpu"


def _check_targets(targets: Tensor, n: int, vocab: int) -> None:
    if targets.shape != (n,):
        raise ValueError(
            f"targets have shape {tuple(targets.shape)}; expected ({n},), one per token"
        )
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise TypeError(f"targets have dtype {targets.dtype}; expected token ids, int64")
    # On a GPU this would wait for the device, whose own assertion finds wrong targets.
    if n and targets.device.type == "cpu" and not 0 <= targets.min() <= targets.max() < vocab:
        raise ValueError(
            f"targets go from {targets.min()} to {targets.max()}; expected 0 to {vocab - 1}: leave "
            "out ignored positions (next_token_targets does)"
        )


def _weighted(
    teachers: Sequence[TeacherOutput], weights: Sequence[float] | None
) -> tuple[Sequence[TeacherOutput], Sequence[float]]:
    """Return the teachers with a weight above 0, and their weights scaled to sum to 1."""
    if weights is None:
        return teachers, [1 / len(teachers)] * len(teachers) if teachers else []
    if len(weights) != len(teachers):
        raise ValueError(
            f"teacher_weights has {len(weights)} numbers; expected {len(teachers)}, one per teacher"
        )
    if any(not 0 <= weight < math.inf for weight in weights) or (teachers and not any(weights)):
        raise ValueError(
            f"teacher_weights are {list(weights)}; expected finite numbers of at least 0, one of "
            "them above 0"
        )
    used = [(t, w) for t, w in zip(teachers, weights, strict=True) if w > 0]
    total = sum(weight for _, weight in used)
    return [teacher for teacher, _ in used], [weight / total for _, weight in used]


def _common_vocabulary(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, teachers: Sequence[TeacherOutput]
) -> tuple[int, Outside | None]:
    """Return the size of the common vocabulary, and the entries that some model excludes."""
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
