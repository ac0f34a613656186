"""Divergences between two categorical distributions, with their gradients in closed form."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Divergence = Literal["forward_kl", "reverse_kl", "js", "skew_kl", "skew_reverse_kl", "tvd"]
SKEW = 0.1  # alpha of DistiLLM: the share of the first distribution in the mixture
SATURATION = 65504.0  # the largest finite float16: what an overflowed logit is taken for
_NOWHERE = -1e9  # log-probability of an entry outside the vocabulary: finite, and exp of it is 0


def check_divergence(name: str) -> None:
    """Refuse an unknown divergence.

    Raises:
        ValueError: names it and those there are.
    """
    if name not in get_args(Divergence):
        raise ValueError(
            f"divergence is {name!r}, expected one of {', '.join(get_args(Divergence))}"
        )


def saturate_(logits: Tensor) -> Tensor:
    """Replace infinities by +-65504, in place; a NaN stays a NaN."""
    return logits.nan_to_num_(nan=float("nan"), posinf=SATURATION, neginf=-SATURATION)


def log_softmax_(
    logits: Tensor, temperature: float, outside: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`log softmax(logits / temperature)` and its exponential.

    The maximum goes before the division: a difference of large logits is exact, their quotients'
    difference is not.

    Args:
        logits: `[n, vocab]`, float32 or float64; overwritten by the log-probabilities.
        temperature: positive.
        outside: `[k]`, entries that get no mass: log-probability about -1e9, probability 0.

    Returns:
        Log-probabilities and probabilities, `[n, vocab]`.
    """
    if outside is not None:
        logits.index_fill_(-1, outside, -torch.inf)
    logits.sub_(logits.amax(-1, keepdim=True))
    if temperature != 1:
        logits.mul_(1 / temperature)
    if outside is not None:
        logits.index_fill_(-1, outside, _NOWHERE)
    probs = logits.exp()
    total = probs.sum(-1, keepdim=True)
    return logits.sub_(total.log()), probs.mul_(total.reciprocal_())


def _log_mixture(x: Tensor, share: float) -> Tensor:
    """`log(1 + share * (e^x - 1))`: the log of a mixture over its first part, exact near x = 0.

    `x` is held at 80, where the first part weighs e^-80 of the second and no longer counts: without
    that, e^x overflows.
    """
    return x.clamp(max=80).expm1_().mul_(share).log1p_()


def divergence_(
    name: Divergence,
    log_p: Tensor,
    p: Tensor,
    log_q: Tensor,
    q: Tensor,
    *,
    gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """The divergence of teacher p and student q, and its gradient with respect to q's logits.

    With g = dD/dq, the gradient is `q_j (g_j - sum_i q_i g_i)`. Every form below keeps the weight
    next to a logarithm that stays finite, so nothing becomes 0 times infinity.

    Args:
        name: see `token_kd`.
        log_p: teacher, `[n, vocab]`; overwritten.
        p: its exponential; overwritten.
        log_q: student, `[n, vocab]`, finite; left as it is.
        q: its exponential; left as it is.
        gradient: whether to compute the gradient.

    Returns:
        `[n]`, and `[n, vocab]` or None.
    """
    if name == "forward_kl":
        value = log_p.sub_(log_q).mul_(p).sum(-1)
        return value, torch.sub(q, p, out=p) if gradient else None
    weighted = None  # q * g, up to a multiple of q, which the centring below removes
    if name == "tvd":
        torch.sub(q, p, out=p)
        size = p.abs()
        value = size.sum(-1) / 2
        # The sign by division: torch.sign makes a NaN 0.
        sign = p.div_(size.clamp_(min=torch.finfo(p.dtype).tiny))
        weighted = sign.mul_(q).div_(2) if gradient else None
    else:
        ratio = torch.sub(log_q, log_p, out=log_p)
        if name == "reverse_kl":
            weighted = ratio.mul_(q)
            value = weighted.sum(-1)
        elif name == "js":
            value = _log_mixture(ratio, 0.5).mul_(p).sum(-1)
            weighted = _log_mixture(ratio.neg_(), 0.5).mul_(q).div_(-2)  # q (log q - log m) / 2
            value = weighted.sum(-1) - value / 2
        elif name == "skew_kl":
            log_mixture = _log_mixture(ratio, 1 - SKEW)  # log(m / p)
            value = -p.mul_(log_mixture).sum(-1)
            weighted = log_mixture.neg_().exp_().mul_(q).mul_(SKEW - 1) if gradient else None
        else:
            log_share = _log_mixture(ratio.neg_(), 1 - SKEW).neg_()  # log(q / m)
            value = torch.mul(log_share, q, out=p).sum(-1)
            weighted = p.addcmul_(log_share.exp_(), q, value=-SKEW) if gradient else None
    if not gradient or weighted is None:
        return value, None
    return value, weighted.addcmul_(q, weighted.sum(-1, keepdim=True), value=-1)
