"""Train heads on a store of embeddings, alone or with other processes, and form the model."""

from __future__ import annotations

import dataclasses
import logging
import math
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from firstnan.parts import TooFewHealthyParts
from ssl_kd.core.files import sha256_file
from ssl_kd.core.memory import cache_clearing
from ssl_kd.core.precision import Precision
from ssl_kd.core.runs.board import Board
from ssl_kd.core.runs.clock import Clock, Progress, no_progress
from ssl_kd.core.runs.fault_bundle import FlightRecorder
from ssl_kd.core.runs.folder import RunFolder, RunFolderError
from ssl_kd.core.runs.loop import run_loop
from ssl_kd.core.runs.process_group import load_checkpoint
from ssl_kd.core.runs.ranks import following
from ssl_kd.core.runs.stop import Signals
from ssl_kd.core.runs.writer import NoWriter
from ssl_kd.core.settings import SettingsError
from ssl_kd.core.shards.fingerprint import Fingerprint
from ssl_kd.vision.cache import EmbeddingStore, neighbors_in_memory
from ssl_kd.vision.fit import form_answer, make_trainer
from ssl_kd.vision.model import DIGEST, ClusterModel
from ssl_kd.vision.model_parts import Projection
from ssl_kd.vision.partition import GraphAnswer, Partitions, partitions_of
from ssl_kd.vision.ranks import HeadRanks, RankHeadsLearner
from ssl_kd.vision.replay import bundle_of
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.stages import Stages, Starts, first_of
from ssl_kd.vision.train.learner import HeadFault, HeadsLearner, LogRecord
from ssl_kd.vision.train.step import HeadTrainer
from ssl_kd.vision.training_rows import TrainingRows, nearest_in_graph

logger = logging.getLogger(__name__)

# Fields of a log record that a board shows.
ON_BOARD = ("loss", "grad_norm", "learning_rate", "healthy", "success_rate", "samples_per_second")


@dataclasses.dataclass(frozen=True)
class RunContext:
    """The objects that every stage of one run uses."""

    settings: VisionSettings
    folder: RunFolder
    precision: Precision
    clock: Clock
    signals: Signals
    progress: Progress
    ranks: HeadRanks
    board: Board


@dataclasses.dataclass(frozen=True)
class TrainedHeads:
    """The trained heads, and the model formed from them."""

    trainer: HeadTrainer  # state of all heads
    model: ClusterModel
    chosen: Tensor  # numbers of the heads that vote, best first
    information: Tensor  # `[head]`, the mutual information by which heads are ranked
    departure: float | None  # share of samples on which the model leaves the partition
    partition: GraphAnswer | None  # of the neighbor graph; None if it was not searched
    about: dict[str, Any]  # entries for `metrics.json`


@dataclasses.dataclass(frozen=True)
class LeaderResult:
    """What rank 0 computes before training and sends to the other ranks."""

    path: Path  # of the run folder
    settings: dict[str, Any]
    store: Path  # folder of the training embeddings, which every rank reads
    fingerprint: Fingerprint
    projection: Projection
    rows: Tensor  # rows of the store in the order of training, first those of the graph
    n_clusters: int
    neighbors: Tensor  # `[n, k]`, of the samples in the graph
    others: Tensor | None  # `[m, k]`, in the graph, of the samples beyond it
    starts: Starts  # of all heads


