"""Run the language mode from its settings to a finished run folder."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from firstnan.parts import TooFewHealthyParts
from ssl_kd.core.memory import cache_clearing
from ssl_kd.core.precision import default_torch_state
from ssl_kd.core.runs.board import Board, check_boards
from ssl_kd.core.runs.clock import Clock, Progress, no_progress
from ssl_kd.core.runs.folder import RunFolder
from ssl_kd.core.runs.process_group import load_checkpoint, run_folder
from ssl_kd.core.runs.ranks import joined
from ssl_kd.core.runs.stop import Signals
from ssl_kd.core.settings.recipes import log_recipe
from ssl_kd.language.evaluate.judge import LanguageJudge
from ssl_kd.language.evaluate.judge_in_run import judge_student, judge_teachers, make_judge
from ssl_kd.language.evaluate.tokens import TokenScores
from ssl_kd.language.memory_plan import plan_of_run
from ssl_kd.language.models.student import save_student
from ssl_kd.language.preflight import check_before_loading
from ssl_kd.language.prepare import Prepared, make_distiller, prepare
from ssl_kd.language.rollouts import RolloutBatches, rollout_batches
from ssl_kd.language.rollouts.served import ServedSampler
from ssl_kd.language.run_record import (
    card_facts,
    config_facts,
    log_step,
    log_summary,
    log_training_outcome,
    metrics_facts,
    stop_message,
    write_left_out,
)
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.teachers.caching import with_automatic_cache
from ssl_kd.language.teachers.load import NO_MODELS, InMemoryModels
from ssl_kd.language.teachers.text_teacher import save_text_teacher
from ssl_kd.language.train.loop import Row, train
from ssl_kd.language.train.step import Distiller, check_ranks, precision_of

logger = logging.getLogger(__name__)


@default_torch_state()
def run(
    settings: LanguageSettings,
    *,
    progress: Progress = no_progress,
    models: InMemoryModels = NO_MODELS,
) -> Path:
    """Train, score and save a student; return the run folder.

    With torchrun, every process calls this with the same settings. All of them train one student:
    they divide the BATCH_SIZE rows among them, and the first one writes the folder. `progress` is
    called as `progress(stage, done, total, info)`.

    Raises:
        InputError: teacher, student, text and settings do not fit together, or the teacher or the
            student outputs NaN or infinity before training.
        Interrupted: Ctrl-C or SIGTERM stopped the run.
        TooFewHealthyParts: the student does not recover from its faults.
        RankLost: another rank does not respond.
    """
    with joined(settings.device) as ranks:
        progress = progress if ranks.rank == 0 else no_progress
        clock, precision = Clock(), precision_of(settings.replace(device=ranks.device))
        log_recipe(settings, logger)
        precision.log(logger)
        check_ranks(ranks, settings.batch_size, settings.router_mode)
        check_boards(settings.boards)
        settings.check_packages()
        plan = plan_of_run(settings, precision)
        checked = settings.with_cache_router()
        work = "run" if ranks.rank == 0 else "prepare"  # the first rank makes the folder
        texts = check_before_loading(checked, precision, models, work=work)
        settings = with_automatic_cache(settings, precision, progress, texts)
        with ExitStack() as stack:
            folder = stack.enter_context(run_folder(settings, ranks))
            signals = stack.enter_context(Signals(folder))
            facts = {"precision": str(precision), "memory_plan": plan}
            folder.write_config(settings, mode="language", **facts)
            with clock("prepare"):
                prepared = prepare(settings, precision, progress, ranks, models, texts)
            ranks.from_first(partial(folder.check_data, prepared.digest))
            folder.writer.update_json("config.json", **config_facts(prepared))
            if folder.writes:
                write_left_out(prepared, folder.path / "left_out.txt")
            steps = prepared.settings.n_steps(len(prepared.blocks))
            with clock("judge"):
                progress("judge", 0, 2, {})
                prepared, table, generations = judge_teachers(prepared)
                folder.writer.update_json("config.json", precision=str(prepared.precision))
            distiller = make_distiller(prepared, folder)
            judge = make_judge(prepared, distiller.teacher.as_loaded)
            with clock("judge"):
                before = partial(judge_student, prepared, judge)
                row, generations["before"] = ranks.from_first(before)
                table.append(row)
                progress("judge", 1, 2, {})
            log_summary(prepared, steps)
            boards = settings.boards if ranks.rank == 0 else ()
            options = boards, prepared.settings.to_dict(), folder.events
            board = stack.enter_context(Board(folder.path, *options))
            with clock("train"), signals.between_steps():
                best = _train(folder, prepared, distiller, steps, signals, judge, progress, board)
            log_training_outcome(distiller, best.step)
            with clock("judge"):
                best.put_back()
                after = partial(judge.row, "student", distiller.student)
                row, generations["after"] = ranks.from_first(after)
                table.append(row)
                board.log(steps, {f"final/{k}": v for k, v in row.items() if isinstance(v, float)})
                progress("judge", 2, 2, {})
            with clock("save"):
                _save(folder, prepared, distiller, table)
            folder.writer.update_json(  # the last file: it marks the run as finished
                "metrics.json",
                table=table,
                best_step=best.step,
                steps=steps,
                events=folder.count_events(),
                generations=judge.side_by_side(generations),
                seconds=clock.seconds,
                **metrics_facts(prepared, distiller),
            )
        return folder.path


def _train(
    folder: RunFolder,
    prepared: Prepared,
    distiller: Distiller,
    steps: int,
    signals: Signals,
    judge: LanguageJudge,
    progress: Progress,
    board: Board,
) -> BestStudent:
    """Train the student, from the last checkpoint if there is one; return the best weights."""
    ranks = distiller.ranks
    settings = prepared.settings
    best = BestStudent(distiller)

    def offer(done: int) -> TokenScores:
        scores = prepared.ranks.from_first(partial(judge.validation, distiller.student))
        best.offer(done, scores)
        return scores

    start, state = load_checkpoint(folder, prepared.ranks)
    if state:
        distiller.load(state["distiller"])
        best.load(state["best"])
    else:
        offer(0)
    folder.writer.rewind(start)
    folder.writer.become_latest()
    board.resume(start)

    def on_log(row: Row) -> None:
        folder.writer.log(row)
        board.log(row["step"], {k: v for k, v in row.items() if v is not None})
        losses = {k: row[k] for k in ("train_loss", "ce", "kd") if row[k] is not None}
        speed = {"tokens/s": row["tokens_per_second"]}
        progress("train", row["step"], steps, losses | speed)

    def on_checkpoint(done: int) -> object:
        state = {"distiller": distiller.state(), "best": best.state()}
        return folder.writer.save_checkpoint(done, state)

    def on_eval(done: int) -> None:
        row = offer(done).table_row("student")
        folder.writer.log({"step": done, "eval": row})
        board.log(done, {f"eval/{k}": v for k, v in row.items() if isinstance(v, float)})

    try:
        train(
            distiller,
            prepared.blocks,
            steps,
            start=start,
            rollouts=_rollouts(distiller, prepared, folder.path / "rollout_weights"),
            on_step=log_step,
            on_log=on_log,
            on_eval=on_eval,
            on_checkpoint=on_checkpoint,
            should_stop=lambda: ranks.any_signal(signals, "before a step"),
            after_step=cache_clearing(
                settings.clear_cache_every_step,
                distiller.precision.device,
                "GRADIENT_CHECKPOINTING, or a lower BATCH_SIZE with more "
                "GRADIENT_ACCUMULATION_STEPS",
            ),
        )
        ranks.any_signal(signals, "after the last step")
    except TooFewHealthyParts as error:
        raise TooFewHealthyParts(stop_message(error, distiller)) from error
    return best


def _rollouts(distiller: Distiller, prepared: Prepared, weights: Path) -> RolloutBatches | None:
    """Return what makes batches of continuations; a server gets its weights in folder `weights`."""
    rollouts = rollout_batches(distiller, prepared.blocks, prepared.student.tokenizer)
    if rollouts is not None and (url := prepared.settings.rollout_url):
        dtype = distiller.precision.student
        rollouts.sample = ServedSampler(url, rollouts.sample, dtype, weights, prepared.ranks)
    return rollouts


def _save(folder: RunFolder, prepared: Prepared, distiller: Distiller, table: list[Row]) -> None:
    """Save the student as a model folder, and the teacher's router if it was trained."""
    student, teachers = prepared.student, prepared.teacher.lms
    is_cut = prepared.settings.student_model.startswith("layers:")

    def save() -> None:
        save_student(
            distiller.student,
            student.tokenizer,
            folder.path / "student",
            table,
            processor=student.processor,
            base=teachers[0].name if is_cut and teachers else "",
            made=card_facts(prepared, distiller, folder.count_events()),
        )
        wrote = teachers[0] if prepared.settings.teacher_text else None
        save_text_teacher(folder.path / "student", student, wrote)
        distiller.teacher.save(folder.path)

    prepared.ranks.from_first(save)


