"""Prepare a run: open text and models, lay the text out in rows, and make the distiller."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ssl_kd.datasets.aligned import AlignedBlocks
from ssl_kd.datasets.blocks import Blocks
from ssl_kd.datasets.new_tokenizer import train_tokenizer
from ssl_kd.datasets.render import describe_turns
from ssl_kd.datasets.text import TextDataset
from ssl_kd.errors import InputError
from ssl_kd.guard.precision import Precision
from ssl_kd.language.aligned import Aligned
from ssl_kd.language.caching import cache_identity, check_divergence
from ssl_kd.language.foreign_names import IN_MEMORY
from ssl_kd.language.rollouts import with_teacher_text
from ssl_kd.language.routed import RoutedTeacher
from ssl_kd.language.served import ServedTeacher, served_lm
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.sources import Plain, Source
from ssl_kd.language.step import Distiller
from ssl_kd.language.teacher_cache import TeacherCache
from ssl_kd.language.teachers import (
    ONE_RANK,
    VOCABULARY,
    load_teacher,
    place_teacher,
    router_id,
    trained_teacher,
)
from ssl_kd.language.text_rows import (
    check_family,
    check_ids_are_known,
    check_ranks_see,
    check_room,
    check_rows,
    lay_out,
    split_held_out,
    texts_of,
)
from ssl_kd.losses.legacy_clamp import LegacyClamp
from ssl_kd.settings import SettingsError
from ssl_kd.teachers.causal import (
    CausalLM,
    CausalLMUnavailable,
    llm_module,
    load_tokenizer,
    without_adapters,
)
from ssl_kd.teachers.dtypes import Quantization, halve_products
from ssl_kd.teachers.frozen import FrozenTeacher, RememberedTeacher
from ssl_kd.teachers.mixture import is_mixture
from ssl_kd.teachers.student import add_lora, build_student, check_rank, freeze_tower
from ssl_kd.training.clock import Progress
from ssl_kd.training.fault_bundle import FlightRecorder
from ssl_kd.training.folder import RunFolder
from ssl_kd.training.process_group import ReadOnlyRunFolder
from ssl_kd.training.ranks import Ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class InMemoryModels:
    """Models that are passed in memory, instead of names in the settings."""

    teacher: CausalLM | None = None
    student: CausalLM | None = None


NO_MODELS = InMemoryModels()


@dataclass(frozen=True)
class Prepared:
    """The models and the text of a run."""

    settings: LanguageSettings  # with ROUTER_MODE resolved
    precision: Precision
    ranks: Ranks
    train_set: TextDataset
    eval_set: TextDataset  # held out
    student: CausalLM
    teacher: CausalLM | None  # the first one; without a model if it is served
    frozen: FrozenTeacher | None  # on its device; None if a cache or a server replaces it
    others: tuple[tuple[CausalLM, FrozenTeacher], ...]  # the other teachers
    served: ServedTeacher | None
    cache: TeacherCache | None
    router_id: str  # identity of ROUTER_WEIGHTS
    blocks: Blocks | AlignedBlocks  # rows to learn from
    eval_blocks: Blocks  # the test rows, for the table
    teacher_eval_blocks: Blocks  # the same text in the teacher's tokens
    validation_blocks: Blocks  # the rows by which the best student is chosen
    remembered: RememberedTeacher | None = None  # some answers of a teacher that a cache replaces

    @property
    def teachers(self) -> list[CausalLM]:
        """Return all teachers."""
        return [lm for lm in (self.teacher, *(lm for lm, _ in self.others)) if lm is not None]

    @property
    def student_blocks(self) -> Blocks:
        """Return the rows to learn from in the student's tokens."""
        return self.blocks.student if isinstance(self.blocks, AlignedBlocks) else self.blocks

    @property
    def validated_apart(self) -> bool:
        """Whether the test rows differ from the validation rows."""
        return not torch.equal(self.validation_blocks.ids, self.eval_blocks.ids)

    @property
    def digest(self) -> str:
        """Return the identity of text, tokenizer, teachers with their caches, and student."""
        ids = [lm.weights_id for lm in (*self.teachers, self.student)]
        digests = [
            self.blocks.digest,
            self.eval_blocks.digest,
            *([self.cache.digest] if self.cache else []),
        ]
        return "-".join([*(digest[:16] for digest in digests), *ids, self.router_id])

    def without_cached_teacher(self) -> Prepared:
        """Free the memory of a teacher that a cache replaces."""
        if self.teacher is None or self.cache is None:
            return self
        return dataclasses.replace(self, teacher=dataclasses.replace(self.teacher, model=None))


