"""Use a cache of a teacher's answers in place of the teacher (TEACHER_CACHE)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import Self

from ssl_kd.core.settings import SettingsError
from ssl_kd.language.losses.teacher_output import TeacherOutput
from ssl_kd.language.models.causal import CausalLM
from ssl_kd.language.models.frozen import FrozenTeacher
from ssl_kd.language.teachers.base import Rows, Scores, Teacher, TeacherContext
from ssl_kd.language.teachers.cache import TeacherCache, cache_identity
from ssl_kd.language.text.blocks import Batch, Blocks
from ssl_kd.language.text.rows import check_rows

if TYPE_CHECKING:
    from ssl_kd.language.evaluate.judge import LanguageJudge


class Cached(Teacher):
    """The cache of a teacher's answers; its model, if it is loaded, is scored only.

    `device` and `dtype` are those in which the model is scored.
    """

    compares = "tokens"

    def __init__(
        self,
        cache: TeacherCache,
        lms: Sequence[CausalLM] = (),
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        self.cache, self.lms = cache, lms
        self._device, self._dtype = device, dtype

    @classmethod
    def check_rows(cls, context: TeacherContext, rows: Rows, held_out: Rows) -> None:
        """Raise SettingsError if the teacher cannot read the rows, or the student its tokens."""
        super().check_rows(context, rows, held_out)
        check_rows(context.student, context.lms[0])

    @classmethod
    def open(cls, context: TeacherContext, rows: Rows) -> Self:
        """Open TEACHER_CACHE; check that it belongs to these rows."""
        settings, lm = context.settings, context.lms[0]
        assert settings.teacher_cache is not None
        assert isinstance(rows, Blocks)  # a cache is refused with ALIGN
        folder = Path(settings.teacher_cache)
        expected = cache_identity(settings, lm, context.texts, rows)
        cache = TeacherCache.open(folder, expect=expected)
        if cache.n != len(rows):
            raise SettingsError(
                f"TEACHER_CACHE: {folder} holds {cache.n} rows, but the text has {len(rows)}: write"
                " the cache again with cache_teacher.py --force_recompute"
            )
        if lm.model is not None:
            lm.model.requires_grad_(False)
        device, dtype = context.precision.device, context.precision.teacher
        return cls(cache, context.lms, device=device, dtype=dtype)

    @property
    def identity(self) -> tuple[str, ...]:
        """The identities of the cache and of the teacher's weights."""
        return self.cache.digest[:16], *super().identity

    def describe(self) -> str:
        """Return the name of the teacher, and the folder of its cache."""
        return f"{', '.join(lm.name for lm in self.lms)}, from the cache {self.cache.folder}"

    def facts(self) -> dict[str, Any]:
        """Return what the cache stores, and its size."""
        return self.cache.facts()

    def score(self, judge: LanguageJudge) -> Scores:
        """Score the teacher if its model is loaded; drop the model, which the cache replaces."""
        if self.lms[0].model is None:
            return [], []
        model = FrozenTeacher(self.lms[0].model, device=self._device, dtype=self._dtype)
        row, texts = judge.row("teacher", model)
        self.lms = [replace(lm, model=None) for lm in self.lms]
        return [row], texts

    def answer(self, batch: Batch, rows: Tensor, student: TeacherOutput) -> list[TeacherOutput]:
        """Return the stored answer."""
        return [self.cache(batch, rows)]
