"""Define the divergences between teacher p and student q, and the table of their names.

To add a divergence, write its function, its entry in `DIVERGENCES` and its formula in `plain.py`
beside this file, then run `make config`, which writes the names into scripts/config.py. Functions
import torch themselves, so that `ssl_kd distill --help` starts fast.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from ssl_kd.core.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

JS_BETA = r"js:0?\.\d*[1-9]\d*"
"""Regular expression of `js:BETA` with BETA above 0 and below 1."""
STUDENT_TOP_K = r"reverse_kl:[1-9]\d*"
"""Regular expression of `reverse_kl:K`, over the student's K likeliest tokens and the rest."""
SKEW = 0.1  # alpha of DistiLLM: the share of the first distribution in the mixture
NOWHERE = -1e9  # log-probability of an entry outside the vocabulary: finite, and exp of it is 0
LEAST_TAIL = 1e-20  # of probability: float32 may have lost entries of a smaller one

ValueAndGradient: TypeAlias = "tuple[Tensor, Tensor | None]"


@dataclass(frozen=True)
class Divergence:
    """A divergence D(p, q) of two categorical distributions, with its gradient in closed form.

    With g = dD/dq, the gradient with respect to q's logits is `q_j (g_j - sum_i q_i g_i)`. All
    formulas in this file multiply probabilities by finite logarithms, so that 0 times infinity
    cannot occur.

    `compute(log_p, p, log_q, q, gradient, exact_near_0)` takes finite `[n, vocab]`; it may
    overwrite the teacher's `log_p` and `p`. It returns D `[n]`, and the gradient with respect to
    the student's logits `[n, vocab]`, or None without `gradient`. With `exact_near_0`, values near
    0 are computed again from a formula without cancellation, which waits for the device.

    `from_samples(indices, weights, entropy, log_q, q, gradient)` estimates D without bias from the
    fields of a `SampledTeacher`; None if this divergence has no such estimate.
    """

    compute: Callable[..., ValueAndGradient]
    from_samples: (
        Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, bool], ValueAndGradient] | None
    ) = None


def _forward_kl(
    log_p: Tensor, p: Tensor, log_q: Tensor, q: Tensor, gradient: bool, exact_near_0: bool = True
) -> ValueAndGradient:
    """Compute KL(p, q); for arguments and result see `Divergence.compute`."""
    ratio = log_p.sub_(log_q)
    value = (ratio * p).sum(-1)
    if exact_near_0:
        _recompute_near_0_(value, lambda p, q, ratio: _kl_near_0(p, q, -ratio), p, q, ratio)
    return value, _difference_(q, p) if gradient else None


def _sampled_forward_kl(
    indices: Tensor, weights: Tensor, entropy: Tensor, log_q: Tensor, q: Tensor, gradient: bool
) -> ValueAndGradient:
    """Estimate KL(p, q) as `sum_i w_i (-log q_i)` minus the teacher's entropy."""
    value = -(weights * log_q.gather(-1, indices)).sum(-1) - entropy
    if not gradient:
        return value, None
    return value, (q * weights.sum(-1, keepdim=True)).scatter_add_(-1, indices, -weights)


def _reverse_kl(
    log_p: Tensor, p: Tensor, log_q: Tensor, q: Tensor, gradient: bool, exact_near_0: bool = True
) -> ValueAndGradient:
    """Compute KL(q, p); for arguments and result see `Divergence.compute`."""
    ratio = _difference_(log_q, log_p)
    weighted = ratio * q
    value = weighted.sum(-1)
    if exact_near_0:
        _recompute_near_0_(value, lambda p, q, ratio: _kl_near_0(q, p, -ratio), p, q, ratio)
    return value, _centered_(weighted, q) if gradient else None


