"""Find samples that are unlike all others, and test samples that copy training samples."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ssl_kd.core.errors import InputError
from ssl_kd.vision.cache import EmbeddingStore
from ssl_kd.vision.cache.neighbors import nearest_among, search_on
from ssl_kd_explore.curate.duplicates import CHANCE, NEIGHBORS, ROWS
from ssl_kd_explore.curate.neighbor_spacing import (
    SAME,
    Progress,
    Spacing,
    check_finite,
    similarity,
    units,
)
from ssl_kd_explore.curate.ranked_samples import Ranked

PART, PARTS = 32, 64  # size and number of the random subsets
COMPARED = 1024  # rows that are compared at once
SHORTEST = 1e-3  # added to lengths, in units of the typical length: log 0 is infinite


def outliers(store: EmbeddingStore, *, progress: Progress | None = None) -> Ranked:
    """Rank all samples by their distance to random subsets of the others.

    Each row is replaced by its direction and log length, `z = (x / |x|, log |x|)`, because broken
    images often differ in length. The distance of a sample is its distance to the nearest of 32
    random rows, averaged over 64 random subsets. Unlike nearest neighbors, this detects groups of
    outliers, because few subsets contain another member of the group.

    Args:
        store: n embeddings.
        progress: called with (rows done, n).

    Returns:
        All n samples. The score is the share of samples with a smaller distance, 0 to 1; the column
        `distance` has the distances.

    Raises:
        InputError: an embedding is not finite.

    References:
        Pang et al., LeSiNN: Detecting anomalies by identifying least similar nearest neighbours,
        ICDM workshops 2015; Sugiyama and Borgwardt, Rapid distance-based outlier detection via
        sampling, NeurIPS 2013 (one part).
    """
    distances = np.zeros(store.n)
    if store.n > 1:
        rng, size = np.random.default_rng(0), min(PART, store.n)
        parts = np.concatenate([rng.choice(store.n, size, replace=False) for _ in range(PARTS)])
        members = torch.from_numpy(parts)
        sample = store.gather(members)
        typical = float(sample.double().norm(dim=1).median()) or 1.0
        reference = _polar(sample, typical)
        for start, block in store.blocks(COMPARED):
            rows = torch.arange(start, start + len(block))
            check_finite(block, store, rows)
            distance = torch.cdist(_polar(block, typical), reference)
            distance[rows.unsqueeze(1) == members] = torch.inf
            distances[rows] = distance.view(-1, PARTS, size).amin(2).double().mean(1)
            if progress is not None:
                progress(start + len(block), store.n)
    scores = np.searchsorted(np.sort(distances), distances) / max(store.n - 1, 1)
    return Ranked(store.ids, np.arange(store.n), scores, {"distance": distances})


def _polar(x: Tensor, typical: float) -> Tensor:
    """Convert rows `[b, d]` to directions and log lengths in units of `typical`, `[b, d + 1]`."""
    length = x.double().norm(dim=1, keepdim=True) / typical
    return torch.cat([units(x), (length + SHORTEST).log()], 1).float()


def leaks(
    train: EmbeddingStore,
    test: EmbeddingStore,
    threshold: float | None = None,
    *,
    progress: Progress | None = None,
) -> Ranked:
    """Find test samples that are copies of training samples.

    All pairs are compared, block by block.

    Args:
        train: n embeddings.
        test: m embeddings by the same teacher.
        threshold: minimum cosine of a copy. If None, a copy is a test sample that is closer to a
            training sample than expected by chance, at a false discovery rate of 1 % (see
            `near_duplicates`).
        progress: called with (test rows done, m).

    Returns:
        The copies among the test samples. The score is the cosine; the columns are `train_row`, the
        nearest training row, and `chance`, the false discovery rate at that cosine.

    Raises:
        InputError: the teachers of the two stores differ, or an embedding is not finite.
    """
    kinds = [(s.fingerprint.teacher, s.fingerprint.weights, s.dim) for s in (train, test)]
    if kinds[0] != kinds[1]:
        raise InputError(
            f"{train.folder} ({train.split}) and {test.folder} ({test.split}) hold embeddings of "
            f"different teachers: {kinds[0][0]} with {kinds[0][2]} dimensions, and {kinds[1][0]} "
            f"with {kinds[1][2]}. Extract both splits with the same teacher"
        )
    k = min(NEIGHBORS, train.n)
    search = search_on(torch.device("cpu"))
    distances, nearest = np.empty((test.n, k)), np.empty(test.n, dtype=np.int64)
    for start, block in test.blocks(ROWS):
        x = units(block).float()
        check_finite(x, test, torch.arange(start, start + len(x)))
        candidates = ((first, units(rows).float()) for first, rows in train.blocks(ROWS))
        excluded = torch.full((len(x),), -1)
        columns = nearest_among(x, excluded, candidates, k, search)
        for row, neighbors in enumerate(columns):
            apart = (units(train.gather(neighbors)).float() - x[row]).norm(dim=1)
            ordered, order = apart.double().sort(stable=True)
            distances[start + row] = ordered.numpy()
            nearest[start + row] = neighbors[order[0]]
        if progress is not None:
            progress(start + len(x), test.n)
    spacing = Spacing([distances], k)
    closeness = np.where(distances[:, 0] > SAME, distances[:, 0] / spacing.scale, 0.0)
    columns = {"train_row": nearest, "chance": spacing.excess(closeness, closeness)}
    ranked = Ranked(test.ids, np.arange(test.n), similarity(distances[:, 0]), columns)
    if threshold is not None:
        return ranked.above(threshold)
    return ranked.only(ranked.columns["chance"] <= CHANCE)
