"""Clamp overflowed logits, check temperatures, and refuse second derivatives of closed forms."""

from __future__ import annotations

import functools
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from firstnan.finite import compute_dtype

SATURATION = 65504.0  # the largest finite float16: logits beyond it are clamped to it
TEMPERATURE_RANGE = (1e-4, 1e4)


def check_temperature(name: str, value: float) -> None:
    """Raise ValueError if a temperature is not in [1e-4, 1e4]."""
    low, high = TEMPERATURE_RANGE
    if not isinstance(value, Real) or not low <= float(value) <= high:  # also catches NaN
        raise ValueError(f"{name} is {value!r}; expected a number from {low:g} to {high:g}")


def saturate_(logits: Tensor) -> Tensor:
    """Clamp logits to +-65504, in place; a NaN stays a NaN."""
    return logits.clamp_(-SATURATION, SATURATION)


class _Saturated(torch.autograd.Function):
    """Clamp to +-65504 with an unchanged gradient, so that training can correct an overflow."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, infinities: bool) -> Tensor:
        held = x.clamp(-SATURATION, SATURATION)
        return held if infinities else torch.where(x.isinf(), x, held)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad_output, None


def saturated(logits: Tensor, *, infinities: bool = True) -> Tensor:
    """Clamp logits to +-65504 in float32 (float64 for float64), with an unchanged gradient.

    Without `infinities`, infinite logits stay: -inf may be a mask, and the guard finds overflows.
    """
    return _Saturated.apply(logits.to(compute_dtype(logits)), infinities)  # pyright: ignore[reportReturnType]


class _Final(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:  # type: ignore[override]
        raise RuntimeError(
            "this loss has a closed-form gradient, which cannot be differentiated again: leave the "
            "loss out of gradient penalties and Hessians"
        )


def differentiated_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make an autograd function's `backward` raise RuntimeError if it is differentiated again.

    PyTorch's `once_differentiable` raises only if the incoming gradient requires a gradient.
    Otherwise its result looks constant under `create_graph=True`: the second derivative would be 0.
    """

    @functools.wraps(backward)
    def wrapped(ctx: Any, *incoming: Tensor) -> Any:
        with torch.no_grad():
            gradients = backward(ctx, *incoming)
        if not torch.is_grad_enabled():  # no create_graph
            return gradients
        return tuple(
            _Final.apply(g.detach().requires_grad_()) if isinstance(g, Tensor) else g
            for g in gradients
        )

    return wrapped
