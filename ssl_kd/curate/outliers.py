"""Samples that lie far from all others, and test samples that lie on a training sample."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ssl_kd.curate.duplicates import CHANCE, NEIGHBOURS, ROWS
from ssl_kd.curate.ranked import Ranked
from ssl_kd.curate.spacing import (
    SAME,
    Progress,
    Spacing,
    neighbour_distances,
    similarity,
    units,
)
from ssl_kd.errors import InputError
from ssl_kd.store import EmbeddingStore, find_neighbours
from ssl_kd.store.neighbours import nearest_among, search_on


def outliers(
    store: EmbeddingStore,
    *,
    search: str = "auto",
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> Ranked:
    """All samples by how far out they lie.

    The score is the share of samples whose mean distance to their 20 nearest others is smaller,
    0 ... 1: of two thresholds the higher one calls fewer samples outliers. A finished run has a
    score of its own for each sample, which takes how dense it is around into account.

    Args:
        store: n embeddings; of a single one nothing is known.
        search: as `find_neighbours` takes it.
        device: where all pairs are compared.
        progress: called with (rows done, n).

    Returns:
        All n; column `distance`, the mean.

    References:
        Ramaswamy et al., Efficient algorithms for mining outliers from large data sets, SIGMOD
        2000; Angiulli and Pizzuti, Fast outlier detection in high dimensional spaces, PKDD 2002.
    """
    far = np.zeros(store.n)
    if store.n > 1:
        neighbours, _ = find_neighbours(
            store, min(NEIGHBOURS, store.n - 1), search=search, device=device
        )
        for rows, _, distance in neighbour_distances(store, neighbours):
            far[rows] = distance.mean(1)
            if progress is not None:
                progress(int(rows[-1]) + 1, store.n)
    score = np.searchsorted(np.sort(far), far) / max(store.n - 1, 1)
    return Ranked(store.ids, np.arange(store.n), score, {"distance": far})


class Leaks:
    """Of each test sample the nearest training sample, the nearest first; cut anywhere.

    Args:
        train: the training samples.
        test: the others.
        nearest: `[m]`, the training row of each test row.
        similarity: `[m]`, its cosine.
        chance: `[m]`, the share of test samples this close that are so by chance.
    """

    def __init__(
        self,
        train: EmbeddingStore,
        test: EmbeddingStore,
        nearest: NDArray[np.int64],
        similarity: NDArray[np.float64],
        chance: NDArray[np.float64],
    ) -> None:
        self.train, self.nearest = train, nearest
        columns = {"train_row": nearest, "chance": chance}
        self._all = Ranked(test.ids, np.arange(test.n), similarity, columns)

    def __len__(self) -> int:
        """How many test samples were looked at."""
        return len(self._all)

    def above(self, threshold: float | None = None) -> Ranked:
        """The test samples that are copies of a training sample, the score their cosine.

        Args:
            threshold: cosine from which on they are; None: as `Duplicates.pairs`.
        """
        if threshold is not None:
            return self._all.above(threshold)
        return self._all.only(self._all.columns["chance"] <= CHANCE)


def leaks(
    train: EmbeddingStore,
    test: EmbeddingStore,
    *,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> Leaks:
    """Find for each test sample the training sample that it may be a copy of.

    All pairs are compared, a block of each side at a time. What is by chance is told by the test
    samples' distances to their 20 nearest training samples, as `near_duplicates` does.

    Args:
        train: n embeddings.
        test: m embeddings by the same teacher.
        device: where all pairs are compared.
        progress: called with (test rows done, m).

    Raises:
        InputError: the two are not of the same teacher.
    """
    of = [(s.fingerprint.teacher, s.fingerprint.weights, s.dim) for s in (train, test)]
    if of[0] != of[1]:
        raise InputError(
            f"{train.folder} ({train.split}) and {test.folder} ({test.split}) hold embeddings of "
            f"different teachers: {of[0][0]} of {of[0][2]} dimensions and {of[1][0]} of "
            f"{of[1][2]}; extract both with one"
        )
    k = min(NEIGHBOURS, train.n)
    search, place = search_on(torch.device(device)), torch.device(device)
    distances, nearest = np.empty((test.n, k)), np.empty(test.n, dtype=np.int64)
    for start, block in test.blocks(ROWS):
        own = units(block).float()
        if not own.isfinite().all():
            raise InputError(f"{test.folder} ({test.split}) has a row that is not finite")
        candidates = ((first, units(x).float().to(place)) for first, x in train.blocks(ROWS))
        none = torch.full((len(own),), -1, device=place)
        found = nearest_among(own.to(place), none, candidates, k, search).cpu()
        for row, columns in enumerate(found):
            apart = (units(train.gather(columns)).float() - own[row]).norm(dim=1)
            ordered, order = apart.double().sort(stable=True)
            distances[start + row] = ordered.numpy()
            nearest[start + row] = columns[order[0]]
        if progress is not None:
            progress(start + len(own), test.n)
    spacing = Spacing.of(distances)
    closeness = np.where(distances[:, 0] > SAME, distances[:, 0] / spacing.scale, 0.0)
    return Leaks(train, test, nearest, similarity(distances[:, 0]), spacing.excess(closeness))
