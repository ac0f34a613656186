"""The main job of the language mode: teacher, student, text, training, judgement, run folder."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ssl_kd.datasets.text import Example, TextDataset, open_text
from ssl_kd.evaluate.tokens import TokenScores
from ssl_kd.guard.events import EventWarnings
from ssl_kd.guard.files import sha256_file
from ssl_kd.guard.parts import TooFewHealthyParts
from ssl_kd.guard.precision import Precision
from ssl_kd.language.alignment import AlignedBlocks, aligned_blocks
from ssl_kd.language.blocks import Blocks, isolates_documents, make_blocks, train_tokenizer
from ssl_kd.language.cache import TeacherCache, TeacherFingerprint, identity, write
from ssl_kd.language.judge import generate, judge_answers, judge_tokens
from ssl_kd.language.memory import estimate_memory
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.sources import Aligned, Plain, Routed, RoutedDraw
from ssl_kd.language.step import Distiller, StepResult, precision_of
from ssl_kd.language.student import add_lora, build_student, save_student
from ssl_kd.language.train import Row, train
from ssl_kd.losses.token_distillation import LegacyClamp
from ssl_kd.runs.board import Board
from ssl_kd.runs.clock import Clock
from ssl_kd.runs.folder import RunFolder
from ssl_kd.runs.stop import Signals
from ssl_kd.settings import SettingsError
from ssl_kd.teachers.causal import (
    CausalLM,
    FrozenTeacher,
    load_causal_lm,
    n_ids,
    tokenizer_id,
    without_adapters,
)
from ssl_kd.teachers.mixture import Mixture, default_renorm, is_mixture

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int, dict[str, Any]], None]
DRY_STEPS = 5
TEACHERS = Path("data") / "teachers"
TEACHER_LR = 2e-3  # of a small teacher that is trained here
PROMPT_CHARACTERS = 120


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
        eval_blocks: held-out rows, as many as are looked at.
        teacher_eval_blocks: the same text by the teacher's tokenizer.
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


def run(settings: LanguageSettings, *, progress: Progress | None = None) -> Path:
    """Do the main job as the settings say; the run folder.

    Args:
        settings: all of them.
        progress: called as `progress(stage, done, total, info)`.

    Raises:
        SettingsError: teacher, student and text do not fit.
        Interrupted: told to stop by Ctrl-C or SIGTERM.
        TooFewHealthyParts: the student does not become healthy any more.
    """
    tell = progress or (lambda stage, done, total, info: None)
    clock, precision = Clock(), precision_of(settings)
    logger.info("%s", precision)
    if settings.dry_run:
        settings = _dry(settings)
    with RunFolder(settings) as folder, Signals(folder) as signals:
        folder.write_config(settings, mode="language", precision=str(precision))
        settings = _cached(settings)
        with clock("prepare"):
            task = prepare(settings, precision, tell)
        settings = _decided(settings, task)
        folder.keep_to(task.digest)
        folder.update_json("config.json", **_about(task), resolved=_resolved(settings))
        steps, student = n_steps(settings, len(task.blocks)), task.student.model
        alone = copy.deepcopy(student) if settings.baseline else None
        distiller = make_distiller(settings, task, folder.path / "events.jsonl")
        _say_memory(settings, task, folder)

        mixture = distiller.source.mixture if isinstance(distiller.source, Routed) else None
        with clock("judge"):
            tell("judge", 0, 2, {})
            table, answers = _Judge(settings, task, mixture).first(student)
            tell("judge", 1, 2, {})
        task = task.without_teacher()
        judge = _Judge(settings, task, mixture)
        with clock("train"), signals.between_steps():
            best = _train(settings, folder, task, distiller, steps, signals, judge, tell)
        with clock("judge"):
            best.put_back()
            table.append(judge.row("student", student))
            answers["after"] = judge.answers(student)
            tell("judge", 2, 2, {})
        with clock("save"):  # before the baseline, which may stop
            save_student(
                student,
                task.student.tokenizer,
                folder.path / "student",
                table,
                merge=settings.lora_merge,
            )
            if isinstance(distiller.source, Routed) and distiller.source.router is not None:
                distiller.source.mixture.save_router(folder.path / "router.safetensors")
        if alone is not None:
            with clock("baseline"):
                try:
                    train_alone(settings, task, alone, steps, judge, tell)
                    table.append(judge.row("CE alone", alone))
                except TooFewHealthyParts as error:
                    logger.warning("cross-entropy alone stopped, and is not judged: %s", error)
                    table.append(dict.fromkeys(table[-1]) | {"name": "CE alone"})
        folder.update_json(  # the last file: it says "finished"
            "metrics.json",
            mode="language",
            table=table,
            best_step=best.step,
            steps=steps,
            tokens=distiller.tokens,
            success_rate=int(distiller.guard.updates[0]) / steps,
            events=folder.count_events(),
            cache=task.caches[0].facts() if task.caches else None,
            alignment=task.blocks.statistics() if isinstance(task.blocks, AlignedBlocks) else None,
            generations=judge.side_by_side(answers),
            seconds=clock.seconds,
        )
    return folder.path


def _decided(settings: LanguageSettings, task: Task) -> LanguageSettings:
    """ROUTER_MODE where it was left to the teacher."""
    if settings.router_mode != "auto":
        return settings
    frozen = task.frozen if settings.align == "auto" else None
    mode = "sar" if frozen is not None and is_mixture(frozen.model) else "native"
    logger.info("ROUTER_MODE is %s: the teacher's experts decide", mode)
    return settings.replace(router_mode=mode)


def _resolved(settings: LanguageSettings) -> dict[str, Any]:
    """What became of settings that were left open."""
    return {
        "STUDENT_LR": settings.peak_lr,
        "DIVERGENCE": settings.kind_of_divergence,
        "ROUTER_MODE": settings.router_mode,
    }


def _dry(settings: LanguageSettings) -> LanguageSettings:
    """Five steps that try everything once."""
    return settings.replace(
        train_steps=DRY_STEPS,
        epochs=None,
        teacher_steps=DRY_STEPS,
        eval_steps=DRY_STEPS,
        save_steps=DRY_STEPS,
        log_every=1,
        verbose_steps=DRY_STEPS,
        eval_rows=min(settings.eval_rows, 8),
        answer_prompts=min(settings.answer_prompts, 2),
        generations=min(settings.generations, 2),
    )


def n_steps(settings: LanguageSettings, rows: int) -> int:
    """Optimizer steps: EPOCHS over the rows if that is set, else TRAIN_STEPS."""
    if settings.epochs is None:
        return settings.train_steps
    per_step = settings.per_device_batch_size * settings.gradient_accumulation_steps
    return max(1, math.ceil(settings.epochs * rows / per_step))


# --- what a run works with ------------------------------------------------------------------------


def prepare(settings: LanguageSettings, precision: Precision, tell: Progress) -> Task:
    """Open the text, load or train the teacher, make the student, and lay the text out in rows.

    Raises:
        SettingsError: teacher, student, cache and text do not fit.
    """
    tell("prepare", 0, 3, {})
    train_set, eval_set = _texts(settings)
    tell("prepare", 1, 3, {"documents": len(train_set)})

    name = settings.teacher_model
    if name == "train":
        name = str(trained_teacher(settings, train_set, precision, tell))
    teacher = None if name == "none" else load_causal_lm(name)
    new = settings.student_model.startswith(("fresh:", "llama:"))
    tokenizer = train_tokenizer(train_set, settings.vocabulary) if new and not teacher else None
    student = build_student(settings.student_model, teacher, tokenizer, seed=settings.seed)
    for lm in (student, teacher):
        room = lm and getattr(lm.model.config, "max_position_embeddings", None)
        if lm and room and settings.block_size > room:
            raise SettingsError(
                f"BLOCK_SIZE is {settings.block_size}, but {lm.name} has {room} positions: set it "
                f"to {room} or less"
            )
    aligned = teacher is not None and settings.align != "auto"
    if teacher is not None and not aligned:
        _check_tokenizers(student, teacher)
    if settings.lora_rank:
        size = settings.lora_rank, settings.lora_alpha
        adapted = add_lora(student.model, *size, seed=settings.seed)
        student = dataclasses.replace(student, model=adapted)

    blocks, eval_blocks = (
        _lay_out(settings, texts, student, teacher, aligned) for texts in (train_set, eval_set)
    )
    tell("prepare", 3, 3, {"rows": len(blocks), "held out": len(eval_blocks)})
    if isinstance(blocks, AlignedBlocks):
        words = "%.1f %% of the text stands in groups of tokens that both share, of %.1f characters"
        found = blocks.statistics()
        logger.info(words, 100 * found["coverage"], found["characters_per_group"])

    frozen, caches = None, []
    if teacher is not None and settings.teacher_cache is None:
        frozen = FrozenTeacher(
            teacher.model,
            device=precision.device,
            dtype=precision.teacher,
            offload=settings.teacher_offload,
        )
    elif teacher is not None and isinstance(blocks, Blocks):
        wanted = _cache_of(settings, teacher, train_set, blocks)
        folders = _cache_folders(settings)
        if absent := [str(folder) for folder in folders if not folder.is_dir()]:
            raise SettingsError(
                f"TEACHER_CACHE: there is no {', '.join(absent)}: run cache_teacher.py with the "
                "settings of this run, or name another folder"
            )
        caches = [TeacherCache.open(folder, expect=wanted) for folder in folders]
        _check_divergence(settings, caches[0].fingerprint.method)
        teacher.model.requires_grad_(False)
    if isinstance(eval_blocks, AlignedBlocks):
        sides = eval_blocks.student, eval_blocks.teacher
    else:
        sides = eval_blocks, eval_blocks
    sides = [side.first(settings.eval_rows) for side in sides]
    texts, models = (train_set, eval_set), (student, teacher, frozen)
    return Task(precision, *texts, *models, _router_id(settings), caches, blocks, *sides)


def _texts(settings: LanguageSettings) -> tuple[TextDataset, TextDataset]:
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


def _is_routed(settings: LanguageSettings) -> bool:
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
    if packing != settings.packing:
        logger.warning("one document a row: in this model packed documents would see each other")
    return make_blocks(texts, student.tokenizer, settings.block_size, packing=packing)


def _check_tokenizers(student: CausalLM, teacher: CausalLM) -> None:
    if tokenizer_id(student.tokenizer) == tokenizer_id(teacher.tokenizer):
        return
    raise SettingsError(
        f"the teacher {teacher.name} and the student {student.name} have different tokenizers "
        f"({len(teacher.tokenizer)} and {len(student.tokenizer)} tokens), so their distributions "
        "are not over the same things. Say how to follow such a teacher: --align chunks, uld or "
        "hidden; or take a student of its family, or one cut from it (--student_model layers:N)"
    )


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


def _check_divergence(settings: LanguageSettings, method: str) -> None:
    if method == "sample" and settings.kind_of_divergence != "forward_kl":
        raise SettingsError(
            f"DIVERGENCE is {settings.kind_of_divergence}, and a cache of CACHE_METHOD 'sample' "
            "knows forward_kl alone: set DIVERGENCE to 'forward_kl', or make a cache with "
            "CACHE_METHOD 'topk'"
        )


def _cached(settings: LanguageSettings) -> LanguageSettings:
    """With a cache ROUTER_MODE auto is native: no router learns there."""
    if settings.teacher_cache is None or settings.router_mode != "auto":
        return settings
    return settings.replace(router_mode="native")


def cache_teacher(
    settings: LanguageSettings, *, progress: Progress | None = None
) -> list[TeacherCache]:
    """Ask the teacher about the whole text once, and keep what it says in TEACHER_CACHE.

    Runs with the same settings then learn from it, without the teacher in memory.

    Args:
        settings: those of the runs to come; CACHE_METHOD and CACHE_K.
        progress: called as `progress(stage, done, total, info)`.

    Returns:
        The cache; for ROUTER_MODE ka one for each of KA_FORWARDS draws of experts.

    Raises:
        SettingsError: there is no teacher or no folder to write to.
        FingerprintMismatch: the folder holds a cache of something else, and not FORCE_RECOMPUTE.
    """
    tell = progress or (lambda stage, done, total, info: None)
    if settings.teacher_cache is None:
        raise SettingsError("TEACHER_CACHE is None: name the folder that the cache goes to.")
    if settings.teacher_model == "none":
        raise SettingsError("TEACHER_MODEL is 'none', so there is nothing to keep.")
    settings = _cached(settings)
    _check_divergence(settings, settings.cache_method)
    precision = precision_of(settings)
    texts, _ = _texts(settings)
    name = settings.teacher_model
    if name == "train":
        name = str(trained_teacher(settings, texts, precision, tell))
    teacher = load_causal_lm(name)
    blocks = _lay_out(settings, texts, teacher, teacher, aligned=False)
    assert isinstance(blocks, Blocks)
    frozen = FrozenTeacher(teacher.model, device=precision.device, dtype=precision.teacher)
    fingerprint = TeacherFingerprint(
        **_cache_of(settings, teacher, texts, blocks),
        dtype=str(precision.teacher).removeprefix("torch."),
        method=settings.cache_method,
        k=settings.cache_k,
    )
    routed = Routed(frozen, settings) if _is_routed(settings) else None
    caches = []
    for i, folder in enumerate(_cache_folders(settings)):
        caches.append(
            write(
                frozen if routed is None else RoutedDraw(routed, i),
                blocks,
                folder,
                fingerprint,
                vocabulary=n_ids(teacher.tokenizer),
                batch_size=settings.per_device_batch_size,
                force=settings.force_recompute,
                progress=lambda done, total: tell("cache", done, total, {}),
            )
        )
    return caches


def trained_teacher(
    settings: LanguageSettings, texts: TextDataset, precision: Precision, tell: Progress
) -> Path:
    """A small teacher trained on the text by cross-entropy; found again where it was before.

    Returns:
        Its folder, below `data/teachers`.
    """
    own = settings.replace(
        teacher_model="none",
        teacher_cache=None,
        student_model=f"fresh:{settings.teacher_size}",
        train_steps=settings.teacher_steps,
        epochs=None,
        alpha_ce=1.0,
        alpha_kd=0.0,
        student_lr=TEACHER_LR,
        max_grad_norm=1.0,
        lora_rank=0,
        legacy_clamp=None,
    )
    decides = ("block_size", "packing", "per_device_batch_size", "gradient_accumulation_steps")
    decides += ("teacher_size", "teacher_steps", "teacher_experts", "vocabulary", "seed")
    decides += ("weight_decay", "warmup_fraction")
    said = [texts.digest, str(precision.student), *(str(getattr(own, name)) for name in decides)]
    folder = TEACHERS / hashlib.sha256("\n".join(said).encode()).hexdigest()[:16]
    if folder.exists():
        logger.info("the teacher trained before on this text: %s", folder)
        return folder
    tokenizer = train_tokenizer(texts, settings.vocabulary)
    spec, experts = own.student_model, settings.teacher_experts
    teacher = build_student(spec, None, tokenizer, seed=settings.seed, experts=experts)
    packing = settings.packing and isolates_documents(teacher.model)
    blocks = make_blocks(texts, tokenizer, settings.block_size, packing=packing)
    distiller = Distiller(teacher.model, own, precision)

    def on_step(step: int, result: StepResult) -> None:
        tell("teacher", step + 1, own.train_steps, {"ce": result.ce})

    train(distiller, blocks, own.train_steps, on_step=on_step)
    card = f"Trained on {texts.name} for {own.train_steps} steps, to be distilled from."
    save_student(teacher.model, tokenizer, folder, card)
    return folder


def _about(task: Task) -> dict[str, Any]:
    """What `config.json` says of models and data."""

    def model(lm: CausalLM | None) -> dict[str, Any] | None:
        if lm is None or lm.model is None:
            return lm and {"name": lm.name}
        config = lm.model.config
        return {
            "name": lm.name,
            "parameters": sum(p.numel() for p in lm.model.parameters()),
            "trained": sum(p.numel() for p in lm.model.parameters() if p.requires_grad),
            "vocabulary": config.vocab_size,
            "layers": config.num_hidden_layers,
        }

    own = task.blocks.student if isinstance(task.blocks, AlignedBlocks) else task.blocks
    return {
        "teacher": model(task.teacher),
        "student": model(task.student),
        "data": {
            "name": task.train_set.name,
            "documents": len(task.train_set),
            "train_tokens": int(own.counts.sum()),
            "eval_tokens": int(task.eval_blocks.counts.sum()),
            "left_out": [*task.train_set.left_out, *own.left_out],
        },
    }


def make_distiller(settings: LanguageSettings, task: Task, events: Path | None) -> Distiller:
    """The student with everything that it learns from."""
    student, frozen = task.student.model, task.frozen
    vocabulary = len(without_adapters(student).get_output_embeddings().weight)
    if settings.legacy_clamp is not None:
        clamp = LegacyClamp.parse(settings.legacy_clamp)
        clamp.check(vocabulary)
        lowest = clamp.lowest_perplexity(vocabulary)
        logger.warning("LEGACY_CLAMP %s: perplexity can never be below %.4g", clamp, lowest)
    source = aligned = None
    if settings.alpha_kd and frozen is not None:
        scale = task.precision.teacher == torch.float16
        source = (
            Routed(frozen, settings, scale_loss=scale) if _is_routed(settings) else Plain(frozen)
        )
        if isinstance(task.blocks, AlignedBlocks):
            answer = source.answer if isinstance(source, Routed) else frozen
            dims = [without_adapters(m).config.hidden_size for m in (student, frozen.model)]
            source, aligned = None, Aligned(answer, settings, *dims)
    elif settings.alpha_kd and task.caches:
        source = Plain(*task.caches)
    return Distiller(student, settings, task.precision, source, events, aligned)


def _say_memory(settings: LanguageSettings, task: Task, folder: RunFolder) -> None:
    """Log what the run will need at its peak, and note it for the report."""
    estimate = estimate_memory(
        task.student.model,
        task.frozen,
        batch_size=settings.per_device_batch_size,
        block_size=settings.block_size,
        dtype=task.precision.student,
        accumulation_steps=settings.gradient_accumulation_steps,
        gradient_checkpointing=settings.gradient_checkpointing,
        device=task.precision.device,
        align=settings.align,
    )
    logger.info("memory at the peak of a step, about:\n%s", estimate)
    folder.update_json("config.json", memory=dict(estimate.parts))


# --- training -------------------------------------------------------------------------------------


def _train(
    settings: LanguageSettings,
    folder: RunFolder,
    task: Task,
    distiller: Distiller,
    steps: int,
    signals: Signals,
    judge: _Judge,
    tell: Progress,
) -> Best:
    """Train the student, from the last checkpoint if there is one; its best weights."""
    start, state = folder.load_checkpoint()
    best = Best(distiller)
    if state:
        distiller.load(state["distiller"])
        best.load(state["best"])
    folder.rewind(start)
    folder.become_latest()
    warn, told = EventWarnings(), len(distiller.guard.events)
    if start < settings.verbose_steps:
        logger.info("%s", _first_forward(settings, task))

    with Board(folder.path, settings.tensorboard) as board:

        def on_step(step: int, result: StepResult) -> None:
            nonlocal told
            warn(distiller.guard.events.events[told:])
            told = len(distiller.guard.events)
            for name, value in (("ce", result.ce), ("kd", result.kd)):
                if settings.stop_after == 1 and value is not None and not math.isfinite(value):
                    raise TooFewHealthyParts(f"step {step}: {name} is {value}")
            if step < settings.verbose_steps:
                kd = "" if result.kd is None else f", kd {result.kd:.4f}"
                words = (step + 1, result.ce, kd, result.grad_norm)
                logger.info("step %d: ce %.4f%s, gradient norm %.3g", *words)

        def on_log(row: Row) -> None:
            folder.log(row)
            board.log(row["step"], {k: v for k, v in row.items() if v is not None})
            info = {k: row[k] for k in ("train_loss", "ce", "kd") if row[k] is not None}
            tell("train", row["step"], steps, info | {"tokens/s": row["tokens_per_second"]})

        def on_eval(done: int) -> None:
            scores = judge.look(distiller.student)
            best.offer(done, scores.nll)
            found = scores.table_row("student")
            folder.log({"step": done, "eval": found})
            board.log(done, {f"eval/{k}": v for k, v in found.items() if isinstance(v, float)})

        try:
            train(
                distiller,
                task.blocks,
                steps,
                start=start,
                on_step=on_step,
                on_log=on_log,
                on_eval=on_eval,
                on_checkpoint=lambda step: folder.save_checkpoint(
                    step, {"distiller": distiller.state(), "best": best.state()}
                ),
                should_stop=lambda: bool(signals.caught),
            )
        except TooFewHealthyParts as error:
            causes = [e for e in distiller.guard.events.events if e.action == "explained"]
            once = {e.reason: f"{e.part}, step {e.step}: {e.reason}" for e in reversed(causes)}
            lines = [str(error), *reversed(once.values())]
            lines.append(advice(settings, distiller))
            raise TooFewHealthyParts("\n".join(lines)) from error
    return best


def _first_forward(settings: LanguageSettings, task: Task) -> str:
    """What goes into the loss, in one line."""
    sides = {"student": task.student.model}
    if task.frozen is not None:
        sides["teacher"] = task.frozen.model
    rows = f"{settings.per_device_batch_size}, {settings.block_size}"
    heads = {who: without_adapters(lm).get_output_embeddings() for who, lm in sides.items()}
    logits = ", ".join(f"{who} [{rows}, {len(head.weight)}]" for who, head in heads.items())
    return (
        f"logits: {logits}; temperature {settings.temperature:g}; weights: "
        f"ce {settings.alpha_ce:g}, kd {settings.alpha_kd:g}"
    )


class Best:
    """The trained weights with the best held-out likelihood so far, on the CPU."""

    def __init__(self, distiller: Distiller) -> None:
        self._student = distiller.student
        self.step, self.nll, self._weights = 0, float("inf"), {}

    def offer(self, step: int, nll: float | None) -> None:
        """Keep the weights as they are now if they are better than those that were kept."""
        if not self._weights or (nll is not None and nll < self.nll):
            self.step, self.nll = step, float("inf") if nll is None else nll
            trained = [(n, p) for n, p in self._student.named_parameters() if p.requires_grad]
            self._weights = {name: p.detach().to("cpu", copy=True) for name, p in trained}

    @torch.no_grad()
    def put_back(self) -> None:
        """Give the student its best weights."""
        for name, p in self._student.named_parameters():
            if name in self._weights:
                p.copy_(self._weights[name])

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"step": self.step, "nll": self.nll, "weights": self._weights}

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave."""
        self.step, self.nll, self._weights = state["step"], state["nll"], state["weights"]


