"""Score teachers and student before training; raise if their output is not finite."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ssl_kd.core.errors import InputError
from ssl_kd.core.precision import DeviceInfo
from ssl_kd.language.evaluate.judge import LanguageJudge, Reading
from ssl_kd.language.models.causal import CausalLM
from ssl_kd.language.models.finite import first_fault, in_words, not_finite
from ssl_kd.language.models.frozen import FrozenTeacher
from ssl_kd.language.prepare import Prepared
from ssl_kd.language.settings.foreign_names import IN_MEMORY
from ssl_kd.language.teachers.load import load_teacher
from ssl_kd.language.text.blocks import Batch, Blocks

logger = logging.getLogger(__name__)

Row = dict[str, Any]
ANSWER_PROMPTS = 100  # at most, of held-out prompts with a reference answer
MARGIN = 0.01  # nats per token by which a teacher must beat a uniform guess


def make_judge(
    prepared: Prepared,
    original_router: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> LanguageJudge:
    """Return the judge that scores all models of a run on the same text with the same settings."""
    settings, teacher = prepared.settings, prepared.teacher
    reading = None
    if teacher.lms:
        reading = Reading(teacher.lms[0].tokenizer, prepared.teacher_eval_blocks)
    return LanguageJudge(
        prepared.eval_set.examples,
        Reading(prepared.student.tokenizer, prepared.eval_blocks),
        reading,
        references=teacher.frozen if teacher.compares == "tokens" else (),
        weights=settings.teacher_shares,
        validation_blocks=prepared.validation_blocks,
        batch_size=-(-settings.batch_size // prepared.ranks.world),
        answer_prompts=min(ANSWER_PROMPTS, settings.eval_rows),
        generations=settings.generations,
        max_new_tokens=settings.max_new_tokens,
        autocast=prepared.precision.autocast,
        original_router=original_router,
    )


def judge_teachers(prepared: Prepared) -> tuple[Prepared, list[Row], dict[str, list[str]]]:
    """Score the teachers on held-out text.

    If the first teacher overflows in float16, it is loaded again in bfloat16 if the device supports
    that, otherwise in float32.

    Returns:
        `prepared`, updated with the first teacher; a row of scores for each teacher; and the texts
        that the first teacher generates, under the key `teacher`.

    Raises:
        InputError: ALPHA_KD is above 0, and a teacher's output on held-out text is not finite.
    """
    teacher, is_half = prepared.teacher, prepared.precision.teacher == torch.float16
    lms = teacher.lms  # a cached teacher drops its model when it is scored
    rows, texts = teacher.score(make_judge(prepared))
    checked = zip(lms, teacher.frozen, rows, strict=False)
    for i, (lm, frozen, row) in enumerate(checked if prepared.settings.alpha_kd else ()):
        if not row["left_out"]:
            continue
        cause = _cause(prepared, frozen)
        if i == 0 and is_half:
            return judge_teachers(_in_wider_dtype(prepared, frozen, cause))
        if i > 0:
            cause += "; or remove this teacher from TEACHER_MODEL"
            cause += "; or compute in float32 (--model_dtype float32)" if is_half else ""
        raise InputError(
            f"the output of the teacher {lm.name} on held-out text is not finite, so no student can"
            f" be trained on it{cause}"
        )
    if rows and lms[0].model is not None:
        _warn_of_uniform_guess(lms[0], rows[0])
    return prepared, rows, {"teacher": texts} if rows else {}


def judge_student(prepared: Prepared, judge: LanguageJudge) -> tuple[Row, list[str]]:
    """Return the student's scores before training, and the texts that it generates."""
    student = prepared.student.model
    (row, texts), weight = judge.row("student before", student), not_finite(student)
    if row["nll"] is not None and weight is None:
        return row, texts
    autocast, known = prepared.precision.autocast, prepared.settings.known()
    batches = _single_rows(prepared.eval_blocks, next(student.parameters()).device)
    fault = first_fault(student, batches, "student", autocast=autocast, known=known)
    cause = in_words(*fault) if fault else f"its weight {weight} holds NaN or infinity"
    raise InputError(
        f"the student {prepared.student.name} has NaN or infinity before training: {cause}. Set"
        " STUDENT_MODEL to a model with finite weights"
    )


def _cause(prepared: Prepared, teacher: FrozenTeacher) -> str:
    """Return a colon and the first fault of a teacher on held-out text, or an empty text."""
    batches = _single_rows(prepared.teacher_eval_blocks, prepared.precision.device)
    known = prepared.settings.known()
    fault = first_fault(teacher.model, batches, "teacher", known=known)
    return "" if fault is None else f": {in_words(*fault)}"


def _single_rows(blocks: Blocks, device: torch.device) -> Iterator[Batch]:
    return (blocks.batch([row], device) for row in range(len(blocks)))


def _warn_of_uniform_guess(teacher: CausalLM, row: Row) -> None:
    vocabulary = teacher.model.config.get_text_config().vocab_size
    uniform = math.log(vocabulary)
    if row["nll"] is not None and row["nll"] > uniform - MARGIN:
        logger.warning(
            "the teacher %s does not predict the held-out text: its loss is %.4g nats per token, "
            "and a uniform guess among its %d tokens has %.4g. Check that TEACHER_MODEL names a "
            "trained model of this language",
            teacher.name,
            row["nll"],
            vocabulary,
            uniform,
        )


def _in_wider_dtype(prepared: Prepared, teacher: FrozenTeacher, cause: str) -> Prepared:
    """Load the first teacher again in bfloat16 or float32; return the updated `prepared`."""
    settings, precision = prepared.settings, prepared.precision
    halves = DeviceInfo.of(precision.device).halves()[0]
    dtype = torch.bfloat16 if torch.bfloat16 in halves else torch.float32
    message = f"the teacher is not finite in float16, so it runs in {str(dtype)[6:]}"
    logger.warning("%s%s", message, cause)
    if settings.teacher_model == IN_MEMORY:
        raise InputError(
            f"{message}, but the model in memory was already cast to float16: set TEACHER_MODEL to"
            " the folder of a saved model, or MODEL_DTYPE to 'float32'"
        )
    teacher.model.to("cpu")  # the device may not hold both
    why = f"{precision.why}; {message}"
    precision = dataclasses.replace(precision, teacher=dtype, why=why)
    lm = load_teacher(settings, prepared.teacher.lms[0].name, precision)
    return prepared.with_first_teacher(lm, precision)
