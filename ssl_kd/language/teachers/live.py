"""Use one or several frozen models in this process as the teacher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from typing_extensions import Self

from ssl_kd.language.losses.teacher_output import TeacherOutput
from ssl_kd.language.models.causal import CausalLM
from ssl_kd.language.teachers.base import Answer, Rows, Scores, Teacher, TeacherContext
from ssl_kd.language.text.blocks import Batch

if TYPE_CHECKING:
    from ssl_kd.language.evaluate.judge import LanguageJudge


class Live(Teacher):
    """Models that ignore the student; with several, the mean of their divergences is learned.

    `answers` return the answer of each of them: a `FrozenTeacher`, or another function. `names`
    label several teachers in fault messages.
    """

    runs_here = True
    compares = "tokens"

    def __init__(
        self,
        *answers: Answer,
        lms: Sequence[CausalLM] = (),
        names: Sequence[str] = (),
        weights: Sequence[float] | None = None,
    ) -> None:
        self.answers = answers
        self.lms = lms
        self.weights = weights
        self.frozen: Any = answers
        labels = [f"teacher {name}" for name in names] or ["teacher"]
        models = [getattr(answer, "model", None) for answer in answers]
        self.models = {n: m for n, m in zip(labels, models, strict=False) if m is not None}

    @classmethod
    def open(cls, context: TeacherContext, rows: Rows) -> Self:
        """Return the teachers of TEACHER_MODEL with their weights."""
        names = context.settings.teacher_names if len(context.lms) > 1 else ()
        shares = context.settings.teacher_shares
        return cls(*context.frozen, lms=context.lms, names=names, weights=shares)

    def describe(self) -> str:
        """Return the names of the models, and how many weights they have."""
        n_weights = sum(p.numel() for lm in self.lms for p in lm.model.parameters())
        return f"{', '.join(lm.name for lm in self.lms)}, {n_weights:,} weights, frozen"

    def score(self, judge: LanguageJudge) -> Scores:
        """Score each model."""
        row, texts = judge.row("teacher", self.frozen[0])
        others = zip(self.lms[1:], self.frozen[1:], strict=True)
        return [row, *(judge.row(f"teacher {lm.name}", one)[0] for lm, one in others)], texts

    def answer_once(self, batch: Batch, rows: Tensor) -> TeacherOutput:
        """Return the answer of the first model at some positions."""
        return self.answers[0](batch, rows)

    def answer(self, batch: Batch, rows: Tensor, student: TeacherOutput) -> list[TeacherOutput]:
        """Return the answer of each model."""
        return [answer(batch, rows) for answer in self.answers]