def prepare(
    settings: LanguageSettings,
    precision: Precision,
    progress: Progress,
    ranks: Ranks = ONE_RANK,
    models: InMemoryModels = NO_MODELS,
) -> Prepared:
    """Open the text, load or train the teacher, make the student, and lay the text out in rows.

    Raises:
        SettingsError: teacher, student, cache and text do not fit.
    """
    settings = settings.with_cache_router()
    progress("prepare", 0, 3, {})
    train_set, eval_set = texts_of(settings)
    settings.check_images(train_set.pictured, eval_set.pictured)
    progress("prepare", 1, 3, {"documents": len(train_set)})

    check_width(settings.lora_rank, settings.student_model)
    for role, lm in vars(models).items():
        if lm is None and getattr(settings, f"{role}_model") == IN_MEMORY:
            raise SettingsError(
                f"{role.upper()}_MODEL is {IN_MEMORY!r}: the {role} was passed in memory to"
                " ssl_kd.Distillation, and only that can pass it again"
            )
    teacher = models.teacher or _teacher(settings, train_set, precision, progress, ranks)
    student = _student(settings, train_set, precision, teacher, models.student)
    if teacher is not None and teacher.tokenizer is None:  # compared with that of the cache
        teacher = dataclasses.replace(teacher, tokenizer=student.tokenizer)
    if teacher is not None and settings.align == "auto":
        check_family(student, teacher)
    aligned = teacher is not None and settings.align != "auto"
    others = [load_teacher(settings, n, precision) for n in settings.teacher_names[1:]]
    teachers = [lm for lm in (teacher, *others) if lm is not None]
    size, packing = settings.block_size, settings.packing
    packed = packing and not (settings.on_policy or settings.teacher_text)
    blocks = lay_out(size, packed, train_set, student, teachers, aligned=aligned)
    eval_blocks = lay_out(size, packing, eval_set, student, teachers, aligned=aligned)
    check_ranks_see(blocks, ranks.world)
    if isinstance(eval_blocks, AlignedBlocks):
        sides = eval_blocks.student, eval_blocks.teacher
    else:
        assert isinstance(blocks, Blocks)  # both are aligned, or neither
        sides = eval_blocks, eval_blocks
        for lm in others:
            check_family(student, lm)
            check_room(lm, size)
        for lm in teachers:
            check_ids_are_known(student, lm, blocks, eval_blocks)
        if settings.teacher_cache is not None and teacher is not None:
            check_rows(student, teacher)
    progress("prepare", 3, 3, {"rows": len(blocks), "held out": len(eval_blocks)})
    _log_rows(train_set, blocks)

    frozen = served = cache = None
    if teacher is not None and settings.teacher_cache is not None:
        assert isinstance(blocks, Blocks)  # LanguageSettings.check_together
        expected = cache_identity(settings, settings.temperature, teacher, train_set, blocks)
        folder, divergence = Path(settings.teacher_cache), settings.kind_of_divergence
        cache = _open_cache(folder, expected, len(blocks), divergence)
        if teacher.model is not None:
            teacher.model.requires_grad_(False)
    elif teacher is not None and teacher.model is not None:
        frozen = place_teacher(teacher, precision, ranks, shard=settings.shard)
        if settings.teacher_text:
            assert isinstance(blocks, Blocks)
            blocks = with_teacher_text(settings, blocks, teacher, frozen, ranks, progress)
    elif teacher is not None:
        served = ServedTeacher.of(settings, size, teacher.tokenizer, precision.device)
    if settings.router_mode == "auto":
        live = frozen is not None and settings.align == "auto" and is_mixture(frozen.model)
        settings = settings.replace(router_mode="sar" if live else "native")
        logger.info("ROUTER_MODE auto is %s for this teacher", settings.router_mode)
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
        others=tuple((lm, place_teacher(lm, precision, ranks, shard=False)) for lm in others),
        served=served,
        cache=cache,
        router_id=router_id(settings.router_weights),
        blocks=blocks,
        eval_blocks=sides[0].part(test),
        teacher_eval_blocks=sides[1].part(test),
        validation_blocks=sides[0].part(validation),
    )


