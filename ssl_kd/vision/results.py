"""Compute and write the results of a vision run: assignments, metrics and `arrays.npz`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ssl_kd.core.files import atomic_write
from ssl_kd.core.runs.folder import RunFolder
from ssl_kd.vision import evaluate
from ssl_kd.vision.assignments import SplitAssignments, write_assignments
from ssl_kd.vision.cache import EmbeddingStore
from ssl_kd.vision.evaluate.baselines import BASELINES, Baseline
from ssl_kd.vision.fit import head_clusters
from ssl_kd.vision.graph import Ensemble
from ssl_kd.vision.graph.ensemble import agreement, aligned, cluster_agreement
from ssl_kd.vision.partition import GraphAnswer
from ssl_kd.vision.pipeline import RunContext, TrainedHeads

TYPICAL = 8


def judge(
    context: RunContext, stores: Mapping[str, EmbeddingStore], trained: TrainedHeads
) -> dict[str, Any]:
    """Assign every row, write the result files, and return the content of `metrics.json`.

    Labels are first read here, after training, so they cannot influence the clustering.
    """
    seed, run_baselines = context.settings.seed, context.settings.baselines
    model, n_stages = trained.model.to(context.precision.device), len(stores) + 2
    splits: dict[str, SplitAssignments] = {}
    heads: dict[str, NDArray[np.int64]] = {}
    with context.clock("answer"):
        context.progress("judge", 0, n_stages, {})
        for done, (name, store) in enumerate(stores.items(), 1):
            splits[name] = SplitAssignments(store, model, seed)

            def projected(rows: Tensor, store: EmbeddingStore = store) -> Tensor:
                return model.projection(store.gather(rows).to(model.weights.device))

            heads[name] = head_clusters(trained.trainer, projected, splits[name].rows).numpy()
            context.progress("judge", done, n_stages, {"split": name})
        write_assignments(context.folder.path, splits)
    with context.clock("judge"):
        train = splits["train"]
        test = splits.get("test")
        n_clusters = model.n_clusters
        baselines = []
        if run_baselines:
            held_out: dict[str, Any] = {} if test is None else {"test_x": test.x}
            baselines = [
                method(train.x, n_clusters, seed, **held_out) for method in BASELINES.values()
            ]
        context.progress("judge", n_stages - 1, n_stages, {"split": "baselines"})

        table, accuracies = [], []
        for name, split in splits.items():
            scores = [evaluate.clustering_scores(split.labels, c) for c in heads[name]]
            accuracies = accuracies or [score["acc"] for score in scores]  # of the training set
            table += _table(name, split, scores, trained.chosen, baselines)
        metrics = {
            "table": table,
            "heads": _heads(trained, heads["train"], accuracies),
            "graph": _graph(trained.partition, trained.departure),
            "cluster_sizes": evaluate.cluster_sizes(train.clusters, n_clusters).tolist(),
            "calibration": {name: _calibration(split) for name, split in splits.items()},
            **_embedding_scores(train, test, seed, run_baselines),
        }
        write_arrays(context.folder, train, n_clusters)
        context.progress("judge", n_stages, n_stages, {})
        return metrics


def _table(
    split: str,
    assignments: SplitAssignments,
    scores: list[dict[str, Any]],
    chosen: Tensor,
    baselines: list[Baseline],
) -> list[dict[str, Any]]:
    rows, best = [], int(chosen[0])

    def row(name: str, values: dict[str, Any], note: str | None = None) -> None:
        rows.append({"name": name, "split": split, **values, "note": note})

    labeled = any(score["acc"] is not None for score in scores)
    answer = evaluate.clustering_scores(assignments.all_labels, assignments.clusters)
    row("consensus", answer, f"{len(chosen)} of {len(scores)} heads")
    row("best head (unsupervised)", scores[best], f"head {best}")
    mean = dict.fromkeys(scores[0])
    if labeled:
        mean = {name: float(np.mean([s[name] or 0.0 for s in scores])) for name in mean}
    row("mean over heads", mean)
    for baseline in baselines:
        clusters = baseline.clusters if split == "train" else baseline.test_clusters
        values = dict.fromkeys(scores[0])
        if clusters is not None:
            values = evaluate.clustering_scores(assignments.labels, clusters)
        row(baseline.name, values, baseline.note)
    if labeled:
        top = max(range(len(scores)), key=lambda i: scores[i]["acc"] or 0.0)
        row("best head, chosen by labels", scores[top], f"head {top}")
    return rows


def _heads(
    trained: TrainedHeads, clusters: NDArray[np.int64], accuracies: list[float | None]
) -> list[dict[str, Any]]:
    """Return the statistics of each head; `clusters` `[head, row]` has the scored rows only."""
    sizes = evaluate.cluster_sizes(clusters, trained.model.n_clusters)
    loss, health = trained.trainer.state.loss.tolist(), trained.trainer.state.health
    information = trained.information
    return [
        {
            "head": i,
            "loss": loss[i] if abs(loss[i]) < float("inf") else None,
            "criterion": None if information[i].isnan() else float(information[i]),
            "collapsed": bool(evaluate.collapsed(sizes[i])),
            "clusters_used": int((sizes[i] > 0).sum()),
            "chosen": i in trained.chosen.tolist(),
            "skipped": int(health.skipped[i]),
            "retired": bool(health.retired[i]),
            "acc": accuracies[i],
        }
        for i in range(len(loss))
    ]


def _graph(answer: GraphAnswer | None, departure: float | None) -> dict[str, Any] | None:
    """Return how the families of partitions voted, and how well they agree with the result.

    `departure` is the share of samples on which the heads left the partition that they learned.
    """
    if answer is None:
        return None
    ensemble, k = answer.ensemble, answer.n_clusters
    clusters = answer.clusters.numpy()
    return {
        "agreement": agreement(ensemble.candidates, ensemble.clusters),
        "cluster_agreement": cluster_agreement(ensemble.by_all_methods, clusters, k).tolist(),
        "metrics": list(ensemble.metrics),
        "departure": departure,
        "voters": sorted({candidate.family for candidate in ensemble.voters}),
        "cluster_sizes": ensemble.sizes,
        "other": _other(ensemble, k),
        "number": None if answer.number is None else dataclasses.asdict(answer.number),
    }


def _other(ensemble: Ensemble, n_clusters: int) -> dict[str, Any]:
    """Return the cluster sizes with the other CLUSTER_SIZES, and the share of samples alike."""
    other = ensemble.other(n_clusters)
    alike = aligned(other.clusters, ensemble.clusters) == ensemble.clusters
    sizes = np.bincount(other.clusters)
    return {
        "cluster_sizes": other.sizes,
        "sizes": sorted(sizes.tolist(), reverse=True),
        "agreement": float(np.mean(alike)),
    }


def _calibration(split: SplitAssignments) -> dict[str, Any] | None:
    """Return accuracy by confidence over the labeled samples; None if there are none."""
    if split.all_labels is None or not (known := split.all_labels >= 0).any():
        return None
    is_right = evaluate.rightly_placed(split.all_labels, split.clusters)
    return evaluate.calibration(split.confidence[known], is_right[known])


def _embedding_scores(
    train: SplitAssignments, test: SplitAssignments | None, seed: int, with_probe: bool
) -> dict[str, Any]:
    """Return the accuracy of k-NN and a linear probe on the embeddings; None without labels."""
    scores: dict[str, Any] = {"knn_accuracy": None, "linear_probe": None}
    if train.labels is not None:
        held_out: Any = () if test is None or test.labels is None else (test.x, test.labels)
        scores["knn_accuracy"] = evaluate.knn_accuracy(train.x, train.labels, *held_out)
        if with_probe:
            probe = evaluate.linear_probe(train.x, train.labels, *held_out, seed=seed)
            scores["linear_probe"] = probe
    return scores


def write_arrays(folder: RunFolder, split: SplitAssignments, n_clusters: int) -> NDArray[np.int64]:
    """Write `arrays.npz`: a 2-D map, and the rows of typical samples.

    Return these rows, `[cluster, 8]`; -1 fills up small clusters.
    """
    rows, positions = evaluate.embedding_map(split.x, split.seed)
    mapped = split.rows.numpy()[rows]
    on_map = split.clusters[mapped].astype(np.int64)
    arrays = {"map": positions, "map_cluster": on_map, "map_row": mapped}
    typical = np.full((n_clusters, TYPICAL), -1)
    for k in range(n_clusters):
        members = np.flatnonzero(split.clusters == k)
        top = members[np.argsort(-split.confidence[members], kind="stable")[:TYPICAL]]
        typical[k, : len(top)] = top
    arrays["typical"] = typical
    atomic_write(folder.path / "arrays.npz", lambda file: np.savez_compressed(file, **arrays))
    return typical
