"""The divergence to a teacher with another tokenizer: hidden states, ULD or chunks of text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ssl_kd.datasets.aligned import AlignedBatch
from ssl_kd.guard.seeds import seeded
from ssl_kd.language.setting_groups import LossSettings
from ssl_kd.language.sources import Answer
from ssl_kd.losses.cross_tokenizer import chunk_matching, hidden_matching, uld
from ssl_kd.losses.teacher_output import logits_of
from ssl_kd.settings import SettingsError


def unfit_for_hidden(who: str, model: Any) -> SettingsError:
    """The error for a model whose logits are not its hidden states times its head."""
    return SettingsError(
        f"ALIGN is 'hidden', but the {who}, {type(model).__name__}, caps or scales its logits and "
        "can be matched by these alone: set ALIGN to 'chunks' or 'uld'"
    )


class HiddenProjection(torch.nn.Linear):
    """A linear map without bias, in float32 also under autocast.

    It is trained with the student and discarded afterwards. Some hidden states hold values in the
    thousands, whose products overflow in float16.

    Args:
        student_dim: hidden size of the student.
        teacher_dim: hidden size of the teacher.
    """

    def __init__(self, student_dim: int, teacher_dim: int) -> None:
        super().__init__(student_dim, teacher_dim, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """`[..., student_dim]` in any floating dtype to `[..., teacher_dim]` in that of the map."""
        with torch.autocast(input.device.type, enabled=False):
            return super().forward(input.to(self.weight.dtype))


class Aligned(torch.nn.Module):
    """A teacher with another tokenizer, aligned in the way of ALIGN.

    Args:
        answer: the teacher; `Routed.answer` for a mixture of experts, asked `draws` times a
            batch.
        settings: ALIGN (`hidden`, `uld` or `chunks`) and TEMPERATURE.
        widths: of the student and of the teacher, for the projection of `hidden`.
        divergence: of `chunks`, decided.
        draws: of experts for each batch.
        seed: of the projection.

    Raises:
        SettingsError: `hidden`, and the teacher caps or scales its logits.

    Attributes:
        projection: for `hidden`, trained with the student; None otherwise.
    """

    def __init__(
        self,
        answer: Answer,
        settings: LossSettings,
        widths: tuple[int, int],
        *,
        divergence: str = "forward_kl",
        draws: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.divergence, self.draws = divergence, draws
        self.answer, self.how, self.settings = answer, settings.align, settings
        self.projection = None
        if self.how == "hidden":
            if not getattr(answer, "linear", True):
                raise unfit_for_hidden("teacher", self.model)
            with seeded(seed):
                self.projection = HiddenProjection(*widths)

    @property
    def model(self) -> Any:
        """The teacher's."""
        return getattr(self.answer, "__self__", self.answer).model

    def count(self, batch: AlignedBatch) -> int:
        """How many groups of tokens there are to average over."""
        return len(batch.groups())

    def forward(
        self, batch: AlignedBatch, hidden: Tensor | None, logits: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """The distance to the teacher, a sum over what `count` counts; mean over draws of experts.

        Args:
            batch: the same text in both tokenizers.
            hidden: `[batch * token, dim]`, the student's hidden states; only `hidden` needs them.
            logits: rows of them -> the student's logits there.
        """
        if self.projection is not None and hidden is not None:
            distance, rows = self._hidden(self.projection, batch, hidden)
        elif self.how == "uld":
            distance, rows = self._uld(batch, logits)
        else:
            distance, rows = self._chunks(batch, logits)
        draws = [distance(self.answer(batch.teacher, rows)).sum() for _ in range(self.draws)]
        return torch.stack(draws).mean(0)

    # Each: a function from the teacher's answer to the distance, and the rows to ask it about.

    def _hidden(
        self, projection: HiddenProjection, batch: AlignedBatch, hidden: Tensor
    ) -> tuple[Callable[[Any], Tensor], Tensor]:
        groups = batch.groups()
        student = projection(hidden[groups.student.rows[groups.student.first]])

        def distance(answer: Any) -> Tensor:
            return hidden_matching(student, answer.hidden)

        return distance, groups.teacher.rows[groups.teacher.first]

    def _uld(
        self, batch: AlignedBatch, logits: Callable[[Tensor], Tensor]
    ) -> tuple[Callable[[Any], Tensor], Tensor]:
        groups = batch.groups()
        student = logits(groups.student.rows[groups.student.first])

        def distance(answer: Any) -> Tensor:
            t = self.settings.temperature
            return uld(student, logits_of(answer), temperature=t)

        return distance, groups.teacher.rows[groups.teacher.first]

    def _chunks(
        self, batch: AlignedBatch, logits: Callable[[Tensor], Tensor]
    ) -> tuple[Callable[[Any], Tensor], Tensor]:
        groups = batch.groups()
        student = logits(groups.student.rows)
        vocabulary = batch.vocabulary.to(groups.student.rows.device)

        def distance(answer: Any) -> Tensor:
            return chunk_matching(
                student,
                logits_of(answer),
                groups.student,
                groups.teacher,
                groups.matched,
                vocabulary.student,
                vocabulary.teacher,
                temperature=self.settings.temperature,
                divergence=self.divergence,
            )

        return distance, groups.teacher.rows
