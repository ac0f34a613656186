"""Samples that lie far from all others, and test samples that lie on a training sample."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssl_kd.errors import InputError
from ssl_kd.store import EmbeddingStore
from ssl_kd.store.neighbours import nearest_among, search_on
from ssl_kd.workbench.curate.duplicates import CHANCE, NEIGHBOURS, ROWS
from ssl_kd.workbench.curate.ranked import Ranked
from ssl_kd.workbench.curate.spacing import SAME, Progress, Spacing, check_finite, similarity, units

PART, PARTS = 32, 64  # rows that one is compared with at a time, and how often
COMPARED = 1024  # rows at once
SHORTEST = 1e-3  # of the typical length: a row of zeros has no logarithm


def outliers(
    store: EmbeddingStore,
    *,
    device: str | torch.device = "cpu",
    seed: int = 0,
    progress: Progress | None = None,
) -> Ranked:
    """All samples by how far out they lie.

    A row becomes its direction and the logarithm of its length, `z = (x / |x|, log |x|)`: broken
    images differ in their length as well. How far out it lies is its distance to the nearest other
    row of a random part of 32, in the mean of 64 parts. So a group of strangers does not vouch for
    its members, as their nearest neighbours would: few parts hold one of them.

    The score is the share of samples that lie less far out, 0 ... 1: of two thresholds the higher
    one calls fewer samples outliers.

    Args:
        store: n embeddings; of a single one nothing is known.
        device: where rows are compared.
        seed: draws the parts.
        progress: called with (rows done, n).

    Returns:
        All n; column `distance`, the mean.

    Raises:
        InputError: a row is not finite.

    References:
        Pang et al., LeSiNN: Detecting anomalies by identifying least similar nearest neighbours,
        ICDM workshops 2015; Sugiyama and Borgwardt, Rapid distance-based outlier detection via
        sampling, NeurIPS 2013 (one part).
    """
    far = np.zeros(store.n)
    if store.n > 1:
        rng, size = np.random.default_rng(seed), min(PART, store.n)
        parts = np.concatenate([rng.choice(store.n, size, replace=False) for _ in range(PARTS)])
        members = torch.from_numpy(parts)
        sample = store.gather(members)
        typical = float(sample.double().norm(dim=1).median()) or 1.0
        reference = _polar(sample, typical).to(device)
        for start, block in store.blocks(COMPARED):
            rows = torch.arange(start, start + len(block))
            check_finite(block, store, rows)
            distance = torch.cdist(_polar(block, typical).to(device), reference).cpu()
            distance[rows.unsqueeze(1) == members] = torch.inf
            far[rows] = distance.view(-1, PARTS, size).amin(2).double().mean(1)
            if progress is not None:
                progress(start + len(block), store.n)
    score = np.searchsorted(np.sort(far), far) / max(store.n - 1, 1)
    return Ranked(store.ids, np.arange(store.n), score, {"distance": far})


def _polar(x: Tensor, typical: float) -> Tensor:
    """Rows `[b, d]` -> `[b, d + 1]`: direction, and logarithm of the length in units of one."""
    length = x.double().norm(dim=1, keepdim=True) / typical
    return torch.cat([units(x), (length + SHORTEST).log()], 1).float()


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
