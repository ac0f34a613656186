"""The TEMI head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ssl_kd.guard.finite import SHORT, safe_normalize


class TEMIHead(nn.Module):
    """An MLP onto the unit sphere, then cosine similarity to one learned prototype per cluster.

    `logits = normalize(W2 gelu(W1 x + b1) + b2) @ normalize(prototypes).T`, so logits are in
    [-1, 1] and the temperature alone bounds the sharpness. A zero row gives finite logits and a
    finite gradient.

    Args:
        in_dim: width of the embeddings.
        n_clusters: number of clusters K.
        hidden_dim: width of the hidden layer.
        bottleneck_dim: width of the sphere.

    References:
        Adaloglou et al., Exploring the Limits of Deep Image Clustering using Pretrained Models,
        BMVC 2023, section 3; the head is DINO's (Caron et al., 2021, appendix C).
    """

    def __init__(
        self, in_dim: int, n_clusters: int, hidden_dim: int = 512, bottleneck_dim: int = 256
    ) -> None:
        super().__init__()
        self.hidden = nn.Linear(in_dim, hidden_dim)
        self.bottleneck = nn.Linear(hidden_dim, bottleneck_dim)
        self.prototypes = nn.Parameter(torch.empty(n_clusters, bottleneck_dim))
        for weight in (self.hidden.weight, self.bottleneck.weight, self.prototypes):
            nn.init.trunc_normal_(weight, std=0.02)
        nn.init.zeros_(self.hidden.bias)
        nn.init.zeros_(self.bottleneck.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Embeddings `[batch, in_dim]` -> logits `[batch, cluster]`."""
        z = self.bottleneck(F.gelu(self.hidden(x)))
        return F.linear(safe_normalize(z), safe_normalize(self.prototypes))

    @staticmethod
    def stacked(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        """Return logits `[head, batch, K]` of many heads: parameters `[head, ...]`.

        The result is that of `vmap`; written out as batched products it is a third faster. The
        intermediate layout is `[head, feature, batch]`: biases and norms run along long rows, and
        gradients have the layout of the weights. So do logits of few clusters, for the softmax.
        """
        p = parameters
        x = x.mT.expand(len(p["prototypes"]), *x.mT.shape)
        z = torch.baddbmm(p["hidden.bias"].unsqueeze(2), p["hidden.weight"], x)
        z = torch.baddbmm(p["bottleneck.bias"].unsqueeze(2), p["bottleneck.weight"], F.gelu(z))
        prototypes, z = safe_normalize(p["prototypes"]), safe_normalize(z, dim=1)
        if prototypes.shape[1] < SHORT:
            return torch.bmm(prototypes, z).mT
        return torch.bmm(z.mT, prototypes.mT)
