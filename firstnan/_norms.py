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

_WIDE = {torch.float32, torch.float64, torch.complex64, torch.complex128}
_COMPRESSED = {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}


def norm_of(gradients: list[Tensor]) -> Tensor:
    """Return the L2 norm of all gradients; in float64 it is finite even if squares overflow."""
    rows = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    rows = [g if g.dtype in _WIDE or g.is_meta else _half_norm(g) for g in rows]
    norm = get_total_norm([g for g in rows if not g.is_meta])
    if norm.dtype == torch.float64 and (norm.device.type != "cpu" or not norm.isfinite()):
        largest = get_total_norm(rows, math.inf)
        scaled = get_total_norm([g / largest for g in rows]) * largest
        norm = torch.where(norm.isfinite(), norm, scaled)
    return norm.full_tensor() if is_sharded(norm) else norm


def _half_norm(gradient: Tensor) -> Tensor:
    return torch.linalg.vector_norm(as_reals(gradient), dtype=torch.float32)


def is_sharded(x: Tensor) -> TypeGuard[DTensor]:
    """Return whether a tensor is sharded over ranks (a DTensor, such as FSDP2's weights)."""
    return hasattr(x, "full_tensor")  # importing DTensor takes half a second


def local(x: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, or the tensor itself if it is not sharded."""
    return x.to_local() if is_sharded(x) else x


def stored(x: Tensor) -> Tensor:
    """Return the values that a tensor of any layout stores on this rank, without a copy."""
    x = local(x)
    if x.layout == torch.sparse_coo:
        return x._values()
    return x.values() if x.is_nested or x.layout in _COMPRESSED else x


def as_reals(x: Tensor) -> Tensor:
    """Return what a tensor of any dtype and layout stores on this rank as real numbers.

    A complex number becomes two real ones, float8 becomes float32; a tensor on the device `meta`
    stores nothing.
    """
    x = stored(x.detach())
    if x.is_meta:
        return torch.zeros(0)
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj())
    # float8 can be converted, and little else.
    return x.float() if x.is_floating_point() and x.dtype.itemsize == 1 else x


def are_finite(tensors: Iterable[Tensor | None]) -> bool:
    """Return whether all entries of tensors, or of this rank's shards, are finite; waits once."""
    looks = [torch.isfinite(as_reals(x)).all() for x in tensors if x is not None]
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
