"""What a run leaves behind: the chosen heads, and how their votes become one answer."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn

from ssl_kd.heads import HeadBank, TEMIHead, head_maker
from ssl_kd.losses import log_probabilities
from ssl_kd.vision.projection import Projection

ROWS_PER_BLOCK = 4096


class ClusterModel(nn.Module, PyTorchModelHubMixin):
    """Trained heads that vote: embeddings in, probabilities of clusters out.

    `p(c | x) = mean_h sum_k p_h(k | x) p_h(c | k)`: each head says how sure it is of each of its
    own clusters, and a table says which cluster of the consensus that one stands for. Training and
    held-out samples go through the same function. `ClusterModel.from_pretrained(folder)` loads what
    `save_pretrained(folder)` wrote, a run folder too.

    Args:
        in_dim: width of the embeddings.
        head_dim: width that the heads see of them, after the projection.
        n_clusters: number of clusters K.
        n_heads: number of heads H.
        head: import path of the head's class.
        hidden_dim: its width, if it has such an argument.
        bottleneck_dim: its width, if it has such an argument.
        temperature: of the heads' probabilities.
    """

    weights: Tensor
    votes: Tensor

    def __init__(
        self,
        in_dim: int,
        head_dim: int,
        n_clusters: int,
        n_heads: int,
        head: str = f"{TEMIHead.__module__}.{TEMIHead.__qualname__}",
        hidden_dim: int = 512,
        bottleneck_dim: int = 256,
        temperature: float = 0.1,
    ) -> None:
        super().__init__()
        self.n_clusters, self.temperature = n_clusters, temperature
        self.options = {
            "in_dim": in_dim,
            "head_dim": head_dim,
            "n_clusters": n_clusters,
            "n_heads": n_heads,
            "head": head,
            "hidden_dim": hidden_dim,
            "bottleneck_dim": bottleneck_dim,
            "temperature": temperature,
        }
        make = head_maker(
            head, head_dim, n_clusters, hidden_dim=hidden_dim, bottleneck_dim=bottleneck_dim
        )
        self.bank = HeadBank(make, n_heads)
        self.register_buffer("weights", torch.zeros(n_heads, self.bank.n_parameters))
        self.register_buffer("votes", torch.zeros(n_heads, n_clusters, n_clusters))
        self.projection = Projection(in_dim, head_dim)

    @classmethod
    def _from_pretrained(cls, *, strict: bool = True, **options: Any) -> Any:
        # The mixin prints, and passes over tensors that a file lacks or this model does not know.
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            return super()._from_pretrained(strict=strict, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Embeddings `[batch, in_dim]` -> probabilities `[batch, cluster]`, float32."""
        return self.vote(self.head_probabilities(x))

    def head_probabilities(self, x: Tensor) -> Tensor:
        """Embeddings `[batch, in_dim]` -> each head's own `[head, batch, cluster]`."""
        logits = self.bank(self.bank.unflatten(self.weights), self.projection(x))
        return log_probabilities(logits, self.temperature).exp()

    def vote(self, probabilities: Tensor) -> Tensor:
        """The heads' own probabilities `[head, batch, cluster]` -> the answer's `[batch, cluster]`.

        Its largest entry is how far the heads agree on that sample.
        """
        return torch.bmm(probabilities, self.votes).mean(0)

    @torch.inference_mode()
    def predict_proba(self, x: Tensor) -> Tensor:
        """`forward` in blocks, without gradients, on the model's device; the result on the CPU."""
        blocks = x.split(ROWS_PER_BLOCK) if len(x) else [x]
        return torch.cat([self(block.to(self.weights.device)).cpu() for block in blocks])

    def predict(self, x: Tensor) -> Tensor:
        """Embeddings `[n, in_dim]` -> clusters `[n]` int64."""
        return self.predict_proba(x).argmax(-1)
