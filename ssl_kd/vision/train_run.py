"""The training of a run: from its last checkpoint, with all that it sees kept in the run folder."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from ssl_kd.errors import InputError
from ssl_kd.guard.events import Event
from ssl_kd.guard.parts import TooFewHealthyParts
from ssl_kd.guard.precision import Precision
from ssl_kd.guard.recorder import FlightRecorder
from ssl_kd.settings import SettingsError
from ssl_kd.store import EmbeddingStore, kept_neighbours
from ssl_kd.store.fingerprint import Fingerprint
from ssl_kd.training.board import Board
from ssl_kd.training.clock import Progress
from ssl_kd.training.folder import RunFolder, RunFolderError
from ssl_kd.training.process_group import ReadOnlyRunFolder, load_checkpoint
from ssl_kd.training.ranks import following
from ssl_kd.training.stop import Signals
from ssl_kd.vision.convergence import Convergence
from ssl_kd.vision.fit import Plan, make_plan, make_trainer
from ssl_kd.vision.projection import Projection
from ssl_kd.vision.ranks import HeadRanks, train_together
from ssl_kd.vision.replay import bundle_of
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.step import HeadTrainer
from ssl_kd.vision.train import Gather, HeadFault, LogRecord, train
from ssl_kd.vision.training_rows import Source

# What TensorBoard shows of a log record.
DRAWN = ("learning_rate", "healthy", "success_rate", "samples_per_second", "loss", "grad_norm")


def train_recorded(
    settings: VisionSettings,
    folder: RunFolder,
    trainer: HeadTrainer,
    plan: Plan,
    gather: Gather,
    clusters: Tensor | None,
    signals: Signals,
    tell: Progress,
    together: HeadRanks | None,
) -> int:
    """Train all heads, from the last checkpoint if there is one; the number of steps done.

    Args:
        settings: of the run.
        folder: its files.
        trainer: of all heads; with several ranks, of rank 0's.
        plan: what is learned from, and for how long.
        gather: reads embeddings, projected.
        clusters: as in `train`.
        signals: tell it to stop.
        tell: shows progress.
        together: the ranks; None for a process by itself.

    Raises:
        RunFolderError: the checkpoint does not fit these heads.
        TooFewHealthyParts: training cannot continue; the message names the first fault's bundle.
    """
    until = plan.until
    start = _loaded(folder, trainer, until, together)
    folder.rewind(start)
    folder.become_latest()
    saved = {} if until is None else until.tensors()

    def on_checkpoint(step: int) -> object:
        mine = trainer.tensors()
        whole = mine if together is None else together.gathered(mine)
        return folder.save_checkpoint(step, whole | saved)

    more: dict[str, Any] = {"should_stop": lambda: bool(signals.caught)}
    if together is not None:
        together.caught, more = signals.caught, {"together": together}
    recorder = FlightRecorder(folder.path / "faults")
    with Board(folder.path, ["tensorboard"]) as board:
        try:
            return (train if together is None else train_together)(
                trainer=trainer,
                sampler=plan.sampler,
                gather=gather,
                steps=plan.steps,
                until=until,
                clusters=clusters,
                start=start,
                log_every=settings.log_every,
                checkpoint_every=settings.checkpoint_every,
                on_log=_logging(folder, board, plan, settings.n_heads, tell),
                on_events=folder.events.extend,
                on_fault=_recording(recorder, trainer, settings),
                on_checkpoint=on_checkpoint,
                **more,
            )
        except TooFewHealthyParts as error:
            bundles = recorder.bundles()
            if not bundles:
                raise
            way = f"ssl_kd replay {shlex.quote(str(bundles[0]))}"
            raise TooFewHealthyParts(f"{error}. {way} explains the first fault") from error


def _logging(
    folder: RunFolder, board: Board, plan: Plan, n_heads: int, tell: Progress
) -> Callable[[LogRecord], None]:
    def on_log(record: LogRecord) -> None:
        row = dataclasses.asdict(record)
        folder.log(row)
        board.log(record.step, {name: row[name] for name in DRAWN})
        finite = [v for v in record.loss if abs(v) < float("inf")]
        mean = sum(finite) / len(finite) if finite else float("nan")
        info = {"loss": mean, "healthy": f"{record.healthy}/{n_heads}"}
        tell("train", record.step, plan.steps if plan.until is None else plan.until.steps, info)

    return on_log


def _recording(
    recorder: FlightRecorder, trainer: HeadTrainer, settings: VisionSettings
) -> Callable[[HeadFault], None]:
    def on_fault(fault: HeadFault) -> None:
        if recorder.wants(fault.event.part):
            recorder.record(bundle_of(trainer, fault, dataclasses.asdict(settings)))

    return on_fault


def _loaded(
    folder: RunFolder, trainer: HeadTrainer, until: Convergence | None, together: HeadRanks | None
) -> int:
    """The step of the last checkpoint, which these have taken over; 0 where there is none."""
    if together is None:
        start, tensors = folder.load_checkpoint()
    else:
        start, tensors = load_checkpoint(folder, together.ranks)
    if tensors:
        try:
            trainer.load(tensors if together is None else together.own(tensors))
            if until is not None:
                until.load(tensors)
        except ValueError as error:
            raise RunFolderError(
                f"checkpoint/step_{start:09d}.pt of {folder.path} does not fit this version of the "
                f"library or these heads: {error}. Start a new run without --resume"
            ) from error
    return start


@dataclasses.dataclass(frozen=True)
class LeaderResult:
    """What rank 0 found before the training, for the others.

    Attributes:
        path: the run folder.
        settings: of the run.
        store: the folder of the training embeddings, which every rank reads.
        fingerprint: of these.
        projection: how the heads see them.
        rows: those of them that training sees, in this order; None: all.
        n_clusters: K.
        neighbours: `[n, k]` integer, nearest first; None: those kept beside the embeddings, which
            each rank maps.
        clusters: as in `train`.
    """

    path: Path
    settings: dict[str, Any]
    store: Path
    fingerprint: Fingerprint
    projection: Projection
    rows: Tensor | None
    n_clusters: int
    neighbours: Tensor | None
    clusters: Tensor | None


class _LeaderRun:
    """A run that is rank 0's to speak of."""

    path, trained = Path(), False


