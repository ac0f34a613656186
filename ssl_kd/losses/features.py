"""The distance between hidden states of student and teacher."""

from __future__ import annotations

from torch import Tensor

from ssl_kd.guard.finite import safe_normalize
from ssl_kd.losses.rows import saturated


def state_distance(student: Tensor, teacher: Tensor) -> Tensor:
    r"""Compute $\frac{1}{2} \| s / |s| - t / |t| \|^2 = 1 - \cos(s, t)$, from 0 to 2.

    Lengths do not count: a few channels of a language model's states are hundreds of times the
    others, and grow with depth. States beyond +-65504 count as that; a zero vector stays one.

    Args:
        student: `[..., dim]`, projected to the teacher's width if that differs.
        teacher: `[..., dim]`; gets no gradient.

    Returns:
        `[...]`; float64 for a float64 student, float32 otherwise. NaN where a state holds one.

    References:
        The cosine loss of DistilBERT, arXiv 1910.01108, section 2; layer by layer as in TinyBERT,
        arXiv 1909.10351, equation 8.

    >>> import torch
    >>> state_distance(torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 9.0]]))
    tensor([1.])
    """
    if student.shape != teacher.shape:
        raise ValueError(
            f"hidden states {tuple(student.shape)} of the student and {tuple(teacher.shape)} of "
            "the teacher: expected the same shape; project the student's to the teacher's width"
        )
    s = safe_normalize(saturated(student))
    t = safe_normalize(saturated(teacher.detach().to(s.dtype)))
    return (s - t).square().sum(-1) / 2