def learn(context: RunContext, store: EmbeddingStore, n_clusters: int | None) -> TrainedHeads:
    """Train heads on the embeddings of `store`, and form the model from the best of them.

    If `n_clusters` is None, the number of clusters is chosen from the neighbor graph.
    """
    settings = context.settings
    clock = context.clock
    ranks = context.ranks
    rows = TrainingRows.fit(store, settings, n_clusters)
    if rows.unequal:
        logger.warning("%s", rows.unequal)
    with clock("neighbors"):
        neighbors, search = _find_neighbors(context, rows)
    with clock("graph"):
        device, report = context.precision.device, _reporter("graph", context.progress)
        inputs = neighbors, rows.embeddings, rows(torch.arange(rows.n)), device
        partitions = partitions_of(n_clusters, *inputs, settings.sizes, report)
        n_clusters, neighbors = partitions.n_clusters, partitions.neighbors
        partition, starts = first_of(partitions, settings)
        others = nearest_in_graph(rows, rows.n, len(rows.rows), neighbors.shape[1], device)
    with clock("train"):
        result = LeaderResult(
            path=context.folder.path.resolve(),
            settings=settings.to_dict(),
            store=store.folder.resolve(),
            fingerprint=store.fingerprint,
            projection=rows.projection,
            rows=rows.rows,
            n_clusters=n_clusters,
            neighbors=neighbors,
            others=others,
            starts=starts,
        )
        ranks.ranks.from_first(lambda: result)
        trainer, formed, about = _train(context, rows, neighbors, result, partitions)
        partition = partition or formed
    with clock("consensus"):
        context.progress("consensus", 0, 1, {})
        answered = form_answer(settings, trainer, neighbors, rows, rows.projection, partition)
        save_model(answered.model, context.folder)
        context.progress("consensus", 1, 1, {"heads": len(answered.chosen)})
    about |= {"neighbors": search, "columns": rows.unequal}
    return TrainedHeads(
        trainer,
        answered.model,
        answered.chosen,
        answered.information,
        answered.departure,
        partition,
        about,
    )


def follow(settings: VisionSettings, ranks: HeadRanks) -> Path:
    """Train this rank's heads of the run that rank 0 leads, and return the run folder."""
    precision = Precision.for_device(ranks.ranks.device, settings.use_fp16)
    with following(), Signals() as signals:
        leader: LeaderResult | Path = ranks.ranks.from_first(_only_rank_0)
        if isinstance(leader, Path):  # the run is already finished
            return leader
        of_leader = {name.lower(): value for name, value in leader.settings.items()}
        if differ := [n for n in settings.rules() if not settings.agrees(n, of_leader.get(n))]:
            raise SettingsError(
                f"rank {ranks.ranks.rank} has other settings than rank 0 "
                f"({', '.join(differ).upper()}): start every rank with the same flags and the same "
                "config.py"
            )
        store = EmbeddingStore.open(leader.store, "train", expect=leader.fingerprint, verify=False)
        rows = TrainingRows(store, leader.projection, leader.rows, len(leader.neighbors))
        folder = RunFolder(leader.path, NoWriter())
        context = RunContext(
            settings,
            folder,
            precision,
            Clock(),
            signals,
            no_progress,
            ranks,
            Board(folder.path, ()),
        )
        _train(context, rows, leader.neighbors, leader)
        with signals.between_steps():  # rank 0 forms the answer and writes the files
            ranks.ranks.from_first(_only_rank_0)
    return leader.path


def _train(
    context: RunContext,
    rows: TrainingRows,
    neighbors: Tensor,
    leader: LeaderResult,
    partitions: Partitions | None = None,
) -> tuple[HeadTrainer, GraphAnswer | None, dict[str, Any]]:
    """Train this rank's heads from the last checkpoint on; rank 0 has the `partitions`.

    Returns:
        The trainer, on rank 0 with the heads of all ranks; the answer in which heads voted, on rank
        0; and entries for `metrics.json`.
    """
    rows.load()  # before the memory for the heads is checked
    settings = context.settings
    folder = context.folder
    ranks = context.ranks
    dim, precision = rows.projection.dim, context.precision
    trainer = make_trainer(settings, dim, leader.n_clusters, precision, ranks.heads)
    ranks.caught = context.signals.caught
    with context.signals.between_steps():
        gather = rows.on(precision.device)
        recorder = FlightRecorder(folder.path / "faults")

        def on_fault(fault: HeadFault) -> None:
            if recorder.wants(fault.event.part):
                recorder.record(bundle_of(trainer, fault, dataclasses.asdict(settings)))

        calls = {"on_events": folder.events.extend, "on_fault": on_fault}
        stages = Stages(
            settings,
            trainer,
            neighbors,
            rows,
            leader.starts,
            partitions,
            others=leader.others,
            numbers=ranks.heads,
            of_ranks=ranks.gather,
            from_first=ranks.ranks.from_first,
        )
        options: dict[str, Any] = stages.first() | {"gather": gather} | calls
        if ranks.ranks.world == 1:
            learner = HeadsLearner(trainer, **options)
        else:
            learner = RankHeadsLearner(ranks, settings.log_every, trainer, **options)
        start = load_last(folder, learner, ranks)
        folder.writer.rewind(start)
        context.board.resume(start)
        folder.writer.become_latest()
        try:
            steps = run_loop(
                learner,
                start=start,
                log_every=settings.log_every,
                checkpoint_every=settings.checkpoint_every,
                on_log=partial(_log, context, learner),
                on_checkpoint=partial(_save, context, learner),
                should_stop=lambda: ranks.stopping,
                after_step=cache_clearing(
                    settings.clear_cache_every_step,
                    precision.device,
                    "a lower BATCH_SIZE, N_HEADS or HIDDEN_DIM",
                ),
            )
        except TooFewHealthyParts as error:
            if not (bundles := recorder.bundles()):
                raise
            command = f"ssl_kd replay {shlex.quote(str(bundles[0]))}"
            raise TooFewHealthyParts(f"{error}. To explain the first fault: {command}") from error
    trainer = ranks.gather_trainer(trainer)
    return (
        trainer,
        stages.formed,
        {
            "steps": steps,
            "convergence": learner.looks() or None,
            "success_rate": 1 - float(trainer.state.health.skipped.float().mean()) / max(steps, 1),
        },
    )


