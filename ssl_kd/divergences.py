"""Divergences between teacher p and student q: one table, read by losses, settings and caches.

To add one, write its function and its entry in `DIVERGENCES`: nothing else in the library lists
them, and `make config` writes their names into scripts/config.py. The tests meet it by its formula
in tests/oracles/token_objectives.py. torch is imported where it is used: `ssl_kd distill --help`
shows the names without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DIVERGENCES", "Divergence", "divergence_named"]

SKEW = 0.1  # alpha of DistiLLM: the share of the first distribution in the mixture

ValueAndGradient: TypeAlias = "tuple[Tensor, Tensor | None]"


@dataclass(frozen=True)
class Divergence:
    """A divergence D(p, q) of two categorical distributions, with its gradient in closed form.

    With g = dD/dq, the gradient with respect to q's logits is `q_j (g_j - sum_i q_i g_i)`. Every
    form below keeps the weight next to a logarithm that stays finite, so nothing becomes 0 times
    infinity.

    Attributes:
        compute: called as `compute(log_p, p, log_q, q, gradient)`, each tensor `[n, vocab]` and
            finite. `log_p` and `p`, of the teacher, may be overwritten; `log_q` and `q`, of the
            student, may not. Returns D `[n]`, and its gradient with respect to the student's logits
            `[n, vocab]`, or None where `gradient` is False.
        swapped: name of the divergence that is D(q, p), which a router of ROUTER_JOINT learns by;
            None: it cannot.
        from_samples: an unbiased estimate from tokens that were sampled from the teacher, called as
            `from_samples(indices, weights, entropy, log_q, q, gradient)` with the fields of a
            `SampledTeacher`; None: there is none.
    """

    compute: Callable[[Tensor, Tensor, Tensor, Tensor, bool], ValueAndGradient]
    swapped: str | None = None
    from_samples: (
        Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, bool], ValueAndGradient] | None
    ) = None


def _forward_kl(
    log_p: Tensor, p: Tensor, log_q: Tensor, q: Tensor, gradient: bool
) -> ValueAndGradient:
    """KL(p, q)."""
    value = log_p.sub_(log_q).mul_(p).sum(-1)
    return value, _difference_(q, p) if gradient else None


def _sampled_forward_kl(
    indices: Tensor, weights: Tensor, entropy: Tensor, log_q: Tensor, q: Tensor, gradient: bool
) -> ValueAndGradient:
    """`sum_i w_i (-log q_i)` less the teacher's entropy."""
    value = -(weights * log_q.gather(-1, indices)).sum(-1) - entropy
    if not gradient:
        return value, None
    return value, (q * weights.sum(-1, keepdim=True)).scatter_add_(-1, indices, -weights)


def _reverse_kl(
    log_p: Tensor, p: Tensor, log_q: Tensor, q: Tensor, gradient: bool
) -> ValueAndGradient:
    """KL(q, p)."""
    weighted = _difference_(log_q, log_p).mul_(q)
    return weighted.sum(-1), _centred_(weighted, q) if gradient else None


def _js(log_p: Tensor, p: Tensor, log_q: Tensor, q: Tensor, gradient: bool) -> ValueAndGradient:
    """KL(p, m) / 2 + KL(q, m) / 2 with m = (p + q) / 2."""
    ratio = _difference_(log_q, log_p)
    of_teacher = _log_mixture(ratio, 0.5).mul_(p).sum(-1)
    weighted = _log_mixture(ratio.neg_(), 0.5).mul_(q).div_(-2)  # q (log q - log m) / 2
    value = weighted.sum(-1) - of_teacher / 2
    return value, _centred_(weighted, q) if gradient else None


def _skew_kl(
    log_p: Tensor, p: Tensor, log_q: Tensor, q: Tensor, gradient: bool
) -> ValueAndGradient:
    """KL(p, 0.1 p + 0.9 q)."""
    log_mixture = _log_mixture(_difference_(log_q, log_p), 1 - SKEW)  # log(m / p)
    value = -p.mul_(log_mixture).sum(-1)
    if not gradient:
        return value, None
    return value, _centred_(log_mixture.neg_().exp_().mul_(q).mul_(SKEW - 1), q)


def _skew_reverse_kl(
    log_p: Tensor, p: Tensor, log_q: Tensor, q: Tensor, gradient: bool
) -> ValueAndGradient:
    """KL(q, 0.9 p + 0.1 q)."""
    import torch

    log_share = _log_mixture(_difference_(log_q, log_p).neg_(), 1 - SKEW).neg_()  # log(q / m)
    value = torch.mul(log_share, q, out=p).sum(-1)
    if not gradient:
        return value, None
    return value, _centred_(p.addcmul_(log_share.exp_(), q, value=-SKEW), q)


def _tvd(log_p: Tensor, p: Tensor, log_q: Tensor, q: Tensor, gradient: bool) -> ValueAndGradient:
    """Total variation distance: sum abs(p - q) / 2."""
    import torch

    difference = _difference_(q, p)
    size = difference.abs()
    value = size.sum(-1) / 2
    if not gradient:
        return value, None
    # The sign by division: torch.sign makes a NaN 0.
    sign = difference.div_(size.clamp_(min=torch.finfo(q.dtype).tiny))
    return value, _centred_(sign.mul_(q).div_(2), q)


def _difference_(a: Tensor, b: Tensor) -> Tensor:
    """`a - b`, in the memory of b."""
    import torch

    return torch.sub(a, b, out=b)


def _centred_(weighted: Tensor, q: Tensor) -> Tensor:
    """The gradient from `q * g`, in place; any multiple of q in it makes no difference."""
    return weighted.addcmul_(q, weighted.sum(-1, keepdim=True), value=-1)


def _log_mixture(x: Tensor, share: float) -> Tensor:
    """`log(1 + share * (e^x - 1))`: the log of a mixture over its first part, exact near x = 0.

    `x` is held at 80, where the first part weighs e^-80 of the second and no longer counts: without
    that, e^x overflows.
    """
    return x.clamp(max=80).expm1_().mul_(share).log1p_()


DIVERGENCES: Mapping[str, Divergence] = MappingProxyType(
    {
        "forward_kl": Divergence(
            _forward_kl, swapped="reverse_kl", from_samples=_sampled_forward_kl
        ),
        "reverse_kl": Divergence(_reverse_kl, swapped="forward_kl"),
        "js": Divergence(_js, swapped="js"),
        "skew_kl": Divergence(_skew_kl),
        "skew_reverse_kl": Divergence(_skew_reverse_kl),
        "tvd": Divergence(_tvd, swapped="tvd"),
    }
)


def divergence_named(name: str) -> Divergence:
    """The divergence of a name.

    Raises:
        ValueError: there is none; names it and those there are.
    """
    if name not in DIVERGENCES:
        raise ValueError(f"divergence is {name!r}, expected one of {', '.join(DIVERGENCES)}")
    return DIVERGENCES[name]
