"""Scores of a finished student on held-out text, on its own writing, and on public tasks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ssl_kd.datasets.aligned import aligned_blocks
from ssl_kd.datasets.blocks import Blocks
from ssl_kd.datasets.text import TextDataset
from ssl_kd.evaluate.language import LanguageJudge, Reading
from ssl_kd.guard.precision import default_torch_state
from ssl_kd.language.judge_in_run import ANSWER_PROMPTS
from ssl_kd.language.prepare import test_and_validation
from ssl_kd.language.setting_groups import TextSettings
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.step import precision_of
from ssl_kd.language.teacher import load_teacher
from ssl_kd.language.text_rows import lay_out, texts_of
from ssl_kd.teachers.causal import CausalLM, positions, tokenizer_id
from ssl_kd.teachers.frozen import FrozenTeacher
from ssl_kd.training.clock import Progress, no_progress

logger = logging.getLogger(__name__)


@default_torch_state()
def judge(
    settings: LanguageSettings,
    *,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Judge a finished student, beside its teacher where there is one.

    Both answer in the dtype that MODEL_DTYPE gives a teacher on this device.

    Args:
        settings: STUDENT_MODEL, TEACHER_MODEL (`none` for none), the text and how it is judged.
        progress: called as `progress(stage, done, total, info)`.

    Returns:
        Plain numbers and texts, ready for JSON: `table`, a row for each model; `generations`, each
        prompt with what followed it; and what was judged.

    Raises:
        InputError, FileNotFoundError: a model or the text cannot be read.
    """
    precision = precision_of(settings)
    whole = settings.replace(quantization=None)  # students are saved unquantized
    student, teacher = (
        None if name == "none" else load_teacher(own, name, precision)
        for own, name in ((whole, settings.student_model), (settings, settings.teacher_model))
    )
    assert student is not None
    learned, texts = texts_of(settings)
    settings.check_images(learned.pictured, texts.pictured)
    alike = teacher is not None and tokenizer_id(teacher.tokenizer) == tokenizer_id(
        student.tokenizer
    )
    readings = _readings(settings, settings.eval_rows, texts, student, teacher, alike)
    answering, frozen = (  # the student in the dtype that it will be used in, as its teacher is
        lm and FrozenTeacher(lm.model, device=precision.device, dtype=precision.teacher)
        for lm in (student, teacher)
    )
    assert answering is not None
    looks = LanguageJudge(
        texts.examples,
        *readings,
        beside=frozen if alike else None,
        batch_size=settings.batch_size,
        answer_prompts=min(ANSWER_PROMPTS, settings.eval_rows),
        generations=settings.generations,
        max_new_tokens=settings.max_new_tokens,
    )
    models = {"teacher": frozen} if frozen is not None else {}
    models["student"] = answering.model
    tell, n = partial(progress, "judge"), len(models)
    table, shown = _looked_at(looks, models, lambda i, who: tell(i, n, {"of": who}))
    tell(n, n, {})
    return {
        "student": student.name,
        "teacher": None if teacher is None else teacher.name,
        "same_tokenizer": None if teacher is None else alike,
        "data": {"name": texts.name, "tokens": int(readings[0].blocks.counts.sum())},
        "precision": str(precision),
        "table": table,
        "generations": shown,
    }


def _readings(
    settings: TextSettings,
    eval_rows: int,
    texts: TextDataset,
    student: CausalLM,
    teacher: CausalLM | None,
    alike: bool,
) -> list[Reading]:
    """The rows that a run of these settings would report, as student and teacher read them."""
    lms = [student] if teacher is None else [student, teacher]
    size = min([settings.block_size, *(room for lm in lms if (room := positions(lm.model)))])
    if size < settings.block_size:
        words = "BLOCK_SIZE is %d, and there are %d positions: rows have %d tokens"
        logger.warning(words, settings.block_size, size, size)
    if teacher is None or alike:
        blocks = lay_out(size, settings.packing, texts, student, teacher)
        assert isinstance(blocks, Blocks)
        sides: Sequence[Blocks] = [blocks] * len(lms)
    else:
        both = aligned_blocks(texts, student.tokenizer, teacher.tokenizer, size)
        sides = both.student, both.teacher
    test, _ = test_and_validation(len(sides[0]), eval_rows)
    return [Reading(lm.tokenizer, side.part(test)) for lm, side in zip(lms, sides, strict=True)]


def _looked_at(
    looks: LanguageJudge,
    models: dict[str, Any],
    tell: Callable[[int, str], object],
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """A row for each model, and each prompt with what each of them wrote."""
    table, wrote = [], {}
    for name, model in models.items():
        tell(len(table), name)
        row, wrote[name] = looks.row(name, model)
        table.append(row)
    return table, looks.side_by_side(wrote)
