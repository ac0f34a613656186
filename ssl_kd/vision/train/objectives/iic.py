"""The objective of Invariant Information Clustering."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from ssl_kd.vision.train.objectives.base import OfProbabilities

if TYPE_CHECKING:
    from torch import Tensor


class IIC(OfProbabilities):
    """Maximize the mutual information of the clusters of two views.

    The joint distribution of the clusters `[cluster, cluster]` is the mean over the batch of the
    outer product of both views' probabilities, made symmetric; both views are students.

    References:
        Ji et al., Invariant Information Clustering for Unsupervised Image Classification and
        Segmentation, 2019, equation 3.
    """

    summary = "mutual information of the clusters of two views"

    def __init__(self, student_temp: float, teacher_temp: float) -> None:
        super().__init__(teacher_temp)
        self._student = student_temp

    def loss(  # noqa: D102
        self, logits: Tensor, targets: Tensor, marginal: Tensor, weights: Tensor | None
    ) -> Tensor:
        from einops import einsum

        from ssl_kd.vision.train import losses

        p = losses.log_probabilities(logits, self._student).exp()
        share = p.new_full((1, p.shape[2]), 1 / p.shape[2]) if weights is None else weights
        weighted = p * share[:, None, :, None]
        pairs = list(combinations(range(p.shape[1]), 2))
        total = p.new_zeros(len(p))
        for v, w in pairs:
            joint = einsum(weighted[:, v], p[:, w], "head batch i, head batch j -> head i j")
            joint = (joint + joint.mT) / 2
            total = total - _information(joint)
        return total / len(pairs)


def _information(joint: Tensor) -> Tensor:
    """Return the mutual information `[head]` of symmetric joint distributions `[head, i, j]`."""
    log_marginal = _log(joint.sum(2))
    apart = log_marginal[:, :, None] + log_marginal[:, None, :]
    return (joint * (_log(joint) - apart)).sum((1, 2))


def _log(p: Tensor) -> Tensor:
    """Return `log p`; at 0 it is finite, and `p log p` is 0 with a finite gradient."""
    import torch

    return p.clamp_min(torch.finfo(p.dtype).tiny).log()
