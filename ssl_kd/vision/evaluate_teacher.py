"""Judge a teacher's embeddings of a data set, without training heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssl_kd.core.precision import Precision
from ssl_kd.core.runs.clock import Clock, Progress, no_progress
from ssl_kd.core.runs.folder import commit, versions
from ssl_kd.vision import evaluate
from ssl_kd.vision.assignments import JUDGED_ROWS
from ssl_kd.vision.cache.embeddings import EmbeddingStore
from ssl_kd.vision.run import open_extractions
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.train.pairs import sample_rows


def evaluate_teacher(
    settings: VisionSettings, *, progress: Progress = no_progress
) -> dict[str, Any]:
    """Fill the teacher's cache, and score the embeddings.

    Returns:
        A dict that can be written as JSON: the scores of `knn_accuracy`, `linear_probe` and
        `few_shot_probes` (None without labels) and `rankme` of `ssl_kd.evaluate`, and what is
        needed to repeat them: the teacher and its weights, the numbers of samples, the settings,
        the versions of packages and the commit.
    """
    clock = Clock()
    precision = Precision.for_device(settings.device, settings.use_fp16)
    extractions = open_extractions(settings, precision, progress=progress)
    teacher = extractions["train"].teacher
    with clock("embed"):
        splits = {
            name: _sampled(extraction.store(), settings.seed)
            for name, extraction in extractions.items()
        }
    x, labels = splits["train"]
    held_out: tuple[Any, ...] = ()
    if "test" in splits and splits["test"][1] is not None:
        held_out = splits["test"]
    scores: dict[str, Any] = {"knn_accuracy": None, "linear_probe": None, "few_shot": None}
    with clock("score"):
        if labels is not None:
            seed = settings.seed
            scores = {
                "knn_accuracy": evaluate.knn_accuracy(x, labels, *held_out),
                "linear_probe": evaluate.linear_probe(x, labels, *held_out, seed=seed),
                "few_shot": evaluate.few_shot_probes(x, labels, *held_out, seed=seed),
            }
        scores["rankme"] = evaluate.rankme(x, seed=settings.seed)
    resolved = settings.replace(teacher=teacher.setting)
    return {
        "teacher": {"name": teacher.name, "dim": teacher.dim, "weights": teacher.weights_id},
        "cache": str(Path(extractions["train"].folder)),
        "rows": {name: len(rows) for name, (rows, _) in splits.items()},
        "held_out": bool(held_out),
        **scores,
        "seconds": clock.seconds,
        "settings": resolved.to_dict(),
        "precision": str(precision),
        "versions": versions(),
        "commit": commit(),
    }


def _sampled(store: EmbeddingStore, seed: int) -> tuple[NDArray, NDArray[np.int64] | None]:
    """Return the embeddings and labels of the rows that a run's scores are of."""
    rows = sample_rows(store.n, seed, JUDGED_ROWS)
    labels = None if store.labels is None else store.labels.numpy()[rows.numpy()]
    return store.gather(rows).numpy(), labels
