"""What a run works with: the text in rows, teacher, student, cache; and the distiller of them."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ssl_kd.datasets.aligned import AlignedBlocks, aligned_blocks
from ssl_kd.datasets.blocks import Blocks, isolates_documents, make_blocks, train_tokenizer
from ssl_kd.datasets.text import TextDataset, open_text
from ssl_kd.divergences import DIVERGENCES
from ssl_kd.files import sha256_file
from ssl_kd.guard.precision import Precision
from ssl_kd.guard.recorder import FlightRecorder
from ssl_kd.language.parallel import check_ranks, shard_teacher
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.sources import Aligned, Plain, Routed, RoutedDraw
from ssl_kd.language.step import Distiller, StudentStep, precision_of
from ssl_kd.language.train import train
from ssl_kd.losses.legacy_clamp import LegacyClamp
from ssl_kd.ranks import Ranks, joined
from ssl_kd.settings import SettingsError
from ssl_kd.store.teacher_cache import TeacherCache, TeacherFingerprint, identity, write
from ssl_kd.teachers.causal import CausalLM, load_causal_lm, n_ids, tokenizer_id, without_adapters
from ssl_kd.teachers.frozen import FrozenTeacher
from ssl_kd.teachers.mixture import default_renorm
from ssl_kd.teachers.student import add_lora, build_student, save_student
from ssl_kd.training.folder import RunFolder
from ssl_kd.training.together import FollowedFolder, Team

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int, dict[str, Any]], None]
TEACHERS = Path("data") / "teachers"
SHARDS_APART = timedelta(days=1)  # that ranks may be, at the end of a cache
TEACHER_LR = 2e-3  # of a small teacher that is trained here
ALONE = Ranks(0, 1, "cpu")
LEAST_HELD_OUT = 16  # rows: half of fewer would say too little


@dataclass(frozen=True)
class Task:
    """What a run works with.

    Attributes:
        precision: dtypes.
        train_set: documents to learn from.
        eval_set: held-out documents.
        student: as it begins.
        teacher: None for cross-entropy alone.
        frozen: the teacher at work; None where its cache stands in.
        router_id: identity of ROUTER_WEIGHTS; empty where there are none.
        caches: the teacher's caches, where they are used: one, or a draw of experts each.
        blocks: rows to learn from, for two tokenizers where they differ.
        eval_blocks: the held-out rows that the table reports.
        teacher_eval_blocks: the same text by the teacher's tokenizer.
        validation_blocks: the held-out rows by which the best student is chosen; see
            `test_and_validation`.
        ranks: which work together.
    """

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

    @property
    def validated_apart(self) -> bool:
        """Whether no choice was made on the rows that the table reports."""
        return not torch.equal(self.validation_blocks.ids, self.eval_blocks.ids)

    @property
    def digest(self) -> str:
        """What the run learns from: text, tokenizer, teacher with its caches, and student."""
        ids = [lm.weights_id for lm in (self.teacher, self.student) if lm is not None]
        digests = [self.blocks.digest, self.eval_blocks.digest, *(c.digest for c in self.caches)]
        return "-".join([*(digest[:16] for digest in digests), *ids, self.router_id])

    def without_teacher(self) -> Task:
        """Let go of a teacher whose cache stands in: its memory is what the cache spares."""
        if self.teacher is None or not self.caches:
            return self
        return dataclasses.replace(self, teacher=dataclasses.replace(self.teacher, model=None))


def prepare(
    settings: LanguageSettings, precision: Precision, tell: Progress, ranks: Ranks = ALONE
) -> Task:
    """Open the text, load or train the teacher, make the student, and lay the text out in rows.

    Raises:
        SettingsError: teacher, student, cache and text do not fit.
    """
    tell("prepare", 0, 3, {})
    train_set, eval_set = texts_of(settings)
    tell("prepare", 1, 3, {"documents": len(train_set)})

    student, teacher = _models(settings, train_set, precision, tell, ranks)
    aligned = teacher is not None and settings.align != "auto"
    blocks, eval_blocks = (
        _lay_out(settings, texts, student, teacher, aligned) for texts in (train_set, eval_set)
    )
    own = blocks.student if isinstance(blocks, AlignedBlocks) else blocks
    for line in [*train_set.left_out[:1], *own.left_out[:1]]:
        logger.info("some of the text was split or left out: %s; the report has more", line)
    tell("prepare", 3, 3, {"rows": len(blocks), "held out": len(eval_blocks)})
    if isinstance(blocks, AlignedBlocks):
        words = "%.1f %% of the text is in groups of tokens that both share, mean %.1f characters"
        found = blocks.statistics()
        logger.info(words, 100 * found["coverage"], found["characters_per_group"])

    frozen, caches = _answers(settings, precision, teacher, train_set, blocks, ranks)
    if isinstance(eval_blocks, AlignedBlocks):
        sides = eval_blocks.student, eval_blocks.teacher
    else:
        sides = eval_blocks, eval_blocks
    test, validation = test_and_validation(len(eval_blocks), settings.eval_rows)
    return Task(
        precision,
        train_set,
        eval_set,
        student,
        teacher,
        frozen,
        _router_id(settings),
        caches,
        blocks,
        *(side.part(test) for side in sides),
        validation_blocks=sides[0].part(validation),
        ranks=ranks,
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
) -> tuple[CausalLM, CausalLM | None]:
    """Student and teacher; a teacher that is to be trained here is found again or trained."""
    name = settings.teacher_model
    if name == "train":
        name = str(trained_teacher(settings, texts, precision, tell, ranks))
    teacher = None if name == "none" else load_causal_lm(name)
    new = settings.student_model.startswith(("fresh:", "llama:"))
    tokenizer = train_tokenizer(texts, settings.vocabulary) if new and not teacher else None
    student = build_student(settings.student_model, teacher, tokenizer, seed=settings.seed)
    for lm in (student, teacher):
        room = lm and getattr(lm.model.config, "max_position_embeddings", None)
        if lm and room and settings.block_size > room:
            raise SettingsError(
                f"BLOCK_SIZE is {settings.block_size}, but {lm.name} has {room} positions: set it "
                f"to {room} or less"
            )
    if teacher is not None and settings.align == "auto":
        _check_tokenizers(student, teacher)
    if settings.lora_rank:
        size = settings.lora_rank, settings.lora_alpha
        adapted = add_lora(student.model, *size, seed=settings.seed)
        student = dataclasses.replace(student, model=adapted)
    return student, teacher


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
    if teacher is not None and settings.teacher_cache is None:
        frozen = at_work(settings, precision, teacher, ranks)
    elif teacher is not None and isinstance(blocks, Blocks):
        wanted = _cache_of(settings, teacher, texts, blocks)
        folders = _cache_folders(settings)
        if absent := [str(folder) for folder in folders if not folder.is_dir()]:
            raise SettingsError(
                f"TEACHER_CACHE: there is no {', '.join(absent)}: run cache_teacher.py with the "
                "settings of this run, or name another folder"
            )
        caches = [TeacherCache.open(folder, expect=wanted) for folder in folders]
        _check_divergence(settings, caches[0].fingerprint.method)
        teacher.model.requires_grad_(False)
    return frozen, caches


def at_work(
    settings: LanguageSettings, precision: Precision, teacher: CausalLM, ranks: Ranks
) -> FrozenTeacher:
    """The teacher on its device; with SHARD a piece of it on each rank's."""
    device, offload = precision.device, settings.teacher_offload
    if not settings.shard:
        return FrozenTeacher(teacher.model, device=device, dtype=precision.teacher, offload=offload)
    frozen = FrozenTeacher(teacher.model, dtype=precision.teacher)
    shard_teacher(frozen, device, ranks.world)
    return frozen


