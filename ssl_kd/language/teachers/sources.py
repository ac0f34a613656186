"""Provide the answers of one or several teachers to a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from ssl_kd.language.losses.teacher_output import LinearTeacher, TeacherOutput
from ssl_kd.language.losses.token_distillation import next_token_targets
from ssl_kd.language.text.blocks import Batch
from ssl_kd.memory import to_device_async

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


class ByTag(Plain):
    """Return the answers of teachers that run only on rows of their own tag, with 0 elsewhere.

    `tags` holds the index of the teacher of each row of the data set.
    """

    def __init__(self, *answers: Answer, names: Sequence[str], tags: Tensor) -> None:
        super().__init__(*answers, names=names)
        self.tags = tags

    def present(self, batch: Batch) -> list[int]:
        """Return the teachers that have rows in a batch, in the order of their answers."""
        return self.tags[batch.rows].unique().tolist()

    def owners(self, batch: Batch) -> Tensor:
        """Return the teacher of each target position of a batch, on the CPU."""
        tags = self.tags[batch.rows, None].expand_as(batch.counts)
        return tags[:, 1:][batch.counts[:, 1:]]

    def __call__(self, batch: Batch, rows: Tensor, student: TeacherOutput) -> list[TeacherOutput]:
        """Return the answer of each teacher that has rows in the batch."""
        return [self._answer(batch, len(rows), teacher) for teacher in self.present(batch)]

    def _answer(self, batch: Batch, n: int, teacher: int) -> TeacherOutput:
        device = batch.input_ids.device
        mine = (self.tags[batch.rows] == teacher).nonzero().flatten()
        on_device = to_device_async(mine, device)
        columns = {name: getattr(batch, name)[on_device] for name in ("input_ids", "position_ids")}
        part = replace(batch, counts=batch.counts[mine], rows=batch.rows[mine], **columns)
        rows, _ = next_token_targets(part.input_ids, part.counts)
        answer: Any = self.answers[teacher](part, rows)
        at = to_device_async((self.owners(batch) == teacher).nonzero().flatten(), device)
        name = "hidden" if isinstance(answer, LinearTeacher) else "logits"  # of a live teacher
        values = getattr(answer, name)
        spread = values.new_zeros(n, values.shape[1]).index_copy(0, at, values)
        return replace(answer, **{name: spread})


def named_rows(rows: Tensor) -> str:
    """Format row numbers of a batch as text for an event, for example `rows 3, 17`."""
    return f"rows {', '.join(map(str, rows.tolist()))}"
