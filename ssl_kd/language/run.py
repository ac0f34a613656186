"""The main job of the language mode: train, judge, save, and leave a run folder."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from ssl_kd.evaluate.language import LanguageJudge
from ssl_kd.guard.parts import TooFewHealthyParts
from ssl_kd.guard.precision import default_torch_state
from ssl_kd.language.best_student import Best
from ssl_kd.language.judge_in_run import judged_student, judged_teachers, make_judge
from ssl_kd.language.parallel import check_ranks
from ssl_kd.language.prepare import NO_MODELS, InMemoryModels, Task, make_distiller, prepare
from ssl_kd.language.presets import TEXT_ALONE
from ssl_kd.language.rollouts import writer
from ssl_kd.language.routed import Routed
from ssl_kd.language.run_record import (
    FIRST_STEPS,
    about,
    facts,
    first_forward,
    log_training_outcome,
    made_by,
    say_step,
    why,
)
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.step import Distiller, StudentStep, precision_of
from ssl_kd.language.train import Row, train
from ssl_kd.teachers.mixture import is_mixture
from ssl_kd.teachers.student import save_student
from ssl_kd.training.board import Board, check_boards
from ssl_kd.training.clock import Clock, Progress, no_progress
from ssl_kd.training.folder import RunFolder
from ssl_kd.training.process_group import load_checkpoint, run_folder
from ssl_kd.training.ranks import Ranks, joined
from ssl_kd.training.stop import Signals

logger = logging.getLogger(__name__)

T = TypeVar("T")


@default_torch_state()
def run(
    settings: LanguageSettings,
    *,
    progress: Progress = no_progress,
    given: InMemoryModels = NO_MODELS,
) -> Path:
    """Train, score and save a student by the settings; return the run folder.

    Processes that torchrun started each call this with the same settings, and train one student:
    BATCH_SIZE is dealt to them, and the first writes the folder.

    Args:
        settings: all of them.
        progress: called as `progress(stage, done, total, info)`.
        given: models in memory, where the settings name none.

    Raises:
        SettingsError: teacher, student and text do not fit; or ranks and BATCH_SIZE or SHARD.
        InputError: teacher or student are not finite before step 0.
        Interrupted: stopped by Ctrl-C or SIGTERM.
        TooFewHealthyParts: the student does not become healthy any more.
        RankLost: another rank does not answer.
    """
    with joined(settings.device) as ranks:
        return _run(settings, ranks, progress if ranks.rank == 0 else no_progress, given)


def _run(settings: LanguageSettings, ranks: Ranks, tell: Progress, given: InMemoryModels) -> Path:
    clock, precision = Clock(), precision_of(settings.replace(device=ranks.device))
    logger.info("%s", precision)
    settings = settings.dry() if settings.dry_run else settings
    check_ranks(ranks, settings.batch_size, shard=settings.shard)
    check_boards(settings.boards)
    settings.check_packages()
    with run_folder(settings, ranks) as folder, Signals(folder) as signals:
        folder.write_config(settings, mode="language", precision=str(precision))
        settings = settings.of_cache()
        with clock("prepare"):
            task = prepare(settings, precision, tell, ranks, given)
        task = _with_router_mode(task)
        settings = task.settings
        ranks.from_first(partial(folder.keep_to, task.digest))
        folder.update_json("config.json", **about(task))
        steps, student = settings.n_steps(len(task.blocks)), task.student.model
        logger.info("%d steps on %d rows", steps, len(task.blocks))
        with clock("judge"):
            tell("judge", 0, 2, {})
            task, table, generations = judged_teachers(task)
            folder.update_json("config.json", precision=str(task.precision))
        alone = copy.deepcopy(student) if settings.baseline else None
        # Where a piece is on each rank, the first saves the student from this copy.
        whole = copy.deepcopy(student) if settings.shard and ranks.rank == 0 else student
        distiller = make_distiller(task, folder)
        inside = partial(_by_first, ranks, distiller)
        mixture = distiller.source.mixture if isinstance(distiller.source, Routed) else None
        judge = make_judge(task, nullcontext if mixture is None else mixture.original_router)
        with clock("judge"):
            row, generations["before"] = inside(judged_student, task, judge)
            table.append(row)
            tell("judge", 1, 2, {})
        task = task.without_teacher()
        with clock("train"), signals.between_steps():
            best = _train(folder, task, distiller, steps, signals, judge, tell)
        log_training_outcome(distiller, best)
        with clock("judge"):
            best.put_back()
            row, generations["after"] = inside(judge.row, "student", student)
            table.append(row)
            tell("judge", 2, 2, {})
        with clock("save"):  # before the baseline, which may stop
            _save(folder, task, distiller, whole, table)
        if alone is not None:
            with clock("baseline"):
                train_it = partial(train_alone, task, alone, steps, judge, tell)
                table.append(dict.fromkeys(table[-1]) | _row_alone(train_it, alone, judge))
        folder.update_json(  # the last file: it marks the run as finished
            "metrics.json",
            table=table,
            best_step=best.step,
            steps=steps,
            events=folder.count_events(),
            generations=judge.side_by_side(generations),
            seconds=clock.seconds,
            **facts(task, distiller, steps),
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
    folder: RunFolder,
    task: Task,
    distiller: Distiller,
    whole: nn.Module,
    table: list[Row],
) -> None:
    """The student as a model's folder, and the teacher's router where one has learned."""
    path, tokenizer, source = folder.path / "student", task.student.tokenizer, distiller.source
    cut = task.settings.student_model.startswith("layers:")
    if distiller.trainee.sharded:
        weights = distiller.trainee.gathered(dict(distiller.student.named_parameters()))
        if task.ranks.rank == 0:
            whole.load_state_dict(weights, strict=False)  # it has its buffers

    def save() -> None:
        save_student(
            whole,
            tokenizer,
            path,
            table,
            processor=task.student.processor,
            base=task.teacher.name if cut and task.teacher is not None else "",
            made=made_by(task),
        )
        if isinstance(source, Routed) and source.router is not None:
            source.mixture.save_router(folder.path / "router.safetensors")

    task.ranks.from_first(save)


def _with_router_mode(task: Task) -> Task:
    """Decide ROUTER_MODE where it was left to the teacher."""
    settings = task.settings
    if settings.router_mode != "auto":
        return task
    frozen = task.frozen if settings.align == "auto" else None
    mode = "sar" if frozen is not None and is_mixture(frozen.model) else "native"
    logger.info("ROUTER_MODE is %s, which auto means for this teacher", mode)
    return replace(task, settings=settings.replace(router_mode=mode))


# --- training -------------------------------------------------------------------------------------


def _train(
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
    start, best = _begun(folder, task, distiller, judge)
    if start < FIRST_STEPS:
        logger.info("%s", first_forward(task))

    shown = ("train_loss", "ce", "kd", *(term.name for term in distiller.others))
    settings = task.settings
    boards = settings.boards if team.rank == 0 else ()
    with Board(folder.path, boards, settings.to_dict()) as board:

        def on_log(row: Row) -> None:
            folder.log(row)
            board.log(row["step"], {k: v for k, v in row.items() if v is not None})
            info = {k: row[k] for k in shown if row[k] is not None}
            tell("train", row["step"], steps, info | {"tokens/s": row["tokens_per_second"]})

        def on_checkpoint(done: int) -> object:
            state = {"distiller": distiller.state(), "best": best.state()}
            return folder.save_checkpoint(done, state)

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
                written=writer(distiller, task.blocks, task.student.tokenizer),
                on_step=say_step,
                on_log=on_log,
                on_eval=on_eval,
                on_checkpoint=on_checkpoint,
                should_stop=lambda: team.told_to_stop(signals, "before a step"),
            )
            team.told_to_stop(signals, "after the last step")
        except TooFewHealthyParts as error:
            raise TooFewHealthyParts(why(error, distiller)) from error
    return best


def _begun(
    folder: RunFolder, task: Task, distiller: Distiller, judge: LanguageJudge
) -> tuple[int, Best]:
    """The steps done and the best weights so far: of the last checkpoint if there is one."""
    start, state = load_checkpoint(folder, task.ranks)
    best = Best(distiller)
    if state:
        distiller.load(state["distiller"])
        best.load(state["best"])
    else:
        best.offer(0, _by_first(task.ranks, distiller, judge.validation, distiller.student))
    folder.rewind(start)
    folder.become_latest()
    return start, best


def train_alone(
    task: Task,
    student: nn.Module,
    steps: int,
    judge: LanguageJudge,
    tell: Progress,
) -> None:
    """The same student by cross-entropy alone: the same batches, steps and learning rates."""
    alone = task.settings.replace(**TEXT_ALONE)
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
    return judge.row("CE alone", student)[0]
