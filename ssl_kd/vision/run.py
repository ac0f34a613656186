"""The main job: embed, find neighbours, train, form the answer, judge it, leave a run folder."""

from __future__ import annotations

import csv
import dataclasses
import io
import logging
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from ssl_kd import evaluate
from ssl_kd.datasets import FeatureDataset, ImageDataset, open_dataset
from ssl_kd.files import atomic_write, atomic_write_bytes, atomic_write_text
from ssl_kd.guard.parts import TooFewHealthyParts
from ssl_kd.guard.precision import Precision
from ssl_kd.guard.recorder import FlightRecorder
from ssl_kd.settings import SettingsError
from ssl_kd.store import EmbeddingStore, cached_neighbours
from ssl_kd.teachers import Teacher, load_teacher
from ssl_kd.training.board import Board
from ssl_kd.training.clock import Clock
from ssl_kd.training.folder import RunFolder, RunFolderError
from ssl_kd.training.stop import Signals
from ssl_kd.vision.consensus import sample_rows
from ssl_kd.vision.extract import ExtractProgress, extract
from ssl_kd.vision.fit import (
    form_answer,
    head_clusters,
    make_sampler,
    make_trainer,
)
from ssl_kd.vision.model import ROWS_PER_BLOCK, ClusterModel
from ssl_kd.vision.pairs import PairSampler
from ssl_kd.vision.projection import Projection
from ssl_kd.vision.replay import bundle_of
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.step import HeadTrainer
from ssl_kd.vision.train import HeadFault, LogRecord, train

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int, dict[str, Any]], None]
Dataset = ImageDataset | FeatureDataset
Images = Callable[[list[int]], list[Any]]
TYPICAL = 8
JUDGED_ROWS = 100_000
PROJECTION_ROWS = 10_000
# What TensorBoard shows of a log record.
DRAWN = ("learning_rate", "healthy", "success_rate", "samples_per_second", "loss", "grad_norm")


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run: its folder, and the pictures of the training samples, if there are any."""

    path: Path
    images: Images | None


def run(settings: VisionSettings, *, progress: Progress | None = None) -> Run:
    """Do the main job as the settings say.

    Args:
        settings: all of them.
        progress: called as `progress(stage, done, total, info)`.

    Raises:
        SettingsError: EMBEDDING_DIM disagrees with the teacher, or N_CLUSTERS is needed.
        Interrupted: told to stop by Ctrl-C or SIGTERM.
        TooFewHealthyParts: no head is healthy any more.
    """
    tell = progress or (lambda stage, done, total, info: None)
    clock = Clock()
    precision = Precision.for_device(settings.device, settings.use_fp16)
    logger.info("%s", precision)

    with RunFolder(settings) as folder, Signals(folder) as signals:
        folder.write_config(settings, precision=str(precision))
        with clock("extract"):
            train_set, stores, teacher = _embed(settings, precision, tell)
        store = stores["train"]
        folder.keep_to(store.fingerprint.digest)
        n_clusters = n_clusters_of(settings, store.class_names, store.n)
        source = _Source(store, settings)

        with clock("neighbours"):
            k = min(settings.neighbours, store.n - 1)
            neighbours = cached_neighbours(
                store,
                k,
                device=precision.device,
                progress=lambda done, total: tell("neighbours", done, total, {}),
            )

        with clock("train"):
            trainer = make_trainer(settings, source.projection.dim, n_clusters, precision)
            sampler, steps = make_sampler(settings, neighbours)
            with signals.between_steps():
                _train(settings, folder, trainer, sampler, source, steps, signals, tell)

        tell("consensus", 0, 1, {})
        with clock("consensus"):
            model, chosen, information = form_answer(
                settings, trainer, neighbours, source, source.projection
            )
            _save(model, folder)
        tell("consensus", 1, 1, {"heads": len(chosen)})

        with clock("judge"):
            metrics = _judge(settings, folder, stores, trainer, model, chosen, information, tell)
        metrics |= {
            "dataset": _about(train_set, stores, n_clusters),
            "teacher": {"name": teacher.name, "dim": teacher.dim, "weights": teacher.weights_id},
            "steps": steps,
            "success_rate": 1 - float(trainer.state.health.skipped.float().mean()) / max(steps, 1),
            "events": folder.count_events(),
            "seconds": clock.seconds,
        }
        folder.update_json("metrics.json", **metrics)  # the last file: it says "finished"
    images = None
    if isinstance(train_set, ImageDataset):
        pictures, rows = train_set, store.indices
        images = lambda wanted: [pictures.image(int(rows[i])) for i in wanted]  # noqa: E731
    return Run(folder.path, images)


class _Source:
    """Embeddings as the heads see them: projected, in memory if they fit, else read from disk."""

    def __init__(self, store: EmbeddingStore, settings: VisionSettings) -> None:
        self._store, self._held = store, None
        sample = store.gather(sample_rows(store.n, settings.seed, PROJECTION_ROWS))
        self.projection = Projection.fit(sample, settings.pca_dim)
        if store.n * self.projection.dim * 4 / 2**30 <= settings.keep_in_memory_gib:
            blocks = [self.projection(block) for _, block in store.blocks(ROWS_PER_BLOCK)]
            self._held = torch.cat(blocks)

    def __call__(self, rows: Tensor) -> Tensor:
        if self._held is not None:
            return self._held[rows]
        return self.projection(self._store.gather(rows))


def _embed(
    settings: VisionSettings, precision: Precision, tell: Progress
) -> tuple[Dataset, dict[str, EmbeddingStore], Teacher]:
    """Open the data, load the teacher, and fill or open the store of each split."""
    root, download = settings.data_dir, settings.download
    train_set = open_dataset(settings.dataset, "train", root=root, download=download)
    n_clusters_of(settings, train_set.class_names, len(train_set))  # before hours of extraction
    if settings.dataset_test is not None:
        names = train_set.class_names
        test_set = open_dataset(
            settings.dataset_test, "test", class_names=names, root=root, download=download
        )
    else:
        test_set = open_dataset(
            settings.dataset, "test", missing_ok=True, root=root, download=download
        )

    teacher = _teacher(settings, train_set, precision)
    if settings.embedding_dim not in (None, teacher.dim):
        raise SettingsError(
            f"EMBEDDING_DIM is {settings.embedding_dim}, but the teacher {teacher.name} gives "
            f"{teacher.dim}: set EMBEDDING_DIM to {teacher.dim} or None"
        )
    stores = {}
    for split, dataset in (("train", train_set), ("test", test_set)):
        if dataset is None:
            continue

        def draw(p: ExtractProgress) -> None:
            info = {"images/s": p.images_per_second}
            tell("extract", p.done, p.total, info)

        stores[split] = extract(
            dataset,
            teacher,
            settings.embeddings_dir,
            split=split,
            precision=precision,
            batch_size=settings.extract_batch_size,
            workers=settings.workers,
            force=settings.force_recompute,
            progress=draw,
        )
    return train_set, stores, teacher


def _teacher(settings: VisionSettings, dataset: Dataset, precision: Precision) -> Teacher:
    name = settings.teacher
    if isinstance(dataset, FeatureDataset) and name == VisionSettings.teacher:
        name = "features"  # a file of features says so by itself
    return load_teacher(
        name,
        dinov2_model=settings.dinov2_model,
        source=settings.teacher_source,
        weights=settings.teacher_weights,
        image_size=settings.image_size,
        token=settings.token,
        device=precision.device,
        dataset=dataset,
    )


def n_clusters_of(settings: VisionSettings, class_names: Sequence[str] | None, n: int) -> int:
    """K of `n` samples: what the settings say, else the number of classes that the data declares.

    Raises:
        SettingsError: neither says it, or it does not fit the number of samples.
    """
    n_clusters = settings.n_clusters
    if n_clusters is None:
        if class_names is None:
            raise SettingsError(
                "N_CLUSTERS is None, which means the number of classes the data set declares, but "
                f"{settings.dataset} declares none: give --n_clusters"
            )
        n_clusters = len(class_names)
    if not 2 <= n_clusters <= n:
        raise SettingsError(
            f"N_CLUSTERS is {n_clusters}, but must be from 2 to the number of samples, {n}"
        )
    return n_clusters


def _train(
    settings: VisionSettings,
    folder: RunFolder,
    trainer: HeadTrainer,
    sampler: PairSampler,
    source: _Source,
    steps: int,
    signals: Signals,
    tell: Progress,
) -> None:
    """Train all heads, from the last checkpoint if there is one."""
    start, tensors = folder.load_checkpoint()
    if tensors:
        try:
            trainer.load(tensors)
        except ValueError as error:
            raise RunFolderError(
                f"checkpoint/step_{start:09d}.pt of {folder.path} does not fit this version of the "
                f"library or these heads: {error}. Start a new run without --resume"
            ) from error
    folder.rewind(start)
    folder.become_latest()

    with Board(folder.path, settings.tensorboard) as board:

        def on_log(record: LogRecord) -> None:
            row = dataclasses.asdict(record)
            folder.log(row)
            board.log(record.step, {name: row[name] for name in DRAWN})
            finite = [v for v in record.loss if abs(v) < float("inf")]
            mean = sum(finite) / len(finite) if finite else float("nan")
            info = {"loss": mean, "healthy": f"{record.healthy}/{settings.n_heads}"}
            tell("train", record.step, steps, info)

        recorder = FlightRecorder(folder.path / "faults")

        def on_fault(fault: HeadFault) -> None:
            if recorder.wants(fault.event.part):
                recorder.record(bundle_of(trainer, fault, dataclasses.asdict(settings)))

        try:
            train(
                trainer,
                sampler,
                source,
                steps,
                start=start,
                log_every=settings.log_every,
                checkpoint_every=settings.checkpoint_every,
                on_log=on_log,
                on_events=folder.events.extend,
                on_fault=on_fault,
                on_checkpoint=lambda step: folder.save_checkpoint(step, trainer.tensors()),
                should_stop=lambda: bool(signals.caught),
            )
        except TooFewHealthyParts as error:
            bundles = recorder.bundles()
            if not bundles:
                raise
            way = f"ssl_kd replay {shlex.quote(str(bundles[0]))}"
            raise TooFewHealthyParts(f"{error}. {way} explains the first fault") from error


def _save(model: ClusterModel, folder: RunFolder) -> None:
    """`model.safetensors`, and the model's options beside the settings in `config.json`."""
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    atomic_write_bytes(folder.path / "model.safetensors", safetensors.torch.save(tensors))
    folder.update_json("config.json", **model.options)