def _teacher(
    settings: LanguageSettings,
    texts: TextDataset,
    precision: Precision,
    progress: Progress,
    ranks: Ranks,
) -> CausalLM | None:
    """Load or train the first teacher; without a model if a server answers for it."""
    name = settings.teacher_names[0]
    if settings.teacher_url is not None:
        return served_lm(settings.teacher_model, settings.teacher_served_as)
    if name == "none":
        return None
    if settings.to_train:
        name = str(trained_teacher(settings, texts, precision, progress, ranks))
    # In the dtype of its file if a student is cut from it, or float16 may be too narrow.
    as_saved = settings.student_model.startswith("layers:") or precision.teacher == torch.float16
    try:
        return load_teacher(settings, name, precision, as_saved=as_saved)
    except (CausalLMUnavailable, FileNotFoundError) as error:
        if settings.teacher_cache is None or settings.is_routed:
            raise
        return _absent_teacher(settings, name, Path(settings.teacher_cache), error)


def _absent_teacher(
    settings: LanguageSettings, name: str, cache: Path, error: Exception
) -> CausalLM:
    """Return a teacher without a model, identified by its cache; raise `error` without a cache.

    Its tokenizer is None if it cannot be loaded either.
    """
    if not cache.is_dir():
        raise error
    weights = TeacherCache.open(cache, verify=False).fingerprint.weights
    if " " in weights:  # of changed experts or another router
        raise error
    if settings.student_model.startswith(("layers:", "fresh:")):
        raise SettingsError(
            f"STUDENT_MODEL {settings.student_model!r} is built from the teacher {name}, which"
            f" cannot be loaded: set it to llama:LAYERSxDIM, or to a saved model with the teacher's"
            f" tokenizer. ({error})"
        ) from error
    message = "the teacher %s cannot be loaded: the student learns from TEACHER_CACHE alone, and"
    logger.warning(f"{message} the table has no row of the teacher (%s)", name, error)
    try:
        tokenizer = load_tokenizer(name, remote_code=settings.trust_remote_code)
    except InputError:
        tokenizer = None
    return CausalLM(None, tokenizer, name, weights)


def _student(
    settings: LanguageSettings,
    texts: TextDataset,
    precision: Precision,
    teacher: CausalLM | None,
    in_memory: CausalLM | None,
) -> CausalLM:
    """Load or make the student, with adapters if LORA_RANK is above 0."""
    local = teacher if teacher is not None and teacher.model is not None else None
    tokenizer = teacher and teacher.tokenizer
    if teacher is None and settings.student_model.startswith(("fresh:", "llama:")):
        tokenizer = train_tokenizer(texts, VOCABULARY)
    # A frozen base is rounded at each product anyway. (FSDP requires one dtype in a layer.)
    half = settings.lora_rank > 0 and precision.student != torch.float32 and not settings.shard
    student = in_memory or build_student(
        settings.student_model,
        local,
        tokenizer,
        seed=settings.seed,
        dtype=None if half else torch.float32,
        remote_code=settings.trust_remote_code,
        quantization=(
            Quantization(precision.device, precision.student)
            if settings.quantization and settings.lora_rank
            else None
        ),
    )
    for lm in (student, local):
        if lm is not None:
            check_room(lm, settings.block_size)
    freeze_tower(student.model, images=texts.pictured is not None)
    if not settings.lora_rank:
        return student
    rank = settings.lora_rank, settings.lora_alpha
    adapted = add_lora(student.model, *rank, seed=settings.seed)
    if half:
        halve_products(adapted, precision.student)
    return dataclasses.replace(student, model=adapted)