def train_alone(
    settings: LanguageSettings,
    task: Task,
    student: nn.Module,
    steps: int,
    judge: _Judge,
    tell: Progress,
) -> None:
    """The same student by cross-entropy alone: the same batches, steps and learning rates."""
    alone = settings.replace(alpha_ce=1.0, alpha_kd=0.0, legacy_clamp=None)
    distiller = Distiller(student, alone, task.precision)

    def on_step(step: int, result: StepResult) -> None:
        tell("baseline", step + 1, steps, {"ce": result.ce})

    best = Best(distiller)
    train(
        distiller,
        task.blocks,
        steps,
        on_step=on_step,
        on_eval=lambda done: best.offer(done, judge.look(student).nll),
    )
    best.put_back()


def advice(settings: LanguageSettings, distiller: Distiller) -> str:
    """Settings that a run which stopped could be tried with, as flags."""
    tries = [f"--student_lr {settings.peak_lr / 5:.1g}"]
    if settings.max_grad_norm is None or settings.max_grad_norm > 0.5:
        tries.append("--max_grad_norm 0.5")
    if distiller.source is not None and settings.temperature < 2:
        tries.append("--temperature 2")
    if distiller.precision.student != torch.float32:
        tries.append("--model_dtype float32")
    return f"Settings to try: {' '.join(tries)}"


