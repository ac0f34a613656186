"""Score a run's models before and after training; refuse those that are not finite before it."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ssl_kd.datasets.aligned import AlignedBlocks
from ssl_kd.datasets.blocks import Batch, Blocks
from ssl_kd.errors import InputError
from ssl_kd.evaluate.language import LanguageJudge, Reading
from ssl_kd.guard.precision import DeviceInfo
from ssl_kd.language.foreign_names import GIVEN
from ssl_kd.language.prepare import Task
from ssl_kd.language.teacher import at_work, load_teacher
from ssl_kd.teachers.causal import CausalLM
from ssl_kd.teachers.finite import first_fault, in_words, not_finite
from ssl_kd.teachers.frozen import FrozenTeacher
from ssl_kd.teachers.remembered import REMEMBERED, RememberedTeacher

logger = logging.getLogger(__name__)

Row = dict[str, Any]
ANSWER_PROMPTS = 100  # held-out prompts with reference answers that are asked, at most
LITTLE = 0.01
"""Nats a token that a teacher must know more than nothing."""

OriginalRouter = Callable[[], AbstractContextManager[Any]]


def make_judge(task: Task, original_router: OriginalRouter) -> LanguageJudge:
    """Return what scores all of the run's models in the same way."""
    settings = task.settings
    alike = not isinstance(task.blocks, AlignedBlocks)
    return LanguageJudge(
        task.eval_set.examples,
        Reading(task.student.tokenizer, task.eval_blocks),
        task.teacher and Reading(task.teacher.tokenizer, task.teacher_eval_blocks),
        beside=(task.frozen or task.remembered) if alike else None,
        validation=task.validation_blocks,
        batch_size=-(-settings.batch_size // task.ranks.world),
        answer_prompts=min(ANSWER_PROMPTS, settings.eval_rows),
        generations=settings.generations,
        max_new_tokens=settings.max_new_tokens,
        autocast=task.precision.autocast,
        original_router=original_router,
    )


def judged_teachers(task: Task) -> tuple[Task, list[Row], dict[str, list[str]]]:
    """Judge the teachers, where there are any, before anything learns from them.

    Returns:
        The task in the precision that the teacher runs in, the rows of the table, and what the
        first teacher writes, by `teacher`.

    Raises:
        InputError: the student learns from one whose output on held-out text is not finite.
    """
    if task.teacher is None or not (task.teacher.model or task.served):
        return task, [], {}
    task, row, texts = _judged_first(task)
    return task, [row, *_judged_others(task)], {"teacher": texts}


def _judged_first(task: Task) -> tuple[Task, Row, list[str]]:
    """The teacher's row of the table and what it writes, before anything learns from it.

    One that overflows in float16 answers in bfloat16 from here on, where the device has it, or in
    float32: the returned task holds it, with the reason.

    Raises:
        InputError: the student learns from it, and its output on held-out text is not finite.
    """
    lm, settings = task.teacher, task.settings
    assert lm is not None
    if lm.model is None:
        return task, _served_row(task, settings.batch_size), [""] * settings.generations
    judge, teacher = make_judge(task, nullcontext), task.frozen
    if teacher is None:  # its caches stand in, and are finite; it is judged, no more
        device, dtype = task.precision.device, task.precision.teacher
        teacher = FrozenTeacher(lm.model, device=device, dtype=dtype)
        kept = RememberedTeacher(teacher, task.eval_blocks)
        task = dataclasses.replace(task, remembered=kept)
        words = "agreement and KL are those of the first %d held-out rows: %.3g MiB of the teacher"
        logger.info(words, min(REMEMBERED, len(task.eval_blocks)), kept.bytes / 2**20)
    row, texts = judge.row("teacher", teacher)
    if not row["left_out"] or task.frozen is None or not settings.alpha_kd:
        _warn_of_a_guess(lm, row)
        return task, row, texts
    why = _why_sick(task, teacher)
    if task.precision.teacher == torch.float16:
        return _judged_first(_wider(task, teacher, why))
    raise InputError(
        f"the output of the teacher {lm.name} on held-out text is not finite, so nothing "
        f"can be learned from it{why}"
    )


def _judged_others(task: Task) -> list[Row]:
    """The rows of the teachers beside the first.

    Raises:
        InputError: the output of one on held-out text is not finite; the message names it.
    """
    judge, rows = make_judge(task, nullcontext), []
    for other in task.others:
        row, _ = judge.row(f"teacher {other.lm.name}", other.frozen)
        if row["left_out"] and task.settings.alpha_kd:
            why = _why_sick(task, other.frozen)
            raise InputError(
                f"the output of the teacher {other.lm.name} on held-out text is not finite, so "
                f"nothing can be learned from it{why}; or "
                "leave it out of TEACHER_MODEL"
                + "; or compute in float32 (--model_dtype float32)"
                * (task.precision.teacher == torch.float16)
            )
        rows.append(row)
    return rows


def _why_sick(task: Task, teacher: FrozenTeacher) -> str:
    """What first went wrong in a teacher on held-out text, with a colon before it."""
    with teacher.on_device():
        rows = _one_by_one(task.teacher_eval_blocks, task.precision.device)
        found = first_fault(teacher.model, rows, "teacher", settings=task.settings.known())
    return "" if found is None else f": {in_words(*found)}"


def _served_row(task: Task, batch_size: int) -> Row:
    """The row of a teacher on a server, which gives no text."""
    served, blocks = task.served, task.teacher_eval_blocks
    assert served is not None
    return task.ranks.from_first(lambda: served.scores(blocks, batch_size).table_row("teacher"))


def _warn_of_a_guess(teacher: CausalLM, row: Row) -> None:
    """Warn of a teacher that predicts held-out text no better than equal probabilities would."""
    vocabulary = teacher.model.config.get_text_config().vocab_size
    uniform = math.log(vocabulary)
    if row["nll"] is not None and row["nll"] > uniform - LITTLE:
        logger.warning(
            "the teacher %s knows nothing of the held-out text: its loss is %.4g nats a token, and "
            "a uniform guess among its %d tokens has %.4g. A student can learn nothing of use from "
            "it: check that these are trained weights",
            teacher.name,
            row["nll"],
            vocabulary,
            uniform,
        )


def _one_by_one(blocks: Blocks, device: torch.device) -> Iterator[Batch]:
    return (blocks.batch([row], device) for row in range(len(blocks)))


def _wider(task: Task, teacher: FrozenTeacher, why: str) -> Task:
    """The task with the teacher loaded again in a dtype of a wider range."""
    assert task.teacher is not None
    settings, device = task.settings, task.precision.device
    halves = DeviceInfo.of(device).halves()[0]
    dtype = torch.bfloat16 if torch.bfloat16 in halves else torch.float32
    words = f"in float16 the teacher is not finite, so it runs in {str(dtype)[6:]}"
    logger.warning("%s%s", words, why)
    if settings.teacher_model == GIVEN:
        raise InputError(
            f"{words}, but a model in memory is in float16 by now: name its folder, or set"
            " MODEL_DTYPE to 'float32'"
        )
    teacher.model.to("cpu")  # two of them may be more than the device holds
    precision = dataclasses.replace(
        task.precision, teacher=dtype, why=f"{task.precision.why}; {words}"
    )
    lm = load_teacher(settings, task.teacher.name, precision)
    frozen = at_work(precision, lm, task.ranks, **settings.teacher_placement)
    return dataclasses.replace(task, precision=precision, teacher=lm, frozen=frozen)


def judged_student(task: Task, judge: LanguageJudge) -> tuple[Row, list[str]]:
    """The student's row of the table before step 0, and what it writes.

    Raises:
        InputError: it is not finite.
    """
    student = task.student.model
    (row, texts), weight = judge.row("student before", student), not_finite(student)
    if row["nll"] is not None and weight is None:
        return row, texts
    autocast = task.precision.autocast
    rows = _one_by_one(task.eval_blocks, next(student.parameters()).device)
    found = first_fault(student, rows, "student", autocast=autocast, settings=task.settings.known())
    why = in_words(*found) if found else f"its weight {weight} holds NaN or infinity"
    raise InputError(
        f"the student {task.student.name} is not finite before step 0, so no step can train it: "
        f"{why}"
    )
