"""Judge teachers by their embeddings of a data set, without training heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ssl_kd.core.errors import InputError
from ssl_kd.core.precision import Precision
from ssl_kd.core.runs.clock import Clock, Progress, no_progress
from ssl_kd.core.runs.folder import commit, versions
from ssl_kd.vision import evaluate
from ssl_kd.vision.assignments import JUDGED_ROWS
from ssl_kd.vision.augmented import embed_views
from ssl_kd.vision.cache.embeddings import EmbeddingStore
from ssl_kd.vision.data import ImageDataset
from ssl_kd.vision.evaluate import knn, rank
from ssl_kd.vision.evaluate.agreement import MAX_ROWS
from ssl_kd.vision.evaluate.sample import random_rows
from ssl_kd.vision.evaluate.sgd_probe import STEPS
from ssl_kd.vision.run import open_extractions
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.train.pairs import sample_rows


@dataclass(frozen=True)
class Protocol:
    """How embeddings are scored."""

    seed: int = 0
    probe: str = "logistic"  # the linear probe: logistic (regression) or sgd (DINOv2's)
    probe_steps: int = STEPS  # of sgd
    views: int = 0  # augmented views of each image, for LiDAR; 0: none
    device: str | torch.device = "cpu"  # that trains the probe sgd


@dataclass(frozen=True)
class _Sample:
    """Embeddings of at most 2,000 random rows, by which caches of the same samples are compared."""

    n: int  # rows of the cache
    ids: list[str]
    x: NDArray[np.float32]  # `[row, d]`

    @classmethod
    def of(cls, store: EmbeddingStore, seed: int) -> _Sample:
        rows = random_rows(store.n, MAX_ROWS, seed)
        ids = store.ids
        x = store.gather(torch.from_numpy(rows)).numpy()
        return cls(store.n, [ids[row] for row in rows.tolist()], x)

    def has_samples_of(self, other: _Sample) -> bool:
        return self.n == other.n and self.ids == other.ids


def evaluate_teachers(
    compared: Sequence[VisionSettings], protocol: Protocol, *, progress: Progress = no_progress
) -> list[dict[str, Any]]:
    """Fill the caches of teachers, and score the embeddings.

    Args:
        compared: data, teacher and cache of each.
        protocol: how to score; its seed and device are replaced by those of the settings.
        progress: called while samples are embedded.

    Returns:
        For each a dict that can be written as JSON: the scores of `scores_of`, `agreement` (that of
        `neighbor_agreement` in `ssl_kd.evaluate`; None unless all embed the same samples), and what
        is needed to repeat them: the teacher and its weights, the numbers of samples, the settings,
        the versions of packages and the commit.
    """
    return _with_agreement([_evaluate_teacher(each, protocol, progress) for each in compared])


def _with_agreement(scored: Sequence[tuple[dict[str, Any], _Sample]]) -> list[dict[str, Any]]:
    samples = [sample for _, sample in scored]
    agreement: Sequence[float | None] = [None] * len(samples)
    if all(sample.has_samples_of(samples[0]) for sample in samples):
        agreement = evaluate.neighbor_agreement([sample.x for sample in samples])
    return [
        scores | {"agreement": value} for (scores, _), value in zip(scored, agreement, strict=True)
    ]


def _evaluate_teacher(
    settings: VisionSettings, protocol: Protocol, progress: Progress
) -> tuple[dict[str, Any], _Sample]:
    clock = Clock()
    precision = Precision.for_device(settings.device, settings.use_fp16)
    extractions = open_extractions(settings, precision, progress=progress)
    train = extractions["train"]
    if protocol.views and not isinstance(train.dataset, ImageDataset):
        raise InputError(
            f"--views is {protocol.views}, but DATASET {settings.dataset} holds no images, of "
            "which views could be made: leave it out"
        )
    with clock("embed"):
        stores = {name: extraction.store() for name, extraction in extractions.items()}
        views = None
        if protocol.views:
            assert isinstance(train.dataset, ImageDataset)
            views = embed_views(
                train.dataset, train.teacher, precision, protocol.views, seed=settings.seed
            )
    with clock("score"):
        protocol = replace(protocol, seed=settings.seed, device=precision.device)
        scores = scores_of(stores, protocol, views)
    teacher = train.teacher
    resolved = settings.replace(teacher=teacher.setting)
    scores = {
        "teacher": {"name": teacher.name, "dim": teacher.dim, "weights": teacher.weights_id},
        "cache": str(Path(train.folder)),
        **scores,
        "seconds": clock.seconds,
        "settings": resolved.to_dict(),
        "precision": str(precision),
        "versions": versions(),
        "commit": commit(),
    }
    return scores, _Sample.of(stores["train"], settings.seed)


def evaluate_caches(folders: Sequence[Path], protocol: Protocol) -> list[dict[str, Any]]:
    """Score the embeddings of caches of the same samples, without teachers or data.

    Returns:
        For each cache what `evaluate_teachers` returns, with the cache's own labels and without
        `settings` and `precision`, but with `fingerprint`, what the cache was computed from.

    Raises:
        InputError: a folder is not a cache of embeddings, or two caches hold other samples.
    """
    scored = []
    for folder in folders:
        clock = Clock()
        stores = open_caches(folder)
        train, identity = stores["train"], stores["train"].fingerprint
        sample = _Sample.of(train, protocol.seed)
        if scored and not sample.has_samples_of(first := scored[0][1]):
            raise InputError(
                f"{folder} and {folders[0]} hold different samples ({sample.n} and {first.n}), so "
                "their scores do not compare: score each with a command of its own"
            )
        with clock("score"):
            scores = scores_of(stores, protocol)
        about = {"name": identity.teacher, "dim": train.dim, "weights": identity.weights}
        scores = {
            "teacher": about,
            "cache": str(folder),
            **scores,
            "seconds": clock.seconds,
            "fingerprint": vars(identity),
            "versions": versions(),
            "commit": commit(),
        }
        scored.append((scores, sample))
    return _with_agreement(scored)


def open_caches(folder: Path) -> dict[str, EmbeddingStore]:
    """Open the splits of a cache: `train` and, if there is one, `test`.

    Raises:
        InputError: the folder is not a cache of embeddings.
    """
    stores = {
        split: EmbeddingStore.open(folder, split)
        for split in ("train", "test")
        if (folder / f"embeddings_{split}.json").is_file()
    }
    if "train" not in stores:
        raise InputError(
            f"{folder} holds no embeddings_train.json; expected a cache of embeddings, the folder "
            "that a run names as EMBEDDINGS_DIR. Data are named by --dataset"
        )
    return stores


def scores_of(
    stores: Mapping[str, EmbeddingStore], protocol: Protocol, views: NDArray | None = None
) -> dict[str, Any]:
    """Score embeddings, on the split `test` if it has labels.

    Returns:
        `rows` of each split, `held_out`, whether `test` has labels; `knn_accuracy`, `linear_probe`
        and `few_shot` (None without labels), `rankme`, `alpha_req` and `lidar` as the functions of
        these names in `ssl_kd.evaluate` (`few_shot_probes` for `few_shot`, `sgd_probe` for the
        probe `sgd`), and `protocol`. `lidar` is a dict: `value`, and `note` if that is None.
    """
    splits = {name: _sampled(store, protocol.seed) for name, store in stores.items()}
    x, labels = splits["train"]
    held_out: tuple[Any, ...] = ()
    if "test" in splits and splits["test"][1] is not None:
        held_out = splits["test"]
    seed = protocol.seed
    scores: dict[str, Any] = {"knn_accuracy": None, "linear_probe": None, "few_shot": None}
    if labels is not None:
        scores = {
            "knn_accuracy": evaluate.knn_accuracy(x, labels, *held_out),
            "linear_probe": _linear_probe(x, labels, held_out, protocol),
            "few_shot": evaluate.few_shot_probes(
                x, labels, *held_out, seed=seed, class_names=stores["train"].class_names
            ),
        }
    about_lidar = {"value": None, "note": "a cache holds one view of each sample: add --views 8"}
    if views is not None:
        about_lidar = {"value": evaluate.lidar(views), "note": None}
    return {
        "rows": {name: len(rows) for name, (rows, _) in splits.items()},
        "held_out": bool(held_out),
        **scores,
        "rankme": evaluate.rankme(x, seed=seed),
        "alpha_req": evaluate.alpha_req(x, seed=seed),
        "lidar": about_lidar,
        "protocol": {
            "seed": seed,
            "knn": {"k": knn.K, "temperature": knn.TEMPERATURE},
            "probe": protocol.probe,
            "alpha_req_ranks": list(rank.FITTED_RANKS),
            "lidar_delta": rank.DELTA,
            "views": None if views is None else list(views.shape[:2]),
        },
    }


def _linear_probe(
    x: NDArray, labels: NDArray, held_out: tuple[Any, ...], protocol: Protocol
) -> dict[str, Any]:
    if protocol.probe == "logistic":
        return evaluate.linear_probe(x, labels, *held_out, seed=protocol.seed)
    options = {"steps": protocol.probe_steps, "seed": protocol.seed, "device": protocol.device}
    return evaluate.sgd_probe(x, labels, *held_out, **options)


def _sampled(store: EmbeddingStore, seed: int) -> tuple[NDArray, NDArray[np.int64] | None]:
    """Return the embeddings and labels of the rows that a run's scores are of."""
    rows = sample_rows(store.n, seed, JUDGED_ROWS)
    labels = None if store.labels is None else store.labels.numpy()[rows.numpy()]
    return store.gather(rows).numpy(), labels
