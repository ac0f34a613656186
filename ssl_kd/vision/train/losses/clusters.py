"""Handle logits `[head, ..., cluster]` in the memory layout that is fast for few clusters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SHORT = 100  # a softmax over fewer entries than this is faster along an axis that is not the last


def along_clusters(function: Callable[..., Tensor], logits: Tensor) -> Tensor:
    """Apply a softmax function to logits `[head, ..., cluster]` along the cluster axis.

    Few clusters run with samples contiguous in memory, as in `TEMIHead.stacked`: it is faster.
    """
    if logits.ndim > 2 and logits.shape[-1] < SHORT:
        return function(logits.movedim(-1, 1), dim=1).movedim(1, -1)
    return function(logits, dim=-1)


def rolled_views(values: Tensor, shift: int) -> Tensor:
    """Return `values.roll(shift, dims=1)` in the memory layout of `values`."""
    rolled = torch.empty_like(values)
    rolled[:, shift:] = values[:, :-shift]
    rolled[:, :shift] = values[:, -shift:]
    return rolled