def follow(settings: VisionSettings, together: HeadRanks) -> Path:
    """Train some of the heads of the run that rank 0 leads, until that has ended.

    Args:
        settings: the same as rank 0's.
        together: the ranks.

    Returns:
        The run folder.

    Raises:
        SettingsError: rank 0 has other settings.
        RankStopped: rank 0 stopped.
        RankLost: it died.
    """
    ranks = together.ranks
    precision = Precision.for_device(ranks.device, settings.use_fp16)
    with following(), Signals(_LeaderRun()) as signals:
        found: LeaderResult | Path = ranks.from_first(_nothing)
        if isinstance(found, Path):  # of a run that is finished
            return found
        with signals.between_steps():
            _follow(settings, together, precision, found, signals)
    return found.path


def _follow(
    settings: VisionSettings,
    together: HeadRanks,
    precision: Precision,
    found: LeaderResult,
    signals: Signals,
) -> None:
    ranks = together.ranks
    if differ := [n for n, v in settings.to_dict().items() if v != found.settings.get(n)]:
        raise SettingsError(
            f"rank {ranks.rank} has other settings than rank 0 ({', '.join(differ)}): start every "
            "rank with the same flags and the same config.py"
        )
    store = EmbeddingStore.open(found.store, "train", expect=found.fingerprint, verify=False)
    source = Source(store, found.projection, found.rows)
    gather = source.on(precision.device)
    together.caught = signals.caught
    dim = found.projection.dim
    trainer = make_trainer(settings, dim, found.n_clusters, precision, together.heads)
    plan = make_plan(
        settings, trainer, _neighbours(settings, store, found), gather, together.of_all
    )
    start = _loaded(ReadOnlyRunFolder(found.path), trainer, plan.until, together)
    with together.overheard():
        train_together(
            together,
            trainer,
            plan.sampler,
            gather,
            plan.steps,
            until=plan.until,
            clusters=found.clusters,
            start=start,
            log_every=settings.log_every,
            checkpoint_every=settings.checkpoint_every,
            on_log=_ignored,
            on_events=_ignored,
            on_fault=_recording(FlightRecorder(found.path / "faults"), trainer, settings),
            on_checkpoint=lambda step: together.gathered(trainer.tensors()),
        )
    if not together.stopping:
        together.whole(trainer)
    ranks.from_first(_nothing)  # its answer, its scores, its files


def _neighbours(settings: VisionSettings, store: EmbeddingStore, found: LeaderResult) -> Tensor:
    """Those that rank 0 sent, or has just checked and left beside the embeddings.

    Raises:
        InputError: this rank does not see them there.
    """
    if found.neighbours is not None:
        return found.neighbours
    kept = kept_neighbours(store, min(settings.neighbours, store.n - 1), verify=False)
    if kept is None:
        raise InputError(
            f"{store.folder} lacks the neighbours that rank 0 found there: EMBEDDINGS_DIR has to"
            " be one folder for all ranks"
        )
    return kept


def _nothing() -> Any:
    """Is rank 0's to do."""
    raise AssertionError("rank 0 does this")


def _ignored(told: LogRecord | list[Event]) -> None:
    """Is rank 0's to write."""
