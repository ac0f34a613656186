"""Token-level distillation as the papers write it: one token at a time, in float64, by autograd.

This is the reference. `ssl_kd.losses.token_kd` and `linear_distillation` return the same losses and
gradients for whole batches, from closed forms, in chunks and in half precision; the tests compare
them with this page, from which they import nothing. Use it to check the mathematics, not to train.

References:
    Hinton et al., Distilling the Knowledge in a Neural Network, 2015 (T^2). Agarwal et al.,
    On-Policy Distillation of Language Models (GKD), ICLR 2024, equation 3 (js:BETA). Ko et al.,
    DistiLLM, ICML 2024 (skew divergences).
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 65504.0  # of float16: an infinite logit is an overflow, and counts as this


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return `sum_i p_i log(p_i / q_i)` of log-probabilities `[outcome]`."""
    return (log_p.exp() * (log_p - log_q)).sum()


def mixture(share: float, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return `log(share * p + (1 - share) * q)`."""
    of_p, of_q = torch.tensor([share, 1 - share], dtype=torch.float64).log()
    return torch.logaddexp(log_p + of_p, log_q + of_q)


def likeliest(k: int, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """Return p and q over k + 1 outcomes: the k likeliest of q, and all others together."""
    chosen = log_q.topk(k).indices
    others = torch.ones_like(log_q).index_fill(0, chosen, 0).nonzero().flatten()
    if not len(others):
        return log_p[chosen], log_q[chosen]
    log_p, log_q = (torch.cat([x[chosen], x[others].logsumexp(0)[None]]) for x in (log_p, log_q))
    return log_p, log_q


def divergence_of(name: str, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return a divergence of teacher p and student q, given log-probabilities `[outcome]`.

    >>> p, q = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
    >>> [round(divergence_of(name, p, q).item(), 4) for name in ("forward_kl", "reverse_kl", "tvd")]
    [0.1438, 0.1308, 0.25]
    """
    kind, _, value = name.partition(":")
    if kind == "forward_kl":
        return kl(log_p, log_q)
    if kind == "reverse_kl":
        return kl(log_q, log_p) if not value else kl(*likeliest(int(value), log_p, log_q)[::-1])
    if kind == "js":
        beta = float(value or 0.5)
        middle = mixture(beta, log_p, log_q)
        return beta * kl(log_p, middle) + (1 - beta) * kl(log_q, middle)
    if kind == "skew_kl":
        return kl(log_p, mixture(0.1, log_p, log_q))
    if kind == "skew_reverse_kl":
        return kl(log_q, mixture(0.9, log_p, log_q))
    if kind == "tvd":
        return (log_p.exp() - log_q.exp()).abs().sum() / 2
    raise ValueError(f"divergence is {name!r}, expected a name in ssl_kd.losses.DIVERGENCES")


def token_kd(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float = 2.0,
    divergence: str = "forward_kl",
) -> tuple[Tensor, Tensor]:
    """Return the loss of `ssl_kd.losses.token_kd`, and its gradient with respect to the student.

    Args:
        student_logits: `[batch, token, vocab]`.
        teacher_logits: `[batch, token, vocab]`; the larger vocabulary is cut to the smaller one.
        mask: `[batch, token]`, 1 for real tokens; None if all tokens are real.
        temperature: T, above 0.
        divergence: name of D, as in `divergence_of`.

    Returns:
        The mean of `T^2 D(p, q)` over real tokens, and the gradient `[batch, token, vocab]`, both
        float64.
    """
    common = min(student_logits.shape[-1], teacher_logits.shape[-1])
    student, teacher = student_logits.detach().double(), teacher_logits.detach().double()
    real = torch.ones(student.shape[:2]) if mask is None else mask
    n_rows, length = real.shape
    tokens = [(b, t) for b in range(n_rows) for t in range(length) if real[b, t]]
    # An entry that is -inf at every token lies outside the vocabulary: it is left out.
    entries = range(common)
    of_student = [v for v in entries if any(student[b, t, v] != -torch.inf for b, t in tokens)]
    of_both = [v for v in of_student if any(teacher[b, t, v] != -torch.inf for b, t in tokens)]
    total, gradient = torch.zeros((), dtype=torch.float64), torch.zeros_like(student)
    for b, t in tokens:
        # A top-k or top-p filter sets most of the teacher's logits to -inf: probabilities of 0.
        absent = int((teacher[b, t, :common] == -torch.inf).sum())
        kept = of_student if common / 2 < absent < common else of_both
        z = _finite(student[b, t, kept]).requires_grad_()
        log_q = (z / temperature).log_softmax(-1)
        log_p = (_finite(teacher[b, t, kept]) / temperature).log_softmax(-1)
        loss = temperature**2 * divergence_of(divergence, log_p, log_q) / len(tokens)
        gradient[b, t, kept] = torch.autograd.grad(loss, z)[0]
        total += loss.detach()
    return total, gradient


def _finite(logits: Tensor) -> Tensor:
    return torch.where(logits.isinf(), logits.sign() * LARGEST, logits)
