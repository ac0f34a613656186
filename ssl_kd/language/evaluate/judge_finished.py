"""Score a saved student, and its teachers, on held-out text and generated answers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from ssl_kd.core.precision import Precision, default_torch_state
from ssl_kd.core.runs.clock import Progress, no_progress
from ssl_kd.language.evaluate.judge import LanguageJudge, Reading
from ssl_kd.language.evaluate.judge_in_run import ANSWER_PROMPTS
from ssl_kd.language.models.causal import CausalLM, positions, tokenizer_id
from ssl_kd.language.models.frozen import FrozenTeacher
from ssl_kd.language.preflight import check_before_judging
from ssl_kd.language.rollouts import with_held_out_text
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.teachers.load import ONE_RANK, load_teacher
from ssl_kd.language.text.aligned import aligned_blocks
from ssl_kd.language.text.blocks import Blocks
from ssl_kd.language.text.dataset import TextDataset
from ssl_kd.language.text.rows import lay_out, split_held_out, with_chat_template
from ssl_kd.language.train.step import precision_of

logger = logging.getLogger(__name__)


@default_torch_state()
def judge(settings: LanguageSettings, *, progress: Progress = no_progress) -> dict[str, Any]:
    """Score a saved student, and its teachers unless TEACHER_MODEL is `none`.

    All models run in the dtype that MODEL_DTYPE means for a teacher on this device.

    Args:
        settings: STUDENT_MODEL, TEACHER_MODEL, and the settings of text and evaluation.
        progress: called as `progress(stage, done, total, info)`.

    Returns:
        A mapping that can be written as JSON: `table` has a row of scores for each model,
        `generations` the continuations of each prompt by each model; the rest names models, data
        and precision. The student is compared with the teacher of each row's tag (TEACHER_FIELD),
        or with all teachers, as weighted in TEACHER_MODEL.

    Raises:
        InputError, OSError, MissingPackage: the only fault that the text or a model's configuration
            and tokenizer show, before any model is loaded; or a model cannot be read.
        SeveralFaults: all such faults, a line for each.
    """
    precision = precision_of(settings)
    _, texts = check_before_judging(settings)
    unquantized = settings.replace(quantization=None)  # students are saved unquantized
    student = load_teacher(unquantized, settings.student_model, precision)
    student = with_chat_template(student, settings)
    names = () if settings.teacher_model in ("none", "self") else settings.teacher_names
    teachers = [load_teacher(settings, name, precision) for name in names]
    teachers = [with_chat_template(lm, settings) for lm in teachers]
    own = tokenizer_id(student.tokenizer)
    alike = all(tokenizer_id(lm.tokenizer) == own for lm in teachers)
    freeze = partial(FrozenTeacher, device=precision.device, dtype=precision.teacher)
    frozen = [freeze(lm.model) for lm in teachers]
    readings = _readings(settings, texts, student, teachers, precision, alike)
    language_judge = LanguageJudge(
        texts.examples,
        *readings,
        references=frozen if alike else (),
        weights=settings.teacher_shares,
        batch_size=settings.batch_size,
        answer_prompts=min(ANSWER_PROMPTS, settings.eval_rows),
        generations=settings.generations,
        max_new_tokens=settings.max_new_tokens,
    )
    titles = ["teacher", *(f"teacher {lm.name}" for lm in teachers[1:])]
    models: dict[str, Any] = dict(zip(titles, frozen, strict=False))
    models["student"] = freeze(student.model).model  # in the dtype of inference, as the teacher
    table, generations = [], {}
    for name, model in models.items():
        progress("judge", len(table), len(models), {"of": name})
        row, generations[name] = language_judge.row(name, model)
        table.append(row)
    progress("judge", len(models), len(models), {})
    return {
        "student": student.name,
        "teacher": teachers[0].name if teachers else None,
        "beside": [lm.name for lm in teachers[1:]],
        "same_tokenizer": alike if teachers else None,
        "data": {"name": texts.name, "tokens": int(readings[0].blocks.counts.sum())},
        "precision": str(precision),
        "table": table,
        "generations": language_judge.side_by_side(generations),
    }


def _readings(
    text: LanguageSettings,
    texts: TextDataset,
    student: CausalLM,
    teachers: Sequence[CausalLM],
    precision: Precision,
    alike: bool,
) -> list[Reading]:
    """Return the test rows that a run with these settings has, tokenized for each model."""
    lms = [student, *teachers]
    size = min([text.block_size, *(room for lm in lms if (room := positions(lm.model)))])
    if size < text.block_size:
        message = "BLOCK_SIZE is %d, but the models have %d positions: using rows of %d tokens"
        logger.warning(message, text.block_size, size, size)
    if alike:
        blocks = lay_out(size, text.packing, texts, student, teachers)
        assert isinstance(blocks, Blocks)
        blocks = with_held_out_text(text, blocks, teachers, precision, ONE_RANK, no_progress)
        sides = [blocks] * len(lms[:2])
    else:
        both = aligned_blocks(texts, student.tokenizer, teachers[0].tokenizer, size)
        sides = [both.student, both.teacher]
    test, _ = split_held_out(len(sides[0]), text.eval_rows)
    return [Reading(lm.tokenizer, side.part(test)) for lm, side in zip(lms, sides, strict=False)]