def _reporter(stage: str, progress: Progress) -> Callable[[int, int], None]:
    return lambda done, total: progress(stage, done, total, {})


def _find_neighbors(context: RunContext, rows: TrainingRows) -> tuple[Tensor, dict[str, Any]]:
    """Return `[n, k]` neighbors and how they were found."""
    k, device = min(context.settings.n_neighbors, rows.n - 1), context.precision.device
    report = _reporter("neighbors", context.progress)
    if rows.n < rows.store.n:
        logger.info("the neighbor graph holds %d of %d samples", rows.n, rows.store.n)
    embeddings = rows.embeddings(torch.arange(rows.n))
    neighbors, record = neighbors_in_memory(embeddings, k, device=device, progress=report)
    return neighbors, record | {"rows": rows.n}


def _log(context: RunContext, learner: HeadsLearner, record: LogRecord) -> None:
    """Write a log record into the run folder and to the board, and show the mean losses."""
    row = dataclasses.asdict(record)
    context.folder.writer.log(row)
    looks = learner.looks()
    for step in [at for at in looks if context.board.last_step < at <= record.step]:
        context.board.log(step, {"neighbor_information": looks[step]})
    context.board.log(record.step, {name: row[name] for name in ON_BOARD})
    info: dict[str, Any] = _mean_losses(record, context.settings.loss.rpartition(".")[2])
    info["healthy"] = f"{record.healthy}/{context.settings.n_heads}"
    context.progress("train", record.step, learner.steps, info)


def _mean_losses(record: LogRecord, name: str) -> dict[str, float]:
    """Return the mean of LOSS, called `name`, and of the cross-entropy, over the heads of each."""
    means = {}
    for of_loss, title in ((True, name), (False, "cross-entropy")):
        values = [
            value
            for value, by_loss in zip(record.loss, record.by_loss, strict=True)
            if by_loss == of_loss
        ]
        finite = [value for value in values if math.isfinite(value)]
        if values:
            means[title] = fmean(finite) if finite else math.nan
    return means


def _save(context: RunContext, learner: HeadsLearner, step: int) -> object:
    """Save a checkpoint with the heads of all ranks."""
    tensors = context.ranks.gather_rows(learner.trainer.tensors())
    return context.folder.writer.save_checkpoint(step, tensors | learner.tensors())


def load_last(folder: RunFolder, learner: HeadsLearner, ranks: HeadRanks) -> int:
    """Load the last checkpoint, and return its step; 0 if there is none."""
    start, tensors = load_checkpoint(folder, ranks.ranks)
    if tensors:
        try:
            learner.trainer.load(ranks.rows_of(tensors))
            learner.load(tensors)
        except ValueError as error:
            raise RunFolderError(
                f"checkpoint/step_{start:09d}.pt of {folder.path} does not fit this version of "
                f"ssl_kd or these heads: {error}. Start a new run without --resume"
            ) from error
    return start


def save_model(model: ClusterModel, folder: RunFolder) -> None:
    """Write `model.safetensors`, and its digest and the model's options into `config.json`."""
    file = model.save_tensors(folder.path)
    folder.writer.update_json("config.json", **model.options, **{DIGEST: sha256_file(file)})


def _only_rank_0() -> Any:
    raise AssertionError("must be called on rank 0 only")
