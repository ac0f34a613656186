"""Arithmetic that stays finite: floors from the dtype, safe normalization, masked means."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SHORT = 100  # a softmax over fewer entries than this is faster along an axis that is not the last


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of loss arithmetic on `x`: float64 for float64, otherwise float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def probability_floor(dtype: torch.dtype) -> float:
    """Return what to add to a probability before a logarithm: `finfo(dtype).eps ** 2`.

    In float32, 1.4e-14: a uniform share of 10,000 clusters moves by 1.4e-10 nats, and the logarithm
    of an exact 0 is -31.9 instead of -inf.
    """
    return torch.finfo(dtype).eps ** 2


class _UnitAndNorm(torch.autograd.Function):
    """`x / |x|` and `|x|`; for a zero vector 0 and 1.

    The closed-form gradient needs only these two, a third of autograd's passes over memory. Both
    are outputs, so that it can be differentiated again.
    """

    @staticmethod
    def forward(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        # Divide by the largest entry first: squares of 1e20 overflow, squares of 1e-25 vanish.
        largest = x.abs().amax(dim=dim, keepdim=True)
        largest = torch.where(largest > 0, largest, 1)
        unit = x / largest
        length = (unit * unit).sum(dim=dim, keepdim=True).sqrt_()
        length = torch.where(length > 0, length, 1)
        return unit.div_(length), largest.mul_(length)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*output)
        ctx.dim = inputs[1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, of_unit: Tensor | None, of_norm: Tensor | None) -> Any:  # type: ignore[override]
        unit, norm = ctx.saved_tensors
        gradient = None if of_norm is None else of_norm * unit
        if of_unit is not None:
            along = (of_unit * unit).sum(dim=ctx.dim, keepdim=True)
            across = torch.addcmul(of_unit, unit, along, value=-1).div_(norm)
            gradient = across if gradient is None else across + gradient
        return gradient, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], x: Tensor, dim: int) -> Any:
        # Before torch 2.7 a generated rule requires both gradients.
        batched = x.movedim(in_dims[0], 0)
        return _UnitAndNorm.apply(batched, dim if dim < 0 else dim + 1), (0, 0)


def safe_normalize(x: Tensor, dim: int = -1) -> Tensor:
    """Scale vectors to unit L2 length; zero vectors stay zero, with a finite gradient.

    Args:
        x: any floating tensor. Half precision is upcast, so that the sum of squares does not
            overflow (`F.normalize` of a zero float16 row is NaN, of a large one 0).
        dim: the axis that holds the vector.

    Returns:
        A tensor of the same shape; float64 for float64 input, float32 otherwise.
    """
    unit, _ = _UnitAndNorm.apply(x.to(compute_dtype(x)), dim)  # pyright: ignore[reportGeneralTypeIssues]
    return unit


def safe_normalize_weights(weights: Tensor, dim: int = -1) -> Tensor:
    """Turn any weights into proportions that sum to one.

    Entries that are NaN, infinite or negative count as 0, and the others keep their proportions;
    where no positive entry is left the result is uniform.

    Args:
        weights: any floating tensor; float16 sums do not overflow.
        dim: the axis that sums to one.

    Returns:
        A tensor of the same shape; float64 for float64 input, float32 otherwise.

    >>> safe_normalize_weights(torch.tensor([1.0, float("nan"), 3.0]))
    tensor([0.2500, 0.0000, 0.7500])
    """
    weights = weights.to(compute_dtype(weights))
    weights = torch.where(torch.isfinite(weights) & (weights > 0), weights, 0)
    largest = weights.amax(dim=dim, keepdim=True)
    weights = weights / torch.where(largest > 0, largest, 1)  # so that the sum cannot overflow
    total = weights.sum(dim=dim, keepdim=True)
    uniform = 1.0 / weights.shape[dim] if weights.shape[dim] else 0.0
    return torch.where(total > 0, weights / torch.where(total > 0, total, 1), uniform)


def masked_mean(values: Tensor, mask: Tensor, dim: int = -1) -> Tensor:
    """Return the mean of `values` where `mask`, 0 for an empty mask; other entries may be NaN.

    Args:
        values: any floating tensor.
        mask: boolean, broadcastable to `values`.
        dim: the axis that is averaged.
    """
    kept = torch.where(mask, values, 0).sum(dim)
    return kept / mask.expand_as(values).sum(dim).clamp(min=1)
