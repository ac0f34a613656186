"""Divergences between teacher p and student q: the table that losses, settings and caches read.

To add one, write its function, its entry in `DIVERGENCES` and its formula in
tests/oracles/token_objectives.py; nothing else lists them. `make config` writes their names into
scripts/config.py. torch is imported inside functions, so that `ssl_kd distill --help` needs none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

JS_BETA = r"js:0?\.\d*[1-9]\d*"
"""Pattern of `js` with another weight than 0.5, above 0 and below 1."""
SKEW = 0.1  # alpha of DistiLLM: the share of the first distribution in the mixture

ValueAndGradient: TypeAlias = "tuple[Tensor, Tensor | None]"


@dataclass(frozen=True)
class Divergence:
    """A divergence D(p, q) of two categorical distributions, with its gradient in closed form.

    With g = dD/dq, the gradient with respect to q's logits is `q_j (g_j - sum_i q_i g_i)`. Every
    form below multiplies a weight by a finite logarithm, so nothing becomes 0 times infinity.

    Attributes:
        compute: called as `compute(log_p, p, log_q, q, gradient, exact)`, each tensor `[n, vocab]`
            and finite. `log_p` and `p`, of the teacher, may be overwritten; `log_q` and `q`, of the
            student, may not. Returns D `[n]`, and its gradient with respect to the student's logits
            `[n, vocab]`, or None if not `gradient`. D is at least 0 and, near 0, as exact as the
            differences of the logarithms; without `exact`, which waits for the device, only where
            it is not `near_0`.
        from_samples: an unbiased estimate from tokens that were sampled from the teacher, called as
            `from_samples(indices, weights, entropy, log_q, q, gradient)` with the fields of a
            `SampledTeacher`; None if there is none.
    """

    compute: Callable[..., ValueAndGradient]
    from_samples: (
        Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, bool], ValueAndGradient] | None
    ) = None


def _forward_kl(
    log_p: Tensor, p: Tensor, log_q: Tensor, q: Tensor, gradient: bool, exact: bool = True
) -> ValueAndGradient:
    """KL(p, q)."""
    ratio = log_p.sub_(log_q)
    value = (ratio * p).sum(-1)
    if exact:
        _exact_(value, lambda p, q, ratio: _kl_near_0(p, q, -ratio), p, q, ratio)
    return value, _difference_(q, p) if gradient else None


def _sampled_forward_kl(
    indices: Tensor, weights: Tensor, entropy: Tensor, log_q: Tensor, q: Tensor, gradient: bool
) -> ValueAndGradient:
    """`sum_i w_i (-log q_i)` minus the teacher's entropy."""
    value = -(weights * log_q.gather(-1, indices)).sum(-1) - entropy
    if not gradient:
        return value, None
    return value, (q * weights.sum(-1, keepdim=True)).scatter_add_(-1, indices, -weights)


def _reverse_kl(
    log_p: Tensor, p: Tensor, log_q: Tensor, q: Tensor, gradient: bool, exact: bool = True
) -> ValueAndGradient:
    """KL(q, p)."""
    ratio = _difference_(log_q, log_p)
    weighted = ratio * q
    value = weighted.sum(-1)
    if exact:
        _exact_(value, lambda p, q, ratio: _kl_near_0(q, p, -ratio), p, q, ratio)
    return value, _centered_(weighted, q) if gradient else None


def _js(
    log_p: Tensor,
    p: Tensor,
    log_q: Tensor,
    q: Tensor,
    gradient: bool,
    exact: bool = True,
    *,
    beta: float = 0.5,
) -> ValueAndGradient:
    """Sum of b KL(p, m) and (1 - b) KL(q, m), with m = b p + (1 - b) q and b = beta."""
    ratio = _difference_(log_q, log_p)
    of_teacher = _log_mixture(ratio, 1 - beta).mul_(p).sum(-1)  # -KL(p, m)
    weighted = _log_mixture(ratio.neg_(), beta).mul_(q).mul_(beta - 1)  # (1 - b) q log(q / m)

    def exactly(p: Tensor, q: Tensor, ratio: Tensor) -> Tensor:
        mixture = p * beta + q * (1 - beta)
        of_teacher = _kl_near_0(p, mixture, _log_mixture(-ratio, 1 - beta)) * beta
        return of_teacher + _kl_near_0(q, mixture, _log_mixture(ratio, beta)) * (1 - beta)

    value = weighted.sum(-1) - of_teacher * beta
    if exact:
        _exact_(value, exactly, p, q, ratio)
    return value, _centered_(weighted, q) if gradient else None


def _skew_kl(
    log_p: Tensor, p: Tensor, log_q: Tensor, q: Tensor, gradient: bool, exact: bool = True
) -> ValueAndGradient:
    """KL(p, 0.1 p + 0.9 q)."""
    log_mixture = _log_mixture(_difference_(log_q, log_p), 1 - SKEW)  # log(m / p)

    def exactly(p: Tensor, q: Tensor, log_mixture: Tensor) -> Tensor:
        return _kl_near_0(p, p * SKEW + q * (1 - SKEW), log_mixture)

    value = -(p * log_mixture).sum(-1)
    if exact:
        _exact_(value, exactly, p, q, log_mixture)
    if not gradient:
        return value, None
    return value, _centered_(log_mixture.neg_().exp_().mul_(q).mul_(SKEW - 1), q)


