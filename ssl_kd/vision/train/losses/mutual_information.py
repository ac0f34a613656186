"""Compute the beta-weighted mutual information between a student and a teacher in log space."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from firstnan.finite import compute_dtype
from ssl_kd.core.logits import check_temperature, differentiated_once, saturated
from ssl_kd.vision.train.losses.clusters import along_clusters, rolled_views

InstanceWeight = Literal["none", "own", "mean"]


def log_probabilities(logits: Tensor, temperature: float) -> Tensor:
    """Return `log softmax(logits / temperature)` over the last axis, float32 (float64 for float64).

    Logits are cast before the division, because float16 logits above 2,620 would overflow at a
    temperature of 0.04.
    """
    return along_clusters(torch.log_softmax, logits.to(compute_dtype(logits)) / temperature)


def log_marginal(marginal: Tensor) -> Tensor:
    """Return `log(marginal + floor)` in float32 (float64 for float64); finite for an exact 0.

    The floor changes log(1e-4) by 1.4e-10 in float32, and turns log(0) into -31.9.
    """
    marginal = marginal.detach().to(compute_dtype(marginal))
    return (marginal + torch.finfo(marginal.dtype).eps ** 2).log()


class _BetaMI(torch.autograd.Function):
    """Compute `-log sum_k (p_k q_k)^beta / pi_k` and its gradient in closed form.

    The gradient with respect to the student's logits is `beta / T (p - r)`, where r is the softmax
    over k of the logarithms of the summands. It is finite for finite logits, cannot underflow to
    zero, and does not depend on `clip_min`. Computing it in the forward pass saves three tensors.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        student_logits: Tensor,
        teacher_log_probs: Tensor,
        log_pi: Tensor,
        beta: float,
        temperature: float,
        clip_min: float,
    ) -> Tensor:
        student_log_probs = log_probabilities(student_logits, temperature)
        joint = (student_log_probs + teacher_log_probs).mul_(beta).sub_(log_pi)
        largest = joint.amax(-1, keepdim=True)
        joint.sub_(largest).exp_()
        total = joint.sum(-1, keepdim=True)
        if ctx.needs_input_grad[0]:  # pyright: ignore[reportAttributeAccessIssue]
            share = total.reciprocal()
            ctx.save_for_backward(student_log_probs.exp_().addcmul_(joint, share, value=-1))
            ctx.dtype, ctx.factor = student_logits.dtype, beta / temperature  # pyright: ignore[reportAttributeAccessIssue]
        return -largest.add_(total.log_()).squeeze(-1).clamp(min=clip_min)

    @staticmethod
    @differentiated_once
    def backward(ctx, grad_output: Tensor):  # noqa: ANN001  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        scale = (grad_output * ctx.factor).unsqueeze(-1)
        return (gradient * scale).to(ctx.dtype), None, None, None, None, None


def _check(beta: float, student_temperature: float, clip_min: float) -> None:
    if not 0 < beta <= 1:
        raise ValueError(f"beta is {beta!r}; expected a number above 0 and at most 1")
    check_temperature("student_temperature", student_temperature)
    if not abs(clip_min) <= torch.finfo(torch.float32).max:  # also catches NaN
        raise ValueError(f"clip_min is {clip_min!r}; expected a number that is finite in float32")


def beta_mi(
    student_logits: Tensor,
    teacher_logits: Tensor,
    marginal: Tensor,
    *,
    beta: float = 0.6,
    student_temperature: float = 0.1,
    teacher_temperature: float = 0.1,
    clip_min: float = -100.0,
) -> Tensor:
    r"""Compute the negative beta-weighted pointwise mutual information of each sample.

    $-\log \sum_k (p_k q_k)^\beta / \pi_k$, with student $p$, teacher $q$ and marginal $\pi$,
    computed as `-logsumexp(beta * (log p + log q) - log pi)`.

    Args:
        student_logits: `[head, batch, cluster]`, any floating dtype. Finite logits beyond +-65504
            are clamped to it.
        teacher_logits: `[head, batch, cluster]`, clamped in the same way; no gradient flows into
            it.
        marginal: `[head, cluster]`, the frequency of each cluster; each head's frequencies sum to
            one, and zeros are smoothed. No gradient flows into it.
        beta: exponent in (0, 1]; below 1 it keeps clusters from collapsing.
        student_temperature: positive; below 0.05 gradients become very large.
        teacher_temperature: positive; below 0.04 the teacher is nearly one-hot.
        clip_min: lower bound of the pointwise mutual information. Clipping does not change the
            gradient, so that clipped samples still contribute to training.

    Returns:
        `[head, batch]`, float32 (float64 for float64 input).

    Raises:
        ValueError: an argument is out of range, or shapes do not fit; the message names them.

    References:
        Adaloglou et al., Exploring the Limits of Deep Image Clustering using Pretrained Models,
        BMVC 2023, equation 7.

    >>> logits = torch.zeros(1, 1, 4)
    >>> beta_mi(logits, logits, torch.full((1, 4), 0.25), beta=1.0)  # independent: log 1 = 0
    tensor([[-0.]])
    """
    _check(beta, student_temperature, clip_min)
    check_temperature("teacher_temperature", teacher_temperature)
    shape = student_logits.shape
    if len(shape) != 3 or teacher_logits.shape != shape or marginal.shape != (shape[0], shape[2]):
        raise ValueError(
            f"student_logits {tuple(student_logits.shape)}, teacher_logits "
            f"{tuple(teacher_logits.shape)} and marginal {tuple(marginal.shape)} do not fit; "
            "expected [head, batch, cluster], [head, batch, cluster] and [head, cluster]"
        )
    student, teacher = (
        saturated(logits, infinities=False) for logits in (student_logits, teacher_logits.detach())
    )
    teacher_log_probs = log_probabilities(teacher, teacher_temperature)
    log_pi = log_marginal(marginal).unsqueeze(1)
    return _BetaMI.apply(student, teacher_log_probs, log_pi, beta, student_temperature, clip_min)  # pyright: ignore[reportReturnType]