def texts_of(settings: LanguageSettings) -> tuple[TextDataset, TextDataset]:
    """What is learned from, and what is held out; no document is both."""
    most = None if settings.max_megabytes is None else int(settings.max_megabytes * 1e6)
    if settings.eval_path is None:
        train_set = open_text(settings.data_path, "train", max_bytes=most)
        eval_set = open_text(settings.data_path, "test", max_bytes=most)
    else:  # all is learned from where the held-out text is a file of its own
        train_set = open_text(settings.data_path, "train", held_out=0, max_bytes=most)
        eval_set = open_text(settings.eval_path, "all", max_bytes=most)
    kept = train_set.without(eval_set)
    if len(kept) < len(train_set):
        words = "%d of %d documents to learn from are held out, too, and left out of training"
        logger.warning(words, len(train_set) - len(kept), len(train_set))
    return kept, eval_set


def _router_id(settings: LanguageSettings) -> str:
    """Identity of ROUTER_WEIGHTS; empty where there are none."""
    if settings.router_weights is None:
        return ""
    file = Path(settings.router_weights)
    if not file.is_file():
        raise SettingsError(f"ROUTER_WEIGHTS: there is no router file {file}.")
    return sha256_file(file)[:16]


def is_routed(settings: LanguageSettings) -> bool:
    """Whether the teacher's experts are others than as it came."""
    return settings.router_mode != "native" or settings.router_weights is not None


def _cache_folders(settings: LanguageSettings) -> list[Path]:
    """Where the teacher's caches are; for ROUTER_MODE ka a draw of experts in each."""
    folder = Path(str(settings.teacher_cache))
    if settings.router_mode != "ka":
        return [folder]
    return [folder / f"draw_{i}" for i in range(settings.ka_forwards)]


