"""From embeddings to the model: neighbours, clusters of their graph, training, consensus."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from ssl_kd.files import atomic_write_bytes, sha256_file
from ssl_kd.guard.precision import Precision
from ssl_kd.store import EmbeddingStore, find_neighbours, nearest_neighbours
from ssl_kd.store.approximate import by_index
from ssl_kd.training.clock import Clock, Progress
from ssl_kd.training.folder import RunFolder
from ssl_kd.training.stop import Signals
from ssl_kd.vision.fit import Plan, form_answer, make_plan, make_trainer
from ssl_kd.vision.model import DIGEST, ClusterModel
from ssl_kd.vision.partition import GraphAnswer, partition_of
from ssl_kd.vision.ranks import HeadRanks
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.step import HeadTrainer
from ssl_kd.vision.train_run import LeaderResult, train_recorded
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
    settings: VisionSettings,
    folder: RunFolder,
    store: EmbeddingStore,
    n_clusters: int | None,
    precision: Precision,
    clock: Clock,
    signals: Signals,
    tell: Progress,
    together: HeadRanks | None,
) -> TrainedHeads:
    """From embeddings to the model. Neighbours, pairs and projected embeddings end with it."""
    source = Source.fit(store, settings, n_clusters)
    neighbours, searched, found = _graph(
        settings, n_clusters, source, precision.device, clock, tell
    )
    if n_clusters is None:
        assert found is not None  # it was searched for this number
        n_clusters = found.n_clusters
    learnt = found if settings.by_graph else None
    clusters = None if learnt is None else learnt.clusters
    with clock("train"):
        source.hold()  # before it is seen whether the heads fit beside
        trainer, plan = _prepared(
            settings, folder, source, n_clusters, neighbours, clusters, precision, together
        )
        with signals.between_steps():
            gather = source.on(precision.device)
            steps = train_recorded(
                settings, folder, trainer, plan, gather, clusters, signals, tell, together
            )
        trainer = trainer if together is None else together.whole(trainer)
    with clock("consensus"):
        model, chosen, information = _consensus(
            settings, folder, trainer, neighbours, source, learnt, tell
        )
    about = {
        "steps": steps,
        "convergence": None if plan.until is None else plan.until.seen(),
        "success_rate": 1 - float(trainer.state.health.skipped.float().mean()) / max(steps, 1),
        "neighbours": searched,
    }
    return TrainedHeads(trainer, model, chosen, information, found, about)


def _consensus(
    settings: VisionSettings,
    folder: RunFolder,
    trainer: HeadTrainer,
    neighbours: Tensor,
    source: Source,
    learnt: GraphAnswer | None,
    tell: Progress,
) -> tuple[ClusterModel, Tensor, Tensor]:
    """As `form_answer`; the model is kept in the folder."""
    tell("consensus", 0, 1, {})
    answer = form_answer(settings, trainer, neighbours, source, source.projection, learnt)
    save_model(answer[0], folder)
    tell("consensus", 1, 1, {"heads": len(answer[1])})
    return answer


def _prepared(
    settings: VisionSettings,
    folder: RunFolder,
    source: Source,
    n_clusters: int,
    neighbours: Tensor,
    clusters: Tensor | None,
    precision: Precision,
    together: HeadRanks | None,
) -> tuple[HeadTrainer, Plan]:
    """The heads that this process trains and from what; the other ranks learn what it found."""
    if together is None:
        trainer = make_trainer(settings, source.projection.dim, n_clusters, precision)
        return trainer, make_plan(settings, trainer, neighbours, source)
    store = source.store
    mapped = source.whole and by_index(store)
    found = LeaderResult(
        folder.path.resolve(),
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
    dim, mine = source.projection.dim, together.heads
    trainer = make_trainer(settings, dim, n_clusters, precision, mine)
    return trainer, make_plan(settings, trainer, neighbours, source, together.of_all)


def _graph(
    settings: VisionSettings,
    n_clusters: int | None,
    source: Source,
    device: torch.device,
    clock: Clock,
    tell: Progress,
) -> tuple[Tensor, dict[str, Any], GraphAnswer | None]:
    """Neighbours, how they were found, and the partition of their graph where it is wanted."""
    with clock("neighbours"):
        neighbours, searched = _neighbours(settings, source, device, tell)
    if not settings.by_graph and n_clusters is not None:
        return neighbours, searched, None
    with clock("graph"):
        return neighbours, searched, _partition(n_clusters, neighbours, source, device, tell)


def _neighbours(
    settings: VisionSettings, source: Source, device: torch.device, tell: Progress
) -> tuple[Tensor, dict[str, Any]]:
    """Of each sample in the source; kept beside the embeddings where these are all."""

    def draw(done: int, total: int) -> None:
        tell("neighbours", done, total, {})

    k = min(settings.neighbours, source.n - 1)
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
