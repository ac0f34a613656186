"""What a vision run leaves behind: scores of every answer, who is in which cluster, the maps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ssl_kd import evaluate
from ssl_kd.evaluate.baselines import Baseline
from ssl_kd.files import atomic_write
from ssl_kd.graph import agreement
from ssl_kd.store import EmbeddingStore
from ssl_kd.training.folder import RunFolder
from ssl_kd.vision.assignments import Assignments, write_assignments
from ssl_kd.vision.context import RunContext
from ssl_kd.vision.fit import head_clusters
from ssl_kd.vision.model import ClusterModel
from ssl_kd.vision.partition import GraphAnswer
from ssl_kd.vision.pipeline import TrainedHeads
from ssl_kd.vision.settings import AnswerSettings
from ssl_kd.vision.step import HeadTrainer

TYPICAL = 8
QUANTILES = (0.5, 0.9, 0.95, 0.99)


def judge(
    settings: AnswerSettings,
    context: RunContext,
    stores: Mapping[str, EmbeddingStore],
    learnt: TrainedHeads,
) -> dict[str, Any]:
    """Answer for every row, score everything, write the assignments and `arrays.npz`.

    Labels are read here for the first time, after the answer has been formed.

    Args:
        settings: of the run.
        context: of the run.
        stores: `train`, and `test` where there is one.
        learnt: the answer, which is moved to the trainer's device, and what it was formed from.

    Returns:
        The content of `metrics.json`.
    """
    with context.clock("answer"):
        splits = _answered(settings, context, stores, learnt)
    with context.clock("judge"):
        return _judged(settings, context, splits, learnt)


def _answered(
    settings: AnswerSettings,
    context: RunContext,
    stores: Mapping[str, EmbeddingStore],
    learnt: TrainedHeads,
) -> dict[str, Answered]:
    """The answer for every row of each split, a block at a time, and the file of assignments."""
    total = len(stores) + 2
    learnt.model.to(context.precision.device)
    context.tell("judge", 0, total, {})
    splits: dict[str, Answered] = {}
    for done, (name, store) in enumerate(stores.items(), 1):
        splits[name] = Answered(store, settings, learnt.trainer, learnt.model)
        context.tell("judge", done, total, {"split": name})
    write_assignments(context.folder.path, splits)
    return splits


def _judged(
    settings: AnswerSettings,
    context: RunContext,
    splits: Mapping[str, Answered],
    learnt: TrainedHeads,
) -> dict[str, Any]:
    """The scores of all splits, and `arrays.npz`."""
    trainer, chosen, n_clusters = learnt.trainer, learnt.chosen, learnt.model.n_clusters
    stages, train, test = len(splits) + 2, splits["train"], splits.get("test")
    baselines = []
    if settings.baselines:
        held: dict[str, Any] = {} if test is None else {"test_x": test.x}
        found = (evaluate.kmeans, evaluate.spectral)
        baselines = [method(train.x, n_clusters, settings.seed, **held) for method in found]
    context.tell("judge", stages - 1, stages, {"split": "baselines"})

    scores = {
        name: [evaluate.clustering_scores(split.labels, c) for c in split.heads]
        for name, split in splits.items()
    }
    table = [
        row
        for name, split in splits.items()
        for row in _table(name, split, scores[name], chosen, baselines)
    ]
    accuracies = [score["acc"] for score in scores["train"]]
    metrics = {
        "table": table,
        "heads": _heads(trainer, train, n_clusters, chosen, learnt.information, accuracies),
        "graph": None if learnt.found is None else _graph(learnt.found),
        "levels": _levels(train, n_clusters),
        "cluster_sizes": evaluate.cluster_sizes(train.members, n_clusters).tolist(),
        "calibration": {name: _calibration(split) for name, split in splits.items()},
        "outliers": {name: _outliers(split) for name, split in splits.items()},
        **_embedding_scores(settings, train, test),
    }
    write_arrays(context.folder, train, n_clusters, settings.seed)
    context.tell("judge", stages, stages, {})
    return metrics


def _table(
    split: str,
    judged: Answered,
    scores: list[dict[str, Any]],
    chosen: Tensor,
    baselines: list[Baseline],
) -> list[dict[str, Any]]:
    """The rows of one split: the answer, heads, and baselines."""
    rows, best = [], int(chosen[0])

    def row(name: str, found: dict[str, Any], note: str | None = None) -> None:
        rows.append({"name": name, "split": split, **found, "note": note})

    known = any(score["acc"] is not None for score in scores)
    answer = evaluate.clustering_scores(judged.all_labels, judged.clusters)
    row("consensus", answer, f"{len(chosen)} of {len(scores)} heads")
    row("best head (unsupervised)", scores[best], f"head {best}")
    mean = {name: np.mean([s[name] or 0.0 for s in scores]) for name in scores[0]} if known else {}
    row("mean over heads", {name: float(mean[name]) if known else None for name in scores[0]})
    for baseline in baselines:
        clusters = baseline.clusters if split == "train" else baseline.test_clusters
        none = dict.fromkeys(scores[0])
        found = none if clusters is None else evaluate.clustering_scores(judged.labels, clusters)
        row(baseline.name, found, baseline.note)
    if known:
        top = max(range(len(scores)), key=lambda i: scores[i]["acc"] or 0.0)
        row("best head with labels (upper bound)", scores[top], f"head {top}")
    return rows


def _heads(
    trainer: HeadTrainer,
    train: Answered,
    n_clusters: int,
    chosen: Tensor,
    information: Tensor,
    accuracies: list[float | None],
) -> list[dict[str, Any]]:
    """What is known of each head."""
    sizes = evaluate.cluster_sizes(train.heads, n_clusters)
    loss, health = trainer.state.loss.tolist(), trainer.state.health
    return [
        {
            "head": i,
            "loss": loss[i] if abs(loss[i]) < float("inf") else None,
            "criterion": None if information[i].isnan() else float(information[i]),
            "collapsed": bool(evaluate.collapsed(sizes[i])),
            "clusters_used": int((sizes[i] > 0).sum()),
            "chosen": i in chosen.tolist(),
            "skipped": int(health.skipped[i]),
            "retired": bool(health.retired[i]),
            "acc": accuracies[i],
        }
        for i in range(len(loss))
    ]


def _graph(answer: GraphAnswer) -> dict[str, Any]:
    """Which families of partitions agree with the answer, and which of them voted."""
    crowd = answer.crowd
    return {
        "agreement": agreement(crowd.candidates, crowd.clusters),
        "voters": sorted({candidate.family for candidate in crowd.voters}),
        "evenness": crowd.evenness,
        "number": None if answer.number is None else dataclasses.asdict(answer.number),
    }


def _levels(split: Assignments, n_clusters: int) -> list[dict[str, Any]]:
    """The tree, coarsest level first, the answer among them: sizes, and what each is part of."""
    levels = {
        f"level_{size}": (size, of) for size, of in zip(split.sizes, split.levels.T, strict=True)
    }
    levels["cluster"] = (n_clusters, split.clusters)
    found, above = [], None
    for column, (_, of) in sorted(levels.items(), key=lambda level: level[1][0]):
        clusters, first, counts = np.unique(of, return_index=True, return_counts=True)
        kept = clusters >= 0
        parents = None if above is None else above[first][kept].tolist()
        level = {"clusters": clusters[kept].tolist(), "sizes": counts[kept].tolist()}
        found.append({"column": column, **level, "parents": parents})
        above = of
    return found if split.sizes else []


def _calibration(split: Answered) -> dict[str, Any] | None:
    """How many are right at each confidence; of samples with a label and a cluster."""
    if split.all_labels is None:
        return None
    known = (split.all_labels >= 0) & (split.clusters >= 0)
    if not known.any():
        return None
    right = evaluate.rightly_placed(split.all_labels, split.clusters)
    return evaluate.calibration(split.confidence[known], right[known])


def _outliers(split: Answered) -> dict[str, Any]:
    """How far out the samples of a split lie, and how many of them are called noise."""
    found = np.quantile(split.outlier, QUANTILES)
    quantiles = {f"{q:g}": float(value) for q, value in zip(QUANTILES, found, strict=True)}
    return {"noise": int((split.clusters < 0).sum()), "quantiles": quantiles}


def _embedding_scores(
    settings: AnswerSettings, train: Answered, test: Answered | None
) -> dict[str, Any]:
    """How well labels can be read off the embeddings, where there are any."""
    found: dict[str, Any] = {"knn_accuracy": None, "linear_probe": None}
    if train.labels is not None:
        held_out: Any = () if test is None or test.labels is None else (test.x, test.labels)
        found["knn_accuracy"] = evaluate.knn_accuracy(train.x, train.labels, *held_out)
        if settings.baselines:
            probe = evaluate.linear_probe(train.x, train.labels, *held_out, seed=settings.seed)
            found["linear_probe"] = probe
    return found


class Answered(Assignments):
    """One split, judged: the answer for every row, and each head's on the rows that are scored."""

    def __init__(
        self,
        store: EmbeddingStore,
        settings: AnswerSettings,
        trainer: HeadTrainer,
        model: ClusterModel,
    ) -> None:
        super().__init__(store, settings, model)

        def projected(rows: Tensor) -> Tensor:
            return model.projection(store.gather(rows).to(model.weights.device))

        self.heads = head_clusters(trainer, projected, self.rows).numpy()


