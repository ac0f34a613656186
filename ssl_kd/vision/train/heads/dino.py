"""The projection head of DINO: a deeper MLP with cosine similarities to prototypes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from firstnan.finite import safe_normalize


class DINOHead(nn.Module):
    """An MLP of three layers onto the unit sphere, then cosine similarity to prototypes.

    The last layer's rows are normalized, which is DINO's weight normalization with a fixed norm of
    1 (`norm_last_layer`). `TEMIHead` is the same with one hidden layer less. The paper's widths are
    2048 and 256.

    Args:
        in_dim: width of the embeddings.
        n_clusters: number of clusters K (prototypes).
        hidden_dim: width of both hidden layers.
        bottleneck_dim: dimension of the normalized vectors and of the prototypes.

    References:
        Caron et al., Emerging Properties in Self-Supervised Vision Transformers, 2021, appendix C.
    """

    def __init__(
        self, in_dim: int, n_clusters: int, hidden_dim: int = 2048, bottleneck_dim: int = 256
    ) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(in_dim, hidden_dim),
            nn.GELU(),
            nn.Linear(hidden_dim, hidden_dim),
            nn.GELU(),
            nn.Linear(hidden_dim, bottleneck_dim),
        )
        self.prototypes = nn.Parameter(torch.empty(n_clusters, bottleneck_dim))
        nn.init.trunc_normal_(self.prototypes, std=0.02)
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits `[batch, cluster]` in [-1, 1] from embeddings `[batch, in_dim]`."""
        return F.linear(safe_normalize(self.mlp(x)), safe_normalize(self.prototypes))
