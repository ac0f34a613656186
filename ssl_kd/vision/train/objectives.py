"""Training objectives of the heads.

To add an objective to the library, write its class and add it to `OBJECTIVES`. An objective in your
own package needs no entry: `--loss my_package.my_module.MyObjective`. torch is imported inside
functions, so that `python train.py --help` works without it.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from ssl_kd.core.errors import InputError
from ssl_kd.core.settings import SettingsError
from ssl_kd.core.settings.import_paths import import_class

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


class TEMI(Objective):
    """Maximize pairwise mutual information; the marginal is the mean teacher probability.

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
        from ssl_kd.vision.train import losses

        log_probs = losses.log_probabilities(logits, self._temperature)
        return log_probs, log_probs.exp().mean((1, 2))

    def log_probabilities(self, targets: Tensor) -> Tensor:  # noqa: D102
        return targets

    def loss(  # noqa: D102
        self, logits: Tensor, targets: Tensor, marginal: Tensor, weights: Tensor | None
    ) -> Tensor:
        from ssl_kd.vision.train import losses

        return losses.temi(logits, targets, marginal, weights, **self._options)

    def has_zero(self, marginal: Tensor) -> Tensor:  # noqa: D102
        return (marginal == 0).any(1)


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


# LOSS -> the objective
OBJECTIVES: Mapping[str, type[Objective]] = MappingProxyType(
    {"temi": TEMI, "sharpened": Sharpened, "fixed": Fixed}
)


def objective_class(name: str) -> type[Objective]:
    """Return the class of an objective, given a name in `OBJECTIVES` or an import path."""
    return OBJECTIVES.get(name) or import_class(name, Objective, "loss")


def make_objective(name: str, values: Mapping[str, Any]) -> Objective:
    """Create an objective, passing to its `__init__` those of the `values` that it accepts."""
    kind = objective_class(name)
    parameters = inspect.signature(kind).parameters
    missing = [p.name for p in parameters.values() if p.default is p.empty and p.name not in values]
    if missing:
        raise InputError(
            f"LOSS is {name!r}, whose __init__ needs {', '.join(missing)}, but there is no such "
            "setting: give the argument a default"
        )
    return kind(**{option: values[option] for option in parameters if option in values})