def agreement(teacher_log_probs: Tensor) -> Tensor:
    """Compute the teacher's agreement on pairs of views of a sample, the mean of `sum_k q1_k q2_k`.

    The result `[head, batch]` of log-probabilities `[head, view, batch, cluster]` is in [0, 1]
    (Adaloglou et al., BMVC 2023, equation 8).
    """
    probs = teacher_log_probs.exp()
    views = probs.shape[1]
    pairs = [(probs[:, v] * probs[:, w]).sum(-1) for v in range(views) for w in range(v)]
    return torch.stack(pairs).mean(0)


def safe_normalize_weights(weights: Tensor, dim: int = -1) -> Tensor:
    """Scale weights so that they sum to one.

    Entries that are NaN, infinite or negative count as 0, and the others keep their proportions;
    if no entry is positive, the result is uniform.

    Args:
        weights: any floating-point tensor; float16 sums do not overflow.
        dim: the axis along which the result sums to one.

    Returns:
        A tensor of the same shape; float64 for float64 input, float32 otherwise.

    >>> safe_normalize_weights(torch.tensor([1.0, float("nan"), 3.0]))
    tensor([0.2500, 0.0000, 0.7500])
    """
    weights = weights.to(compute_dtype(weights))
    weights = torch.where(torch.isfinite(weights) & (weights > 0), weights, 0)
    largest = weights.amax(dim=dim, keepdim=True)
    weights = weights / torch.where(largest > 0, largest, 1)  # so that the sum cannot overflow
    total = weights.sum(dim=dim, keepdim=True)
    uniform = 1.0 / weights.shape[dim] if weights.shape[dim] else 0.0
    return torch.where(total > 0, weights / torch.where(total > 0, total, 1), uniform)


def instance_weights(agreements: Tensor, how: InstanceWeight) -> Tensor | None:
    """Turn the teachers' agreement on each sample into sample weights that sum to one.

    Args:
        agreements: `[head, batch]`, from `agreement`.
        how: `mean` averages over the heads whose entries are all finite, as in the paper, which
            couples the heads; `own` normalizes each head separately; `none` uses no weights.

    Returns:
        `[1, batch]` for `mean`, `[head, batch]` for `own`, None for `none`.
    """
    if how == "none":
        return None
    if how == "mean":
        healthy = torch.isfinite(agreements).all(-1, keepdim=True)
        kept = torch.where(healthy, agreements, 0).sum(0, keepdim=True)
        agreements = kept / healthy.sum().clamp(min=1)
    return safe_normalize_weights(agreements)


def temi(
    student_logits: Tensor,
    teacher_log_probs: Tensor,
    marginal: Tensor,
    weights: Tensor | None = None,
    *,
    beta: float = 0.6,
    student_temperature: float = 0.1,
    clip_min: float = -100.0,
) -> Tensor:
    """Compute the TEMI objective of each head, the mean of `beta_mi` over samples and view pairs.

    The mean is over all ordered pairs of different views, one for the student and one for the
    teacher. Logits are not clamped, which would cost a pass over all logits in each step: if they
    overflow float32 when divided by the temperature, their head's loss is NaN and the guard
    excludes that head.

    Args:
        student_logits: `[head, view, batch, cluster]`, two views or more.
        teacher_log_probs: `[head, view, batch, cluster]`, from `log_probabilities`; no gradient
            flows into it.
        marginal: `[head, cluster]`, the frequency of each cluster.
        weights: `[1 or head, batch]` from `instance_weights`; each row sums to one. None for an
            unweighted mean over samples.
        beta: as in `beta_mi`.
        student_temperature: as in `beta_mi`.
        clip_min: as in `beta_mi`.

    Returns:
        `[head]`, float32 (float64 for float64 input).

    Raises:
        ValueError: an argument is out of range; the message names it.

    References:
        Adaloglou et al., BMVC 2023, equations 7 to 9. The paper's weights are not normalized. Here
        they sum to one, so that gradients do not grow as teachers become more confident.
    """
    _check(beta, student_temperature, clip_min)
    views = student_logits.shape[1]
    log_pi = log_marginal(marginal)[:, None, None]
    total = torch.zeros((), device=student_logits.device)
    for shift in range(1, views):
        other = rolled_views(teacher_log_probs, shift)
        loss = _BetaMI.apply(
            student_logits, other, log_pi, beta, student_temperature, clip_min
        )  # [head, view, batch]
        loss = loss.mean(1)  # pyright: ignore[reportOptionalMemberAccess]
        total = total + (loss.mean(-1) if weights is None else (weights * loss).sum(-1))
    return total / (views - 1)
