"""What a student's inside is compared by: hidden states, and relations of attention."""

from __future__ import annotations

import torch
from torch import Tensor

from ssl_kd.guard.finite import safe_normalize
from ssl_kd.losses.rows import saturated


def state_distance(student: Tensor, teacher: Tensor) -> Tensor:
    r"""Half the squared distance of two states that are scaled to unit length.

    $\frac{1}{2} \| s / |s| - t / |t| \|^2 = 1 - \cos(s, t)$, in float32, from 0 to 2. Lengths do
    not count: a few channels of a language model's states are hundreds of times the others, and
    grow with depth.

    Args:
        student: `[..., dim]`, projected to the teacher's width where that is another.
        teacher: `[..., dim]`; gets no gradient. An infinity on either side counts as 65504, and a
            zero vector stays one.

    Returns:
        `[...]`; float64 for a float64 student, float32 otherwise. NaN where a state holds one.

    Raises:
        ValueError: the shapes differ.

    References:
        The cosine loss of DistilBERT, arXiv 1910.01108, section 2; layer by layer as in TinyBERT,
        arXiv 1909.10351, equation 8.

    >>> import torch
    >>> state_distance(torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 9.0]]))
    tensor([1.])
    """
    if student.shape != teacher.shape:
        raise ValueError(
            f"states {tuple(student.shape)} of the student and {tuple(teacher.shape)} of the "
            "teacher: expected the same shape; project the student's to the teacher's width"
        )
    s = safe_normalize(saturated(student))
    t = safe_normalize(saturated(teacher.detach().to(s.dtype)))
    return (s - t).square().sum(-1) / 2


def relation_divergence(
    student: Tensor, teacher: Tensor, queries: Tensor, documents: Tensor, heads: int
) -> Tensor:
    r"""KL of the relations that one row's tokens have to each other, teacher against student.

    $\frac{1}{A} \sum_a KL(\sigma(t_a t_a^\top / \sqrt{d_t}) \| \sigma(s_a s_a^\top / \sqrt{d_s}))$,
    $\sigma$ the softmax, for each query, over the tokens of its document up to itself. Vectors
    (queries, keys or values of attention, of all heads side by side) are split anew into A relation
    heads on either side, so that models of other widths and numbers of heads compare.

    Args:
        student: `[token, dim]`.
        teacher: `[token, dim']`; gets no gradient. An infinity on either side counts as 65504.
        queries: int64 `[n]`, the tokens whose relations count.
        documents: `[token]`, the number of each token's document; 0 is padding, which may hold
            anything.
        heads: A, which divides both widths.

    Returns:
        `[n]`, nats; float64 for a float64 student, float32 otherwise. NaN where a document holds
        one up to the query.

    Raises:
        ValueError: a width cannot be split into so many heads.

    References:
        MiniLMv2, arXiv 2012.15828, equations 3 to 6, here with a causal mask.
    """
    if student.shape[-1] % heads or teacher.shape[-1] % heads:
        raise ValueError(
            f"widths {student.shape[-1]} and {teacher.shape[-1]} cannot both be split into {heads} "
            "relation heads: expected a divisor of both"
        )
    s = saturated(student)
    position = torch.arange(len(documents), device=documents.device)
    seen = (position <= queries[:, None]) & (documents == documents[queries, None])
    log_q = _relations(s, queries, documents, seen, heads)
    log_p = _relations(saturated(teacher.detach().to(s.dtype)), queries, documents, seen, heads)
    ratio = (log_p - log_q).masked_fill(~seen, 0)  # -inf on both sides where nothing is seen
    return (log_p.exp() * ratio).sum(-1).mean(0)


def _relations(x: Tensor, queries: Tensor, documents: Tensor, seen: Tensor, heads: int) -> Tensor:
    """Log-probabilities `[head, query, token]`."""
    # Zero before the product: a masked score hides a NaN of padding, its gradient would not.
    x = torch.where(documents[:, None] > 0, x, 0).unflatten(-1, (heads, -1)).transpose(0, 1)
    with torch.autocast(x.device.type, enabled=False):
        scores = x[:, queries] @ x.transpose(1, 2) / x.shape[-1] ** 0.5
    return scores.masked_fill(~seen, -torch.inf).log_softmax(-1)
