"""Provide the answers of one or several teachers to a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from ssl_kd.datasets.blocks import Batch
from ssl_kd.losses.teacher_output import TeacherOutput

Answer = Callable[[Batch, Tensor], TeacherOutput]
"""Function that returns a teacher's answer to a batch at some positions, which are indices into
the flattened `[batch * token]`."""


class Source(Protocol):
    """Interface of an object that returns the teachers' outputs for a batch."""

    def __call__(self, batch: Batch, rows: Tensor, student: TeacherOutput) -> list[TeacherOutput]:
        """Return answers at `rows` whose divergences to the student are averaged.

        `student` is the student's own answer at these positions, without gradient.
        """
        ...


class Plain:
    """Return the answers of teachers that ignore the student: live models, a cache or a server.

    `names` label several teachers in fault messages; `weights` are their weights in the average.
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
    """Format row numbers of a batch as text for an event, for example `rows 3, 17`."""
    return f"rows {', '.join(map(str, rows.tolist()))}"
