"""Compute the distance of a student to a teacher with another tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ssl_kd.language.losses.cross_tokenizer import chunk_matching, uld
from ssl_kd.language.losses.teacher_output import logits_of
from ssl_kd.language.settings.groups import LossSettings
from ssl_kd.language.teachers.sources import Answer
from ssl_kd.language.text.aligned import AlignedBatch, Groups


class Aligned:
    """The distance between a student and a teacher with another tokenizer.

    `answer` is the teacher, or `RoutedTeacher.answer` for a mixture of experts, which runs `draws`
    times over each batch with other experts. `divergence` is used where one token matches one.
    """

    def __init__(
        self,
        answer: Answer,
        loss: LossSettings,
        *,
        divergence: str = "forward_kl",
        draws: int = 1,
    ) -> None:
        self.answer: Any = answer
        self.align, self.temperature = loss.align, loss.temperature
        self.divergence, self.draws = divergence, draws

    @property
    def models(self) -> dict[str, Any]:
        """The live teacher, by its name in fault messages."""
        return {"teacher": getattr(self.answer, "__self__", self.answer).model}

    def __call__(self, batch: AlignedBatch, logits: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the distance to the teacher: summed over token groups, averaged over passes.

        `logits` computes the student's logits at some of the flattened `[batch * token]` positions.
        """
        groups = batch.groups()
        sides = groups.student, groups.teacher
        if self.align == "uld":
            student_rows, rows = (side.rows[side.first] for side in sides)
        else:
            student_rows, rows = (side.rows for side in sides)
        student = logits(student_rows)
        distances = [
            self._distance(
                batch, groups, student, logits_of(self.answer(batch.teacher, rows))
            ).sum()
            for _ in range(self.draws)
        ]
        return torch.stack(distances).mean(0)

    def _distance(
        self, batch: AlignedBatch, groups: Groups, student: Tensor, teacher: Tensor
    ) -> Tensor:
        if self.align == "uld":
            return uld(student, teacher, temperature=self.temperature)
        vocabulary = batch.vocabulary.to(groups.student.rows.device)
        return chunk_matching(
            student,
            teacher,
            groups.student,
            groups.teacher,
            groups.matched,
            vocabulary.student,
            vocabulary.teacher,
            temperature=self.temperature,
            divergence=self.divergence,
        )
