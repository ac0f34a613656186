"""Choose which outputs of a vision transformer are the embedding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import reduce
from torch import Tensor


def one_layer(token: str, pooled: Tensor, patches: Tensor) -> Tensor:
    """Return the embedding of a TOKEN that needs the last layer alone.

    Args:
        token: `class`, `patch`, `both`, or `patches` for the patches themselves.
        pooled: the class token, or what the network pools instead, `[image, dim]`.
        patches: tokens of the patches, without class token and registers, `[image, patch, dim]`.
    """
    if token == "class":
        return pooled
    if token == "patches":
        return patches
    patch = _mean(patches)
    return patch if token == "patch" else torch.cat([pooled, patch], 1)


def last_layers(layers: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the class tokens of all `layers` and the mean patch of the last one, concatenated.

    This is the input of the linear probes of DINO and DINOv2, for four layers after the final norm.

    Args:
        layers: of each layer the tokens of the patches, `[image, patch, dim]`, and the class token,
            `[image, dim]`.

    Returns:
        float `[image, (layers + 1) * dim]`.

    References:
        Oquab et al., DINOv2: Learning Robust Visual Features without Supervision, 2023, and its
        eval/linear.py (`create_linear_input` with `use_n_blocks=4` and `use_avgpool`).
    """
    return torch.cat([*(of_class for _, of_class in layers), _mean(layers[-1][0])], 1)


def _mean(patches: Tensor) -> Tensor:
    return reduce(patches, "image patch dim -> image dim", "mean")
