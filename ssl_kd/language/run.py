"""The main job of the language mode: teacher, student, text, training, judgement, run folder."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ssl_kd.datasets.text import Example, TextDataset, open_text
from ssl_kd.evaluate.tokens import TokenScores
from ssl_kd.guard.events import EventWarnings
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
    tokenizer_id,
    without_adapters,
)
from ssl_kd.teachers.mixture import is_mixture

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
    caches: list[TeacherCache]
    blocks: Blocks | AlignedBlocks
    eval_blocks: Blocks
    teacher_eval_blocks: Blocks

    @property
    def digest(self) -> str:
        """What the run learns from: text, tokenizer, teacher and student."""
        ids = [lm.weights_id for lm in (self.teacher, self.student) if lm is not None]
        return "-".join([self.blocks.digest[:16], self.eval_blocks.digest[:16], *ids])


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
        folder.update_json("config.json", **_about(task))
        steps, student = n_steps(settings, len(task.blocks)), task.student.model
        alone = copy.deepcopy(student) if settings.baseline else None
        distiller = make_distiller(settings, task, folder.path / "events.jsonl")
        _say_memory(settings, task, folder)

        judge = _Judge(settings, task)
        with clock("judge"):
            tell("judge", 0, 2, {})
            table, answers = judge.first(student)
            tell("judge", 1, 2, {})
        with clock("train"), signals.between_steps():
            best = _train(settings, folder, task, distiller, steps, signals, judge, tell)
        with clock("judge"):
            best.put_back()
            table.append(judge.row("student", student))
            answers["after"] = judge.answers(student)
            tell("judge", 2, 2, {})
        if alone is not None:
            with clock("baseline"):
                train_alone(settings, task, alone, steps, judge, tell)
                table.append(judge.row("CE alone", alone))

        with clock("save"):
            save_student(student, task.student.tokenizer, folder.path / "student", table)
            if isinstance(distiller.source, Routed) and distiller.source.router is not None:
                distiller.source.mixture.save_router(folder.path / "router.safetensors")
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
    train_set = _train_text(settings)
    most = _max_bytes(settings)
    if settings.eval_path is None:
        eval_set = open_text(settings.data_path, "test", max_bytes=most)
    else:
        eval_set = open_text(settings.eval_path, "all", max_bytes=most)
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
        folders = sorted(Path(str(settings.teacher_cache)).glob("draw_*"))
        folders = folders or [Path(str(settings.teacher_cache))]
        caches = [TeacherCache.open(folder, expect=wanted) for folder in folders]
        _check_divergence(settings, caches[0].fingerprint.method)
        teacher = dataclasses.replace(teacher, model=None)  # its memory is what the cache spares
    if isinstance(eval_blocks, AlignedBlocks):
        sides = eval_blocks.student, eval_blocks.teacher
    else:
        sides = eval_blocks, eval_blocks
    sides = [_first_rows(side, settings.eval_rows) for side in sides]
    return Task(precision, train_set, eval_set, student, teacher, frozen, caches, blocks, *sides)


def _train_text(settings: LanguageSettings) -> TextDataset:
    """What is learned from; all of it where the held-out text is a file of its own."""
    most = _max_bytes(settings)
    if settings.eval_path is None:
        return open_text(settings.data_path, "train", max_bytes=most)
    return open_text(settings.data_path, "train", held_out=0, max_bytes=most)


def _max_bytes(settings: LanguageSettings) -> int | None:
    return None if settings.max_megabytes is None else int(settings.max_megabytes * 1e6)


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


def _first_rows(blocks: Blocks, n: int) -> Blocks:
    names = ("ids", "counts", "documents", "row_characters")
    return dataclasses.replace(blocks, **{name: getattr(blocks, name)[:n] for name in names})


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
    experts = {"native": "", "ka": f" ka {settings.ka_lambda:g}"}.get(settings.router_mode, " all")
    weights = f"{teacher.weights_id}{experts}"
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
    texts = _train_text(settings)
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
    folder, draws = Path(str(settings.teacher_cache)), [""]
    if settings.router_mode == "ka":
        draws = [f"draw_{i}" for i in range(settings.ka_forwards)]
    caches = []
    for i, draw in enumerate(draws):
        answer = frozen
        if settings.router_mode != "native":
            answer = RoutedDraw(Routed(frozen, settings), i)
        caches.append(
            write(
                answer,
                blocks,
                folder / draw,
                fingerprint,
                vocabulary=len(teacher.tokenizer),
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
        routed = settings.router_mode != "native" or settings.router_weights is not None
        scale = task.precision.teacher == torch.float16
        source = Routed(frozen, settings, scale_loss=scale) if routed else Plain(frozen)
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
    """Looks at models through the same held-out rows, prompts and questions."""

    def __init__(self, settings: LanguageSettings, task: Task) -> None:
        self._settings, self._task = settings, task
        self._examples = task.eval_set.examples
        self._prompts = [_prompt(example) for example in self._examples[: settings.generations]]

    def look(self, model: Any) -> TokenScores:
        """Held-out scores of a model, beside the live teacher's word if there is one."""
        task, frozen = self._task, self._task.frozen
        alike = not isinstance(task.blocks, AlignedBlocks)
        return judge_tokens(
            model,
            task.teacher_eval_blocks if model is frozen else task.eval_blocks,
            teacher=frozen if alike and model is not frozen else None,
            batch_size=self._settings.per_device_batch_size,
            autocast=self._task.precision.autocast,
        )

    def row(self, name: str, model: Any) -> Row:
        """A row of the report's table."""
        row = self.look(model).table_row(name)
        asked, _ = judge_answers(
            model.model if isinstance(model, FrozenTeacher) else model,
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
        if self._task.frozen is not None:
            table.append(self.row("teacher", self._task.frozen))
            answers["teacher"] = self.answers(self._task.frozen)
        table.append(self.row("student before", student))
        return table, answers

    def _tokenizer(self, model: Any) -> Any:
        task = self._task
        lm = task.teacher if task.teacher is not None and model is task.frozen else task.student
        return lm.tokenizer

    def answers(self, model: Any) -> list[str]:
        """What a model writes after each prompt."""
        settings, tokenizer = self._settings, self._tokenizer(model)
        prompts = [prompt for prompt, _ in self._prompts]
        autocast = self._task.precision.autocast
        model = model.model if isinstance(model, FrozenTeacher) else model
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
