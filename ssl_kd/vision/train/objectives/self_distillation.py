"""Cross-entropy to given targets, and to those of a sharper teacher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ssl_kd.core.settings import SettingsError
from ssl_kd.vision.train.objectives.base import Objective

if TYPE_CHECKING:
    from torch import Tensor


class Fixed(Objective):
    """Minimize cross-entropy to given targets, as those of a partition; heads find no clusters."""

    summary = "cross-entropy to the partition alone"

    def __init__(self, student_temp: float) -> None:
        self._student = student_temp

    def initial_marginal(self, n_clusters: int) -> float:  # noqa: D102
        return 0.0

    def targets(self, logits: Tensor, marginal: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        raise TypeError("the targets of Fixed are given")

    def log_probabilities(self, targets: Tensor) -> Tensor:  # noqa: D102
        return targets.log()

    def loss(  # noqa: D102
        self, logits: Tensor, targets: Tensor, marginal: Tensor, weights: Tensor | None
    ) -> Tensor:
        from ssl_kd.vision.train import losses

        return losses.sharpened_cross_entropy(
            logits, targets, weights, student_temperature=self._student
        )


class Sharpened(Fixed):
    """Minimize cross-entropy to a sharper teacher; the marginal is the mean teacher logit.

    References:
        Caron et al., Emerging Properties in Self-Supervised Vision Transformers, 2021.
    """

    summary = "self-distillation towards a sharper teacher"

    def __init__(self, student_temp: float, teacher_temp: float) -> None:
        if teacher_temp > student_temp:
            raise SettingsError(
                f"TEACHER_TEMP is {teacher_temp:g} and STUDENT_TEMP {student_temp:g}; expected "
                "TEACHER_TEMP to be at most STUDENT_TEMP with LOSS 'sharpened': lower "
                "--teacher_temp"
            )
        super().__init__(student_temp)
        self._temperature = teacher_temp

    def targets(self, logits: Tensor, marginal: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        from ssl_kd.vision.train import losses

        targets = losses.centered_targets(logits, marginal, self._temperature)
        return targets, logits.float().mean((1, 2))
