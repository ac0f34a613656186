"""The main job of the language mode: train, judge, save, and leave a run folder."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import shlex
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ssl_kd.datasets.aligned import AlignedBlocks
from ssl_kd.evaluate.language import LanguageJudge
from ssl_kd.evaluate.tokens import TokenScores
from ssl_kd.guard.diagnosis import Cause
from ssl_kd.guard.parts import TooFewHealthyParts
from ssl_kd.guard.precision import undisturbed
from ssl_kd.language.judging import judged_student, judged_teacher, make_judge
from ssl_kd.language.memory import estimate_memory
from ssl_kd.language.parallel import check_ranks
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.sources import Routed
from ssl_kd.language.step import Distiller, StudentStep, precision_of
from ssl_kd.language.task import (
    Progress,
    Task,
    make_distiller,
    prepare,
    without_router,
)
from ssl_kd.language.train import Row, train
from ssl_kd.ranks import Ranks, joined
from ssl_kd.teachers.causal import CausalLM, without_adapters
from ssl_kd.teachers.mixture import is_mixture
from ssl_kd.teachers.student import save_student
from ssl_kd.training.board import Board
from ssl_kd.training.clock import Clock
from ssl_kd.training.folder import RunFolder
from ssl_kd.training.stop import Signals
from ssl_kd.training.together import load_checkpoint, run_folder

logger = logging.getLogger(__name__)

DRY_STEPS = 5

T = TypeVar("T")


@undisturbed()
def run(settings: LanguageSettings, *, progress: Progress | None = None) -> Path:
    """Do the main job as the settings say; the run folder.

    Processes that torchrun started each call this with the same settings, and train one student:
    BATCH_SIZE is dealt to them, and the first writes the folder.

    Args:
        settings: all of them.
        progress: called as `progress(stage, done, total, info)`.

    Raises:
        SettingsError: teacher, student and text do not fit; or ranks and BATCH_SIZE or SHARD.
        InputError: teacher or student are not finite before step 0.
        Interrupted: told to stop by Ctrl-C or SIGTERM.
        TooFewHealthyParts: the student does not become healthy any more.
        RankLost: another rank does not answer.
    """
    with joined(settings.device) as ranks:
        return _run(settings, ranks, progress if progress and ranks.rank == 0 else _silent)


def _silent(stage: str, done: int, total: int, info: dict[str, Any]) -> None:
    """Nobody asked, or the first rank tells of the progress of all."""


def _run(settings: LanguageSettings, ranks: Ranks, tell: Progress) -> Path:
    clock, precision = Clock(), precision_of(settings.replace(device=ranks.device))
    logger.info("%s", precision)
    settings = _dry(settings) if settings.dry_run else settings
    check_ranks(settings, ranks)
    with run_folder(settings, ranks) as folder, Signals(folder) as signals:
        folder.write_config(settings, mode="language", precision=str(precision))
        settings = without_router(settings)
        with clock("prepare"):
            task = prepare(settings, precision, tell, ranks)
        settings = _decided(settings, task)
        ranks.from_first(partial(folder.keep_to, task.digest))
        folder.update_json("config.json", **_about(task), resolved=_resolved(settings))
        steps, student = n_steps(settings, len(task.blocks)), task.student.model
        table, generations = [], {}
        with clock("judge"):
            tell("judge", 0, 2, {})
            if task.teacher is not None:
                task, row, generations["teacher"] = judged_teacher(settings, task)
                table.append(row)
                folder.update_json("config.json", precision=str(task.precision))
        alone = copy.deepcopy(student) if settings.baseline else None
        # Where a piece is on each rank, the first saves the student from this copy.
        whole = copy.deepcopy(student) if settings.shard and ranks.rank == 0 else student
        distiller = make_distiller(settings, task, folder)
        distiller.trainee.inside(_say_memory, settings, task, folder)
        inside = partial(_by_first, ranks, distiller)
        mixture = distiller.source.mixture if isinstance(distiller.source, Routed) else None
        judge = make_judge(settings, task, nullcontext if mixture is None else mixture.as_it_came)
        with clock("judge"):
            table.append(inside(judged_student, settings, task, judge))
            generations["before"] = inside(judge.generations, student)
            tell("judge", 1, 2, {})
        task = task.without_teacher()
        with clock("train"), signals.between_steps():
            best = _train(settings, folder, task, distiller, steps, signals, judge, tell)
        _say_what_was_learned(distiller, best, steps)
        with clock("judge"):
            best.put_back()
            table.append(inside(judge.row, "student", student))
            generations["after"] = inside(judge.generations, student)
            tell("judge", 2, 2, {})
        with clock("save"):  # before the baseline, which may stop
            _save(settings, folder, task, distiller, whole, table)
        if alone is not None:
            with clock("baseline"):
                train_it = partial(train_alone, settings, task, alone, steps, judge, tell)
                table.append(dict.fromkeys(table[-1]) | _row_alone(train_it, alone, judge))
        folder.update_json(  # the last file: it says "finished"
            "metrics.json",
            table=table,
            best_step=best.step,
            steps=steps,
            events=folder.count_events(),
            generations=judge.side_by_side(generations),
            seconds=clock.seconds,
            **_facts(task, distiller, steps),
        )
    return folder.path


def _by_first(ranks: Ranks, distiller: Distiller, work: Callable[..., T], *arguments: Any) -> T:
    """What `work(*arguments)`, which asks the student, returns on the first rank, on all of them.

    A student in pieces can be asked by all ranks alone.
    """
    if not distiller.trainee.sharded:
        return ranks.from_first(partial(work, *arguments))
    found = distiller.trainee.inside(work, *arguments)
    return ranks.from_first(lambda: found)


def _save(
    settings: LanguageSettings,
    folder: RunFolder,
    task: Task,
    distiller: Distiller,
    whole: nn.Module,
    table: list[Row],
) -> None:
    """The student as a model's folder, and the teacher's router where one has learned."""
    path, tokenizer, source = folder.path / "student", task.student.tokenizer, distiller.source
    if distiller.trainee.sharded:
        weights = distiller.trainee.gathered(dict(distiller.student.named_parameters()))
        if task.ranks.rank == 0:
            whole.load_state_dict(weights, strict=False)  # it has its buffers

    def save() -> None:
        save_student(whole, tokenizer, path, table, merge=settings.lora_merge)
        if isinstance(source, Routed) and source.router is not None:
            source.mixture.save_router(folder.path / "router.safetensors")

    task.ranks.from_first(save)


def _say_what_was_learned(distiller: Distiller, best: Best, steps: int) -> None:
    """Warn of a training that did not help, and of loss terms that took no part in every step."""
    if best.step == 0:
        logger.warning(
            "training did not improve the held-out score: the student is saved as it was before "
            "step 0"
        )
    for name, learned in distiller.learned.items():
        if learned < steps:
            logger.warning("%s learned from %d of %d steps", name, learned, steps)


def _facts(task: Task, distiller: Distiller, steps: int) -> dict[str, Any]:
    """What `metrics.json` says beside the scores."""
    aligned = task.blocks if isinstance(task.blocks, AlignedBlocks) else None
    return {
        "mode": "language",
        "tokens": distiller.tokens,
        "success_rate": int(distiller.guard.updates[0]) / steps,
        "learned_from": distiller.learned,
        "cache": task.caches[0].facts() if task.caches else None,
        "alignment": None if aligned is None else aligned.statistics(),
    }


def _decided(settings: LanguageSettings, task: Task) -> LanguageSettings:
    """ROUTER_MODE where it was left to the teacher."""
    if settings.router_mode != "auto":
        return settings
    frozen = task.frozen if settings.align == "auto" else None
    mode = "sar" if frozen is not None and is_mixture(frozen.model) else "native"
    logger.info("ROUTER_MODE is %s, which auto means for this teacher", mode)
    return settings.replace(router_mode=mode)


def _resolved(settings: LanguageSettings) -> dict[str, Any]:
    """What became of settings that were left open."""
    return {
        "LEARNING_RATE": settings.peak_lr,
        "DIVERGENCE": settings.kind_of_divergence,
        "ROUTER_MODE": settings.router_mode,
    }


def _dry(settings: LanguageSettings) -> LanguageSettings:
    """Five steps that try everything once."""
    return settings.replace(
        max_steps=DRY_STEPS,
        epochs=None,
        teacher_steps=DRY_STEPS,
        eval_every=DRY_STEPS,
        checkpoint_every=DRY_STEPS,
        log_every=1,
        verbose_steps=DRY_STEPS,
        eval_rows=min(settings.eval_rows, 8),
        answer_prompts=min(settings.answer_prompts, 2),
        generations=min(settings.generations, 2),
    )


def n_steps(settings: LanguageSettings, rows: int) -> int:
    """Optimizer steps: EPOCHS over the rows if that is set, else MAX_STEPS."""
    if settings.epochs is None:
        return settings.max_steps
    per_step = settings.batch_size * settings.gradient_accumulation_steps
    steps = max(1, math.ceil(settings.epochs * rows / per_step))
    logger.info("EPOCHS %g of %d rows: %d steps", settings.epochs, rows, steps)
    return steps


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
            "validation_tokens": int(task.validation_blocks.counts.sum()),
            "validated_apart": task.validated_apart,
            "left_out": [*task.train_set.left_out, *own.left_out],
        },
    }


def _say_memory(settings: LanguageSettings, task: Task, folder: RunFolder) -> None:
    """Log what the run will need at its peak on each device, and note it for the report."""
    estimate = estimate_memory(
        task.student.model,
        task.frozen,
        batch_size=-(-settings.batch_size // task.ranks.world),
        block_size=settings.block_size,
        dtype=task.precision.student,
        accumulation_steps=settings.gradient_accumulation_steps,
        gradient_checkpointing=settings.gradient_checkpointing,
        device=task.precision.device,
        align=settings.align,
    )
    if settings.shard:
        pieces = ("teacher", "student", "optimizer", "guard")
        shares = {name: estimate.parts[name] / task.ranks.world for name in pieces}
        estimate = dataclasses.replace(estimate, parts={**estimate.parts, **shares})
    for line in ("memory at the peak of a step, about:", *str(estimate).splitlines()):
        logger.info("%s", line)
    folder.update_json("config.json", memory=dict(estimate.parts))


# --- training -------------------------------------------------------------------------------------


def _train(
    settings: LanguageSettings,
    folder: RunFolder,
    task: Task,
    distiller: Distiller,
    steps: int,
    signals: Signals,
    judge: LanguageJudge,
    tell: Progress,
) -> Best:
    """Train the student, from the last checkpoint if there is one; its best weights."""
    inside, team = partial(_by_first, task.ranks, distiller), distiller.team
    start, state = load_checkpoint(folder, task.ranks)
    best = Best(distiller)
    if not state or not state["best"]["weights"]:
        best.offer(0, inside(judge.validation, distiller.student))
    if state:
        distiller.load(state["distiller"])
        best.load(state["best"])
    folder.rewind(start)
    folder.become_latest()
    if start < settings.verbose_steps:
        logger.info("%s", _first_forward(settings, task))

    with Board(folder.path, settings.tensorboard and team.rank == 0) as board:

        def on_log(row: Row) -> None:
            folder.log(row)
            board.log(row["step"], {k: v for k, v in row.items() if v is not None})
            info = {k: row[k] for k in ("train_loss", "ce", "kd") if row[k] is not None}
            tell("train", row["step"], steps, info | {"tokens/s": row["tokens_per_second"]})

        def on_checkpoint(done: int) -> None:
            state = {"distiller": distiller.state(), "best": best.state()}
            folder.save_checkpoint(done, state)

        def on_eval(done: int) -> None:
            scores = inside(judge.validation, distiller.student)
            best.offer(done, scores)
            found = scores.table_row("student")
            folder.log({"step": done, "eval": found})
            board.log(done, {f"eval/{k}": v for k, v in found.items() if isinstance(v, float)})

        try:
            train(
                distiller,
                task.blocks,
                steps,
                start=start,
                on_step=partial(_say_step, settings),
                on_log=on_log,
                on_eval=on_eval,
                on_checkpoint=on_checkpoint,
                should_stop=lambda: team.told_to_stop(signals, "before a step"),
            )
            team.told_to_stop(signals, "after the last step")
        except TooFewHealthyParts as error:
            raise TooFewHealthyParts(_why(error, settings, distiller)) from error
    return best


def _say_step(settings: LanguageSettings, step: int, result: StudentStep) -> None:
    """Log the first steps."""
    if step < settings.verbose_steps:
        kd = "" if result.kd is None else f", kd {result.kd:.4f}"
        words = (step + 1, result.ce, kd, result.grad_norm)
        logger.info("step %d: ce %.4f%s, gradient norm %.3g", *words)


def _why(error: TooFewHealthyParts, settings: LanguageSettings, distiller: Distiller) -> str:
    """Why the run stopped: each cause that was found, the first recorded fault, and what to try."""
    events = distiller.guard.events
    causes = [event for event in events.events if event.action == "explained"]
    once = {e.reason: f"{e.part}, step {e.step}: {e.reason}" for e in reversed(causes)}
    lines = [str(error), *reversed(once.values())]
    if tries := advice(settings, distiller):
        lines.append(tries)
    if bundles := distiller.witness.bundles():
        lines.append(f"ssl_kd replay {shlex.quote(str(bundles[0]))} runs the first fault again")
    return "\n".join(lines)


def _first_forward(settings: LanguageSettings, task: Task) -> str:
    """What goes into the loss, in one line."""
    sides = {"student": task.student.model}
    if task.frozen is not None:
        sides["teacher"] = task.frozen.model
    rows = f"{settings.batch_size}, {settings.block_size}"
    heads = {who: without_adapters(lm).get_output_embeddings() for who, lm in sides.items()}
    logits = ", ".join(f"{who} [{rows}, {len(head.weight)}]" for who, head in heads.items())
    return (
        f"logits: {logits}; temperature {settings.temperature:g}; weights: "
        f"ce {settings.alpha_ce:g}, kd {settings.alpha_kd:g}"
    )


class Best:
    """The trained weights with the best held-out likelihood so far, on the first rank's CPU."""

    def __init__(self, distiller: Distiller, name: str = "student") -> None:
        self._student, self._name, self._trainee = distiller.student, name, distiller.trainee
        self._holds = distiller.team.rank == 0
        self.step, self.nll, self._weights = 0, float("inf"), {}

    def offer(self, step: int, scores: TokenScores) -> None:
        """Keep the weights as they are now if they are better than those that were kept."""
        nll = scores.nll
        better = not self._weights or (nll is not None and nll < self.nll)
        if better := better and self._trainee.is_finite():
            self.step, self.nll = step, float("inf") if nll is None else nll
            trained = [(n, p) for n, p in self._student.named_parameters() if p.requires_grad]
            weights = self._trainee.gathered({name: p.detach() for name, p in trained})
            if self._holds:
                self._weights = {name: p.to("cpu", copy=True) for name, p in weights.items()}
            else:
                self._weights = dict.fromkeys(weights, torch.empty(0))
        known = "unknown" if scores.perplexity is None else f"{scores.perplexity:.4g}"
        words = "; the best so far" if better and step else ""
        logger.info("%s: held-out perplexity %s at step %d%s", self._name, known, step, words)

    @torch.no_grad()
    def put_back(self) -> None:
        """Give the student its best weights; where it is whole on each rank, the first's."""
        for name, p in self._student.named_parameters():
            if name in self._weights and (self._holds or self._trainee.sharded):
                p.copy_(self._trainee.spread(self._weights[name], p))

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"step": self.step, "nll": self.nll, "weights": self._weights}

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave; where that kept nothing yet, what is kept here stays."""
        if state["weights"]:
            self.step, self.nll, self._weights = state["step"], state["nll"], state["weights"]


def train_alone(
    settings: LanguageSettings,
    task: Task,
    student: nn.Module,
    steps: int,
    judge: LanguageJudge,
    tell: Progress,
) -> None:
    """The same student by cross-entropy alone: the same batches, steps and learning rates."""
    alone = settings.replace(alpha_ce=1.0, alpha_kd=0.0, legacy_clamp=None)
    distiller = Distiller(student, alone, task.precision)

    def on_step(step: int, result: StudentStep) -> None:
        tell("baseline", step + 1, steps, {"ce": result.ce})

    best = Best(distiller, "CE alone")

    def on_eval(done: int) -> None:
        best.offer(done, _by_first(task.ranks, distiller, judge.validation, student))

    on_eval(0)
    train(distiller, task.blocks, steps, on_step=on_step, on_eval=on_eval)
    best.put_back()


def _row_alone(train_it: Callable[[], None], student: nn.Module, judge: LanguageJudge) -> Row:
    """The table's row of the student once it is trained; without scores where that stops."""
    try:
        train_it()
    except TooFewHealthyParts as error:
        words = "the baseline (cross-entropy alone) stopped, and is not evaluated: %s"
        logger.warning(words, error)
        return {"name": "CE alone"}
    return judge.row("CE alone", student)


def advice(settings: LanguageSettings, distiller: Distiller) -> str:
    """Settings that a run which stopped could be tried with, as flags; empty where none would help.

    Those that the diagnoses name; without a diagnosis those that calm any training.
    """
    found = [d for d in distiller.witness.diagnoses if d.cause != Cause.UNKNOWN]
    tries: dict[str, Any] = {change.setting: change.value for d in found for change in d.advice}
    if not found:
        tries = {"learning_rate": min(settings.peak_lr / 5, settings.usual_lr)}
        if settings.clip_grad is None or settings.clip_grad > 0.5:
            tries["clip_grad"] = 0.5
        if settings.grad_norm_threshold is not None:
            tries["grad_norm_threshold"] = None
        if distiller.source is not None and settings.temperature < 2:
            tries["temperature"] = 2.0
        if distiller.precision.student != torch.float32:
            tries["model_dtype"] = "float32"
    flags = [f"--{n} {v:.2g}" if isinstance(v, float) else f"--{n} {v}" for n, v in tries.items()]
    return f"Settings to try: {' '.join(flags)}" if flags else ""
