"""The objective of SCAN."""

from __future__ import annotations

import math
from itertools import combinations
from typing import TYPE_CHECKING

from ssl_kd.vision.train.objectives.base import OfProbabilities

if TYPE_CHECKING:
    from torch import Tensor


class SCAN(OfProbabilities):
    """Give neighbors the same cluster, and spread the samples over all clusters.

    The loss of a pair of views is the mean of `-log sum_k p_k q_k`, minus `entropy_weight` times
    the entropy of the mean probabilities; both views are students. Of the paper's two steps this is
    the first, on pairs of neighbors; the paper's entropy is that of the first view alone, and here
    it is the mean over the two.

    References:
        Van Gansbeke et al., SCAN: Learning to Classify Images without Labels, 2020, equation 2.
    """

    summary = "same cluster for neighbors, large entropy over all"

    def __init__(
        self, student_temp: float, teacher_temp: float, entropy_weight: float = 5.0
    ) -> None:
        super().__init__(teacher_temp)
        self._student, self._entropy_weight = student_temp, entropy_weight

    def loss(  # noqa: D102
        self, logits: Tensor, targets: Tensor, marginal: Tensor, weights: Tensor | None
    ) -> Tensor:
        import torch

        from ssl_kd.vision.train import losses

        log_p = losses.log_probabilities(logits, self._student)
        log_mean = log_p.logsumexp(2) - math.log(log_p.shape[2])
        entropy = -(log_mean.exp() * log_mean).sum(-1).mean(1)
        pairs = list(combinations(range(log_p.shape[1]), 2))
        apart = -torch.stack([(log_p[:, v] + log_p[:, w]).logsumexp(-1) for v, w in pairs]).mean(0)
        consistency = apart.mean(1) if weights is None else (apart * weights).sum(1)
        return consistency - self._entropy_weight * entropy
