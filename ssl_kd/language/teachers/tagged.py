"""Choose the teacher of each row by the tag of its record (TEACHER_FIELD)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from typing_extensions import Self

from ssl_kd.core.memory import to_device_async
from ssl_kd.core.settings import SettingsError
from ssl_kd.language.losses.teacher_output import LinearTeacher, TeacherOutput
from ssl_kd.language.losses.token_distillation import next_token_targets
from ssl_kd.language.models.causal import CausalLM
from ssl_kd.language.teachers.base import Answer, Rows, TeacherContext
from ssl_kd.language.teachers.live import Live
from ssl_kd.language.text.blocks import Batch


class Tagged(Live):
    """Models that run only on rows of their own tag, with an answer of 0 elsewhere.

    `tags` holds the index of the teacher of each row of the data set.
    """

    def __init__(
        self,
        *answers: Answer,
        names: Sequence[str],
        tags: Tensor,
        lms: Sequence[CausalLM] = (),
    ) -> None:
        super().__init__(*answers, lms=lms, names=names)
        self.tags = tags

    @classmethod
    def check_rows(cls, context: TeacherContext, rows: Rows, held_out: Rows) -> None:
        """Raise SettingsError if the rows have no tags, or a teacher cannot read them."""
        if _tags(rows) is None:
            raise SettingsError("TEACHER_FIELD supports only text models: set it to None")
        super().check_rows(context, rows, held_out)

    @classmethod
    def open(cls, context: TeacherContext, rows: Rows) -> Self:
        """Return the teachers of TEACHER_MODEL, each for the rows of its tag."""
        names, tags = context.settings.teacher_names, _tags(rows)
        assert tags is not None  # check_rows
        return cls(*context.frozen, lms=context.lms, names=names, tags=tags)

    def owners(self, batch: Batch) -> Tensor:
        """Return which answer belongs to each target position: that of its row's teacher."""
        _, answer_of_row = self.tags[batch.rows].unique(return_inverse=True)
        return answer_of_row[:, None].expand_as(batch.counts)[:, 1:][batch.counts[:, 1:]]

    def answer(self, batch: Batch, rows: Tensor, student: TeacherOutput) -> list[TeacherOutput]:
        """Return the answer of each teacher that has rows in the batch."""
        owners, present = self.owners(batch), self.tags[batch.rows].unique().tolist()
        return [
            self._answer(batch, teacher, len(rows), owners == i)
            for i, teacher in enumerate(present)
        ]

    def _answer(self, batch: Batch, teacher: int, n: int, is_owned: Tensor) -> TeacherOutput:
        device = batch.input_ids.device
        mine = (self.tags[batch.rows] == teacher).nonzero().flatten()
        on_device = to_device_async(mine, device)
        columns = {name: getattr(batch, name)[on_device] for name in ("input_ids", "position_ids")}
        part = replace(batch, counts=batch.counts[mine], rows=batch.rows[mine], **columns)
        rows, _ = next_token_targets(part.input_ids, part.counts)
        answer: Any = self.answers[teacher](part, rows)
        at = to_device_async(is_owned.nonzero().flatten(), device)
        name = "hidden" if isinstance(answer, LinearTeacher) else "logits"  # of a live teacher
        values = getattr(answer, name)
        spread = values.new_zeros(n, values.shape[1]).index_copy(0, at, values)
        return replace(answer, **{name: spread})


def _tags(rows: Rows) -> Tensor | None:
    return getattr(rows, "tags", None)  # aligned rows have none