def _judge(
    settings: VisionSettings,
    folder: RunFolder,
    stores: dict[str, EmbeddingStore],
    trainer: HeadTrainer,
    model: ClusterModel,
    chosen: Tensor,
    information: Tensor,
    tell: Progress,
) -> dict[str, Any]:
    """Score everything, write `assignments.csv` and `arrays.npz`; the content of `metrics.json`.

    Labels are read here for the first time, after the answer has been formed.
    """
    stages, n_clusters = len(stores) + 2, model.n_clusters
    tell("judge", 0, stages, {})
    splits = {}
    for done, (name, store) in enumerate(stores.items(), 1):
        splits[name] = _Split(store, settings, trainer, model)
        tell("judge", done, stages, {"split": name})
    _write_assignments(folder, splits)

    train, test = splits["train"], splits.get("test")
    held = {} if test is None else {"test_x": test.x}
    baselines = []
    if settings.baselines:
        found = (evaluate.kmeans, evaluate.spectral)
        baselines = [method(train.x, n_clusters, settings.seed, **held) for method in found]
    tell("judge", stages - 1, stages, {"split": "baselines"})

    table, best = [], int(chosen[0])
    for name, split in splits.items():
        scores = [evaluate.clustering_scores(split.labels, c) for c in split.heads]
        known = [s["acc"] for s in scores if s["acc"] is not None]

        def row(what: str, scores: dict[str, Any], note: str | None = None, name: str = name):
            table.append({"name": what, "split": name, **scores, "note": note})

        note = f"{len(chosen)} of {len(scores)} heads"
        row("consensus", evaluate.clustering_scores(split.all_labels, split.clusters), note)
        row("best head (unsupervised)", scores[best], f"head {best}")
        mean = {k: np.mean([s[k] or 0.0 for s in scores]) for k in scores[0]} if known else {}
        row("mean over heads", {k: float(mean[k]) if known else None for k in scores[0]})
        for baseline in baselines:
            clusters = baseline.clusters if name == "train" else baseline.test_clusters
            none = dict.fromkeys(scores[0])
            found = none if clusters is None else evaluate.clustering_scores(split.labels, clusters)
            row(baseline.name, found, baseline.note)
        if known:
            top = max(range(len(scores)), key=lambda i: scores[i]["acc"] or 0.0)
            row("best head with labels (upper bound)", scores[top], f"head {top}")
        if name == "train":
            accuracies = [s["acc"] for s in scores]

    sizes = evaluate.cluster_sizes(train.heads, n_clusters)
    loss, health = trainer.state.loss.tolist(), trainer.state.health
    heads = [
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

    metrics: dict[str, Any] = {
        "table": table,
        "heads": heads,
        "cluster_sizes": evaluate.cluster_sizes(train.clusters, n_clusters).tolist(),
        "knn_accuracy": None,
        "linear_probe": None,
    }
    if train.labels is not None:
        held_out = () if test is None or test.labels is None else (test.x, test.labels)
        metrics["knn_accuracy"] = evaluate.knn_accuracy(train.x, train.labels, *held_out)
        if settings.probe:
            metrics["linear_probe"] = evaluate.linear_probe(
                train.x, train.labels, *held_out, seed=settings.seed
            )
    _write_arrays(folder, train, stores["train"].class_names, n_clusters, settings.seed)
    tell("judge", stages, stages, {})
    return metrics


class _Split:
    """One split, judged: the answer for every row, and each head's on the rows that are scored."""

    def __init__(
        self,
        store: EmbeddingStore,
        settings: VisionSettings,
        trainer: HeadTrainer,
        model: ClusterModel,
    ) -> None:
        self.store = store
        blocks = [model.predict_proba(x) for _, x in store.blocks(ROWS_PER_BLOCK)]
        confidence, clusters = torch.cat(blocks).max(-1)
        self.clusters, self.confidence = clusters.numpy(), confidence.numpy()
        self.all_labels = None if store.labels is None else store.labels.numpy()

        # Heads and baselines are compared on the same rows, a sample where there are very many.
        rows = sample_rows(store.n, settings.seed, JUDGED_ROWS)
        x = store.gather(rows)
        self.x = x.numpy()
        self.labels = None if self.all_labels is None else self.all_labels[rows.numpy()]

        def projected(rows: Tensor) -> Tensor:
            return model.projection(store.gather(rows))

        self.heads = head_clusters(trainer, projected, rows).numpy()


def _write_assignments(folder: RunFolder, splits: dict[str, _Split]) -> None:
    """`assignments.csv`: file, cluster, confidence, split, and the label where it is known."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    labelled = any(split.all_labels is not None for split in splits.values())
    writer.writerow(["file", "cluster", "confidence", "split", *(["label"] if labelled else [])])
    for name, split in splits.items():
        labels = split.all_labels if split.all_labels is not None else [-1] * split.store.n
        names = split.store.class_names
        rows = zip(split.store.ids, split.clusters, split.confidence, labels, strict=True)
        for file, cluster, confidence, label in rows:
            known = "" if label < 0 else label if names is None else names[label]
            row = [file, int(cluster), f"{confidence:.4f}", name]
            writer.writerow([*row, known] if labelled else row)
    atomic_write_text(folder.path / "assignments.csv", text.getvalue())


def _write_arrays(
    folder: RunFolder,
    split: _Split,
    class_names: tuple[str, ...] | None,
    n_clusters: int,
    seed: int,
) -> None:
    """`arrays.npz`: the map of the embeddings, typical samples of each cluster, the confusion."""
    rows, places = evaluate.embedding_map(split.x, seed)
    judged = sample_rows(split.store.n, seed, JUDGED_ROWS).numpy()[rows]
    arrays = {"map": places, "map_cluster": split.clusters[judged]}
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


def _about(dataset: Dataset, stores: dict[str, EmbeddingStore], n_clusters: int) -> dict[str, Any]:
    """What `metrics.json` says of the data."""
    store = stores["train"]
    return {
        "name": dataset.name,
        "n_train": store.n,
        "n_test": stores["test"].n if "test" in stores else 0,
        "n_classes": None if store.class_names is None else len(store.class_names),
        "n_clusters": n_clusters,
        "class_names": None if store.class_names is None else list(store.class_names),
        "labelled": store.labels is not None,
        "unreadable": len(store.manifest.get("unreadable", [])),
    }
