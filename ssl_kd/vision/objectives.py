"""Training objectives of the heads.

To add one to the library, write its class and its entry in `OBJECTIVES`. Yours needs no entry:
`--loss my_package.my_module.MyObjective`. torch is imported only where it is used, so that
`python train.py --help` lists the names without it.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from ssl_kd.errors import InputError
from ssl_kd.settings import SettingsError
from ssl_kd.settings.import_paths import import_class

if TYPE_CHECKING:
    from torch import Tensor


class Objective(ABC):
    """What a head learns from its EMA teacher.

    Its `__init__` takes settings by their names, such as `beta` or `student_temp`, and raises
    SettingsError where they do not fit together. Every head has a running marginal `[cluster]`,
    which the objective defines. Heads are rows of tensors: do not mix rows, and do not read numbers
    from a tensor, which would wait for the GPU.

    Attributes:
        summary: a few words for the setting's help.
    """

    summary: ClassVar[str] = ""

    @abstractmethod
    def initial_marginal(self, n_clusters: int) -> float:
        """Return the first value of every entry of the running marginal."""

    @abstractmethod
    def targets(self, logits: Tensor, marginal: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the students are to learn in a step.

        Args:
            logits: the teachers' `[head, view, batch, cluster]`.
            marginal: running marginal `[head, cluster]`, of the steps before.

        Returns:
            Targets of the shape of `logits`, and the batch's marginal `[head, cluster]`, which the
            running one moves towards.
        """

    @abstractmethod
    def log_probabilities(self, targets: Tensor) -> Tensor:
        """Return the targets as log-probabilities, for the agreement between views."""

    @abstractmethod
    def loss(
        self, logits: Tensor, targets: Tensor, marginal: Tensor, weights: Tensor | None
    ) -> Tensor:
        """Return the loss of each head, `[head]` float32.

        Args:
            logits: the students' `[head, view, batch, cluster]`, with gradient.
            targets: from `targets`.
            marginal: running marginal `[head, cluster]`, this step's batch included.
            weights: of each sample, `[head or 1, batch]`; None for equal ones.
        """

    def smoothed(self, marginal: Tensor) -> Tensor:
        """Return which heads' marginal `[head, cluster]` has an exact 0: boolean `[head]`."""
        import torch

        return torch.zeros(len(marginal), dtype=torch.bool, device=marginal.device)


class TEMI(Objective):
    """Pairwise mutual information; the marginal is the running mean of the teacher's probabilities.

    References:
        Adaloglou et al., Exploring the Limits of Deep Image Clustering using Pretrained Models,
        2023.
    """

    summary = "pairwise mutual information"

    def __init__(self, beta: float, student_temp: float, teacher_temp: float) -> None:
        self._temperature = teacher_temp
        self._options = {"beta": beta, "student_temperature": student_temp}

    def initial_marginal(self, n_clusters: int) -> float:  # noqa: D102
        return 1 / n_clusters

    def targets(self, logits: Tensor, marginal: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        from ssl_kd import losses

        log_probs = losses.log_probabilities(logits, self._temperature)
        return log_probs, log_probs.exp().mean((1, 2))

    def log_probabilities(self, targets: Tensor) -> Tensor:  # noqa: D102
        return targets

    def loss(  # noqa: D102
        self, logits: Tensor, targets: Tensor, marginal: Tensor, weights: Tensor | None
    ) -> Tensor:
        from ssl_kd import losses

        return losses.temi(logits, targets, marginal, weights, **self._options)

    def smoothed(self, marginal: Tensor) -> Tensor:  # noqa: D102
        return (marginal == 0).any(1)


class Sharpened(Objective):
    """Cross-entropy with a sharper teacher; the marginal is the center, a mean of its logits.

    References:
        Caron et al., Emerging Properties in Self-Supervised Vision Transformers, 2021.
    """

    summary = "self-distillation towards a sharper teacher"

    def __init__(self, student_temp: float, teacher_temp: float) -> None:
        if teacher_temp > student_temp:
            raise SettingsError(
                f"TEACHER_TEMP is {teacher_temp:g} and STUDENT_TEMP {student_temp:g}, but with LOSS"
                " 'sharpened' the teacher's must not be the higher one."
            )
        self._temperature, self._student = teacher_temp, student_temp

    def initial_marginal(self, n_clusters: int) -> float:  # noqa: D102
        return 0.0

    def targets(self, logits: Tensor, marginal: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        from ssl_kd import losses

        targets = losses.centered_targets(logits, marginal, self._temperature)
        return targets, logits.float().mean((1, 2))

    def log_probabilities(self, targets: Tensor) -> Tensor:  # noqa: D102
        return targets.log()

    def loss(  # noqa: D102
        self, logits: Tensor, targets: Tensor, marginal: Tensor, weights: Tensor | None
    ) -> Tensor:
        from ssl_kd import losses

        return losses.sharpened_cross_entropy(
            logits, targets, weights, student_temperature=self._student
        )


OBJECTIVES: Mapping[str, type[Objective]] = MappingProxyType({"temi": TEMI, "sharpened": Sharpened})
"""LOSS -> the objective."""


def objective_class(name: str) -> type[Objective]:
    """Return the class of a value of LOSS: a name in `OBJECTIVES`, or an import path.

    Raises:
        ValueError: not found, or not a subclass of `Objective`.
    """
    return OBJECTIVES.get(name) or import_class(name, Objective, "loss")


def make_objective(name: str, values: Mapping[str, Any]) -> Objective:
    """Return the objective of a value of LOSS, with the settings that its `__init__` names.

    Raises:
        ValueError: as `objective_class`; it needs an unknown setting, or refuses the settings.
    """
    kind = objective_class(name)
    parameters = inspect.signature(kind).parameters
    missing = [p.name for p in parameters.values() if p.default is p.empty and p.name not in values]
    if missing:
        raise InputError(
            f"loss {name!r} needs {', '.join(missing)}: no such setting, so give it a default"
        )
    return kind(**{option: values[option] for option in parameters if option in values})
