"""Regularization of a mixture of experts' router: load balance, entropy, distance; in float32.

The objective of a student-aware router itself is `linear_distillation` with the roles swapped: the
teacher whose router learns is the *student* argument, the fixed student the *teacher* argument,
with `divergence="reverse_kl"`, which is KL(first || second).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ssl_kd.guard.finite import compute_dtype
from ssl_kd.losses.rows import lifted, saturated

_EPS = 1e-10


def load_balance(mass: Tensor, counts: Tensor) -> Tensor:
    """Compute `CV(m)^2 + CV(P)^2`, CV = standard deviation / mean: 0 for an even load.

    Args:
        mass: P, `[..., expert]`, gate probabilities summed over real tokens (not over padding).
        counts: m, the same shape, how many real tokens chose the expert; no gradient.

    Returns:
        `[...]`, at least 0, float32 (float64 for float64); 0 where there was no token.

    References:
        Shazeer et al., Outrageously Large Neural Networks, 2017, section 4 and appendix A; weighted
        0.01 a layer in Every Expert Matters, arXiv 2502.12947, 2025.

    >>> load_balance(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 2.0]))
    tensor(0.5000)
    """
    if mass.shape != counts.shape or mass.ndim < 1 or mass.shape[-1] < 2:
        raise ValueError(
            f"mass is {list(mass.shape)} and counts {list(counts.shape)}; expected the same "
            "[..., expert] with 2 experts or more"
        )
    return _squared_variation(mass) + _squared_variation(counts.detach())


def _squared_variation(x: Tensor) -> Tensor:
    x = x.to(compute_dtype(x))
    variance, mean = torch.var_mean(x, dim=-1, correction=1)
    return variance / (mean * mean + _EPS)


def gate_entropy(logits: Tensor) -> Tensor:
    """Compute the entropy `[token]` of gate logits `[token, expert]`, in nats.

    It is 0 for one expert, log N for N experts of equal weight.
    """
    log_p = torch.log_softmax(saturated(logits, infinities=False), dim=-1)
    return -_times_log(log_p.exp(), log_p)


def gate_kl(original_logits: Tensor, logits: Tensor) -> Tensor:
    """Compute KL(original || current) `[token]` of two routers' logits `[token, expert]`, in nats.

    Both are of the same hidden states; the original gets no gradient.
    """
    original = original_logits.detach().to(compute_dtype(logits))
    log_p = torch.log_softmax(saturated(original, infinities=False), dim=-1)
    log_q = torch.log_softmax(saturated(logits, infinities=False), dim=-1)
    return lifted(_times_log(log_p.exp(), log_p - log_q))


def _times_log(p: Tensor, log: Tensor) -> Tensor:
    """Sum `p * log`, where an expert at -inf (p exactly 0) adds 0."""
    return (p * torch.where(p == 0, 0, log)).sum(-1)
