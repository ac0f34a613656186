"""A worked example of a head of your own: `python train.py --head heads.cosine_head.CosineHead`.

A head is a plain module. It is built as `Head(in_dim, n_clusters)`, maps embeddings
`[batch, in_dim]` to logits `[batch, n_clusters]`, and holds parameters only (no batch statistics).
The bank runs many of them side by side; nothing here needs to know that.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from firstnan import safe_normalize


class CosineHead(nn.Module):
    """One linear map onto a small sphere, and cosine similarity to a prototype per cluster."""

    def __init__(self, in_dim: int, n_clusters: int, sphere_dim: int = 32) -> None:
        super().__init__()
        self.project = nn.Linear(in_dim, sphere_dim, bias=False)
        self.prototypes = nn.Linear(sphere_dim, n_clusters, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Embeddings `[batch, in_dim]` -> logits `[batch, n_clusters]` in [-1, 1]."""
        return F.linear(safe_normalize(self.project(x)), safe_normalize(self.prototypes.weight))
