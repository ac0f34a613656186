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
from ssl_kd.language.teachers.aligned import Aligned
from ssl_kd.language.teachers.cache import TeacherCache, cache_identity
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
from ssl_kd.language.teachers.routed import RoutedTeacher
from ssl_kd.language.teachers.self_teacher import OwnPrompts, SelfTeacher, with_own_prompts
from ssl_kd.language.teachers.served import ServedTeacher, served_lm
from ssl_kd.language.teachers.sources import ByTag, Plain, Source
from ssl_kd.language.teachers.text_teacher import check_same_teacher
from ssl_kd.language.text.aligned import AlignedBlocks
from ssl_kd.language.text.blocks import Blocks
from ssl_kd.language.text.dataset import TextDataset
from ssl_kd.language.text.new_tokenizer import train_tokenizer
from ssl_kd.language.text.render import describe_turns
from ssl_kd.language.text.rows import (
    check_family,
    check_ids_are_known,
    check_ranks_see,
    check_room,
    check_rows,
    lay_out,
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
    teacher: CausalLM | None  # the first; without a model if it is served
    frozen: FrozenTeacher | None  # None if a cache or server replaces it
    others: tuple[tuple[CausalLM, FrozenTeacher], ...]  # the other teachers
    served: ServedTeacher | None
    cache: TeacherCache | None
    router_id: str  # identity of ROUTER_WEIGHTS
    blocks: Blocks | AlignedBlocks  # the training rows
    eval_blocks: Blocks  # the test rows, for the table
    teacher_eval_blocks: Blocks  # the same text, tokenized for the teacher
    validation_blocks: Blocks  # the rows by which the best student is chosen
    own_prompts: OwnPrompts  # of TEACHER_MODEL self, see `SelfTeacher`

    @property
    def teachers(self) -> list[CausalLM]:
        """Return all teachers."""
        return [lm for lm in (self.teacher, *(lm for lm, _ in self.others)) if lm is not None]

    @property
    def student_blocks(self) -> Blocks:
        """Return the training rows, tokenized for the student."""
        return _sides(self.blocks)[0]

    @property
    def digest(self) -> str:
        """Return a hash of the text, the tokenizer, the teachers, their cache and the student."""
        ids = [lm.weights_id for lm in (*self.teachers, self.student)]
        digests = [
            self.blocks.digest,
            self.eval_blocks.digest,
            *([self.cache.digest] if self.cache else []),
        ]
        return "-".join([*(digest[:16] for digest in digests), *ids, self.router_id])

    def without_cached_teacher(self) -> Prepared:
        """Return a copy that no longer holds the model of a teacher that a cache replaces."""
        if self.teacher is None or self.cache is None:
            return self
        return dataclasses.replace(self, teacher=dataclasses.replace(self.teacher, model=None))


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
    teacher, student = loader.load(models)
    others = [load_teacher(settings, n, precision) for n in settings.teacher_names[1:]]
    teachers = [lm for lm in (teacher, *others) if lm is not None]
    blocks, eval_blocks = _lay_out(settings, train_set, eval_set, student, teachers)
    check_ranks_see(blocks, ranks.world)
    progress("prepare", 3, 3, {"rows": len(blocks), "held out": len(eval_blocks)})

    place = precision, ranks, progress
    freeze = partial(FrozenTeacher, device=precision.device, dtype=precision.teacher)
    frozen = served = cache = None
    if teacher is not None and settings.teacher_cache is None:
        if teacher.model is not None:
            frozen = freeze(teacher.model)
        else:
            size = settings.block_size
            served = ServedTeacher.of(settings, size, teacher.tokenizer, precision.device)
    own_prompts: OwnPrompts = []
    if settings.teacher_model == "self":
        template = settings.teacher_prompt_template
        blocks, own_prompts = with_own_prompts(train_set, student, settings.block_size, template)
    blocks = _with_generated_text(settings, blocks, student, teacher, *place)
    if teacher is not None and settings.teacher_cache is not None:
        cache = _open_cache(settings, Path(settings.teacher_cache), teacher, train_set, blocks)
    settings = _with_router(settings, frozen, ranks)
    if isinstance(eval_blocks, Blocks):
        eval_blocks = with_held_out_text(settings, eval_blocks, teachers, *place)
    sides = _sides(eval_blocks)
    test, validation = split_held_out(len(eval_blocks), settings.eval_rows)
    return Prepared(
        settings=settings,
        precision=precision,
        ranks=ranks,
        train_set=train_set,
        eval_set=eval_set,
        student=student,
        teacher=teacher,
        frozen=frozen,
        others=tuple((lm, freeze(lm.model)) for lm in others),
        served=served,
        cache=cache,
        router_id=router_id(settings.router_weights),
        blocks=blocks,
        eval_blocks=sides[0].part(test),
        teacher_eval_blocks=sides[1].part(test),
        validation_blocks=sides[0].part(validation),
        own_prompts=own_prompts,
    )


def _with_generated_text(
    settings: LanguageSettings,
    blocks: Blocks | AlignedBlocks,
    student: CausalLM,
    teacher: CausalLM | None,
    *place: Any,
) -> Blocks | AlignedBlocks:
    """Return the rows, with the continuations of STUDENT_TEXT or TEACHER_TEXT if there are any."""
    if not settings.student_text and not settings.teacher_text:
        return blocks
    assert isinstance(blocks, Blocks)  # LanguageSettings.check_together
    if settings.student_text:
        check_same_teacher(student, teacher)
        return with_text_by("student", settings, blocks, student, *place)
    assert teacher is not None  # LanguageSettings.check_together
    return with_text_by("teacher", settings, blocks, teacher, *place)


def _sides(blocks: Blocks | AlignedBlocks) -> tuple[Blocks, Blocks]:
    """Return the rows as tokenized for the student, and for the teacher."""
    if isinstance(blocks, AlignedBlocks):
        return blocks.student, blocks.teacher
    return blocks, blocks


def _with_router(
    settings: LanguageSettings, frozen: FrozenTeacher | None, ranks: Ranks
) -> LanguageSettings:
    """Return the settings with the ROUTER_MODE that auto stands for with this teacher."""
    if settings.router_mode != "auto":
        return settings
    live = frozen is not None and settings.align == "auto" and is_mixture(frozen.model)
    mode = "sar" if live else "native"
    logger.info("ROUTER_MODE auto is %s for this teacher", mode)
    check_ranks(ranks, settings.batch_size, mode)
    return settings.replace(router_mode=mode)


def _lay_out(
    settings: LanguageSettings,
    train_set: TextDataset,
    eval_set: TextDataset,
    student: CausalLM,
    teachers: Sequence[CausalLM],
) -> tuple[Blocks | AlignedBlocks, Blocks | AlignedBlocks]:
    """Lay out both texts in rows, log what was left out, and check that all models fit them."""
    aligned, size = settings.align != "auto", settings.block_size
    blocks = lay_out(size, settings.packs, train_set, student, teachers, aligned=aligned)
    held_out = lay_out(size, settings.packing, eval_set, student, teachers, aligned=aligned)
    student_blocks, _ = _sides(blocks)
    if settings.teacher_tags and student_blocks.tags is None:
        raise SettingsError("TEACHER_FIELD supports only text models: set it to None")
    if turns := describe_turns(student_blocks.turns):
        logger.info("%s: %s", train_set.name, turns)
    log_shares(logger, train_set.name, [*train_set.shares, *student_blocks.shares])
    of_eval = eval_set.shares if settings.eval_path else ()  # else those of the training text
    log_shares(logger, f"held-out {eval_set.name}", [*of_eval, *_sides(held_out)[0].shares])
    if isinstance(blocks, AlignedBlocks) or isinstance(held_out, AlignedBlocks):
        assert isinstance(blocks, AlignedBlocks)  # both are aligned, or neither
        statistics = blocks.statistics()
        logger.info(
            "student and teacher tokens have common boundaries in %.1f %% of the text, every %.1f"
            " characters on average",
            100 * statistics["coverage"],
            statistics["characters_per_group"],
        )
        return blocks, held_out
    for lm in teachers[1:]:
        check_family(student, lm)
        check_room(lm, size)
    for lm in teachers:
        check_ids_are_known(student, lm, blocks, held_out)
    if settings.teacher_cache is not None and teachers:
        check_rows(student, teachers[0])
    return blocks, held_out


@dataclass(frozen=True)
class ModelLoader:
    """Load, build or train the first teacher and the student of a run."""

    settings: LanguageSettings
    texts: TextDataset  # to train on
    precision: Precision
    progress: Progress
    ranks: Ranks

    def load(self, in_memory: InMemoryModels) -> tuple[CausalLM | None, CausalLM]:
        """Return the teacher, None if no other model teaches, and the student."""
        teacher = in_memory.teacher or self._teacher_of_run()
        student = self._student(teacher, in_memory.student)
        if teacher is not None and teacher.tokenizer is None:  # compared with that of the cache
            teacher = dataclasses.replace(teacher, tokenizer=student.tokenizer)
        if teacher is not None and self.settings.align == "auto":
            check_family(student, teacher)
        student = with_chat_template(student, self.settings)
        return teacher and with_chat_template(teacher, self.settings), student

    def teacher(self, *, as_saved: bool = False) -> CausalLM:
        """Load or train the teacher; its model is None if it runs on a server."""
        settings, precision, name = self.settings, self.precision, self.settings.teacher_names[0]
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
        except InputError:
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


def _open_cache(
    settings: LanguageSettings,
    folder: Path,
    teacher: CausalLM,
    texts: TextDataset,
    blocks: Blocks | AlignedBlocks,
) -> TeacherCache:
    """Open the cache that replaces the teacher; check that it belongs to these rows."""
    assert isinstance(blocks, Blocks)  # LanguageSettings.check_together
    cache = TeacherCache.open(folder, expect=cache_identity(settings, teacher, texts, blocks))
    if cache.n != len(blocks):
        raise SettingsError(
            f"TEACHER_CACHE: {folder} holds {cache.n} rows, but the text has {len(blocks)}: write"
            " the cache again with cache_teacher.py --force_recompute"
        )
    if teacher.model is not None:
        teacher.model.requires_grad_(False)
    return cache


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
    source, aligned = _source(prepared)
    if folder is None:
        return Distiller(student, settings, precision, source, aligned=aligned)
    recorder = FlightRecorder(folder.path / "faults") if folder.writes else None
    distiller = Distiller(student, settings, precision, source, folder.events, aligned, recorder)
    distiller.explainer.facts = {"learns_from": prepared.digest}
    return distiller


def _source(prepared: Prepared) -> tuple[Source | None, Aligned | None]:
    """Return the teacher's answers as a `Source`, or as `Aligned` if its tokenizer differs."""
    settings, frozen = prepared.settings, prepared.frozen
    if not settings.alpha_kd:
        return None, None
    if prepared.own_prompts:
        return Plain(SelfTeacher(prepared.student.model, prepared.own_prompts)), None
    if prepared.served is not None:
        return Plain(prepared.served), None
    if frozen is None:
        return (Plain(prepared.cache) if prepared.cache else None), None
    if settings.is_routed:
        source = RoutedTeacher(
            frozen,
            settings,
            scale_loss=prepared.precision.teacher == torch.float16,
            gradient_checkpointing=settings.gradient_checkpointing,
        )
    elif prepared.others:
        answers: Sequence[FrozenTeacher] = [frozen, *(placed for _, placed in prepared.others)]
        names, weights = settings.teacher_names, settings.teacher_shares
        source = Plain(*answers, names=names, weights=weights)
        if settings.teacher_tags:
            tags = prepared.student_blocks.tags
            assert tags is not None  # _lay_out
            source = ByTag(*answers, names=names, tags=tags)
    else:
        source = Plain(frozen)
    if not isinstance(prepared.blocks, AlignedBlocks):
        return source, None
    answer = source.answer if isinstance(source, RoutedTeacher) else frozen
    kind = settings.kind_of_divergence
    return None, Aligned(answer, settings, divergence=kind, draws=settings.draws)
