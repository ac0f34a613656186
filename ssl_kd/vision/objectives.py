"""What heads are trained for: each objective is one object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ssl_kd import losses
from ssl_kd.vision.settings import VisionSettings


class Objective(Protocol):
    """What a head learns from its EMA teacher.

    Every head keeps a running marginal `[cluster]`, whatever an objective makes of it. It is made
    from the settings of the run, `MyObjective(settings)`.
    """

    def initial_marginal(self, n_clusters: int) -> float:
        """What every entry of the running marginal begins with."""
        ...

    def targets(self, logits: Tensor, marginal: Tensor) -> tuple[Tensor, Tensor]:
        """What the students are to learn in a step.

        Args:
            logits: the teachers' `[head, view, batch, cluster]`.
            marginal: running marginal `[head, cluster]`, of the steps before.

        Returns:
            Targets of the shape of `logits`, and the batch's own marginal `[head, cluster]`, which
            the running one moves towards.
        """
        ...

    def log_probabilities(self, targets: Tensor) -> Tensor:
        """The targets as log-probabilities, for the agreement between views."""
        ...

    def loss(
        self, logits: Tensor, targets: Tensor, marginal: Tensor, weights: Tensor | None
    ) -> Tensor:
        """The loss of each head, `[head]` float32.

        Args:
            logits: the students' `[head, view, batch, cluster]`, with gradient.
            targets: from `targets`.
            marginal: running marginal `[head, cluster]`, this step's batch included.
            weights: of each sample, `[head or 1, batch]`; None for equal ones.
        """
        ...

    def smoothed(self, marginal: Tensor) -> Tensor:
        """Which heads have a marginal `[head, cluster]` that must be smoothed: boolean `[head]`."""
        ...


class TEMI:
    """Pairwise mutual information; the marginal is the running mean of the teacher's probabilities.

    References:
        Adaloglou et al., Exploring the Limits of Deep Image Clustering using Pretrained Models,
        2023.
    """

    def __init__(self, settings: VisionSettings) -> None:
        self._temperature = settings.teacher_temp
        self._options = {"beta": settings.beta, "student_temperature": settings.student_temp}

    def initial_marginal(self, n_clusters: int) -> float:
        """Uniform."""
        return 1 / n_clusters

    def targets(self, logits: Tensor, marginal: Tensor) -> tuple[Tensor, Tensor]:
        """The teacher's log-probabilities, and their mean."""
        log_probs = losses.log_probabilities(logits, self._temperature)
        return log_probs, log_probs.exp().mean((1, 2))

    def log_probabilities(self, targets: Tensor) -> Tensor:
        """As they are."""
        return targets

    def loss(
        self, logits: Tensor, targets: Tensor, marginal: Tensor, weights: Tensor | None
    ) -> Tensor:
        """`losses.temi`."""
        return losses.temi(logits, targets, marginal, weights, **self._options)

    def smoothed(self, marginal: Tensor) -> Tensor:
        """Where a cluster's share is exactly 0."""
        return (marginal == 0).any(1)


class Sharpened:
    """Cross-entropy with a sharper teacher; the marginal is the center, a mean of its logits.

    References:
        Caron et al., Emerging Properties in Self-Supervised Vision Transformers, 2021.
    """

    def __init__(self, settings: VisionSettings) -> None:
        self._temperature, self._student = settings.teacher_temp, settings.student_temp
        self._sinkhorn = settings.centering == "sinkhorn"

    def initial_marginal(self, n_clusters: int) -> float:
        """No center yet."""
        return 0.0

    def targets(self, logits: Tensor, marginal: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities, centred or balanced, and the mean of the logits."""
        if self._sinkhorn:
            targets = losses.sinkhorn_targets(logits, self._temperature)
        else:
            targets = losses.centred_targets(logits, marginal, self._temperature)
        return targets, logits.float().mean((1, 2))

    def log_probabilities(self, targets: Tensor) -> Tensor:
        """Their logarithm."""
        return targets.log()

    def loss(
        self, logits: Tensor, targets: Tensor, marginal: Tensor, weights: Tensor | None
    ) -> Tensor:
        """`losses.sharpened_cross_entropy`."""
        return losses.sharpened_cross_entropy(
            logits, targets, weights, student_temperature=self._student
        )

    def smoothed(self, marginal: Tensor) -> Tensor:
        """A center of 0 is like any other."""
        return torch.zeros(len(marginal), dtype=torch.bool, device=marginal.device)


OBJECTIVES: dict[str, Callable[[VisionSettings], Objective]] = {
    "temi": TEMI,
    "sharpened": Sharpened,
}
"""LOSS -> the objective."""
