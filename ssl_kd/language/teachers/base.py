"""Define what every kind of teacher has; this module's class is a run without a teacher.

`ssl_kd.language.teachers.kinds` lists the kinds, each a subclass in a file of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor
from typing_extensions import Self

from firstnan.events import Event
from ssl_kd.core.precision import Precision
from ssl_kd.core.runs.ranks import Ranks
from ssl_kd.language.losses.teacher_output import TeacherOutput
from ssl_kd.language.models.causal import CausalLM
from ssl_kd.language.models.frozen import FrozenTeacher
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.text.aligned import AlignedBatch, AlignedBlocks
from ssl_kd.language.text.blocks import Batch, Blocks
from ssl_kd.language.text.dataset import TextDataset
from ssl_kd.language.text.rows import check_family, check_ids_are_known, check_room, lay_out

if TYPE_CHECKING:
    from ssl_kd.language.evaluate.judge import LanguageJudge

Answer = Callable[[Batch, Tensor], TeacherOutput]
"""Function that returns a teacher's answer to a batch at some positions, which are indices into
the flattened `[batch * token]`."""
Rows = Blocks | AlignedBlocks
Scores = tuple[list[dict[str, Any]], list[str]]
"""A row of scores for each teacher, and the texts that the first one generates."""


@dataclass(frozen=True)
class TeacherContext:
    """What a teacher is made from: the settings, the text and the models of a run."""

    settings: LanguageSettings
    precision: Precision
    ranks: Ranks
    texts: TextDataset  # to train on
    student: CausalLM
    lms: Sequence[CausalLM]  # all teachers, the first one first; without a model if not loaded
    frozen: Sequence[FrozenTeacher] = ()  # those that run in this process, on their device


class Teacher:
    """The teacher of a run; this class itself is a run without one.

    Its life: `lay_out` the text in rows, `open` the teacher, `score` it on held-out text, `begin`
    training, and `answer` each batch. A kind of teacher is a subclass that defines what differs.

    Attributes:
        runs_here: whether its models are loaded and run in this process.
        compares: what the student is compared with: `answer` at each of its tokens, or `distance`
            over groups of tokens; None if there is nothing to learn from.
        lms: all teachers, the first one first.
        frozen: those that run in this process, as they were loaded.
        models: the live teachers, by their names in fault messages.
        weights: of several teachers, in the average of their divergences; None: all equal.
        prefetch: requests the answers to batches in the background; None if none is waited for.
    """

    runs_here: ClassVar[bool] = False
    compares: ClassVar[Literal["tokens", "groups"] | None] = None
    lms: Sequence[CausalLM] = ()
    frozen: Sequence[FrozenTeacher] = ()
    models: Mapping[str, Any] = MappingProxyType({})
    weights: Sequence[float] | None = None
    prefetch: Callable[[Sequence[Batch]], None] | None = None

    # -- before training --------------------------------------------------------------------------

    @classmethod
    def lay_out(cls, context: TeacherContext, texts: TextDataset, *, trains: bool) -> Rows:
        """Lay out a text in rows of tokens: the one to train on (`trains`), or the held-out one."""
        settings = context.settings
        packing = settings.packs if trains else settings.packing
        return lay_out(settings.block_size, packing, texts, context.student, context.lms)

    @classmethod
    def check_rows(cls, context: TeacherContext, rows: Rows, held_out: Rows) -> None:
        """Raise SettingsError if a teacher cannot read the rows that `lay_out` returned."""
        assert isinstance(rows, Blocks) and isinstance(held_out, Blocks)  # lay_out
        for lm in context.lms[1:]:
            check_family(context.student, lm)
            check_room(lm, context.settings.block_size)
        for lm in context.lms:
            check_ids_are_known(context.student, lm, rows, held_out)

    @classmethod
    def open(cls, context: TeacherContext, rows: Rows) -> Self:
        """Return the teacher of a run, which answers these training rows."""
        return cls()

    @property
    def identity(self) -> tuple[str, ...]:
        """The identities of all that the answers depend on besides the text."""
        return tuple(lm.weights_id for lm in self.lms)

    def describe(self) -> str:
        """Return the line about the teacher in the log of a run."""
        return "none: cross-entropy alone"

    def facts(self) -> dict[str, Any] | None:
        """Return facts about a cache of answers for `metrics.json`; None without a cache."""
        return None

    def score(self, judge: LanguageJudge) -> Scores:
        """Score the teachers on held-out text, as they were loaded; nothing if none can run."""
        return [], []

    # -- training ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """Get ready for training, after `score` and before the first `answer`."""

    def answer(self, batch: Batch, rows: Tensor, student: TeacherOutput) -> list[TeacherOutput]:
        """Return answers at `rows` whose divergences to the student are averaged.

        `student` is the student's own answer at these positions, without gradient.
        """
        return []

    def owners(self, batch: Batch) -> Tensor | None:
        """Return which answer belongs to each target position, `[n]` int64 on the CPU.

        None: each answer belongs to all of them.
        """
        return None

    def distance(self, batch: AlignedBatch, logits: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the student's distance to the teacher, summed over groups of tokens.

        `logits` computes the student's logits at some of the flattened `[batch * token]` positions.
        """
        raise NotImplementedError(f"{type(self).__name__} compares {self.compares}, not groups")

    def count(self, batch: Any) -> int:
        """Return the number of tokens, or of groups of tokens, whose divergences are summed."""
        return int(batch.counts.sum())

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


def named_rows(rows: Tensor) -> str:
    """Format row numbers of a batch as text for an event, for example `rows 3, 17`."""
    return f"rows {', '.join(map(str, rows.tolist()))}"