def check_width(rank: int, student: str) -> None:
    """Raise InputError if LORA_RANK exceeds the width of a student, before any model is loaded."""
    kind, _, size = student.partition(":")
    width = size.rpartition("x")[2]
    if kind in ("fresh", "llama") and width.isdecimal():
        check_rank(rank, int(width))
    elif rank and (folder := Path(student).expanduser()).is_dir():
        try:
            config = llm_module("transformers").AutoConfig.from_pretrained(folder)
        except (OSError, ValueError):  # reported when the student is loaded
            return
        check_rank(rank, config)


def _open_cache(
    folder: Path, expected: Mapping[str, Any], n_rows: int, divergence: str
) -> TeacherCache:
    if not folder.is_dir():
        raise SettingsError(
            f"TEACHER_CACHE: there is no {folder}: run cache_teacher.py with the settings of this"
            " run, or name another folder"
        )
    cache = TeacherCache.open(folder, expect=expected)
    if cache.n != n_rows:
        raise SettingsError(
            f"TEACHER_CACHE: {folder} holds {cache.n} rows, but the text has {n_rows}: write"
            " it again with cache_teacher.py --force_recompute"
        )
    check_divergence(divergence, cache.fingerprint.method)
    return cache


def _log_rows(texts: TextDataset, blocks: Blocks | AlignedBlocks) -> None:
    """Log what was split or left out, and how much of the text two tokenizers share."""
    own = blocks.student if isinstance(blocks, AlignedBlocks) else blocks
    if turns := describe_turns(own.turns):
        logger.info("%s: %s", texts.name, turns)
    for line in [*texts.left_out[:1], *own.left_out[:1]]:
        logger.info("some of the text was split or left out: %s; the report has more", line)
    if isinstance(blocks, AlignedBlocks):
        message = "%.1f %% of the text is in groups of tokens that both share, mean %.1f characters"
        statistics = blocks.statistics()
        coverage = 100 * statistics["coverage"]
        logger.info(message, coverage, statistics["characters_per_group"])


def make_distiller(prepared: Prepared, folder: RunFolder | None = None) -> Distiller:
    """Return the student with its loss and guard; `folder` saves its events and faults."""
    settings, precision = prepared.settings, prepared.precision
    student = prepared.student.model
    if settings.legacy_clamp is not None:
        vocabulary = len(without_adapters(student).get_output_embeddings().weight)
        clamp = LegacyClamp.parse(settings.legacy_clamp)
        clamp.check(vocabulary)
        lowest = clamp.lowest_perplexity(vocabulary)
        message = "LEGACY_CLAMP %s: perplexity can never be below %.4g"
        logger.warning(message, settings.legacy_clamp, lowest)
    source, aligned = _source(prepared)
    if folder is None:
        return Distiller(student, settings, precision, source, aligned=aligned)
    writes = not isinstance(folder, ReadOnlyRunFolder) and not settings.shard
    recorder = FlightRecorder(folder.path / "faults") if writes else None
    distiller = Distiller(student, settings, precision, source, folder.events, aligned, recorder)
    distiller.explainer.facts = {"learns_from": prepared.digest}
    return distiller


def _source(prepared: Prepared) -> tuple[Source | None, Aligned | None]:
    """Return the teacher as a source of answers, or aligned if its tokenizer differs."""
    settings, frozen = prepared.settings, prepared.frozen
    if not settings.alpha_kd:
        return None, None
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
    else:
        source = Plain(frozen)
    if not isinstance(prepared.blocks, AlignedBlocks):
        return source, None
    configs = [without_adapters(m).config for m in (prepared.student.model, frozen.model)]
    own, theirs = (config.get_text_config().hidden_size for config in configs)
    aligned = Aligned(
        source.answer if isinstance(source, RoutedTeacher) else frozen,
        settings,
        (own, theirs),
        divergence=settings.kind_of_divergence,
        draws=settings.draws,
        seed=settings.seed,
    )
    return None, aligned