# --- judging --------------------------------------------------------------------------------------


class _Judge:
    """Looks at models through the same held-out rows, prompts and questions.

    A mixture of experts is looked at with its routers as they came, so that all rows of the table
    are beside one teacher, whatever its routers learn.
    """

    def __init__(
        self, settings: LanguageSettings, task: Task, mixture: Mixture | None = None
    ) -> None:
        self._settings, self._task = settings, task
        self._as_it_came = nullcontext if mixture is None else mixture.as_it_came
        self._examples = task.eval_set.examples
        self._prompts = [_prompt(example) for example in self._examples[: settings.generations]]

    def look(self, model: Any) -> TokenScores:
        """Held-out scores of a model, beside the live teacher's word if there is one."""
        task, itself = self._task, isinstance(model, FrozenTeacher)
        alike = not isinstance(task.blocks, AlignedBlocks)
        with self._as_it_came():
            return judge_tokens(
                model,
                task.teacher_eval_blocks if itself else task.eval_blocks,
                teacher=task.frozen if alike and not itself else None,
                batch_size=self._settings.per_device_batch_size,
                autocast=task.precision.autocast,
            )

    def row(self, name: str, model: Any) -> Row:
        """A row of the report's table."""
        row = self.look(model).table_row(name)
        with self._as_it_came():
            asked, _ = judge_answers(
                model,
                self._tokenizer(model),
                self._examples,
                limit=self._settings.answer_prompts,
                max_new_tokens=self._settings.max_new_tokens,
                autocast=self._task.precision.autocast,
            )
        return row | {
            "answer_accuracy": asked.accuracy,
            "answer_rate": asked.answer_rate,
            "n": asked.n,
            "interval": asked.interval,
        }

    def first(self, student: nn.Module) -> tuple[list[Row], dict[str, list[str]]]:
        """The table's first rows, of the teacher and the student before, and what they write."""
        table, answers = [], {"before": self.answers(student)}
        task, teacher = self._task, self._task.frozen
        if task.caches and task.teacher is not None:
            device, dtype = task.precision.device, task.precision.teacher
            teacher = FrozenTeacher(task.teacher.model, device=device, dtype=dtype)
        if teacher is not None:
            table.append(self.row("teacher", teacher))
            answers["teacher"] = self.answers(teacher)
        table.append(self.row("student before", student))
        return table, answers

    def _tokenizer(self, model: Any) -> Any:
        lm = self._task.teacher if isinstance(model, FrozenTeacher) else self._task.student
        assert lm is not None
        return lm.tokenizer

    def answers(self, model: Any) -> list[str]:
        """What a model writes after each prompt."""
        settings, tokenizer = self._settings, self._tokenizer(model)
        prompts = [prompt for prompt, _ in self._prompts]
        autocast = self._task.precision.autocast
        with self._as_it_came():
            return generate(model, tokenizer, prompts, settings.max_new_tokens, autocast=autocast)

    def side_by_side(self, answers: dict[str, list[str]]) -> list[Row]:
        """Each prompt with what everybody wrote, and the text's own continuation."""
        return [
            {"prompt": prompt, "reference": reference}
            | {who: texts[i] for who, texts in answers.items()}
            for i, (prompt, reference) in enumerate(self._prompts)
        ]


def _prompt(example: Example) -> tuple[str, str]:
    """A prompt and its own continuation, of any kind of example."""
    if example.text is None:
        return example.prompt or "", example.completion or ""
    end = example.text.rfind(" ", 0, PROMPT_CHARACTERS)
    end = PROMPT_CHARACTERS if end < 1 else end
    return example.text[:end], example.text[end : 4 * end]
