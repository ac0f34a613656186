"""Prepare a run: open text and models, lay the text out in rows, and make the distiller."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ssl_kd.datasets.aligned import AlignedBlocks
from ssl_kd.datasets.blocks import Blocks
from ssl_kd.datasets.new_tokenizer import train_tokenizer
from ssl_kd.datasets.render import describe_turns
from ssl_kd.datasets.text import TextDataset
from ssl_kd.guard.precision import Precision
from ssl_kd.language.aligned import Aligned
from ssl_kd.language.caching import cache_folders, cache_of, check_divergence
from ssl_kd.language.foreign_names import GIVEN
from ssl_kd.language.hidden_states import HiddenStates
from ssl_kd.language.model_checks import (
    check_family,
    check_ids_are_known,
    check_ranks_see,
    check_room,
    check_rows,
)
from ssl_kd.language.objective import Term
from ssl_kd.language.routed import Routed
from ssl_kd.language.served import ServedTeacher, served_lm
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.sources import Plain
from ssl_kd.language.step import Distiller
from ssl_kd.language.teacher import (
    ALONE,
    ExtraTeacher,
    absent_teacher,
    at_work,
    load_teacher,
    router_id,
)
from ssl_kd.language.teacher_cache import TeacherCache
from ssl_kd.language.teacher_text import with_teacher_text
from ssl_kd.language.text_rows import lay_out, texts_of
from ssl_kd.language.trained_teacher import VOCABULARY, trained_teacher
from ssl_kd.losses.legacy_clamp import LegacyClamp
from ssl_kd.settings import SettingsError
from ssl_kd.teachers.causal import (
    CausalLM,
    CausalLMUnavailable,
    llm_module,
    without_adapters,
)
from ssl_kd.teachers.dtypes import halve_products
from ssl_kd.teachers.frozen import FrozenTeacher
from ssl_kd.teachers.layers import freeze_tower
from ssl_kd.teachers.quantization import Quantization
from ssl_kd.teachers.remembered import RememberedTeacher
from ssl_kd.teachers.student import add_lora, build_student, check_rank
from ssl_kd.training.clock import Progress
from ssl_kd.training.fault_bundle import FlightRecorder
from ssl_kd.training.folder import RunFolder
from ssl_kd.training.process_group import ReadOnlyRunFolder
from ssl_kd.training.ranks import Ranks

logger = logging.getLogger(__name__)

LEAST_HELD_OUT = 16  # rows: half of fewer would be too few to score


@dataclass(frozen=True)
class InMemoryModels:
    """Models that are handed over in memory, where the settings name none (GIVEN).

    Attributes:
        teacher: None where TEACHER_MODEL names one.
        student: None where STUDENT_MODEL names one.
    """

    teacher: CausalLM | None = None
    student: CausalLM | None = None


NO_MODELS = InMemoryModels()


@dataclass(frozen=True)
class Task:
    """What a run works with.

    Attributes:
        settings: all of them.
        precision: dtypes.
        train_set: documents to learn from.
        eval_set: held-out documents.
        student: as it begins.
        teacher: None for cross-entropy alone; without a model where its cache alone is there.
        frozen: the teacher at work; None where its cache stands in.
        router_id: identity of ROUTER_WEIGHTS; empty where there are none.
        caches: the teacher's caches, where they are used: one, or a draw of experts each.
        others: teachers beside the first.
        served: the teacher's server; None where it is here, or its caches stand in.
        blocks: rows to learn from, for two tokenizers where they differ.
        eval_blocks: the held-out rows that the table reports.
        teacher_eval_blocks: the same text by the teacher's tokenizer.
        validation_blocks: the held-out rows by which the best student is chosen; see
            `test_and_validation`.
        ranks: which work together.
        remembered: answers to some held-out rows of a teacher that a cache replaces.
    """

    settings: LanguageSettings
    precision: Precision
    train_set: TextDataset
    eval_set: TextDataset
    student: CausalLM
    teacher: CausalLM | None
    frozen: FrozenTeacher | None
    router_id: str
    caches: list[TeacherCache]
    blocks: Blocks | AlignedBlocks
    eval_blocks: Blocks
    teacher_eval_blocks: Blocks
    validation_blocks: Blocks
    ranks: Ranks
    served: ServedTeacher | None = None
    remembered: RememberedTeacher | None = None
    others: tuple[ExtraTeacher, ...] = ()

    @property
    def validated_apart(self) -> bool:
        """Whether no choice was made on the rows that the table reports."""
        return not torch.equal(self.validation_blocks.ids, self.eval_blocks.ids)

    @property
    def digest(self) -> str:
        """What the run learns from: text, tokenizer, teacher with its caches, and student."""
        models = (self.teacher, *(other.lm for other in self.others), self.student)
        ids = [lm.weights_id for lm in models if lm is not None]
        digests = [self.blocks.digest, self.eval_blocks.digest, *(c.digest for c in self.caches)]
        return "-".join([*(digest[:16] for digest in digests), *ids, self.router_id])

    def plain(
        self, frozen: FrozenTeacher, names: Sequence[str], shares: Sequence[float] | None
    ) -> Plain:
        """Return the unchanged teacher as a source, or several by name with their weights."""
        if not self.others:
            return Plain(frozen)
        answers = [frozen, *(other.frozen for other in self.others)]
        return Plain(*answers, names=names, weights=shares)

    def without_teacher(self) -> Task:
        """Let go of a teacher whose cache stands in: its memory is what the cache spares."""
        if self.teacher is None or not self.caches:
            return self
        return dataclasses.replace(self, teacher=dataclasses.replace(self.teacher, model=None))


def prepare(
    settings: LanguageSettings,
    precision: Precision,
    tell: Progress,
    ranks: Ranks = ALONE,
    given: InMemoryModels = NO_MODELS,
) -> Task:
    """Open the text, load or train the teacher, make the student, and lay the text out in rows.

    Raises:
        SettingsError: teacher, student, cache and text do not fit.
    """
    tell("prepare", 0, 3, {})
    train_set, eval_set = texts_of(settings)
    settings.check_images(train_set.pictured, eval_set.pictured)
    tell("prepare", 1, 3, {"documents": len(train_set)})

    student, teacher = _models(settings, train_set, precision, tell, ranks, given)
    aligned = teacher is not None and settings.align != "auto"
    more = [load_teacher(settings, n, precision) for n in settings.teacher_names[1:]]
    prompted = settings.on_policy or settings.teacher_text
    size, packing = settings.block_size, settings.packing
    models = student, teacher, more
    blocks = lay_out(size, packing and not prompted, train_set, *models, aligned=aligned)
    eval_blocks = lay_out(size, packing, eval_set, *models, aligned=aligned)
    check_ranks_see(blocks, ranks.world)
    own = blocks.student if isinstance(blocks, AlignedBlocks) else blocks
    if teacher is not None and isinstance(eval_blocks, Blocks):
        check_ids_are_known(student, teacher, own, eval_blocks)
        if settings.teacher_cache is not None:
            check_rows(student, teacher)
    tell("prepare", 3, 3, {"rows": len(blocks), "held out": len(eval_blocks)})
    _say_rows(train_set, own, blocks)

    frozen, caches = _answers(settings, precision, teacher, train_set, blocks, ranks)
    if settings.teacher_text and frozen is not None and teacher is not None:
        assert isinstance(blocks, Blocks)  # LanguageSettings.check_together
        blocks = with_teacher_text(settings, blocks, teacher, frozen, ranks, tell)
    served = None
    if teacher is not None and settings.teacher_url is not None and not caches:
        served = ServedTeacher.of(settings, size, teacher.tokenizer, precision.device)
    others: tuple[ExtraTeacher, ...] = ()
    if isinstance(eval_blocks, AlignedBlocks):
        sides = eval_blocks.student, eval_blocks.teacher
    else:
        sides = eval_blocks, eval_blocks
        for lm in more:
            check_family(student, lm)
            check_ids_are_known(student, lm, own, eval_blocks)
            check_room(lm, size)
        where = settings.teacher_placement
        others = tuple(ExtraTeacher(lm, at_work(precision, lm, ranks, **where)) for lm in more)
    test, validation = test_and_validation(len(eval_blocks), settings.eval_rows)
    return Task(
        settings,
        precision,
        train_set,
        eval_set,
        student,
        teacher,
        frozen,
        router_id(settings.router_weights),
        caches,
        blocks,
        *(side.part(test) for side in sides),
        validation_blocks=sides[0].part(validation),
        ranks=ranks,
        served=served,
        others=others,
    )


def test_and_validation(n: int, most: int) -> tuple[slice, slice]:
    """Which of `n` held-out rows the table reports, and by which the best student is chosen.

    Two parts of the same size, of `most` rows at most. Of fewer than LEAST_HELD_OUT rows both are
    all of them.
    """
    if n < LEAST_HELD_OUT:
        return slice(most), slice(most)
    half = min(most, n // 2)
    return slice(half), slice(half, 2 * half)


def _models(
    settings: LanguageSettings,
    texts: TextDataset,
    precision: Precision,
    tell: Progress,
    ranks: Ranks,
    given: InMemoryModels,
) -> tuple[CausalLM, CausalLM | None]:
    """Student and teacher."""
    check_width(settings.lora_rank, settings.student_model)
    for who, lm in vars(given).items():
        if lm is None and getattr(settings, f"{who}_model") == GIVEN:
            raise SettingsError(
                f"{who.upper()}_MODEL is {GIVEN!r}: the {who} was handed over in memory, by"
                " ssl_kd.Distillation, and only that can hand it over again"
            )
    teacher = given.teacher or _teacher(settings, texts, precision, tell, ranks)
    here = teacher if teacher and teacher.model else None
    tokenizer = teacher and teacher.tokenizer
    if teacher is None and settings.student_model.startswith(("fresh:", "llama:")):
        tokenizer = train_tokenizer(texts, VOCABULARY)
    # A frozen base is rounded at each product anyway. (FSDP wants one dtype in all of a layer.)
    half = settings.lora_rank > 0 and precision.student != torch.float32 and not settings.shard
    bits = settings.quantization if settings.lora_rank else None
    student = given.student or build_student(
        settings.student_model,
        here,
        tokenizer,
        seed=settings.seed,
        dtype=None if half else torch.float32,
        remote_code=settings.trust_remote_code,
        quantization=Quantization.of(bits, precision.device, precision.student),
    )
    if teacher is not None and teacher.tokenizer is None:  # its cache knows whether it is this one
        teacher = dataclasses.replace(teacher, tokenizer=student.tokenizer)
    for lm in (student, here):
        if lm is not None:
            check_room(lm, settings.block_size)
    if teacher is not None and settings.align == "auto":
        check_family(student, teacher)
    images = texts.pictured is not None
    freeze_tower(student.model, images=images)
    if settings.lora_rank:
        size = settings.lora_rank, settings.lora_alpha
        adapted = add_lora(student.model, *size, seed=settings.seed)
        if half:
            halve_products(adapted, precision.student)
        student = dataclasses.replace(student, model=adapted)
    return student, teacher


def check_width(rank: int, student: str) -> None:
    """Raise InputError where LORA_RANK is above a width that is known before a model is there."""
    kind, _, size = student.partition(":")
    width = size.rpartition("x")[2]
    if kind in ("fresh", "llama") and width.isdecimal():
        check_rank(rank, int(width))
    elif rank and (folder := Path(student).expanduser()).is_dir():
        try:
            config = llm_module("transformers").AutoConfig.from_pretrained(folder)
        except (OSError, ValueError):  # what is wrong is found when the student is loaded
            return
        check_rank(rank, config)


def _teacher(
    settings: LanguageSettings,
    texts: TextDataset,
    precision: Precision,
    tell: Progress,
    ranks: Ranks,
) -> CausalLM | None:
    """The teacher that the settings name; without a model where a server or its cache answers."""
    name = settings.teacher_names[0]
    if settings.teacher_url is not None:
        return served_lm(settings.teacher_model, settings.teacher_served_as)
    if name == "none":
        return None
    if settings.to_train:  # found again or trained
        name = str(trained_teacher(settings, texts, precision, tell, ranks))
    # Where a student is cut from it, or float16 may be too narrow, in the dtype of its file first.
    first = settings.student_model.startswith("layers:") or precision.teacher == torch.float16
    try:
        return load_teacher(settings, name, precision, as_saved=first)
    except (CausalLMUnavailable, FileNotFoundError) as error:
        if settings.is_routed:
            raise
        return absent_teacher(settings, name, error, settings.student_model)


def _answers(
    settings: LanguageSettings,
    precision: Precision,
    teacher: CausalLM | None,
    texts: TextDataset,
    blocks: Blocks | AlignedBlocks,
    ranks: Ranks,
) -> tuple[FrozenTeacher | None, list[TeacherCache]]:
    """Where the teacher's answers come from: itself at work, or its caches."""
    frozen, caches = None, []
    if teacher is not None and settings.teacher_cache is None and teacher.model is not None:
        frozen = at_work(precision, teacher, ranks, **settings.teacher_placement)
    elif teacher is not None and settings.teacher_cache and isinstance(blocks, Blocks):
        wanted = cache_of(settings, settings.temperature, teacher, texts, blocks)
        folders = cache_folders(settings.teacher_cache, settings.draws)
        if absent := [str(folder) for folder in folders if not folder.is_dir()]:
            raise SettingsError(
                f"TEACHER_CACHE: there is no {', '.join(absent)}: run cache_teacher.py with the "
                "settings of this run, or name another folder"
            )
        caches = [TeacherCache.open(folder, expect=wanted) for folder in folders]
        if odd := [cache for cache in caches if cache.n != len(blocks)]:
            raise SettingsError(
                f"TEACHER_CACHE: {odd[0].folder} holds {odd[0].n} rows, and the text has"
                f" {len(blocks)}: write it anew by cache_teacher.py --force_recompute"
            )
        check_divergence(settings.kind_of_divergence, caches[0].fingerprint.method)
        if teacher.model is not None:
            teacher.model.requires_grad_(False)
    return frozen, caches


