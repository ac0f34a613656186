"""Choose which outputs of a vision transformer are the embedding."""

from __future__ import annotations

import torch
from einops import reduce
from torch import Tensor


def pooled(token: str, of_network: Tensor, patches: Tensor) -> Tensor:
    """Return the features of a TOKEN, from the network's pooling and `[image, patch, dim]`."""
    if token == "class":
        return of_network
    patch = reduce(patches, "image patch dim -> image dim", "mean")
    return patch if token == "patch" else torch.cat([of_network, patch], 1)
