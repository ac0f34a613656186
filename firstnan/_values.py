"""Say where two results of one operation differ, entry by entry."""

from __future__ import annotations

import torch
from torch import Tensor

_NAMED = 4  # indices that are listed
_MOVES = (1, -1, 2, -2)  # positions along a dimension by which values may have moved


def where_unequal(a: Tensor, b: Tensor) -> str:
    """Return which entries of two tensors differ, in words.

    Values that have moved along a dimension, and rows in another order, are recognized. NaN equals
    NaN.

    Args:
        a: tensor of any shape and dtype.
        b: tensor of the same shape; its dtype may be another one.
    """
    a, b = _reals(a), _reals(b)
    unequal = _unequal(a, b)
    n = int(unequal.sum())
    if not n:
        return "no entry differs"
    text = f"{n:,} of {a.numel():,} entries differ"
    if (place := _narrowest(unequal)) is not None:
        dim, indices = place
        more = " ..." if len(indices) > _NAMED else ""
        listed = ", ".join(map(str, indices[:_NAMED]))
        text += f", at {listed}{more} of {a.shape[dim]:,} along dimension {dim}"
    distance = torch.where(unequal, (a - b).abs(), -1.0).nan_to_num(torch.inf, posinf=torch.inf)
    at = torch.unravel_index(distance.argmax(), a.shape)
    index = [int(i) for i in at]
    text += f"; the largest difference at {index}: {float(a[at]):.7g} and {float(b[at]):.7g}"
    moved = _moved(a, b)
    return text if moved is None else f"{text}; {moved}"


def _reals(x: Tensor) -> Tensor:
    x = x.detach().cpu()
    return torch.view_as_real(x).double() if x.is_complex() else x.double()


def _unequal(a: Tensor, b: Tensor) -> Tensor:
    return (a != b) & ~(a.isnan() & b.isnan())


def _narrowest(unequal: Tensor) -> tuple[int, list[int]] | None:
    """Return the dimension of whose indices the smallest share is concerned, if not all are."""
    found = []
    for dim, size in enumerate(unequal.shape):
        others = [d for d in range(unequal.ndim) if d != dim]
        concerned = (unequal.any(others) if others else unequal).nonzero().flatten().tolist()
        found.append((len(concerned) / size, dim, concerned))
    share, dim, concerned = min(found, default=(1.0, 0, []))
    return (dim, concerned) if share < 1 else None


def _moved(a: Tensor, b: Tensor) -> str | None:
    """Return how the values of B are those of A at other places, if they are."""
    for dim in range(a.ndim):
        for move in _MOVES:
            size = a.shape[dim] - abs(move)
            if size < 2:
                continue
            before = a.narrow(dim, max(0, -move), size)
            if not _unequal(before, b.narrow(dim, max(0, move), size)).any():
                return f"B holds the values of A moved by {move} along dimension {dim}"
    if a.ndim and len(a) > 1 and _same_rows(a, b):
        return "B holds the rows of A in another order"
    return None


def _same_rows(a: Tensor, b: Tensor) -> bool:
    one, other = (sorted(x.reshape(len(x), -1).tolist()) for x in (a, b))
    return one == other
