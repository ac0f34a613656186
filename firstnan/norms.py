"""Compute losses and gradient norms of a step, and read them from the device with one sync."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def norm_of(gradients: list[Tensor]) -> Tensor:
    """Return the L2 norm of all gradients; in float64 it is finite even if squares overflow."""
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
    """Return whether a tensor is sharded over ranks (a DTensor, such as FSDP2's weights)."""
    return hasattr(x, "full_tensor")  # importing DTensor takes half a second


def local(x: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, or the tensor itself if it is not sharded."""
    return x.to_local() if is_sharded(x) else x


def are_finite(tensors: Iterable[Tensor | None]) -> bool:
    """Return whether all entries of tensors, or of this rank's shards, are finite; waits once."""
    looks = [torch.isfinite(local(x)).all() for x in tensors if x is not None]
    return not looks or bool(torch.stack([look.to(looks[0].device) for look in looks]).all())


def narrow(x: Tensor) -> Tensor:
    """Convert a number to float32; a finite float64 number stays finite."""
    if x.dtype == torch.float64:
        limit = torch.finfo(torch.float32).max
        x = torch.where(x.isfinite(), x.clamp(-limit, limit), x)
    return x.to(torch.float32)


def look(losses: Mapping[str, Tensor], through: Any) -> tuple[Tensor, Tensor]:
    """Return the losses and their gradient norms at `through`, `[loss]` on the CPU; waits once."""
    values = [narrow(loss.detach()) for loss in losses.values()]
    norms = [torch.ones_like(value) for value in values]
    if through is not None:
        tensors = [through] if isinstance(through, Tensor) else list(through)
        norms = [_norm_at(tensors, name, loss) for name, loss in losses.items()]
    loss, norm = read([values, norms], values[0].device if values else torch.device("cpu"))
    return loss, norm


def read(numbers: list[list[Tensor]], device: torch.device) -> tuple[Tensor, ...]:
    """Copy lists of numbers from a device to the CPU, one vector for each list; waits once."""
    there = [narrow(x).to(device) for column in numbers for x in column]
    flat = torch.stack(there).cpu() if there else torch.zeros(0)
    return flat.split([len(column) for column in numbers])


def _norm_at(tensors: list[Tensor], name: str, loss: Tensor) -> Tensor:
    if not loss.requires_grad:  # a constant: a term that does not apply to this batch
        return torch.zeros_like(loss)
    gradients = torch.autograd.grad(loss, tensors, retain_graph=True, allow_unused=True)
    if not (reached := [g for g in gradients if g is not None]):
        raise ValueError(
            f"loss {name!r} was not computed from `through`: add to `through` the tensor from which"
            " this loss was computed"
        )
    return norm_of(reached)
