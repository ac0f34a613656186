"""Check what text, configurations and tokenizers tell of a run, before it loads a model's weights.

A wrong name, or settings that do not fit a model, would otherwise be noticed only after a teacher
has been trained or cached, which takes minutes to hours. All faults are reported at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ssl_kd.core.errors import Faults
from ssl_kd.core.precision import Precision
from ssl_kd.core.runs.folder import check_new_folder, check_writable
from ssl_kd.core.settings import SettingsError
from ssl_kd.language.losses.legacy_clamp import LegacyClamp
from ssl_kd.language.models.causal import (
    CausalLM,
    CausalLMUnavailable,
    outline_causal_lm,
    tokenizer_id,
)
from ssl_kd.language.models.copied_layers import copied_layers
from ssl_kd.language.models.dtypes import bitsandbytes
from ssl_kd.language.models.mixture import find_routers
from ssl_kd.language.models.student import (
    adapted_layers,
    check_rank,
    freeze_tower,
    is_built,
    outline_student,
)
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.settings.foreign_names import IN_MEMORY
from ssl_kd.language.teachers.cache import TeacherCache, check_divergence
from ssl_kd.language.teachers.load import NO_MODELS, VOCABULARY, InMemoryModels, router_id
from ssl_kd.language.teachers.served import served_lm
from ssl_kd.language.teachers.server import CompletionServer
from ssl_kd.language.text.dataset import TextDataset
from ssl_kd.language.text.new_tokenizer import train_tokenizer
from ssl_kd.language.text.rows import (
    check_images_are_seen,
    check_room,
    check_rows,
    check_vocabulary,
    texts_of,
    unshared_tokens,
    with_chat_template,
)
from ssl_kd.language.train.step import optimizer_package

CACHES = Path("data") / "teacher_caches"  # where TEACHER_CACHE auto writes
Work = Literal["run", "cache", "prepare"]
Texts = tuple[TextDataset, TextDataset]
"""The training text and the held-out text."""

_FEW = 8  # documents for the tokenizer of an outline that is compared with no other


def check_before_loading(
    settings: LanguageSettings,
    precision: Precision,
    models: InMemoryModels = NO_MODELS,
    *,
    work: Work = "prepare",
) -> Texts:
    """Check settings, text, configurations and tokenizers; return the text.

    Args:
        settings: of the run, or of the cache.
        precision: whose device the optimizer uses.
        models: of the caller, in place of those that the settings name.
        work: what follows: `run` makes a run folder, `cache` writes TEACHER_CACHE.

    Raises:
        InputError, OSError, MissingPackage: the only fault, with the setting to change.
        SeveralFaults: all faults, a line for each.
    """
    faults = Faults()
    texts = _texts(faults, settings)
    _check_places(faults, settings, precision, work)
    teachers = _outlined_teachers(faults, settings, texts, models.teacher, work)
    student = _outlined_student(faults, settings, texts, models.student, teachers)
    pictured = texts is None or texts[0].pictured is not None
    _check_models(faults, settings, student, teachers, pictured)
    is_read_by_teachers = work == "cache" or settings.align != "auto"
    _check_text(faults, settings, texts, student, teachers, is_read_by_teachers)
    faults.raise_all("no model was loaded, trained or cached")
    assert texts is not None  # otherwise, it was a fault
    return texts


def check_before_judging(settings: LanguageSettings) -> Texts:
    """Check what `judge` reads, before it loads the saved student and its teachers.

    Args:
        settings: of `judge`.

    Returns:
        The training text and the held-out text.

    Raises:
        InputError, OSError, MissingPackage: the only fault, with the setting to change.
        SeveralFaults: all faults, a line for each.
    """
    faults = Faults()
    texts = _texts(faults, settings)
    names = () if settings.teacher_model in ("none", "self") else settings.teacher_names
    if names:
        _check_quantization(faults, settings)
    remote = settings.trust_remote_code
    teachers = []
    student = None
    with faults.of("STUDENT_MODEL"):  # students are saved unquantized
        student = outline_causal_lm(settings.student_model, remote_code=remote)
    for name in names:
        with faults.of("TEACHER_MODEL"):
            quantized = settings.quantization is not None
            teachers.append(outline_causal_lm(name, remote_code=remote, quantized=quantized))
    for setting, lm in _roles(student, teachers):
        with faults.of(setting):
            check_vocabulary(lm)
    own = student and tokenizer_id(student.tokenizer)
    alike = all(tokenizer_id(lm.tokenizer) == own for lm in teachers)
    if student is not None and len(teachers) > 1 and not alike:
        with faults.of("TEACHER_MODEL"):
            raise SettingsError(
                f"TEACHER_MODEL is {settings.teacher_model!r}, and not all of them have the"
                f" tokenizer of the student {student.name}: judge it beside one teacher at a time"
            )
    _check_text(faults, settings, texts, student, teachers, not alike)
    faults.raise_all("no model was loaded")
    assert texts is not None  # otherwise, it was a fault
    return texts


def _texts(faults: Faults, settings: LanguageSettings) -> Texts | None:
    with faults.of("DATA_PATH" if settings.eval_path is None else "DATA_PATH or EVAL_PATH"):
        return texts_of(settings)
    return None


def _roles(student: CausalLM | None, teachers: Sequence[CausalLM]) -> list[tuple[str, CausalLM]]:
    """Return the setting and the outline of each model that could be built."""
    roles = [*(("TEACHER_MODEL", lm) for lm in teachers), ("STUDENT_MODEL", student)]
    return [(setting, lm) for setting, lm in roles if lm is not None and lm.model is not None]


def _check_places(
    faults: Faults, settings: LanguageSettings, precision: Precision, work: Work
) -> None:
    """Check run folder, cache, router file, server and optional packages."""
    if work == "run" and not settings.resume:
        with faults.of("RUNS_DIR"):
            check_new_folder(settings)
    if settings.teacher_cache is not None:
        with faults.of("TEACHER_CACHE"):
            _check_cache(settings, is_written=work == "cache")
    with faults.of("ROUTER_WEIGHTS"):
        router_id(settings.router_weights)
    if settings.teacher_url is not None:
        with faults.of("TEACHER_URL"):
            name = settings.teacher_served_as or settings.teacher_model
            CompletionServer(settings.teacher_url, name).check(settings.block_size)
    _check_quantization(faults, settings)
    with faults.of("OPTIM"):
        optimizer_package(settings, precision.device)


def _check_quantization(faults: Faults, settings: LanguageSettings) -> None:
    if settings.quantization is not None:
        with faults.of("QUANTIZATION"):
            bitsandbytes(f"QUANTIZATION {settings.quantization}")


def _check_cache(settings: LanguageSettings, *, is_written: bool) -> None:
    """Check the folder of the cache, and that its method suits the divergence."""
    assert settings.teacher_cache is not None
    is_auto = settings.teacher_cache == "auto"
    if is_written or is_auto:
        check_writable("TEACHER_CACHE", CACHES if is_auto else Path(settings.teacher_cache))
        check_divergence(settings.kind_of_divergence, settings.cache_spec[0])
        return
    folder = Path(settings.teacher_cache)
    if not folder.is_dir():
        raise SettingsError(
            f"TEACHER_CACHE is {str(folder)!r}, which is not a folder: run cache_teacher.py with"
            " the settings of this run, or name the folder of a cache"
        )
    method = TeacherCache.open(folder, verify=False).fingerprint.method
    check_divergence(settings.kind_of_divergence, method)


def _outlined_teachers(
    faults: Faults,
    settings: LanguageSettings,
    texts: Texts | None,
    in_memory: CausalLM | None,
    work: Work,
) -> list[CausalLM]:
    """Return the outline of each teacher that could be read; empty if no other model teaches."""
    if in_memory is not None:
        return [in_memory]
    if settings.teacher_model in ("none", "self"):
        return []
    if settings.to_train is not None:
        if texts is None:
            return []
        size, _ = settings.to_train
        compared = settings.align == "auto" and not is_built(settings.student_model)
        few = replace(texts[0], examples=texts[0].examples[:_FEW])
        tokenizer = train_tokenizer(texts[0] if compared else few, VOCABULARY)
        return [replace(outline_student(f"fresh:{size}", None, tokenizer), name="train")]
    outlines = []
    for name in settings.teacher_names:
        with faults.of("TEACHER_MODEL"):
            _check_given("TEACHER_MODEL", name)
            if settings.teacher_url is not None:
                outlines.append(served_lm(name, settings.teacher_served_as))
                continue
            try:
                outlines.append(
                    outline_causal_lm(
                        name,
                        remote_code=settings.trust_remote_code,
                        quantized=settings.quantization is not None,
                    )
                )
            except (CausalLMUnavailable, FileNotFoundError):
                if work == "cache" or settings.is_routed or not _may_be_cached(settings):
                    raise
    return outlines


def _may_be_cached(settings: LanguageSettings) -> bool:
    """Return whether a cache may take the place of a teacher that is absent."""
    if settings.teacher_cache is None:
        return False
    folder = CACHES if settings.teacher_cache == "auto" else Path(settings.teacher_cache)
    return folder.is_dir()


def _outlined_student(
    faults: Faults,
    settings: LanguageSettings,
    texts: Texts | None,
    in_memory: CausalLM | None,
    teachers: Sequence[CausalLM],
) -> CausalLM | None:
    """Return the outline of the student; None if it cannot be read, or its teacher cannot."""
    if in_memory is not None:
        return in_memory
    spec = settings.student_model
    teacher = teachers[0] if teachers else None
    tokenizer = teacher and teacher.tokenizer
    if is_built(spec):
        if teacher is None and settings.teacher_model not in ("none", "self"):
            return None
        if tokenizer is None and texts is None:
            return None
        if tokenizer is None and texts is not None:
            few = replace(texts[0], examples=texts[0].examples[:_FEW])
            tokenizer = train_tokenizer(few, VOCABULARY)
        if teacher is not None and teacher.model is None:
            teacher = None
    with faults.of("STUDENT_MODEL"):
        _check_given("STUDENT_MODEL", spec)
        return outline_student(
            spec,
            teacher,
            tokenizer,
            remote_code=settings.trust_remote_code,
            quantized=settings.quantization == "nf4" and settings.lora_rank > 0,
        )
    return None


def _check_given(setting: str, name: str) -> None:
    if name == IN_MEMORY:
        role = setting.partition("_")[0].lower()
        raise SettingsError(
            f"{setting} is {IN_MEMORY!r}: the {role} was a model in memory. Run"
            " ssl_kd.Distillation with that model again, or set the name of a saved one"
        )


def _check_models(
    faults: Faults,
    settings: LanguageSettings,
    student: CausalLM | None,
    teachers: Sequence[CausalLM],
    pictured: bool,
) -> None:
    """Check positions, vocabularies, adapters and routers."""
    for setting, lm in _roles(student, teachers):
        with faults.of("BLOCK_SIZE"):
            check_room(lm, settings.block_size)
        if not is_built(lm.name):
            with faults.of(setting):
                check_vocabulary(lm)
    if student is None:
        return
    for teacher in teachers if settings.align == "auto" else ():
        with faults.of("ALIGN"):
            unshared_tokens(student, teacher)
    if student.model is None:
        return
    if settings.teacher_cache is not None and teachers:
        with faults.of("TEACHER_CACHE"):
            check_rows(student, teachers[0])
    if settings.legacy_clamp is not None:
        vocabulary = len(student.model.get_output_embeddings().weight)
        with faults.of("LEGACY_CLAMP"):
            LegacyClamp.parse(settings.legacy_clamp).check(vocabulary)
    if settings.lora_rank:
        freeze_tower(student.model, images=pictured)  # its layers get no adapters
        with faults.of("LORA_RANK"):
            check_rank(settings.lora_rank, student.model.config)
        with faults.of("LORA_TARGET_MODULES"):
            adapted_layers(student.model, settings.lora_target_modules)
        with faults.of("MODULES_TO_SAVE"):
            copied_layers(student.model, settings.modules_to_save)
    if settings.is_routed and settings.router_mode != "auto" and teachers and teachers[0].model:
        with faults.of("ROUTER_MODE"):
            find_routers(teachers[0].model)


def _check_text(
    faults: Faults,
    settings: LanguageSettings,
    texts: Texts | None,
    student: CausalLM | None,
    teachers: Sequence[CausalLM],
    is_read_by_teachers: bool,
) -> None:
    """Check that the models read the images and the chats of the text.

    `is_read_by_teachers`: the teachers' tokenizers lay out the text, too.
    """
    readers = [("STUDENT_MODEL", student)] if student is not None else []
    if is_read_by_teachers:
        readers += [("TEACHER_MODEL", lm) for lm in teachers]
    chat = None
    for text in texts or ():
        chats = (example.where for example in text.examples if example.messages is not None)
        chat = chat or next(chats, None)
    for setting, lm in readers:
        with faults.of("CHAT_TEMPLATE_PATH"):
            reader = with_chat_template(lm, settings)
            template = getattr(reader.processor, "chat_template", None)
            if chat is not None and not (template or reader.tokenizer.chat_template):
                raise SettingsError(
                    f"{chat}: messages need a chat template, but the tokenizer of {setting}"
                    f" {lm.name} has none: set CHAT_TEMPLATE_PATH to a .jinja file or to a chat"
                    " model, use the tokenizer of a chat model, or records of prompt and completion"
                )
    if texts is not None and student is not None:
        with faults.of("STUDENT_MODEL"):
            _check_images(texts[0], student, teachers)


def _check_images(texts: TextDataset, student: CausalLM, teachers: Sequence[CausalLM]) -> None:
    local: list[Any] = [lm for lm in teachers if lm.model is not None]
    if student.model is not None:
        check_images_are_seen(texts, student, local)
