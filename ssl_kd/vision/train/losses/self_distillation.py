"""Self-distillation with centered and sharpened teacher targets, as in DINO.

Finite logits beyond +-65504 are clamped to it; infinite logits stay infinite, so that the guard
finds the overflow. Results are float32 (float64 for float64 input).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from firstnan.finite import compute_dtype
from ssl_kd.core.logits import check_temperature, differentiated_once, saturate_, saturated
from ssl_kd.vision.train.losses.clusters import along_clusters, rolled_views
from ssl_kd.vision.train.losses.mutual_information import log_probabilities


def centered_targets(teacher_logits: Tensor, center: Tensor, temperature: float) -> Tensor:
    """Return the teacher's targets `softmax((logits - center) / temperature)`.

    The center `[head, cluster]` is a running mean of the teacher's logits `[head, ..., cluster]`;
    subtracting it prevents that all samples are assigned to one cluster.

    References:
        Caron et al., Emerging Properties in Self-Supervised Vision Transformers, 2021, section 3.1.
    """
    check_temperature("teacher_temperature", temperature)
    shape = (len(center), *[1] * (teacher_logits.ndim - 2), center.shape[-1])
    logits = saturated(teacher_logits.detach(), infinities=False)
    return along_clusters(torch.softmax, (logits - center.detach().view(shape)) / temperature)


class _CrossEntropy(torch.autograd.Function):
    """Compute `-sum_k q_k log p_k` of each sample; its gradient is `(p sum_k q_k - q) / T`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
        wide = logits.to(compute_dtype(logits))
        # Adding 0 times an infinity gives NaN: only finite logits are clamped.
        log_probs = log_probabilities(saturate_(wide.clone()).add_(wide, alpha=0), temperature)
        ctx.save_for_backward(log_probs, targets)
        ctx.dtype, ctx.temperature = logits.dtype, temperature
        return -(targets * log_probs).sum(-1)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, grad_output: Tensor) -> Any:  # type: ignore[override]
        log_probs, targets = ctx.saved_tensors
        gradient = log_probs.exp().mul_(targets.sum(-1, keepdim=True)).sub_(targets)
        return gradient.mul_(grad_output.unsqueeze(-1) / ctx.temperature).to(ctx.dtype), None, None


def sharpened_cross_entropy(
    student_logits: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    *,
    student_temperature: float = 0.1,
) -> Tensor:
    """Compute the student's cross-entropy `[head]` against targets from other views of a sample.

    Args:
        student_logits: `[head, view, batch, cluster]`, two views or more.
        targets: `[head, view, batch, cluster]`, or the same with one head; probabilities from
            `centered_targets`. No gradient flows into them.
        weights: `[1 or head, batch]`, sample weights; each row sums to one. None for an unweighted
            mean.
        student_temperature: positive.

    Raises:
        ValueError: `student_temperature` is out of range.

    References:
        Caron et al., Emerging Properties in Self-Supervised Vision Transformers, 2021, equation 3.
    """
    check_temperature("student_temperature", student_temperature)
    shifts = range(1, student_logits.shape[1])
    others = functools.reduce(torch.add, (rolled_views(targets, shift) for shift in shifts))
    loss = _CrossEntropy.apply(student_logits, others / len(shifts), student_temperature)
    loss = loss.mean(1)  # pyright: ignore[reportOptionalMemberAccess]
    return loss.mean(-1) if weights is None else (weights * loss).sum(-1)
