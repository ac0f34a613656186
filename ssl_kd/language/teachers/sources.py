"""Provide the answers of one or several teachers to a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from firstnan.events import Event
from ssl_kd.core.memory import to_device_async
from ssl_kd.language.losses.teacher_output import LinearTeacher, TeacherOutput
from ssl_kd.language.losses.token_distillation import next_token_targets
from ssl_kd.language.text.blocks import Batch

Answer = Callable[[Batch, Tensor], TeacherOutput]
"""Function that returns a teacher's answer to a batch at some positions, which are indices into
the flattened `[batch * token]`."""


class Source:
    """The teachers of a run as training sees them; this class itself is a run without any.

    A kind of teacher is a subclass: it defines `__call__`, and of the rest what it has.

    Attributes:
        models: the live teachers, by their names in fault messages.
        weights: of several teachers, in the average of their divergences; None: all equal.
        prefetch: requests the answers to batches in the background; None if none is waited for.
    """

    models: Mapping[str, Any] = MappingProxyType({})
    weights: Sequence[float] | None = None
    prefetch: Callable[[Sequence[Batch]], None] | None = None

    def __call__(self, batch: Batch, rows: Tensor, student: TeacherOutput) -> list[TeacherOutput]:
        """Return answers at `rows` whose divergences to the student are averaged.

        `student` is the student's own answer at these positions, without gradient.
        """
        return []

    def owners(self, batch: Batch) -> Tensor | None:
        """Return which answer belongs to each target position, `[n]` int64 on the CPU.

        None: each answer belongs to all of them.
        """
        return None

    def fixed(self) -> AbstractContextManager[None]:
        """Train nothing of the teacher in the block."""
        return nullcontext()

    def as_loaded(self) -> AbstractContextManager[None]:
        """Use the weights from before training in the block."""
        return nullcontext()

    def trained(self) -> dict[str, Tensor]:
        """Return the tensors of the teacher that training changes, by name."""
        return {}

    def take_events(self) -> list[Event]:
        """Return the events since the last call; their steps are not set."""
        return []

    def values(self) -> dict[str, float | None]:
        """Return the values of the last step for the log."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return the state of what training changes, for a checkpoint."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Restore a state that `state` returned."""

    def save(self, folder: Path) -> None:
        """Write what training changed into the folder of a finished run."""


class Plain(Source):
    """Return the answers of teachers that ignore the student: live models, a cache or a server.

    `names` label several teachers in fault messages.
    """

    def __init__(
        self, *answers: Answer, names: Sequence[str] = (), weights: Sequence[float] | None = None
    ) -> None:
        self.answers, self.weights = answers, weights
        self.prefetch = getattr(answers[0], "prefetch", None)
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

    def owners(self, batch: Batch) -> Tensor:
        """Return which answer belongs to each target position: that of its row's teacher."""
        _, answer_of_row = self.tags[batch.rows].unique(return_inverse=True)
        return answer_of_row[:, None].expand_as(batch.counts)[:, 1:][batch.counts[:, 1:]]

    def __call__(self, batch: Batch, rows: Tensor, student: TeacherOutput) -> list[TeacherOutput]:
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


def named_rows(rows: Tensor) -> str:
    """Format row numbers of a batch as text for an event, for example `rows 3, 17`."""
    return f"rows {', '.join(map(str, rows.tolist()))}"