class BestStudent:
    """The trained weights with the best held-out likelihood so far, on the first rank's CPU.

    If the student trains only on its own continuations, the latest weights are stored instead,
    because the likelihood of other text does not measure their progress.
    """

    def __init__(self, distiller: Distiller) -> None:
        self._student, self._is_first = distiller.student, distiller.ranks.rank == 0
        self._latest = not distiller.settings.learns_text
        self.step = 0
        self.nll = float("inf")
        self._weights = {}
        self._is_empty = True

    def offer(self, step: int, scores: TokenScores) -> None:
        """Store the current weights if they are finite and score better than the stored ones."""
        nll = scores.nll
        better = self._is_empty or (nll is not None and (self._latest or nll < self.nll))
        if better := better and all(bool(p.isfinite().all()) for p in self._student.parameters()):
            self.step, self.nll = step, float("inf") if nll is None else nll
            self._is_empty = False
            trained = [(n, p) for n, p in self._student.named_parameters() if p.requires_grad]
            if self._is_first:
                self._weights = {name: p.detach().to("cpu", copy=True) for name, p in trained}
        perplexity = "unknown" if scores.perplexity is None else f"{scores.perplexity:.4g}"
        note = "; saved" if self._latest else "; the best so far"
        note = note if better and step else ""
        logger.info("student: held-out perplexity %s at step %d%s", perplexity, step, note)

    @torch.no_grad()
    def put_back(self) -> None:
        """Load the best weights into the student."""
        for name, p in self._student.named_parameters():
            if name in self._weights:
                p.copy_(self._weights[name])

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"step": self.step, "nll": self.nll, "weights": self._weights}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the state that `state` returned."""
        self.step = state["step"]
        self.nll = state["nll"]
        self._weights = state["weights"]
        self._is_empty = False