def _lay_out(
    settings: LanguageSettings,
    texts: TextDataset,
    student: CausalLM,
    teacher: CausalLM | None,
    aligned: bool,
) -> Blocks | AlignedBlocks:
    """The text in rows of tokens."""
    if aligned and teacher is not None:
        tokenizers = student.tokenizer, teacher.tokenizer
        return aligned_blocks(texts, *tokenizers, settings.block_size)
    models = [lm.model for lm in (student, teacher) if lm is not None]
    packing = settings.packing and all(isolates_documents(model) for model in models)
    return make_blocks(texts, student.tokenizer, settings.block_size, packing=packing)


def _check_tokenizers(student: CausalLM, teacher: CausalLM) -> None:
    if tokenizer_id(student.tokenizer) == tokenizer_id(teacher.tokenizer):
        return
    raise SettingsError(
        f"the teacher {teacher.name} and the student {student.name} have different tokenizers "
        f"({len(teacher.tokenizer)} and {len(student.tokenizer)} tokens), so their distributions "
        "are over different tokens. Choose how to align them: --align chunks, uld or hidden; or "
        " take a student of its family, or one cut from it (--student_model layers:N)"
    )


def _check_divergence(settings: LanguageSettings, method: str) -> None:
    known = [name for name, entry in DIVERGENCES.items() if entry.from_samples]
    if method == "sample" and settings.kind_of_divergence not in known:
        raise SettingsError(
            f"DIVERGENCE is {settings.kind_of_divergence}, and a cache of CACHE_METHOD 'sample' "
            f"supports {', '.join(known)} only: set DIVERGENCE to {known[0]!r}, or make a cache "
            "with CACHE_METHOD 'topk'"
        )


def without_router(settings: LanguageSettings) -> LanguageSettings:
    """With a cache ROUTER_MODE auto is native: no router learns there."""
    if settings.teacher_cache is None or settings.router_mode != "auto":
        return settings
    return settings.replace(router_mode="native")


def _cache_of(
    settings: LanguageSettings, teacher: CausalLM, texts: TextDataset, blocks: Blocks
) -> dict[str, Any]:
    """The fields of its fingerprint that a teacher's cache must have for this run."""
    weights = teacher.weights_id
    if settings.router_mode != "native":
        weights += f" ka {settings.ka_lambda:g}" if settings.router_mode == "ka" else " all"
        renorm = settings.router_renorm
        weights += f" {default_renorm(teacher.model) if renorm == 'auto' else renorm}"
    if router := _router_id(settings):
        weights += f" router {router}"
    of = identity(teacher.name, weights, teacher.tokenizer, texts, blocks)
    return of | {"temperature": settings.temperature}


def make_distiller(
    settings: LanguageSettings, task: Task, folder: RunFolder | None = None
) -> Distiller:
    """The student with everything that it learns from; `folder` keeps its events and faults."""
    student, frozen = task.student.model, task.frozen
    vocabulary = len(without_adapters(student).get_output_embeddings().weight)
    if settings.legacy_clamp is not None:
        clamp = LegacyClamp.parse(settings.legacy_clamp)
        clamp.check(vocabulary)
        lowest = clamp.lowest_perplexity(vocabulary)
        words = settings.legacy_clamp, lowest
        logger.warning("LEGACY_CLAMP %s: perplexity can never be below %.4g", *words)
    source = aligned = None
    if settings.alpha_kd and frozen is not None:
        scale = task.precision.teacher == torch.float16
        source = (
            Routed(frozen, settings, scale_loss=scale) if is_routed(settings) else Plain(frozen)
        )
        if isinstance(task.blocks, AlignedBlocks):
            answer = source.answer if isinstance(source, Routed) else frozen
            dims = [without_adapters(m).config.hidden_size for m in (student, frozen.model)]
            source, aligned = None, Aligned(answer, settings, *dims)
    elif settings.alpha_kd and task.caches:
        source = Plain(*task.caches)
    if folder is None:
        return Distiller(student, settings, task.precision, source, aligned=aligned)
    writes = not isinstance(folder, FollowedFolder) and not settings.shard
    recorder = FlightRecorder(folder.path / "faults") if writes else None
    events = folder.events
    distiller = Distiller(student, settings, task.precision, source, events, aligned, recorder)
    distiller.witness.about = {"learns_from": task.digest}
    return distiller


