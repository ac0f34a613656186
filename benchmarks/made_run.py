"""A finished run of any size, made up: its clusters are the groups that its rows were drawn from.

The folder is a real one: embeddings, configuration and assignments as `python train.py` on a file
of features leaves them, a tree of two levels with them. Only the heads are missing.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as arrow
import torch
from pyarrow import csv, parquet

from ssl_kd.store import EmbeddingStore, EmbeddingWriter, Fingerprint
from ssl_kd.vision.assigned import CSV_ROWS

BLOCK, DIM, COARSE, FINE = 50_000, 32, 20, 200


def made_run(folder: Path, rows: int) -> Path:
    """Write it, where it is not there yet."""
    run = folder / f"run_{rows}"
    if (run / "metrics.json").is_file():
        return run
    run.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    centres = 2 * random.standard_normal((COARSE, DIM))
    centres = centres.repeat(FINE // COARSE, 0) + random.standard_normal((FINE, DIM))
    clusters = random.integers(0, FINE, rows)
    ids = [f"photos/group {k:03}/IMG_{row:07}.jpg" for row, k in enumerate(clusters)]
    of = Fingerprint("features", "none", "none", "float32", f"{rows} x {DIM}, made up")
    cache, far = folder / f"embeddings_{rows}", np.empty(rows, np.float32)
    with EmbeddingWriter(cache, "train", of, rows, DIM, ids=ids, dtype=torch.float16) as writer:
        for start in range(0, rows, BLOCK):
            own = clusters[start : start + BLOCK]
            noise = 0.7 * random.standard_normal((len(own), DIM))
            far[start : start + BLOCK] = np.linalg.norm(noise, axis=1)
            x = torch.from_numpy((centres[own] + noise).astype(np.float32))
            writer.append(x, torch.arange(start, start + len(own)))
        writer.close()
    names = [f"group {k:02}" for k in range(COARSE)]
    table = arrow.table({
        "file": ids,
        "cluster": clusters.astype(np.int32),
        "confidence": 1 / (1 + np.exp(far - 5)),
        "split": ["train"] * rows,
        "label": [names[k * COARSE // FINE] for k in clusters],
        "outlier": far,
        f"level_{COARSE}": (clusters * COARSE // FINE).astype(np.int32),
    })  # fmt: skip
    if rows < CSV_ROWS:
        csv.write_csv(table, run / "assignments.csv")
    else:
        parquet.write_table(table, run / "assignments.parquet")
    digest = EmbeddingStore.open(cache, "train", verify=False).fingerprint.digest
    settings = {"DATASET": "made up", "EMBEDDINGS_DIR": str(cache.absolute()), "DATA_DIR": "data"}
    config = {"settings": settings, "learns_from": digest, "n_clusters": FINE}
    (run / "config.json").write_text(json.dumps(config))
    metrics = {"dataset": {"n_clusters": FINE}, "teacher": {"name": "features"}}
    (run / "metrics.json").write_text(json.dumps(metrics))
    return run