def write_arrays(
    folder: RunFolder, split: Assignments, n_clusters: int, seed: int
) -> NDArray[np.int64]:
    """`arrays.npz`: the map of the embeddings, typical samples of each cluster, the confusion.

    Returns:
        Rows of the typical samples, `[cluster, 8]`, -1 for none.
    """
    class_names = split.store.class_names
    rows, places = evaluate.embedding_map(split.x, seed)
    judged = split.rows.numpy()[rows]
    arrays = {"map": places, "map_cluster": split.clusters[judged].astype(np.int64)}
    typical = np.full((n_clusters, TYPICAL), -1)
    for k in range(n_clusters):
        members = np.flatnonzero(split.clusters == k)
        top = members[np.argsort(-split.confidence[members], kind="stable")[:TYPICAL]]
        typical[k, : len(top)] = top
    arrays["typical"] = typical
    labels = split.all_labels
    if labels is not None:
        arrays["map_label"] = labels[judged]
        if (labels >= 0).any():
            n_classes = len(class_names) if class_names is not None else int(labels.max()) + 1
            table, order = evaluate.confusion(labels, split.clusters, n_classes, n_clusters)
            arrays |= {"confusion": table, "confusion_clusters": order}
    atomic_write(folder.path / "arrays.npz", lambda file: np.savez_compressed(file, **arrays))
    return typical