def _say_rows(texts: TextDataset, own: Blocks, blocks: Blocks | AlignedBlocks) -> None:
    """Log what was split or left out, and how much of the text two tokenizers share."""
    if turns := describe_turns(own.turns):
        logger.info("%s: %s", texts.name, turns)
    for line in [*texts.left_out[:1], *own.left_out[:1]]:
        logger.info("some of the text was split or left out: %s; the report has more", line)
    if isinstance(blocks, AlignedBlocks):
        words = "%.1f %% of the text is in groups of tokens that both share, mean %.1f characters"
        found = blocks.statistics()
        logger.info(words, 100 * found["coverage"], found["characters_per_group"])


def make_distiller(task: Task, folder: RunFolder | None = None) -> Distiller:
    """The student with everything that it learns from; `folder` keeps its events and faults."""
    settings, student, frozen = task.settings, task.student.model, task.frozen
    vocabulary = len(without_adapters(student).get_output_embeddings().weight)
    if settings.legacy_clamp is not None:
        clamp = LegacyClamp.parse(settings.legacy_clamp)
        clamp.check(vocabulary)
        lowest = clamp.lowest_perplexity(vocabulary)
        words = settings.legacy_clamp, lowest
        logger.warning("LEGACY_CLAMP %s: perplexity can never be below %.4g", *words)
    source = aligned = None
    others: list[Term] = []
    if frozen is not None and settings.alpha_hidden:
        layers, seed = settings.layer_map, settings.seed
        others = [HiddenStates(settings.alpha_hidden, student, frozen.model, layers, seed)]
    if frozen is not None and (settings.alpha_kd or others):
        scale = task.precision.teacher == torch.float16
        if settings.is_routed:
            checkpointing = settings.gradient_checkpointing
            how = {"scale_loss": scale, "gradient_checkpointing": checkpointing}
            source = Routed(frozen, settings, **how)
        else:
            source = task.plain(frozen, settings.teacher_names, settings.teacher_shares)
        if isinstance(task.blocks, AlignedBlocks):
            answer = source.answer if isinstance(source, Routed) else frozen
            configs = [without_adapters(m).config for m in (student, frozen.model)]
            own, theirs = (config.get_text_config().hidden_size for config in configs)
            source = None
            aligned = Aligned(
                answer,
                settings,
                (own, theirs),
                divergence=settings.kind_of_divergence,
                draws=settings.draws,
                seed=settings.seed,
            )
    elif settings.alpha_kd and task.served is not None:
        source = Plain(task.served)
    elif settings.alpha_kd and task.caches:
        source = Plain(*task.caches)
    if folder is None:
        return Distiller(student, settings, task.precision, source, aligned=aligned, others=others)
    writes = not isinstance(folder, ReadOnlyRunFolder) and not settings.shard
    recorder = FlightRecorder(folder.path / "faults") if writes else None
    events = folder.events
    distiller = Distiller(
        student, settings, task.precision, source, events, aligned, recorder, others
    )
    distiller.explainer.about = {"learns_from": task.digest}
    return distiller
