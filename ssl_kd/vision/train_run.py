"""The training of a run: from its last checkpoint, with all that it sees kept in the run folder."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from ssl_kd.errors import InputError
from ssl_kd.guard.events import Event
from ssl_kd.guard.parts import TooFewHealthyParts
from ssl_kd.guard.precision import Precision
from ssl_kd.settings import SettingsError
from ssl_kd.store import EmbeddingStore, kept_neighbours
from ssl_kd.store.fingerprint import Fingerprint
from ssl_kd.training.board import Board
from ssl_kd.training.clock import Progress
from ssl_kd.training.fault_bundle import FlightRecorder
from ssl_kd.training.folder import RunFolder, RunFolderError
from ssl_kd.training.loop import run_loop
from ssl_kd.training.process_group import ReadOnlyRunFolder, load_checkpoint
from ssl_kd.training.ranks import following
from ssl_kd.training.stop import Signals
from ssl_kd.vision.context import RunContext
from ssl_kd.vision.convergence import Convergence
from ssl_kd.vision.fit import Plan, make_plan, make_trainer
from ssl_kd.vision.projection import Projection
from ssl_kd.vision.ranks import HeadRanks, RankHeads
from ssl_kd.vision.replay import bundle_of
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.step import HeadTrainer
from ssl_kd.vision.train import HeadFault, LogRecord
from ssl_kd.vision.training_rows import Source

# What TensorBoard shows of a log record.
DRAWN = ("learning_rate", "healthy", "success_rate", "samples_per_second", "loss", "grad_norm")


@contextlib.contextmanager
def recorded(
    context: RunContext, settings: VisionSettings, trainer: HeadTrainer, plan: Plan
) -> Iterator[tuple[Callable[[LogRecord], object], Callable[[int], object]]]:
    """Keep all that a training sees in the run folder, whose logs begin anew after its last step.

    Args:
        context: of the run.
        settings: of the run.
        trainer: of all heads; with several ranks, of rank 0's.
        plan: what is learned from, and for how long.

    Yields:
        `on_log` and `on_checkpoint` for the loop.

    Raises:
        TooFewHealthyParts: that of the training; the message names the first fault's bundle.
    """
    folder, together = context.folder, context.together
    saved = {} if plan.until is None else plan.until.tensors()

    def on_checkpoint(step: int) -> object:
        mine = trainer.tensors()
        whole = mine if together is None else together.gathered(mine)
        return folder.save_checkpoint(step, whole | saved)

    with Board(folder.path, ["tensorboard"]) as board:
        try:
            yield _logging(folder, board, plan, settings.n_heads, context.tell), on_checkpoint
        except TooFewHealthyParts as error:
            bundles = FlightRecorder(folder.path / "faults").bundles()
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


def fault_recorder(
    folder: Path, trainer: HeadTrainer, settings: VisionSettings
) -> Callable[[HeadFault], None]:
    """Return what keeps the first fault of each head in `faults` of a run's folder."""
    recorder = FlightRecorder(folder / "faults")

    def on_fault(fault: HeadFault) -> None:
        if recorder.wants(fault.event.part):
            recorder.record(bundle_of(trainer, fault, dataclasses.asdict(settings)))

    return on_fault


def load_last(
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
        together.caught = signals.caught
        with signals.between_steps():
            _train_beside(settings, together, precision, found)
            ranks.from_first(_nothing)  # its answer, its scores, its files
    return found.path


def _train_beside(
    settings: VisionSettings, together: HeadRanks, precision: Precision, found: LeaderResult
) -> None:
    if differ := [n for n, v in settings.to_dict().items() if v != found.settings.get(n)]:
        raise SettingsError(
            f"rank {together.ranks.rank} has other settings than rank 0 ({', '.join(differ)}): "
            "start every rank with the same flags and the same config.py"
        )
    store = EmbeddingStore.open(found.store, "train", expect=found.fingerprint, verify=False)
    gather = Source(store, found.projection, found.rows).on(precision.device)
    dim, mine = found.projection.dim, together.heads
    trainer = make_trainer(settings, dim, found.n_clusters, precision, mine)
    neighbours = _neighbours(settings.neighbours, store, found)
    plan = make_plan(settings, trainer, neighbours, gather, together.of_all)
    together.done = load_last(ReadOnlyRunFolder(found.path), trainer, plan.until, together)
    on_fault = fault_recorder(found.path, trainer, settings)
    with together.overheard():
        learner = RankHeads(
            together, settings.log_every, trainer, plan, gather, _ignored, on_fault, found.clusters
        )
        run_loop(
            learner,
            start=together.done,
            log_every=settings.log_every,
            checkpoint_every=settings.checkpoint_every,
            on_log=_ignored,
            on_checkpoint=lambda step: together.gathered(trainer.tensors()),
            should_stop=learner.should_stop,
        )
    if not together.stopping:
        together.whole(trainer)


def _neighbours(k: int, store: EmbeddingStore, found: LeaderResult) -> Tensor:
    """Those that rank 0 sent, or has just checked and left beside the embeddings.

    Raises:
        InputError: this rank does not see them there.
    """
    if found.neighbours is not None:
        return found.neighbours
    kept = kept_neighbours(store, min(k, store.n - 1), verify=False)
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
