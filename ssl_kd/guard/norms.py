"""What a step shows of its losses: their values and gradient norms, read in one wait."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def norm_of(gradients: list[Tensor]) -> Tensor:
    """L2 norm of all of them as one, in float32 at least; whole, where they are sharded.

    In float64 it is finite where they are, also where their squares are not.
    """
    rows = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    wide = (torch.float32, torch.float64)
    rows = [
        g if g.dtype in wide else torch.linalg.vector_norm(g, dtype=torch.float32) for g in rows
    ]
    norm = get_total_norm(rows)
    if norm.dtype == torch.float64 and (norm.device.type != "cpu" or not norm.isfinite()):
        largest = get_total_norm(rows, math.inf)
        scaled = get_total_norm([g / largest for g in rows]) * largest
        norm = torch.where(norm.isfinite(), norm, scaled)
    return norm.full_tensor() if is_sharded(norm) else norm


def is_sharded(x: Tensor) -> TypeGuard[DTensor]:
    """Whether each rank holds a piece of it, as of FSDP2's weights."""
    return hasattr(x, "full_tensor")  # without the half second that importing the class takes


def local(x: Tensor) -> Tensor:
    """This rank's piece of a tensor; itself where it is whole."""
    return x.to_local() if is_sharded(x) else x


def narrow(x: Tensor) -> Tensor:
    """A number in float32; what is finite in float64 stays finite."""
    if x.dtype == torch.float64:
        limit = torch.finfo(torch.float32).max
        x = torch.where(x.isfinite(), x.clamp(-limit, limit), x)
    return x.to(torch.float32)


def look(losses: dict[str, Tensor], through: Any) -> tuple[Tensor, Tensor]:
    """Loss and gradient norm at `through` of each, `[loss]`, on the CPU: waits for the device."""
    values = [narrow(loss.detach()) for loss in losses.values()]
    norms = [torch.ones_like(value) for value in values]
    if through is not None:
        tensors = [through] if isinstance(through, Tensor) else list(through)
        norms = [_norm_at(tensors, name, loss) for name, loss in losses.items()]
    loss, norm = read([values, norms], values[0].device)
    return loss, norm


def read(numbers: list[list[Tensor]], device: torch.device) -> tuple[Tensor, ...]:
    """Lists of numbers on a device, as vectors on the CPU, in one wait."""
    flat = torch.stack([narrow(x).to(device) for some in numbers for x in some]).cpu()
    return flat.split([len(some) for some in numbers])


def _norm_at(tensors: list[Tensor], name: str, loss: Tensor) -> Tensor:
    if not loss.requires_grad:  # a constant, as a term has it that found nothing in this batch
        return torch.zeros_like(loss)
    gradients = torch.autograd.grad(loss, tensors, retain_graph=True, allow_unused=True)
    if not (reached := [g for g in gradients if g is not None]):
        raise ValueError(
            f"loss {name!r} was not computed from `through`: add the tensor it was computed from"
        )
    return norm_of(reached)
