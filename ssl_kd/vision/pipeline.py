"""From embeddings to the model: neighbours, clusters of their graph, training, consensus."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from ssl_kd.files import atomic_write_bytes, sha256_file
from ssl_kd.store import EmbeddingStore, find_neighbours, nearest_neighbours
from ssl_kd.store.approximate import by_index
from ssl_kd.training.clock import Progress
from ssl_kd.training.folder import RunFolder
from ssl_kd.training.loop import run_loop
from ssl_kd.vision.context import RunContext
from ssl_kd.vision.fit import form_answer, make_plan, make_trainer
from ssl_kd.vision.model import DIGEST, ClusterModel
from ssl_kd.vision.partition import GraphAnswer, partition_of
from ssl_kd.vision.ranks import RankHeads
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.step import HeadTrainer
from ssl_kd.vision.train import Heads, Plan
from ssl_kd.vision.train_run import LeaderResult, fault_recorder, load_last, recorded
from ssl_kd.vision.training_rows import Source

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainedHeads:
    """What training leaves for the answer.

    Attributes:
        trainer: after training, of all heads.
        model: the answer.
        chosen: numbers of the heads that vote, best first.
        information: of every head, `[head]`: what it was ranked by.
        found: the partition of the graph, where it was searched.
        about: what `metrics.json` says of it.
    """

    trainer: HeadTrainer
    model: ClusterModel
    chosen: Tensor
    information: Tensor
    found: GraphAnswer | None
    about: dict[str, Any]


def learn(
    settings: VisionSettings, context: RunContext, store: EmbeddingStore, n_clusters: int | None
) -> TrainedHeads:
    """From embeddings to the model. Neighbours, pairs and projected embeddings end with it.

    Args:
        settings: of the run.
        context: of the run.
        store: the training embeddings.
        n_clusters: K; None: as many as are found.

    Raises:
        RunFolderError: the run's checkpoint does not fit these heads.
        TooFewHealthyParts: no head is healthy any more; the message names the first fault.
    """
    device, clock, together = context.precision.device, context.clock, context.together
    source = Source.fit(store, settings, n_clusters)
    with clock("neighbours"):
        neighbours, searched = _neighbours(settings.neighbours, source, device, context.tell)
    found = None
    if settings.by_graph or n_clusters is None:
        with clock("graph"):
            found = _partition(n_clusters, neighbours, source, device, context.tell)
            n_clusters = found.n_clusters
    assert n_clusters is not None
    learnt = found if settings.by_graph else None
    clusters = None if learnt is None else learnt.clusters
    with clock("train"):
        source.hold()  # before it is seen whether the heads fit beside
        trainer, plan = _prepared(settings, context, source, n_clusters, neighbours, clusters)
        with context.signals.between_steps():
            gather = source.on(device)
            start = load_last(context.folder, trainer, plan.until, together)
            context.folder.rewind(start)
            context.folder.become_latest()
            on_fault = fault_recorder(context.folder.path, trainer, settings)
            heads = trainer, plan, gather, context.folder.events.extend, on_fault, clusters
            with recorded(context, settings, trainer, plan) as (on_log, on_checkpoint):
                if together is None:
                    learner = Heads(*heads)
                    should_stop = partial(bool, context.signals.caught)
                else:
                    together.caught, together.done = context.signals.caught, start
                    learner = RankHeads(together, settings.log_every, *heads)
                    should_stop = learner.should_stop
                steps = run_loop(
                    learner,
                    start=start,
                    log_every=settings.log_every,
                    checkpoint_every=settings.checkpoint_every,
                    on_log=on_log,
                    on_checkpoint=on_checkpoint,
                    should_stop=should_stop,
                )
        trainer = trainer if together is None else together.whole(trainer)
    with clock("consensus"):
        context.tell("consensus", 0, 1, {})
        model, chosen, information = form_answer(
            settings, trainer, neighbours, source, source.projection, learnt
        )
        save_model(model, context.folder)
        context.tell("consensus", 1, 1, {"heads": len(chosen)})
    about = {
        "steps": steps,
        "convergence": None if plan.until is None else plan.until.seen(),
        "success_rate": 1 - float(trainer.state.health.skipped.float().mean()) / max(steps, 1),
        "neighbours": searched,
    }
    return TrainedHeads(trainer, model, chosen, information, found, about)


def _prepared(
    settings: VisionSettings,
    context: RunContext,
    source: Source,
    n_clusters: int,
    neighbours: Tensor,
    clusters: Tensor | None,
) -> tuple[HeadTrainer, Plan]:
    """The heads that this process trains and from what; the other ranks learn what it found."""
    together, dim = context.together, source.projection.dim
    if together is None:
        trainer = make_trainer(settings, dim, n_clusters, context.precision)
        return trainer, make_plan(settings, trainer, neighbours, source)
    store = source.store
    mapped = source.whole and by_index(store)
    found = LeaderResult(
        context.folder.path.resolve(),
        settings.to_dict(),
        store.folder.resolve(),
        store.fingerprint,
        source.projection,
        source.rows,
        n_clusters,
        None if mapped else neighbours,
        clusters,
    )
    together.ranks.from_first(lambda: found)
    trainer = make_trainer(settings, dim, n_clusters, context.precision, together.heads)
    return trainer, make_plan(settings, trainer, neighbours, source, together.of_all)


def _neighbours(
    k: int, source: Source, device: torch.device, tell: Progress
) -> tuple[Tensor, dict[str, Any]]:
    """Of each sample in the source, and how they were found; kept where these are all rows."""

    def draw(done: int, total: int) -> None:
        tell("neighbours", done, total, {})

    k = min(k, source.n - 1)
    if source.whole:
        return find_neighbours(source.store, k, device=device, progress=draw)
    if source.n < source.store.n:
        logger.info("the graph is that of %d of %d samples", source.n, source.store.n)
    embeddings = source.embeddings(torch.arange(source.n))
    found = nearest_neighbours(embeddings, k, device=device, progress=draw)
    return found, {"index": "exact", "recall": 1.0, "rows": source.n}


def _partition(
    n_clusters: int | None, neighbours: Tensor, source: Source, device: torch.device, tell: Progress
) -> GraphAnswer:
    """The clusters that the heads are to learn."""
    projected = source(torch.arange(source.n))

    def draw(done: int, total: int) -> None:
        tell("graph", done, total, {})

    return partition_of(n_clusters, neighbours, source.embeddings, projected, device, draw)


def save_model(model: ClusterModel, folder: RunFolder) -> None:
    """Write `model.safetensors`, and into `config.json` its digest and the model's options."""
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    file = folder.path / "model.safetensors"
    atomic_write_bytes(file, safetensors.torch.save(tensors))
    folder.update_json("config.json", **model.options, **{DIGEST: sha256_file(file)})
