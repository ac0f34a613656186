"""Teachers' answers to a batch, live or cached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from ssl_kd.datasets.blocks import Batch
from ssl_kd.losses.teacher_output import TeacherOutput

Answer = Callable[[Batch, Tensor], TeacherOutput]
"""A batch and its real positions, rows of the flattened `[batch * token]` -> the answer there."""


class Source(Protocol):
    """Answers of a teacher to a batch."""

    def __call__(self, batch: Batch, rows: Tensor, student: TeacherOutput) -> list[TeacherOutput]:
        """Return the answers, to be averaged, at `rows` of the flattened `[batch * token]`.

        `student` is the student's own answer there, without gradient.
        """
        ...


class Plain:
    """Teachers that answer without knowing the student: live ones, a cache or a server.

    Args:
        answers: of one teacher, or of several.
        names: of several teachers, for messages about faults.
        weights: of several teachers; None: equal.
    """

    def __init__(
        self, *answers: Answer, names: Sequence[str] = (), weights: Sequence[float] | None = None
    ) -> None:
        self.answers, self.weights = answers, weights
        self.model: Any = getattr(answers[0], "model", None)  # of a live teacher
        self.prefetch: Any = getattr(answers[0], "prefetch", None)
        labels = [f"teacher {name}" for name in names] or ["teacher"]
        models = [getattr(answer, "model", None) for answer in answers]
        self.models = {n: m for n, m in zip(labels, models, strict=False) if m is not None}

    def __call__(self, batch: Batch, rows: Tensor, student: TeacherOutput) -> list[TeacherOutput]:
        """Return the answer of each teacher."""
        return [answer(batch, rows) for answer in self.answers]


def named_rows(rows: Tensor) -> str:
    """Return the rows of a batch as text for an event, such as `rows 3, 17`."""
    return f"rows {', '.join(map(str, rows.tolist()))}"
