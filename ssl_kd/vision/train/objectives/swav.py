"""The objective of SwAV: targets in which all clusters are equally large."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ssl_kd.vision.train.objectives.self_distillation import Fixed

if TYPE_CHECKING:
    from torch import Tensor

ITERATIONS = 3  # of Sinkhorn-Knopp, as in the paper


class SwAV(Fixed):
    """Predict the balanced assignments of another view, found by Sinkhorn-Knopp.

    The teacher's logits over TEACHER_TEMP (epsilon in the paper, 0.05 there) become assignments in
    which, over the batch of each view, every cluster has the same mass. The paper assigns by the
    student itself; here its EMA teacher does. The marginal is the mean assignment, which the loss
    does not use.

    References:
        Caron et al., Unsupervised Learning of Visual Features by Contrasting Cluster Assignments,
        2020, equations 2 and 3.
    """

    summary = "prediction of balanced assignments"

    def __init__(self, student_temp: float, teacher_temp: float) -> None:
        super().__init__(student_temp)
        self._temperature = teacher_temp

    def initial_marginal(self, n_clusters: int) -> float:  # noqa: D102
        return 1 / n_clusters

    def targets(self, logits: Tensor, marginal: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        from ssl_kd.core.logits import saturated

        log_q = saturated(logits.detach(), infinities=False) / self._temperature
        for _ in range(ITERATIONS):
            log_q = log_q.log_softmax(2)  # each cluster has the same mass in the batch of a view
            log_q = log_q.log_softmax(3)  # each sample has a mass of 1
        q = log_q.exp()
        return q, q.mean((1, 2))
