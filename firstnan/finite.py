"""Normalize vectors with results and gradients that stay finite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which to compute losses from `x`: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class _UnitAndNorm(torch.autograd.Function):
    """Return `x / |x|` and `|x|`; 0 and 1 for a zero vector.

    The closed-form gradient needs only these two tensors, a third of autograd's passes over memory.
    Both are outputs, so that the gradient can be differentiated again.
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
        x: any floating-point tensor. Half precision is upcast, so that the sum of squares does not
            overflow (in float16, `F.normalize` returns NaN for a zero row, and 0 for a large one).
        dim: the axis of the vectors.

    Returns:
        A tensor of the same shape; float64 for float64 input, float32 otherwise.
    """
    unit, _ = _UnitAndNorm.apply(x.to(compute_dtype(x)), dim)  # pyright: ignore[reportGeneralTypeIssues]
    return unit