def cache_teacher(
    settings: LanguageSettings, *, progress: Progress | None = None
) -> list[TeacherCache]:
    """Ask the teacher about the whole text once, and keep what it says in TEACHER_CACHE.

    Runs with the same settings then learn from it, without the teacher in memory. Processes that
    torchrun started share the text; BATCH_SIZE is of each one's forward passes.

    Args:
        settings: those of the runs to come; CACHE_METHOD and CACHE_K.
        progress: called as `progress(stage, done, total, info)`.

    Returns:
        The cache; for ROUTER_MODE ka one for each of KA_FORWARDS draws of experts.

    Raises:
        SettingsError: there is no teacher or no folder to write to.
        FingerprintMismatch: the folder holds a cache of something else, and not FORCE_RECOMPUTE.
        RankLost: another rank does not answer.
    """
    if settings.teacher_cache is None:
        raise SettingsError("TEACHER_CACHE is None: name the folder that the cache goes to.")
    if settings.teacher_model == "none":
        raise SettingsError("TEACHER_MODEL is 'none', so there is nothing to keep.")
    if Path(settings.teacher_cache).is_file():
        raise SettingsError(
            f"TEACHER_CACHE is {settings.teacher_cache!r}, a file: expected a folder, or a name for"
            " a new one."
        )
    settings = without_router(settings)
    _check_divergence(settings, settings.cache_method)
    with joined(settings.device, timeout=SHARDS_APART) as ranks:
        return _cache(settings, ranks, progress or (lambda stage, done, total, info: None))


def _cache(settings: LanguageSettings, ranks: Ranks, tell: Progress) -> list[TeacherCache]:
    precision = precision_of(settings.replace(device=ranks.device))
    texts, _ = texts_of(settings)
    name = settings.teacher_model
    if name == "train":
        name = str(trained_teacher(settings, texts, precision, tell, ranks))
    teacher = load_causal_lm(name)
    blocks = _lay_out(settings, texts, teacher, teacher, aligned=False)
    assert isinstance(blocks, Blocks)
    frozen = at_work(settings.replace(teacher_offload=False), precision, teacher, ranks)
    fingerprint = TeacherFingerprint(
        **_cache_of(settings, teacher, texts, blocks),
        dtype=str(precision.teacher).removeprefix("torch."),
        method=settings.cache_method,
        k=settings.cache_k,
    )
    routed = Routed(frozen, settings) if is_routed(settings) else None
    caches = []
    for i, folder in enumerate(_cache_folders(settings)):
        caches.append(
            write(
                frozen if routed is None else RoutedDraw(routed, i),
                blocks,
                folder,
                fingerprint,
                vocabulary=n_ids(teacher.tokenizer),
                batch_size=settings.batch_size,
                force=settings.force_recompute,
                team=Team(precision.device),
                in_step=settings.shard,
                progress=lambda done, total: tell("cache", done, total, {}),
            )
        )
    return caches


def trained_teacher(
    settings: LanguageSettings,
    texts: TextDataset,
    precision: Precision,
    tell: Progress,
    ranks: Ranks = ALONE,
) -> Path:
    """A small teacher trained on the text by cross-entropy; found again where it was before.

    Several ranks train it together.

    Returns:
        Its folder, below `data/teachers`.
    """
    own = settings.replace(
        teacher_model="none",
        teacher_cache=None,
        student_model=f"fresh:{settings.teacher_size}",
        max_steps=settings.teacher_steps,
        epochs=None,
        alpha_ce=1.0,
        alpha_kd=0.0,
        learning_rate=TEACHER_LR,
        clip_grad=1.0,
        lora_rank=0,
        legacy_clamp=None,
        shard=False,
    )
    decides = ("block_size", "packing", "batch_size", "gradient_accumulation_steps")
    decides += ("teacher_size", "teacher_steps", "teacher_experts", "vocabulary", "seed")
    decides += ("weight_decay", "warmup_fraction")
    said = [texts.digest, str(precision.student), *(str(getattr(own, name)) for name in decides)]
    folder = TEACHERS / hashlib.sha256("\n".join(said).encode()).hexdigest()[:16]
    if ranks.from_first(folder.exists):
        logger.info("using the teacher trained earlier on this text: %s", folder)
        return folder
    check_ranks(own, ranks)
    tokenizer = train_tokenizer(texts, settings.vocabulary)
    spec, experts = own.student_model, settings.teacher_experts
    teacher = build_student(spec, None, tokenizer, seed=settings.seed, experts=experts)
    packing = settings.packing and isolates_documents(teacher.model)
    blocks = make_blocks(texts, tokenizer, settings.block_size, packing=packing)
    distiller = Distiller(teacher.model, own, precision)

    def on_step(step: int, result: StudentStep) -> None:
        tell("teacher", step + 1, own.max_steps, {"ce": result.ce})

    train(distiller, blocks, own.max_steps, on_step=on_step)
    card = f"Trained on {texts.name} for {own.max_steps} steps, to be distilled from."
    ranks.from_first(partial(save_student, teacher.model, tokenizer, folder, card))
    return folder