def _student_top_k(
    log_p: Tensor,
    p: Tensor,
    log_q: Tensor,
    q: Tensor,
    gradient: bool,
    exact_near_0: bool = True,
    *,
    k: int,
) -> ValueAndGradient:
    """Compute KL(q, p) over k + 1 outcomes: the k likeliest of q, and any other."""
    if k > (n := log_q.shape[-1]):
        raise InputError(
            f"the divergence is 'reverse_kl:{k}', but teacher and student share a vocabulary of "
            f"{n} tokens: use 'reverse_kl', which compares all of them"
        )
    indices = log_q.topk(k, -1).indices
    coarse_p, _ = with_tail(log_p, p, indices)
    coarse_q, shares = with_tail(log_q, q, indices)
    pairs = coarse_p, coarse_p.exp(), coarse_q, coarse_q.exp()
    value, slope = _reverse_kl(*pairs, gradient, exact_near_0)
    if slope is None:
        return value, None
    return value, shares.mul_(slope[:, -1:]).scatter_(-1, indices, slope[:, :-1])


def with_tail(log_probs: Tensor, probs: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities `[n, k + 1]` of k outcomes and of all others together.

    Also returns the share `[n, vocab]` of each other outcome in the tail. Without others, the
    log-probability of the tail is finite and so low that its probability is 0.
    """
    import torch

    largest = 0.0
    tail = probs.scatter(-1, indices, 0)
    total = tail.sum(-1, keepdim=True)
    if probs.device.type != "cpu" or bool((total < LEAST_TAIL).any()):  # a GPU is not waited for
        # By logarithms: a tail that q has emptied beyond its least number is to be filled again.
        tail = log_probs.scatter(-1, indices, 2 * NOWHERE)
        largest = tail.amax(-1, keepdim=True)
        total = tail.sub_(largest).exp_().sum(-1, keepdim=True)
    coarse = torch.cat([log_probs.gather(-1, indices), total.log() + largest], -1)
    return coarse, tail.div_(total)


def _js(
    log_p: Tensor,
    p: Tensor,
    log_q: Tensor,
    q: Tensor,
    gradient: bool,
    exact_near_0: bool = True,
    *,
    beta: float = 0.5,
) -> ValueAndGradient:
    """Compute `b KL(p, m) + (1 - b) KL(q, m)` with `m = b p + (1 - b) q` and b = beta."""
    ratio = _difference_(log_q, log_p)
    of_teacher = _log_mixture(ratio, 1 - beta).mul_(p).sum(-1)  # -KL(p, m)
    weighted = _log_mixture(ratio.neg_(), beta).mul_(q).mul_(beta - 1)  # (1 - b) q log(q / m)

    def exactly(p: Tensor, q: Tensor, ratio: Tensor) -> Tensor:
        mixture = p * beta + q * (1 - beta)
        of_teacher = _kl_near_0(p, mixture, _log_mixture(-ratio, 1 - beta)) * beta
        return of_teacher + _kl_near_0(q, mixture, _log_mixture(ratio, beta)) * (1 - beta)

    value = weighted.sum(-1) - of_teacher * beta
    if exact_near_0:
        _recompute_near_0_(value, exactly, p, q, ratio)
    return value, _centered_(weighted, q) if gradient else None


def _skew_kl(
    log_p: Tensor, p: Tensor, log_q: Tensor, q: Tensor, gradient: bool, exact_near_0: bool = True
) -> ValueAndGradient:
    """Compute KL(p, 0.1 p + 0.9 q); for arguments and result see `Divergence.compute`."""
    log_mixture = _log_mixture(_difference_(log_q, log_p), 1 - SKEW)  # log(m / p)

    def exactly(p: Tensor, q: Tensor, log_mixture: Tensor) -> Tensor:
        return _kl_near_0(p, p * SKEW + q * (1 - SKEW), log_mixture)

    value = -(p * log_mixture).sum(-1)
    if exact_near_0:
        _recompute_near_0_(value, exactly, p, q, log_mixture)
    if not gradient:
        return value, None
    return value, _centered_(log_mixture.neg_().exp_().mul_(q).mul_(SKEW - 1), q)


def _skew_reverse_kl(
    log_p: Tensor, p: Tensor, log_q: Tensor, q: Tensor, gradient: bool, exact_near_0: bool = True
) -> ValueAndGradient:
    """Compute KL(q, 0.9 p + 0.1 q); for arguments and result see `Divergence.compute`."""
    log_share = _log_mixture(_difference_(log_q, log_p).neg_(), 1 - SKEW).neg_()  # log(q / m)
    weighted = log_share * q

    def exactly(p: Tensor, q: Tensor, log_share: Tensor) -> Tensor:
        return _kl_near_0(q, p * (1 - SKEW) + q * SKEW, -log_share)

    value = weighted.sum(-1)
    if exact_near_0:
        _recompute_near_0_(value, exactly, p, q, log_share)
    if not gradient:
        return value, None
    return value, _centered_(weighted.addcmul_(log_share.exp_(), q, value=-SKEW), q)


def _tvd(
    log_p: Tensor, p: Tensor, log_q: Tensor, q: Tensor, gradient: bool, exact_near_0: bool = True
) -> ValueAndGradient:
    """Compute the total variation distance `sum |p - q| / 2`."""
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
    """Return `[n]` bool: where a divergence `[n]` is so small that rounding errors dominate it."""
    import torch

    return value < 2**14 * torch.finfo(value.dtype).eps


def _recompute_near_0_(value: Tensor, exactly: Callable[..., Tensor], *tensors: Tensor) -> None:
    """Where `value` `[n]` is near 0, replace it by `exactly(...)` of these rows of the tensors."""
    close = near_0(value).nonzero().flatten()
    if len(close):
        value[close] = exactly(*(x[close] for x in tensors))


def _kl_near_0(a: Tensor, b: Tensor, log_ratio: Tensor) -> Tensor:
    """Compute KL(a, b) as a sum of nonnegative terms, given `log_ratio`, r = log(b / a).

    The terms are `a (e^r - 1 - r)`: the usual `-a r` plus `b - a`, which sums to 0. A rounding
    error that shifts all r by the same amount changes the sum only in second order.
    """
    import torch

    near = log_ratio.clamp(max=1).expm1_().sub_(log_ratio).mul_(a)
    return torch.where(log_ratio < 1, near, b - a - a * log_ratio).clamp_(min=0).sum(-1)


def _difference_(a: Tensor, b: Tensor) -> Tensor:
    import torch

    return torch.sub(a, b, out=b)


def _centered_(weighted: Tensor, q: Tensor) -> Tensor:
    """Turn `weighted`, q times dD/dq, into the gradient with respect to the logits, in place."""
    return weighted.addcmul_(q, weighted.sum(-1, keepdim=True), value=-1)


def _log_mixture(x: Tensor, share: float) -> Tensor:
    """Compute `log(1 + share * (e^x - 1))`, exact near x = 0.

    For x = log(b / a) this is the logarithm of the mixture `(1 - share) a + share b`, divided by a.
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


def selects_by_student(name: str) -> bool:
    """Return whether the divergence needs the teacher's probabilities of the student's tokens."""
    return re.fullmatch(STUDENT_TOP_K, name) is not None


def divergence_named(name: str) -> Divergence:
    """Return the divergence with a given name.

    `js:BETA` is GKD's generalized Jensen-Shannon divergence, `BETA KL(p, m) + (1 - BETA) KL(q, m)`
    with m = BETA p + (1 - BETA) q. Divided by BETA it tends to `forward_kl` as BETA goes to
    0; divided by 1 - BETA, to `reverse_kl` as BETA goes to 1.

    `reverse_kl:K` is the reverse KL over K + 1 outcomes: the student's K likeliest tokens, and all
    other tokens together. It is at most `reverse_kl`, and equal to it if K is the vocabulary.

    References:
        Agarwal et al., On-Policy Distillation of Language Models (GKD), ICLR 2024, equation 3.
    """
    if selects_by_student(name):
        return Divergence(partial(_student_top_k, k=int(name.partition(":")[2])))
    if re.fullmatch(JS_BETA, name):
        return Divergence(partial(_js, beta=float(name[3:])))
    if name not in DIVERGENCES:
        forms = "js:BETA with BETA between 0 and 1", "reverse_kl:K with K of 1 or more"
        known = ", ".join([*DIVERGENCES, *forms])
        raise ValueError(f"divergence is {name!r}, expected one of {known}")
    return DIVERGENCES[name]
