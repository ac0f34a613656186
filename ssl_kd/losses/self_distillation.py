"""Temperature-sharpened self-distillation: a sharper, centred teacher sets the target.

Finite logits beyond +-65504 count as that; an infinity stays one, for the guard to find.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ssl_kd.losses.mutual_information import check_temperature, log_probabilities
from ssl_kd.losses.rows import saturated


def centred_targets(teacher_logits: Tensor, center: Tensor, temperature: float) -> Tensor:
    """The teacher's targets `softmax((logits - center) / temperature)`.

    Args:
        teacher_logits: `[head, ..., cluster]`.
        center: `[head, cluster]`, a running mean of the teacher's logits: it keeps one cluster from
            taking everything.
        temperature: positive; smaller than the student's, which sharpens the target.

    Returns:
        Probabilities of the same shape, float32 (float64 for float64).

    References:
        Caron et al., Emerging Properties in Self-Supervised Vision Transformers, 2021, section 3.1.
    """
    check_temperature("teacher_temperature", temperature)
    shape = (len(center), *[1] * (teacher_logits.ndim - 2), center.shape[-1])
    logits = saturated(teacher_logits.detach(), infinities=False)
    return torch.softmax((logits - center.detach().view(shape)) / temperature, dim=-1)


def sinkhorn_targets(teacher_logits: Tensor, temperature: float, iterations: int = 3) -> Tensor:
    """The teacher's targets, balanced so that a batch uses all clusters equally.

    Sinkhorn-Knopp in log space: rows and columns are normalised in turn, and no exponential of a
    large logit is ever formed.

    Args:
        teacher_logits: `[head, ..., cluster]`; every axis between is one batch.
        temperature: positive; smaller than the student's.
        iterations: at least 1; three are enough in practice.

    Returns:
        Probabilities of the same shape, summing to one over clusters, float32 (float64 for
        float64).

    References:
        Caron et al., Unsupervised Learning of Visual Features by Contrasting Cluster Assignments,
        2020, algorithm 1.
    """
    check_temperature("teacher_temperature", temperature)
    if iterations < 1:
        raise ValueError(f"iterations is {iterations}, expected at least 1")
    logits = saturated(teacher_logits.detach(), infinities=False) / temperature
    log_q = logits.flatten(1, -2)
    for _ in range(iterations):
        log_q = log_q - torch.logsumexp(log_q, dim=1, keepdim=True)  # every cluster the same mass
        log_q = torch.log_softmax(log_q, dim=2)  # every sample mass one
    return log_q.exp().view(logits.shape)


def sharpened_cross_entropy(
    student_logits: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    *,
    student_temperature: float = 0.1,
) -> Tensor:
    """Cross-entropy of the student against the teacher's targets on the other view.

    Args:
        student_logits: `[head, view, batch, cluster]`, two views or more.
        targets: the same shape, probabilities from `centred_targets` or `sinkhorn_targets`.
        weights: `[1 or head, batch]`, each row summing to one; None for a plain mean.
        student_temperature: positive.

    Returns:
        `[head]`, float32 (float64 for float64 input).

    Raises:
        ValueError: names the argument that is out of range.

    References:
        Caron et al., Emerging Properties in Self-Supervised Vision Transformers, 2021, equation 3.
    """
    check_temperature("student_temperature", student_temperature)
    views = student_logits.shape[1]
    log_probs = log_probabilities(saturated(student_logits, infinities=False), student_temperature)
    total = torch.zeros((), device=student_logits.device)
    for shift in range(1, views):
        loss = -(targets.roll(shift, dims=1) * log_probs).sum(-1).mean(1)  # [head, batch]
        total = total + (loss.mean(-1) if weights is None else (weights * loss).sum(-1))
    return total / (views - 1)
