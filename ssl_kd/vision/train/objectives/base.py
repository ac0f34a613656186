"""What an objective of the heads defines: targets, loss and running marginal."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import Tensor


class Objective(ABC):
    """Define the targets that heads learn from their EMA teachers, and the loss.

    The arguments of `__init__` are settings by their names, such as `beta` or `student_temp`; raise
    SettingsError if their values do not fit together. Every head has a running marginal
    `[cluster]`, whose meaning the objective defines. Each row of a tensor is one head: do not mix
    rows, and do not read numbers from a tensor, which would wait for the GPU.

    Attributes:
        summary: a short description for the help of the setting LOSS.
    """

    summary: ClassVar[str] = ""

    @abstractmethod
    def initial_marginal(self, n_clusters: int) -> float:
        """Return the first value of every entry of the running marginal."""

    @abstractmethod
    def targets(self, logits: Tensor, marginal: Tensor) -> tuple[Tensor, Tensor]:
        """Return the students' targets in a step, and the marginal of the batch.

        Args:
            logits: logits of the EMA teachers, `[head, view, batch, cluster]`.
            marginal: running marginal before the step, `[head, cluster]`.

        Returns:
            Targets of the shape of `logits`, and the batch's marginal `[head, cluster]`, towards
            which the running marginal moves.
        """

    @abstractmethod
    def log_probabilities(self, targets: Tensor) -> Tensor:
        """Return the targets as log-probabilities, to measure the agreement between views."""

    @abstractmethod
    def loss(
        self, logits: Tensor, targets: Tensor, marginal: Tensor, weights: Tensor | None
    ) -> Tensor:
        """Return the loss of each head, `[head]` float32.

        Args:
            logits: logits of the students, `[head, view, batch, cluster]`, with gradient.
            targets: targets that the method `targets` returned.
            marginal: running marginal `[head, cluster]`, including this step's batch.
            weights: weight of each sample, `[head or 1, batch]`; None: equal weights.
        """

    def has_zero(self, marginal: Tensor) -> Tensor:
        """Mark the heads whose marginal `[head, cluster]` contains an exact 0, boolean `[head]`."""
        return marginal.new_zeros(len(marginal)).bool()


class OfProbabilities(Objective):
    """An objective whose targets are the EMA teachers' log-probabilities.

    The running marginal is the mean probability of each cluster.
    """

    def __init__(self, teacher_temp: float) -> None:
        self._temperature = teacher_temp

    def initial_marginal(self, n_clusters: int) -> float:  # noqa: D102
        return 1 / n_clusters

    def targets(self, logits: Tensor, marginal: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        from ssl_kd.vision.train import losses

        log_probs = losses.log_probabilities(logits, self._temperature)
        return log_probs, log_probs.exp().mean((1, 2))

    def log_probabilities(self, targets: Tensor) -> Tensor:  # noqa: D102
        return targets
