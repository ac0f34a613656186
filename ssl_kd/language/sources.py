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
        """Ask the teacher.

        Args:
            batch: rows of tokens.
            rows: int64 `[n]`, the real positions in the flattened `[batch * token]`.
            student: the student's own answer there, without gradient.

        Returns:
            Several, as of several draws of experts, count as their mean.
        """
        ...


class Plain:
    """Teachers that answer a batch and know of no student: live, or from caches.

    Args:
        answers: one, or the variants of a cache, or those of several teachers.
        names: of several teachers, for messages about faults.
        weights: of several teachers; None: all alike.

    Attributes:
        model: the live teacher's, of several the first's; None for a cache.
        models: of all live teachers, by `teacher NAME`, or `teacher` where there is one.
        ask_ahead: has a server answer about batches before they are wanted; None where none is.
    """

    def __init__(
        self, *answers: Answer, names: Sequence[str] = (), weights: Sequence[float] | None = None
    ) -> None:
        self.answers, self.weights = answers, weights
        self.model: Any = getattr(answers[0], "model", None)
        self.ask_ahead: Any = getattr(answers[0], "ask_ahead", None)
        called = [f"teacher {name}" for name in names] or ["teacher"]
        models = [getattr(answer, "model", None) for answer in answers]
        self.models = {n: m for n, m in zip(called, models, strict=False) if m is not None}

    def __call__(self, batch: Batch, rows: Tensor, student: TeacherOutput) -> list[TeacherOutput]:
        """As `Source`."""
        return [answer(batch, rows) for answer in self.answers]


def named_rows(rows: Tensor) -> str:
    """`rows 3, 17`: how a batch is named in an event."""
    return f"rows {', '.join(map(str, rows.tolist()))}"
