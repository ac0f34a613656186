"""Regularize the router of a mixture of experts: load balance, entropy, distance; in float32.

The main objective for training a teacher's router towards a fixed student is
`linear_distillation` with swapped roles: pass the teacher as the student and the student as the
teacher, with `divergence="reverse_kl"`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstnan.finite import compute_dtype

_EPS = 1e-10


def load_balance(mass: Tensor, counts: Tensor) -> Tensor:
    """Compute a load-balance loss `CV(m)^2 + CV(P)^2`, with CV = standard deviation / mean.

    P is `mass` `[..., expert]`, gate probabilities summed over real tokens; m is `counts`, the
    number of tokens routed to each expert, without gradient. The loss `[...]` is 0 for equal loads.

    References:
        Shazeer et al., Outrageously Large Neural Networks, 2017, section 4 and appendix A. Every
        Expert Matters, arXiv 2502.12947, 2025, weights the loss of each layer by 0.01.
    """
    if mass.shape != counts.shape or mass.ndim < 1 or mass.shape[-1] < 2:
        raise ValueError(
            f"mass has shape {list(mass.shape)} and counts {list(counts.shape)}; expected equal "
            "shapes [..., expert] with 2 experts or more"
        )
    return _squared_variation(mass) + _squared_variation(counts.detach())


def _squared_variation(x: Tensor) -> Tensor:
    x = x.to(compute_dtype(x))
    variance, mean = torch.var_mean(x, dim=-1, correction=1)
    return variance / (mean * mean + _EPS)


def gate_entropy(logits: Tensor) -> Tensor:
    """Compute the entropy `[token]`, in nats, of gate logits `[token, expert]`."""
    log_p = torch.log_softmax(logits.to(compute_dtype(logits)), dim=-1)
    return -_times_log(log_p.exp(), log_p)


def gate_kl(original_logits: Tensor, logits: Tensor) -> Tensor:
    """Compute KL(original || current) `[token]`, in nats, of two gates with equal inputs."""
    dtype = compute_dtype(logits)
    log_p = torch.log_softmax(original_logits.detach().to(dtype), dim=-1)
    log_q = torch.log_softmax(logits.to(dtype), dim=-1)
    return _times_log(log_p.exp(), log_p - log_q).clamp(min=0)  # rounding may fall below 0


def _times_log(p: Tensor, log: Tensor) -> Tensor:
    """Sum `p * log` over experts; where p is 0, and its logarithm -inf, the summand is 0."""
    return (p * torch.where(p == 0, 0, log)).sum(-1)
