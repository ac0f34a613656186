"""What a Trainer is given as its teacher, as its objective asks it: token by token, or aligned."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel

from ssl_kd.datasets.aligned import AlignedBlocks
from ssl_kd.datasets.blocks import Blocks
from ssl_kd.errors import InputError
from ssl_kd.guard.precision import Precision
from ssl_kd.language.aligned import Aligned
from ssl_kd.language.routed import Routed
from ssl_kd.language.schedules import moves_of
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.sources import Answer, Plain, Source
from ssl_kd.store.teacher_cache import TeacherCache
from ssl_kd.teachers.causal import CausalLM, load_causal_lm, tokenizer_id
from ssl_kd.teachers.frozen import FrozenTeacher

Teacher: TypeAlias = str | os.PathLike[str] | PreTrainedModel | CausalLM | Answer | Source
"""One teacher: a folder or a name on the Hub, a model, or whatever answers a batch."""


def asked(
    teacher: Teacher | Sequence[Teacher] | None,
    dataset: Any,
    settings: LanguageSettings,
    device: torch.device,
    processing: Any,
) -> tuple[Source | None, Aligned | None]:
    """The teacher, or several whose divergences count as their mean.

    Args:
        teacher: None for cross-entropy alone.
        dataset: what is learned from.
        settings: ALIGN, TEMPERATURE, SCHEDULE and ON_POLICY.
        device: where a model goes.
        processing: the student's tokenizer or processor, which that of a teacher is compared with.

    Returns:
        A source, or with ALIGN what aligns; neither without a teacher.

    Raises:
        InputError: teacher, dataset and settings do not fit.
        SettingsError: a cache is to judge what the student writes.
    """
    aligned = isinstance(dataset, AlignedBlocks)
    if aligned != (settings.align != "auto"):
        raise InputError(
            f"align is {settings.align!r}, and train_dataset a {type(dataset).__name__}: "
            "'chunks' and 'uld' go with aligned_blocks(...), which keeps the text of both "
            "tokenizers, and nothing else does"
        )
    if teacher is None:
        return None, None
    many: Sequence[Any] = teacher if isinstance(teacher, list | tuple) else [teacher]
    answers = [_answer(one, device, None if aligned else processing) for one in many]
    for answer in answers:
        if isinstance(answer, TeacherCache):
            _check_cache(answer, dataset, settings)
    if aligned:
        if len(answers) > 1 or settings.align == "hidden":
            raise InputError(
                "align takes one teacher, and 'chunks' or 'uld': 'hidden' trains a projection "
                "beside the student, which `ssl_kd distill --align hidden` does"
            )
        own = answers[0].answer if isinstance(answers[0], Routed) else answers[0]
        return None, Aligned(own, settings, 0, 0)
    if len(answers) == 1 and _knows_student(answers[0]):
        return answers[0], None
    if any(map(_knows_student, answers)):
        raise InputError("of several teachers each answers alone: no Source such as Routed")
    return Plain(*answers), None


def _answer(teacher: Any, device: torch.device, processing: Any) -> Any:
    """One teacher as something that answers a batch."""
    if isinstance(teacher, str | os.PathLike):
        teacher = load_causal_lm(teacher, dtype=Precision.for_device(device).teacher)
    if isinstance(teacher, CausalLM):
        if processing is not None:
            _check_tokenizers(teacher, processing)
        teacher = teacher.model
    if isinstance(teacher, nn.Module) and hasattr(teacher, "get_output_embeddings"):
        return FrozenTeacher(teacher, device=device)
    if not callable(teacher):
        raise InputError(
            f"teacher is a {type(teacher).__name__}: expected a folder or a name on the Hub, a "
            "causal language model, or something that answers (batch, rows)"
        )
    return teacher


def _check_tokenizers(teacher: CausalLM, processing: Any) -> None:
    tokenizer = getattr(processing, "tokenizer", processing)  # of a processor
    if tokenizer_id(teacher.tokenizer) != tokenizer_id(tokenizer):
        raise InputError(
            f"the teacher {teacher.name} has another tokenizer than processing_class "
            f"({len(teacher.tokenizer)} and {len(tokenizer)} tokens): take a teacher of the same "
            "family, or align='chunks' with aligned_blocks(...) as train_dataset"
        )


def _check_cache(cache: TeacherCache, dataset: Any, settings: LanguageSettings) -> None:
    fits = isinstance(dataset, Blocks) and dataset.digest == cache.fingerprint.blocks
    if not fits or len(dataset) != cache.n:  # a part of some blocks has the digest of all
        raise InputError(
            f"{cache.folder} holds answers to other rows than train_dataset, a "
            f"{type(dataset).__name__}: give the make_blocks(...) that it was written from, whole"
        )
    if settings.on_policy:
        settings.replace(teacher_cache=str(cache.folder))  # refuses it
    written = cache.fingerprint.temperature
    if written is None:  # hidden states serve every temperature
        return
    if any(move.name == "temperature" for move in moves_of(settings)):
        raise InputError(
            f"{cache.folder} was written at temperature {written:g}, and schedule moves it: leave "
            "temperature out of it, or write a cache of the method 'hidden'"
        )
    if written != settings.temperature:
        raise InputError(
            f"{cache.folder} was written at temperature {written:g}, and "
            f"temperature is {settings.temperature:g}: set it to that"
        )


def _knows_student(answer: Any) -> bool:
    """Whether it is a `Source`, which also gets the student's own answer."""
    parameters = inspect.signature(answer).parameters.values()
    needed = (p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    return sum(needed) > 2
