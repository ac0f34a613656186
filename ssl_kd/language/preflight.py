"""Check what text, configurations and tokenizers tell of a run, before it loads a model's weights.

A wrong name, or settings that do not fit a model, would otherwise be noticed only after a teacher
has been trained or cached, which takes minutes to hours. All faults are reported at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
from ssl_kd.language.settings.groups import TeacherSettings
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
    preflight = _Preflight(settings)
    preflight.read_texts()
    preflight.check_places(precision, work)
    preflight.outline_teachers(models.teacher, work)
    preflight.outline_student(models.student)
    preflight.check_models()
    preflight.check_text(is_read_by_teachers=work == "cache" or settings.align != "auto")
    preflight.faults.raise_all("no model was loaded, trained or cached")
    assert preflight.texts is not None  # otherwise, it was a fault
    return preflight.texts


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
    preflight = _Preflight(settings)
    preflight.read_texts()
    preflight.outline_saved()
    student, teachers = preflight.student, preflight.teachers
    own = student and tokenizer_id(student.tokenizer)
    alike = all(tokenizer_id(lm.tokenizer) == own for lm in teachers)
    if student is not None and len(teachers) > 1 and not alike:
        with preflight.faults.of("TEACHER_MODEL"):
            raise SettingsError(
                f"TEACHER_MODEL is {settings.teacher_model!r}, and not all of them have the"
                f" tokenizer of the student {student.name}: judge it beside one teacher at a time"
            )
    preflight.check_text(is_read_by_teachers=not alike)
    preflight.faults.raise_all("no model was loaded")
    assert preflight.texts is not None  # otherwise, it was a fault
    return preflight.texts


@dataclass
class _Preflight:
    """The faults found so far, and the text and the outlines of models that could be read."""

    settings: LanguageSettings
    faults: Faults = field(default_factory=Faults)
    texts: Texts | None = None
    teachers: list[CausalLM] = field(default_factory=list)
    student: CausalLM | None = None

    def read_texts(self) -> None:
        """Read both texts."""
        setting = "DATA_PATH" if self.settings.eval_path is None else "DATA_PATH or EVAL_PATH"
        with self.faults.of(setting):
            self.texts = texts_of(self.settings)

    def check_places(self, precision: Precision, work: Work) -> None:
        """Check run folder, cache, router file, server and optional packages."""
        settings, of = self.settings, self.faults.of
        if work == "run" and not settings.resume:
            with of("RUNS_DIR"):
                check_new_folder(settings)
        if settings.teacher_cache is not None:
            with of("TEACHER_CACHE"):
                _check_cache(settings, settings.kind_of_divergence, is_written=work == "cache")
        with of("ROUTER_WEIGHTS"):
            router_id(settings.router_weights)
        if settings.teacher_url is not None:
            with of("TEACHER_URL"):
                name = settings.teacher_served_as or settings.teacher_model
                CompletionServer(settings.teacher_url, name).check(settings.block_size)
        self._check_quantization()
        with of("OPTIM"):
            optimizer_package(settings, precision.device)

    def _check_quantization(self) -> None:
        if self.settings.quantization is not None:
            with self.faults.of("QUANTIZATION"):
                bitsandbytes(f"QUANTIZATION {self.settings.quantization}")

    def outline_saved(self) -> None:
        """Outline a saved student and its teachers, and check their vocabularies."""
        settings = self.settings
        names = () if settings.teacher_model in ("none", "self") else settings.teacher_names
        if names:
            self._check_quantization()
        with self.faults.of("STUDENT_MODEL"):  # students are saved unquantized
            remote = settings.trust_remote_code
            self.student = outline_causal_lm(settings.student_model, remote_code=remote)
        for name in names:
            with self.faults.of("TEACHER_MODEL"):
                self.teachers.append(_outline_teacher(settings, name))
        for setting, lm in self._roles():
            with self.faults.of(setting):
                check_vocabulary(lm)

    def outline_teachers(self, in_memory: CausalLM | None, work: Work) -> None:
        """Read the outline of each teacher; none if no other model teaches."""
        settings, texts = self.settings, self.texts
        if in_memory is not None:
            self.teachers = [in_memory]
        elif settings.to_train is not None:
            if texts is None:
                return
            size, _ = settings.to_train
            compared = settings.align == "auto" and not is_built(settings.student_model)
            tokenizer = train_tokenizer(texts[0] if compared else _first_few(texts), VOCABULARY)
            outline = outline_student(f"fresh:{size}", None, tokenizer)
            self.teachers = [replace(outline, name="train")]
        elif settings.teacher_model not in ("none", "self"):
            for name in settings.teacher_names:
                with self.faults.of("TEACHER_MODEL"):
                    self._outline(name, work)

    def _outline(self, name: str, work: Work) -> None:
        """Read the outline of a teacher, which may be absent if there is a cache."""
        settings = self.settings
        _check_given("TEACHER_MODEL", name)
        if settings.teacher_url is not None:
            self.teachers.append(served_lm(name, settings.teacher_served_as))
            return
        try:
            self.teachers.append(_outline_teacher(settings, name))
        except (CausalLMUnavailable, FileNotFoundError):
            is_replaced = _may_be_cached(settings.teacher_cache) and not settings.is_routed
            if work == "cache" or not is_replaced:
                raise

    def outline_student(self, in_memory: CausalLM | None) -> None:
        """Read the outline of the student, unless its teacher cannot be read."""
        settings = self.settings
        texts = self.texts
        spec = self.settings.student_model
        if in_memory is not None:
            self.student = in_memory
            return
        teacher = self.teachers[0] if self.teachers else None
        tokenizer = teacher and teacher.tokenizer
        if is_built(spec):
            if teacher is None and settings.teacher_model not in ("none", "self"):
                return
            if tokenizer is None and texts is None:
                return
            if tokenizer is None and texts is not None:
                tokenizer = train_tokenizer(_first_few(texts), VOCABULARY)
            if teacher is not None and teacher.model is None:
                teacher = None
        with self.faults.of("STUDENT_MODEL"):
            _check_given("STUDENT_MODEL", spec)
            self.student = outline_student(
                spec,
                teacher,
                tokenizer,
                remote_code=settings.trust_remote_code,
                quantized=settings.quantization == "nf4" and settings.lora_rank > 0,
            )

    def _roles(self) -> list[tuple[str, CausalLM]]:
        """Return the setting and the outline of each model that could be built."""
        roles = [*(("TEACHER_MODEL", lm) for lm in self.teachers), ("STUDENT_MODEL", self.student)]
        return [(setting, lm) for setting, lm in roles if lm is not None and lm.model is not None]

    def check_models(self) -> None:
        """Check positions, vocabularies, adapters and routers."""
        settings, of = self.settings, self.faults.of
        student, teachers = self.student, self.teachers
        for setting, lm in self._roles():
            with of("BLOCK_SIZE"):
                check_room(lm, settings.block_size)
            if not is_built(lm.name):
                with of(setting):
                    check_vocabulary(lm)
        if student is None:
            return
        if settings.align == "auto":
            for teacher in teachers:
                with of("ALIGN"):
                    unshared_tokens(student, teacher)
        if student.model is None:
            return
        if settings.teacher_cache is not None and teachers:
            with of("TEACHER_CACHE"):
                check_rows(student, teachers[0])
        if settings.legacy_clamp is not None:
            vocabulary = len(student.model.get_output_embeddings().weight)
            with of("LEGACY_CLAMP"):
                LegacyClamp.parse(settings.legacy_clamp).check(vocabulary)
        if settings.lora_rank:
            images = self.texts is None or self.texts[0].pictured is not None
            freeze_tower(student.model, images=images)  # its layers get no adapters
            with of("LORA_RANK"):
                check_rank(settings.lora_rank, student.model.config)
            with of("LORA_TARGET_MODULES"):
                adapted_layers(student.model, settings.lora_target_modules)
            with of("MODULES_TO_SAVE"):
                copied_layers(student.model, settings.modules_to_save)
        if settings.is_routed and settings.router_mode != "auto" and teachers and teachers[0].model:
            with of("ROUTER_MODE"):
                find_routers(teachers[0].model)

    def check_text(self, *, is_read_by_teachers: bool) -> None:
        """Check that the models read the images and the chats of the text.

        `is_read_by_teachers`: the teachers' tokenizers lay out the text, too.
        """
        readers = [("STUDENT_MODEL", self.student)] if self.student is not None else []
        if is_read_by_teachers:
            readers += [("TEACHER_MODEL", lm) for lm in self.teachers]
        chat = None
        for text in self.texts or ():
            chats = (example.where for example in text.examples if example.messages is not None)
            chat = chat or next(chats, None)
        for setting, lm in readers:
            with self.faults.of("CHAT_TEMPLATE_PATH"):
                reader = with_chat_template(lm, self.settings)
                template = getattr(reader.processor, "chat_template", None)
                if chat is not None and not (template or reader.tokenizer.chat_template):
                    raise SettingsError(
                        f"{chat}: messages need a chat template, but the tokenizer of {setting}"
                        f" {lm.name} has none: set CHAT_TEMPLATE_PATH to a .jinja file or to a chat"
                        " model, use the tokenizer of a chat model, or records of prompt and"
                        " completion"
                    )
        if self.texts is not None and self.student is not None:
            with self.faults.of("STUDENT_MODEL"):
                _check_images(self.texts[0], self.student, self.teachers)


def _check_cache(teacher: TeacherSettings, divergence: str, *, is_written: bool) -> None:
    """Check the folder of the cache, and that its method suits the divergence."""
    assert teacher.teacher_cache is not None
    is_auto = teacher.teacher_cache == "auto"
    if is_written or is_auto:
        check_writable("TEACHER_CACHE", CACHES if is_auto else Path(teacher.teacher_cache))
        check_divergence(divergence, teacher.cache_spec[0])
        return
    folder = Path(teacher.teacher_cache)
    if not folder.is_dir():
        raise SettingsError(
            f"TEACHER_CACHE is {str(folder)!r}, which is not a folder: run cache_teacher.py with"
            " the settings of this run, or name the folder of a cache"
        )
    check_divergence(divergence, TeacherCache.open(folder, verify=False).fingerprint.method)


def _may_be_cached(cache: str | None) -> bool:
    """Return whether a cache may take the place of a teacher that is absent."""
    return cache is not None and (CACHES if cache == "auto" else Path(cache)).is_dir()


def _outline_teacher(teacher: TeacherSettings, name: str) -> CausalLM:
    remote, quantized = teacher.trust_remote_code, teacher.quantization is not None
    return outline_causal_lm(name, remote_code=remote, quantized=quantized)


def _first_few(texts: Texts) -> TextDataset:
    return replace(texts[0], examples=texts[0].examples[:_FEW])


def _check_given(setting: str, name: str) -> None:
    if name == IN_MEMORY:
        role = setting.partition("_")[0].lower()
        raise SettingsError(
            f"{setting} is {IN_MEMORY!r}: the {role} was a model in memory. Run"
            " ssl_kd.Distillation with that model again, or set the name of a saved one"
        )


def _check_images(texts: TextDataset, student: CausalLM, teachers: Sequence[CausalLM]) -> None:
    local: list[Any] = [lm for lm in teachers if lm.model is not None]
    if student.model is not None:
        check_images_are_seen(texts, student, local)
