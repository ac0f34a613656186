"""Open the text and the models of a language run, and build the object that trains."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ssl_kd.core.errors import InputError
from ssl_kd.core.precision import Precision
from ssl_kd.core.runs.clock import Progress
from ssl_kd.core.runs.fault_bundle import FlightRecorder
from ssl_kd.core.runs.folder import RunFolder
from ssl_kd.core.runs.ranks import Ranks
from ssl_kd.core.settings import SettingsError
from ssl_kd.language.losses.legacy_clamp import LegacyClamp
from ssl_kd.language.models.causal import (
    CausalLM,
    CausalLMUnavailable,
    load_tokenizer,
    without_adapters,
)
from ssl_kd.language.models.dtypes import halve_products, nf4
from ssl_kd.language.models.frozen import FrozenTeacher
from ssl_kd.language.models.mixture import is_mixture
from ssl_kd.language.models.student import add_lora, build_student, freeze_tower
from ssl_kd.language.preflight import Texts, check_before_loading
from ssl_kd.language.rollouts import with_held_out_text, with_text_by
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.settings.groups import TextSettings
from ssl_kd.language.teachers.base import Rows, Teacher, TeacherContext
from ssl_kd.language.teachers.cache import TeacherCache
from ssl_kd.language.teachers.kinds import teacher_class
from ssl_kd.language.teachers.load import (
    NO_MODELS,
    ONE_RANK,
    VOCABULARY,
    InMemoryModels,
    load_teacher,
    router_id,
    set_attention,
    trained_teacher,
)
from ssl_kd.language.teachers.served import served_lm
from ssl_kd.language.teachers.text_teacher import check_same_teacher
from ssl_kd.language.text.aligned import AlignedBlocks
from ssl_kd.language.text.blocks import Blocks
from ssl_kd.language.text.dataset import TextDataset
from ssl_kd.language.text.new_tokenizer import train_tokenizer
from ssl_kd.language.text.render import describe_turns
from ssl_kd.language.text.rows import (
    check_family,
    check_ranks_see,
    check_room,
    first_rows,
    split_held_out,
    with_chat_template,
)
from ssl_kd.language.text.shares import log_shares
from ssl_kd.language.train.step import Distiller, check_ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """The models and the text of a language run, ready for training."""

    settings: LanguageSettings  # with ROUTER_MODE resolved
    precision: Precision
    ranks: Ranks
    train_set: TextDataset
    eval_set: TextDataset  # held out
    student: CausalLM
    teacher: Teacher  # with the other teachers, if there are several
    router_id: str  # identity of ROUTER_WEIGHTS
    blocks: Rows  # the training rows
    eval_blocks: Blocks  # the test rows, for the table
    teacher_eval_blocks: Blocks  # the same text, tokenized for the teacher
    validation_blocks: Blocks  # the rows by which the best student is chosen

    @property
    def student_blocks(self) -> Blocks:
        """Return the training rows, tokenized for the student."""
        return _sides(self.blocks)[0]

    @property
    def digest(self) -> str:
        """Return a hash of the text, the tokenizer, the teachers, their cache and the student."""
        texts = self.blocks.digest[:16], self.eval_blocks.digest[:16]
        return "-".join([*texts, *self.teacher.identity, self.student.weights_id, self.router_id])

    def with_first_teacher(self, lm: CausalLM, precision: Precision) -> Prepared:
        """Return a copy whose first teacher is `lm`, which was loaded in another dtype."""
        first = FrozenTeacher(lm.model, device=precision.device, dtype=precision.teacher)
        context = TeacherContext(
            self.settings,
            precision,
            self.ranks,
            self.train_set,
            self.student,
            lms=[lm, *self.teacher.lms[1:]],
            frozen=[first, *self.teacher.frozen[1:]],
        )
        teacher = type(self.teacher).open(context, self.blocks)
        return dataclasses.replace(self, precision=precision, teacher=teacher)


def prepare(
    settings: LanguageSettings,
    precision: Precision,
    progress: Progress,
    ranks: Ranks = ONE_RANK,
    models: InMemoryModels = NO_MODELS,
    texts: Texts | None = None,
) -> Prepared:
    """Open the text, load or build teacher and student, and lay the text out in rows of tokens.

    `texts` are those that `check_before_loading` returned; None: it is called here.
    """
    settings = settings.with_cache_router()
    progress("prepare", 0, 3, {})
    train_set, eval_set = texts or check_before_loading(settings, precision, models)
    progress("prepare", 1, 3, {"documents": len(train_set)})
    loader = ModelLoader(settings, train_set, precision, progress, ranks)
    lms, student = loader.load(models)
    kind = teacher_class(settings)
    context = TeacherContext(settings, precision, ranks, train_set, student, lms)
    blocks, eval_blocks = (
        kind.lay_out(context, text, trains=text is train_set) for text in (train_set, eval_set)
    )
    blocks = first_rows(blocks, settings.train_rows)
    _log_rows(settings, (train_set, eval_set), _sides(blocks)[0], _sides(eval_blocks)[0])
    kind.check_rows(context, blocks, eval_blocks)
    check_ranks_see(blocks, ranks.world)
    progress("prepare", 3, 3, {"rows": len(blocks), "held out": len(eval_blocks)})

    place = precision, ranks, progress
    freeze = partial(FrozenTeacher, device=precision.device, dtype=precision.teacher)
    frozen = [freeze(lm.model) for lm in lms] if kind.runs_here else []
    blocks = _with_generated_text(settings, blocks, student, lms, *place)
    settings = _with_router(settings, frozen, ranks)
    if isinstance(eval_blocks, Blocks):
        eval_blocks = with_held_out_text(settings, eval_blocks, lms, *place)
    context = dataclasses.replace(context, settings=settings, frozen=frozen)
    student_eval, teacher_eval = _sides(eval_blocks)
    test, validation = split_held_out(len(eval_blocks), settings.eval_rows)
    return Prepared(
        settings=settings,
        precision=precision,
        ranks=ranks,
        train_set=train_set,
        eval_set=eval_set,
        student=student,
        teacher=teacher_class(settings).open(context, blocks),
        router_id=router_id(settings.router_weights),
        blocks=blocks,
        eval_blocks=student_eval.part(test),
        teacher_eval_blocks=teacher_eval.part(test),
        validation_blocks=student_eval.part(validation),
    )


def _with_generated_text(
    settings: LanguageSettings,
    blocks: Rows,
    student: CausalLM,
    lms: Sequence[CausalLM],
    *place: Any,
) -> Rows:
    """Return the rows, with the continuations of STUDENT_TEXT or TEACHER_TEXT if there are any."""
    if not settings.student_text and not settings.teacher_text:
        return blocks
    assert isinstance(blocks, Blocks)  # the kinds of teachers refuse others
    if settings.student_text:
        for lm in lms[:1]:
            check_same_teacher(student, lm)
        return with_text_by("student", settings, blocks, student, *place)
    return with_text_by("teacher", settings, blocks, lms[0], *place)


def _sides(blocks: Rows) -> tuple[Blocks, Blocks]:
    """Return the rows as tokenized for the student, and for the teacher."""
    if isinstance(blocks, AlignedBlocks):
        return blocks.student, blocks.teacher
    return blocks, blocks


def _with_router(
    settings: LanguageSettings, frozen: Sequence[FrozenTeacher], ranks: Ranks
) -> LanguageSettings:
    """Return the settings with the ROUTER_MODE that auto stands for with this teacher."""
    if settings.router_mode != "auto":
        return settings
    is_trained = settings.align == "auto" and any(is_mixture(each.model) for each in frozen)
    mode = "sar" if is_trained else "native"
    logger.info("ROUTER_MODE auto is %s for this teacher", mode)
    check_ranks(ranks, settings.batch_size, mode)
    return settings.replace(router_mode=mode)


def _log_rows(settings: TextSettings, texts: Texts, blocks: Blocks, eval_blocks: Blocks) -> None:
    """Log how chats were laid out, and what was left out of both texts."""
    train_set, eval_set = texts
    if turns := describe_turns(blocks.turns):
        logger.info("%s: %s", train_set.name, turns)
    log_shares(logger, train_set.name, [*train_set.shares, *blocks.shares])
    of_eval = eval_set.shares if settings.eval_path else ()  # else those of the training text
    log_shares(logger, f"held-out {eval_set.name}", [*of_eval, *eval_blocks.shares])


@dataclass(frozen=True)
class ModelLoader:
    """Load, build or train the first teacher and the student of a run."""

    settings: LanguageSettings
    texts: TextDataset  # to train on
    precision: Precision
    progress: Progress
    ranks: Ranks

    def load(self, in_memory: InMemoryModels) -> tuple[list[CausalLM], CausalLM]:
        """Return the teachers, none if no other model teaches, and the student."""
        settings = self.settings
        first = in_memory.teacher or self._teacher_of_run()
        student = self._student(first, in_memory.student)
        if first is None:
            return [], with_chat_template(student, settings)
        if first.tokenizer is None:  # compared with that of the cache
            first = dataclasses.replace(first, tokenizer=student.tokenizer)
        if settings.align == "auto":
            check_family(student, first)
        student, first = (with_chat_template(lm, settings) for lm in (student, first))
        names = settings.teacher_names[1:]
        others = [load_teacher(settings, name, self.precision) for name in names]
        return [first, *others], student

    def teacher(self, *, as_saved: bool = False) -> CausalLM:
        """Load or train the teacher; its model is None if it runs on a server."""
        settings = self.settings
        precision = self.precision
        name = self.settings.teacher_names[0]
        if settings.teacher_url is not None:
            return served_lm(settings.teacher_model, settings.teacher_served_as)
        if settings.to_train:
            name = trained_teacher(settings, self.texts, precision, self.progress, self.ranks)
        return load_teacher(settings, str(name), precision, as_saved=as_saved)

    def _teacher_of_run(self) -> CausalLM | None:
        """Return the teacher, or one known by its cache alone; None if no other model teaches."""
        settings, name = self.settings, self.settings.teacher_names[0]
        if name in ("none", "self"):
            return None
        # In the dtype of its file if a student is cut from it, or float16 may be too narrow.
        cut = settings.student_model.startswith("layers:")
        try:
            return self.teacher(as_saved=cut or self.precision.teacher == torch.float16)
        except (CausalLMUnavailable, FileNotFoundError) as error:
            if settings.teacher_cache is None or settings.is_routed:
                raise
            return self._absent_teacher(name, Path(settings.teacher_cache), error)

    def _absent_teacher(self, name: str, cache: Path, error: Exception) -> CausalLM:
        """Return a teacher without a model, known by its cache; raise `error` without a cache."""
        if not cache.is_dir():
            raise error
        weights = TeacherCache.open(cache, verify=False).fingerprint.weights
        if " " in weights:  # of changed experts or another router
            raise error
        student = self.settings.student_model
        if student.startswith(("layers:", "fresh:")):
            raise SettingsError(
                f"STUDENT_MODEL is {student!r}, which is built from the teacher {name}, but the"
                f" teacher cannot be loaded ({error}): set STUDENT_MODEL to llama:LAYERSxDIM, or to"
                " a saved model with the teacher's tokenizer"
            ) from error
        message = "the teacher %s cannot be loaded, so the student learns from TEACHER_CACHE alone"
        logger.warning(f"{message}, and the table has no row of the teacher (%s)", name, error)
        try:
            tokenizer = load_tokenizer(name, remote_code=self.settings.trust_remote_code)
        except (InputError, FileNotFoundError):
            tokenizer = None
        return CausalLM(None, tokenizer, name, weights)

    def _student(self, teacher: CausalLM | None, in_memory: CausalLM | None) -> CausalLM:
        """Load or build the student; add adapters if LORA_RANK is above 0."""
        settings, precision = self.settings, self.precision
        local = teacher if teacher is not None and teacher.model is not None else None
        tokenizer = teacher and teacher.tokenizer
        if teacher is None and settings.student_model.startswith(("fresh:", "llama:")):
            tokenizer = train_tokenizer(self.texts, VOCABULARY)
        # A frozen base is rounded at each product anyway.
        half = settings.lora_rank > 0 and precision.student != torch.float32
        quantized = settings.quantization == "nf4" and settings.lora_rank
        student = in_memory or build_student(
            settings.student_model,
            local,
            tokenizer,
            seed=settings.seed,
            dtype=None if half else torch.float32,
            remote_code=settings.trust_remote_code,
            quantization=nf4(precision.device, precision.student) if quantized else None,
        )
        set_attention(student, settings.attn_implementation)
        for lm in (student, local):
            if lm is not None:
                check_room(lm, settings.block_size)
        freeze_tower(student.model, images=self.texts.pictured is not None)
        if not settings.lora_rank:
            return student
        rank, options = settings.lora_rank, settings.lora_options
        adapted = add_lora(student.model, rank, seed=settings.seed, **options)
        if half:
            halve_products(adapted, precision.student)
        return dataclasses.replace(student, model=adapted)


def make_distiller(prepared: Prepared, folder: RunFolder | None = None) -> Distiller:
    """Return the student with its loss, optimizer and guard.

    Events and recorded faults are saved in `folder`, if there is one.
    """
    settings, precision = prepared.settings, prepared.precision
    student = prepared.student.model
    if settings.legacy_clamp is not None:
        vocabulary = len(without_adapters(student).get_output_embeddings().weight)
        clamp = LegacyClamp.parse(settings.legacy_clamp)
        clamp.check(vocabulary)
        lowest = clamp.lowest_perplexity(vocabulary)
        message = "LEGACY_CLAMP is %s, with which perplexity can never fall below %.4g"
        logger.warning(message, settings.legacy_clamp, lowest)
    teacher = prepared.teacher if settings.alpha_kd else Teacher()  # which is scored only
    if folder is None:
        return Distiller(student, settings, precision, teacher)
    recorder = FlightRecorder(folder.path / "faults") if folder.writes else None
    distiller = Distiller(student, settings, precision, teacher, folder.events, recorder)
    distiller.explainer.facts = {"learns_from": prepared.digest}
    return distiller
