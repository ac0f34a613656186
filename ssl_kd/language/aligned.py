"""Compute the distance of a student to a teacher with another tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ssl_kd.datasets.aligned import AlignedBatch, Groups
from ssl_kd.guard.seeds import seeded
from ssl_kd.language.setting_groups import LossSettings
from ssl_kd.language.sources import Answer
from ssl_kd.losses.cross_tokenizer import chunk_matching, hidden_matching, uld
from ssl_kd.losses.teacher_output import logits_of
from ssl_kd.settings import SettingsError


def unfit_for_hidden(who: str, model: Any) -> SettingsError:
    """Return the error for ALIGN `hidden` with a model whose logits are capped or scaled."""
    return SettingsError(
        f"ALIGN is 'hidden', but the {who}, {type(model).__name__}, caps or scales its logits, so"
        " its hidden states do not determine them: set ALIGN to 'chunks' or 'uld'"
    )


class HiddenProjection(torch.nn.Linear):
    """A linear map from the student's hidden size to the teacher's, in float32 under autocast.

    Hidden states may have values in the thousands, and products of these overflow in float16. The
    map is trained with the student and then discarded.
    """

    def __init__(self, student_dim: int, teacher_dim: int) -> None:
        super().__init__(student_dim, teacher_dim, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """Map `[..., student_dim]` of any floating dtype to `[..., teacher_dim]` in float32."""
        with torch.autocast(input.device.type, enabled=False):
            return super().forward(input.to(self.weight.dtype))


class Aligned(torch.nn.Module):
    """The distance between a student and a teacher with another tokenizer.

    Args:
        answer: the teacher; `RoutedTeacher.answer` for a mixture of experts.
        loss: ALIGN (`hidden`, `uld` or `chunks`) and TEMPERATURE.
        widths: hidden sizes of student and teacher, for the projection of ALIGN `hidden`.
        divergence: used by ALIGN `chunks` where one token matches one token.
        draws: number of passes of the teacher over each batch, with other experts in each.
        seed: initializes the projection of ALIGN `hidden`.
    """

    def __init__(
        self,
        answer: Answer,
        loss: LossSettings,
        widths: tuple[int, int],
        *,
        divergence: str = "forward_kl",
        draws: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.answer, self.align, self.temperature = answer, loss.align, loss.temperature
        self.divergence, self.draws = divergence, draws
        self.projection = None
        if self.align == "hidden":
            if not getattr(answer, "linear", True):
                raise unfit_for_hidden("teacher", self.model)
            with seeded(seed):
                self.projection = HiddenProjection(*widths)

    @property
    def model(self) -> Any:
        """The teacher's model."""
        return getattr(self.answer, "__self__", self.answer).model

    def count(self, batch: AlignedBatch) -> int:
        """Return the number of token groups, the divisor of the mean distance."""
        return len(batch.groups())

    def forward(
        self, batch: AlignedBatch, hidden: Tensor | None, logits: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return the distance to the teacher: summed over token groups, averaged over passes.

        Args:
            batch: the same text, tokenized for both models.
            hidden: `[batch * token, dim]`, the student's hidden states, for ALIGN `hidden`.
            logits: computes the student's logits at some of the `batch * token` positions.
        """
        groups = batch.groups()
        first = groups.teacher.rows[groups.teacher.first]
        if self.projection is not None and hidden is not None:
            student = self.projection(hidden[groups.student.rows[groups.student.first]])
            rows = first
        elif self.align == "uld":
            student, rows = logits(groups.student.rows[groups.student.first]), first
        else:
            student, rows = logits(groups.student.rows), groups.teacher.rows
        distances = [
            self._distance(batch, groups, student, self.answer(batch.teacher, rows)).sum()
            for _ in range(self.draws)
        ]
        return torch.stack(distances).mean(0)

    def _distance(
        self, batch: AlignedBatch, groups: Groups, student: Tensor, answer: Any
    ) -> Tensor:
        if self.projection is not None:
            return hidden_matching(student, answer.hidden)
        if self.align == "uld":
            return uld(student, logits_of(answer), temperature=self.temperature)
        vocabulary = batch.vocabulary.to(groups.student.rows.device)
        return chunk_matching(
            student,
            logits_of(answer),
            groups.student,
            groups.teacher,
            groups.matched,
            vocabulary.student,
            vocabulary.teacher,
            temperature=self.temperature,
            divergence=self.divergence,
        )
