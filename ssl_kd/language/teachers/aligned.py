"""Compute the distance of a student to a teacher with another tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from ssl_kd.language.losses.cross_tokenizer import chunk_matching, uld
from ssl_kd.language.losses.teacher_output import TeacherOutput, logits_of
from ssl_kd.language.settings.groups import LossSettings
from ssl_kd.language.teachers.base import Rows, TeacherContext
from ssl_kd.language.teachers.live import Live
from ssl_kd.language.teachers.routed import Routed
from ssl_kd.language.text.aligned import AlignedBatch, AlignedBlocks, Groups, aligned_blocks
from ssl_kd.language.text.blocks import Batch
from ssl_kd.language.text.dataset import TextDataset
from ssl_kd.language.text.rows import check_images_are_seen

logger = logging.getLogger(__name__)


class Aligned(Live):
    """A teacher with another tokenizer, at a distance from the student over groups of tokens.

    `teacher` is a mixture of experts if it is `Routed`; it runs `draws` times over each batch with
    other experts. `divergence` is used where one token matches one.
    """

    compares = "groups"

    def __init__(
        self,
        teacher: Live,
        loss: LossSettings,
        *,
        divergence: str = "forward_kl",
        draws: int = 1,
    ) -> None:
        super().__init__(*teacher.answers, lms=teacher.lms)
        self.teacher = teacher
        self.align = loss.align
        self.temperature = loss.temperature
        self.divergence, self.draws = divergence, draws

    @classmethod
    def lay_out(cls, context: TeacherContext, texts: TextDataset, *, trains: bool) -> Rows:
        """Tokenize a text for the student and for the teacher, in rows of the same text."""
        check_images_are_seen(texts, context.student, context.lms)
        tokenizers = context.student.tokenizer, context.lms[0].tokenizer
        return aligned_blocks(texts, *tokenizers, context.settings.block_size)

    @classmethod
    def check_rows(cls, context: TeacherContext, rows: Rows, held_out: Rows) -> None:
        """Log how well the tokens match; each model reads its own."""
        assert isinstance(rows, AlignedBlocks)  # lay_out
        statistics = rows.statistics()
        logger.info(
            "student and teacher tokens have common boundaries in %.1f %% of the text, every %.1f"
            " bytes on average",
            100 * statistics["coverage"],
            statistics["bytes_per_group"],
        )

    @classmethod
    def open(cls, context: TeacherContext, rows: Rows) -> Self:
        """Return the teacher, with the experts of ROUTER_MODE if that is set."""
        settings = context.settings
        teacher = (Routed if settings.is_routed else Live).open(context, rows)
        kind = settings.kind_of_divergence
        return cls(teacher, settings, divergence=kind, draws=settings.draws)

    def begin(self) -> None:
        """Get the teacher ready for training."""
        self.teacher.begin()

    def count(self, batch: AlignedBatch) -> int:
        """Return the number of groups of tokens."""
        return len(batch.groups())

    def answer(self, batch: Batch, rows: Tensor, student: TeacherOutput) -> list[TeacherOutput]:
        """Return nothing, because the student is compared by `distance`."""
        return []

    def distance(self, batch: AlignedBatch, logits: Callable[[Tensor], Tensor]) -> Tensor:
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
        answer: Any = self.teacher.answer_once  # of a live model, which has all logits
        distances = [
            self._distance(batch, groups, student, logits_of(answer(batch.teacher, rows))).sum()
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