def _skew_reverse_kl(
    log_p: Tensor, p: Tensor, log_q: Tensor, q: Tensor, gradient: bool, exact: bool = True
) -> ValueAndGradient:
    """KL(q, 0.9 p + 0.1 q)."""
    log_share = _log_mixture(_difference_(log_q, log_p).neg_(), 1 - SKEW).neg_()  # log(q / m)
    weighted = log_share * q

    def exactly(p: Tensor, q: Tensor, log_share: Tensor) -> Tensor:
        return _kl_near_0(q, p * (1 - SKEW) + q * SKEW, -log_share)

    value = weighted.sum(-1)
    if exact:
        _exact_(value, exactly, p, q, log_share)
    if not gradient:
        return value, None
    return value, _centered_(weighted.addcmul_(log_share.exp_(), q, value=-SKEW), q)


def _tvd(
    log_p: Tensor, p: Tensor, log_q: Tensor, q: Tensor, gradient: bool, exact: bool = True
) -> ValueAndGradient:
    """Total variation distance: sum abs(p - q) / 2."""
    import torch

    difference = _difference_(q, p)
    size = difference.abs()
    value = size.sum(-1) / 2
    if not gradient:
        return value, None
    # The sign by division: torch.sign makes a NaN 0.
    sign = difference.div_(size.clamp_(min=torch.finfo(q.dtype).tiny))
    return value, _centered_(sign.mul_(q).div_(2), q)


def near_0(value: Tensor) -> Tensor:
    """Return where rounding errors of the logarithms dominate a divergence `[n]`."""
    import torch

    return value < 2**14 * torch.finfo(value.dtype).eps


def _exact_(value: Tensor, exactly: Callable[..., Tensor], *tensors: Tensor) -> None:
    """Replace `value` `[n]` by `exactly` of the same rows of the tensors where it is `near_0`."""
    close = near_0(value).nonzero().flatten()
    if len(close):
        value[close] = exactly(*(x[close] for x in tensors))


def _kl_near_0(a: Tensor, b: Tensor, log_ratio: Tensor) -> Tensor:
    """KL(a, b) with r = `log_ratio` = log(b / a), as a sum of terms that are all at least 0.

    `a (e^r - 1 - r)` adds b - a, whose sum is 0, to `-a r`. An error in the logarithms that shifts
    all r equally enters only squared.
    """
    import torch

    near = log_ratio.clamp(max=1).expm1_().sub_(log_ratio).mul_(a)
    return torch.where(log_ratio < 1, near, b - a - a * log_ratio).clamp_(min=0).sum(-1)


def _difference_(a: Tensor, b: Tensor) -> Tensor:
    """`a - b`, in the memory of b."""
    import torch

    return torch.sub(a, b, out=b)


def _centered_(weighted: Tensor, q: Tensor) -> Tensor:
    """Turn `q * g` into the gradient, in place; adding a multiple of q changes nothing."""
    return weighted.addcmul_(q, weighted.sum(-1, keepdim=True), value=-1)


def _log_mixture(x: Tensor, share: float) -> Tensor:
    """`log(1 + share * (e^x - 1))`: the log of a mixture over its first part, exact near x = 0.

    `x` is clamped to 80, beyond which e^x overflows and the first part no longer counts.
    """
    return x.clamp(max=80).expm1_().mul_(share).log1p_()


DIVERGENCES: Mapping[str, Divergence] = MappingProxyType(
    {
        "forward_kl": Divergence(_forward_kl, from_samples=_sampled_forward_kl),
        "reverse_kl": Divergence(_reverse_kl),
        "js": Divergence(_js),
        "skew_kl": Divergence(_skew_kl),
        "skew_reverse_kl": Divergence(_skew_reverse_kl),
        "tvd": Divergence(_tvd),
    }
)


def divergence_named(name: str) -> Divergence:
    """Return the divergence of a name; `js:BETA` is GKD's generalised Jensen-Shannon divergence.

    `BETA KL(p, m) + (1 - BETA) KL(q, m)` with m = BETA p + (1 - BETA) q. Divided by BETA it tends
    to `forward_kl` for BETA near 0; divided by 1 - BETA, to `reverse_kl` for BETA near 1.

    Raises:
        ValueError: the name is unknown; the message lists those there are.

    References:
        Agarwal et al., On-Policy Distillation of Language Models (GKD), ICLR 2024, equation 3.
    """
    if re.fullmatch(JS_BETA, name):
        return Divergence(partial(_js, beta=float(name[3:])))
    if name not in DIVERGENCES:
        known = ", ".join([*DIVERGENCES, "js:BETA with BETA between 0 and 1"])
        raise ValueError(f"divergence is {name!r}, expected one of {known}")
    return DIVERGENCES[name]
