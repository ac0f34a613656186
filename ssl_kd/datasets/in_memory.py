"""Embeddings in memory, as users have them: tensors, frames with a column of lists, AnnData."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ssl_kd.datasets.features import as_numpy


def as_array(X: Any) -> Any:
    """Return the embeddings in X as what scikit-learn's validation takes; its types as they are.

    Args:
        X: an array, a data frame or a tensor; a frame may hold one column of lists and no other.

    Raises:
        TypeError: X holds embeddings in a form that leaves a choice, or that is not dense; the
            message names the form and what to pass instead.
    """
    if isinstance(X, torch.Tensor):
        if X.layout != torch.strided:
            raise TypeError("Sparse tensors are not supported: pass X.to_dense()")
        if X.is_quantized or X.is_meta:
            kind = "Quantised tensors" if X.is_quantized else "Tensors on the meta device"
            way = "X.dequantize()" if X.is_quantized else "a tensor that holds values"
            raise TypeError(f"{kind} are not supported: pass {way}")
        return as_numpy(X)
    if hasattr(X, "obsm") and hasattr(X, "obs"):
        kept = "".join(f", X.obsm[{name!r}]" for name in list(X.obsm)[:5])
        raise TypeError(f"An AnnData object holds several matrices: pass X.X{kept}")
    if not (hasattr(X, "columns") and hasattr(X, "__getitem__") and len(X)):
        return X
    names = list(X.columns)
    lists = [n for n in names if isinstance(next(iter(X[n])), (list, tuple, np.ndarray))]
    if not lists:
        return X
    if len(names) > 1:
        raise TypeError(
            f"A data frame with lists in column {lists[0]!r} and {len(names) - 1} other columns: "
            f"pass numpy.stack(X[{lists[0]!r}])"
        )
    lengths = sorted({np.size(row) for row in X[lists[0]]})
    if len(lengths) > 1:
        raise ValueError(
            f"The lists in column {lists[0]!r} have {lengths[0]} to {lengths[-1]} numbers; "
            "expected all of one length"
        )
    return np.stack([np.asarray(row) for row in X[lists[0]]])
