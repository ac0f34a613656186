"""Make caches of embeddings for tests."""

from pathlib import Path

import numpy as np
import torch

from ssl_kd.core.shards import Fingerprint
from ssl_kd.vision.cache import EmbeddingStore, EmbeddingWriter


def write(
    folder: Path,
    x,
    labels=None,
    split="train",
    shard_rows=70,
    class_names=None,
    data="made up",
    ids=None,
) -> EmbeddingStore:
    """A store of rows `[n, d]`, in several shards."""
    x = torch.as_tensor(np.asarray(x), dtype=torch.float32)
    n, dim = x.shape
    with EmbeddingWriter(
        folder,
        split,
        Fingerprint("features", "none", "none", "float32", data),
        n,
        dim,
        labels=None if labels is None else torch.as_tensor(labels),
        ids=[f"{split}/{row}.png" for row in range(n)] if ids is None else ids,
        class_names=class_names,
        shard_rows=shard_rows,
    ) as writer:
        writer.append(x, torch.arange(n))
        return writer.close()


def distinct(n=400, dim=16, clusters=8, seed=0):
    """Rows of a few clusters, none a copy of another; and the clusters."""
    rng = np.random.default_rng(seed)
    y = rng.integers(clusters, size=n)
    return 2 * rng.normal(size=(clusters, dim))[y] + rng.normal(size=(n, dim)), y
