"""The objective of TEMI, the default."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ssl_kd.vision.train.objectives.base import OfProbabilities

if TYPE_CHECKING:
    from torch import Tensor


class TEMI(OfProbabilities):
    """Maximize pairwise mutual information; the marginal is the mean teacher probability.

    References:
        Adaloglou et al., Exploring the Limits of Deep Image Clustering using Pretrained Models,
        2023.
    """

    summary = "pairwise mutual information"

    def __init__(self, beta: float, student_temp: float, teacher_temp: float) -> None:
        super().__init__(teacher_temp)
        self._options = {"beta": beta, "student_temperature": student_temp}

    def loss(  # noqa: D102
        self, logits: Tensor, targets: Tensor, marginal: Tensor, weights: Tensor | None
    ) -> Tensor:
        from ssl_kd.vision.train import losses

        return losses.temi(logits, targets, marginal, weights, **self._options)

    def has_zero(self, marginal: Tensor) -> Tensor:  # noqa: D102
        return (marginal == 0).any(1)
