"""Compare two results of one operation: what was recorded of them, or all of their entries."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from firstnan._norms import as_reals
from firstnan._recording import Digest, Operation

_NAMED = 4  # indices that are listed
_MOVES = (1, -1, 2, -2)  # positions along a dimension by which values may have moved


def where_unequal(a: Tensor, b: Tensor) -> str:
    """Return which entries of two tensors differ, in words.

    Values that have moved along a dimension, and rows in another order, are recognized. NaN equals
    NaN.

    Args:
        a: tensor of any shape and dtype.
        b: tensor of the same shape on the same device; its dtype may be another one.
    """
    a, b = as_reals(a).double(), as_reals(b).double()
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
    (one, n), (other, m) = (x.reshape(len(x), -1).unique(dim=0, return_counts=True) for x in (a, b))
    return one.equal(other) and n.equal(m)


def relative_difference(x: Digest, y: Digest, least: float = 0.0) -> float:
    """Return how far two results are apart, relative to the larger; infinite if not comparable.

    `least` is the root mean square of a usual entry below which differences are relative to it.
    """
    if x["shape"] != y["shape"] or ("values" in x) != ("values" in y):
        return math.inf
    if "values" not in x:
        return 0.0
    one, other = x["values"], y["values"]
    if not all(map(math.isfinite, [*one, *other])):
        return 0.0 if str(one) == str(other) else math.inf
    if "norm" not in x or "norm" not in y:  # integers and booleans
        return 0.0 if one == other else math.inf
    norms = x["norm"], y["norm"]
    if not all(map(math.isfinite, norms)):
        return 0.0 if str(norms[0]) == str(norms[1]) else math.inf
    size = math.prod(x["shape"])
    norm = max(*norms, least * math.sqrt(size))
    usual = norm * math.sqrt(len(one) / size)  # norm of as many usual entries
    scale = max(usual, math.hypot(*one), math.hypot(*other))
    return max(math.dist(one, other) / scale, abs(norms[0] - norms[1]) / norm) if norm else 0.0


def usual_entry(output: Digest) -> float:
    """Return the root mean square of a result's entries."""
    norm = output.get("norm", 0.0)
    return norm / math.sqrt(math.prod(output["shape"])) if math.isfinite(norm) and norm else 0.0


def ratio_of(x: Digest, y: Digest) -> float | None:
    """Return the factor from one result to another; None if there is no one factor."""
    if x["shape"] != y["shape"] or not x.get("norm") or not y.get("norm"):
        return None
    ratio = y["norm"] / x["norm"]
    for sign in (1, -1):
        scaled = [sign * ratio * v for v in x["values"]]
        size = max(math.hypot(*scaled), math.hypot(*y["values"]))
        if math.isfinite(ratio) and math.dist(scaled, y["values"]) <= 1e-3 * size:
            return sign * ratio
    return None


def in_words(x: Digest, y: Digest) -> str:
    """Return how two results differ."""
    if x["shape"] != y["shape"]:
        return f"shape {x['shape']} in A, {y['shape']} in B"
    if (ratio := ratio_of(x, y)) is not None and not math.isclose(ratio, 1, rel_tol=1e-4):
        return f"{x['dtype']} {x['shape']}, those in B are {ratio:.4g} times those in A"
    values = zip(x.get("values", ()), y.get("values", ()), strict=False)
    unequal = next(((u, v) for u, v in values if u != v), None)
    text = f"{x['dtype']} {x['shape']}, relative difference {relative_difference(x, y):.2g}"
    return text if unequal is None else f"{text}, such as {unequal[0]:.7g} and {unequal[1]:.7g}"


def values_in_words(x: Operation, y: Operation) -> str:
    both = list(zip(x.outputs, y.outputs, strict=False))
    unequal = [pair for pair in both if relative_difference(*pair)]
    return in_words(*(unequal or both)[0]) if both else "no result"
