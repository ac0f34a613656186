"""Select samples to look at or to label: typical ones, diverse ones, and sides of a split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import faiss
import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.cluster import kmeans_plusplus
from torch import Tensor

from ssl_kd.core.errors import InputError
from ssl_kd.vision.cache import EmbeddingStore
from ssl_kd.vision.evaluate.sample import random_rows
from ssl_kd_explore.curate.neighbor_spacing import check_finite, units

ITERATIONS = 20  # of k-means
_PER_CENTER = 64  # samples among which the first centers are chosen
_ROWS = 65_536  # that are read or assigned at once

Rows = NDArray[np.int64]


class Selection(NamedTuple):
    """Selected samples, in the order in which they were chosen.

    Attributes:
        rows: row numbers `[n]`.
        scores: a number for each `[n]`; its meaning is that of the method.
    """

    rows: Rows
    scores: NDArray[np.float64]


def directions(store: EmbeddingStore) -> Tensor:
    """Return the embeddings scaled to length 1, `[n, d]` float32, in memory."""
    x = torch.empty(store.n, store.dim)
    for start, block in store.blocks(_ROWS):
        x[start : start + len(block)] = units(block).float()
        rows = torch.arange(start, start + len(block))
        check_finite(x[start : start + len(block)], store, rows)
    return x


def diverse(x: Tensor, n: int, *, start: Sequence[int] = (), allowed: Rows) -> Selection:
    """Choose samples that are far apart: each is the one furthest from all before.

    The first, if there is no `start`, is nearest to the mean. After n samples, every sample is
    within a distance of one of them that is at most twice what any n samples allow. Outliers are
    among the first.

    Args:
        x: directions, `[n, d]`.
        n: number of samples.
        start: rows that were chosen before, and are not chosen again.
        allowed: rows among which to choose, each once.

    Returns:
        The rows; a score is the distance `sqrt(2 - 2 cos)` to the nearest row chosen before, 2
        for the first.

    Raises:
        InputError: fewer than n rows remain.

    References:
        Gonzalez, Clustering to minimize the maximum intercluster distance, 1985.
    """
    left = _left(len(x), n, start, allowed)
    nearest = torch.full((len(x),), 4.0)  # squared distance to the nearest chosen row
    for row in start:
        torch.minimum(nearest, _squared(x, row), out=nearest)
    rows: list[int] = []
    scores: list[float] = []
    forbidden = torch.from_numpy(~left)
    for _ in range(n):
        if rows or len(start):
            row = int(nearest.masked_fill(forbidden, -1).argmax())
        else:
            row = int((x @ x.mean(0)).masked_fill(forbidden, -torch.inf).argmax())
        scores.append(float(nearest[row].sqrt()))
        rows.append(row)
        forbidden[row] = True
        torch.minimum(nearest, _squared(x, row), out=nearest)
    return Selection(np.array(rows, np.int64), np.array(scores))


def covering_radius(x: Tensor, rows: Sequence[int]) -> float:
    """Return the largest distance `sqrt(2 - 2 cos)` of a sample to the nearest of some rows."""
    nearest = torch.full((len(x),), 4.0)
    for row in rows:
        torch.minimum(nearest, _squared(x, row), out=nearest)
    return float(nearest.max().sqrt())


def typical(
    x: Tensor, n: int, *, start: Sequence[int] = (), allowed: Rows, seed: int = 0
) -> Selection:
    """Choose samples that stand for many others: the centers of n groups of similar ones.

    The samples are divided by k-means into as many groups as there are samples in `start` and n
    more. Groups with a row of `start` are covered; of the others, the largest first, the row
    nearest to the center is chosen.

    Args:
        x: directions, `[n, d]`.
        n: number of samples.
        start: rows that were chosen before, and are not chosen again.
        allowed: rows among which to choose, each once.
        seed: seed of k-means.

    Returns:
        The rows; a score is the number of samples in the group.

    Raises:
        InputError: fewer than n rows remain.

    References:
        Hacohen et al., Active Learning on a Budget: Opposite Strategies Suit High and Low Budgets,
        2022 (TypiClust), with the center of a group as its typical sample.
    """
    left = _left(len(x), n, start, allowed)
    k = min(len(x), n + len(start))
    kmeans = faiss.Kmeans(x.shape[1], k, niter=ITERATIONS, seed=seed, min_points_per_centroid=1)
    drawn = random_rows(len(x), _PER_CENTER * k, seed)
    # By k-means++: centers drawn at random would miss small groups.
    begin, _ = kmeans_plusplus(x[drawn].numpy(), k, random_state=seed, n_local_trials=1)
    kmeans.train(x.numpy(), init_centroids=begin.astype(np.float32))
    distance, group = np.empty(len(x), np.float32), np.empty(len(x), np.int64)
    for first in range(0, len(x), _ROWS):
        part = slice(first, first + _ROWS)
        d, i = kmeans.index.search(x[part].numpy(), 1)
        distance[part], group[part] = d[:, 0], i[:, 0]
    sizes = np.bincount(group, minlength=k)
    covered = np.zeros(k, bool)
    covered[group[list(start)]] = True
    rows = np.flatnonzero(left)
    rows = rows[np.lexsort((rows, distance[rows]))]
    # The nearest row of every uncovered group, then the second nearest, ...; the largest groups
    # first, and those that are covered only if nothing else is left.
    rank = _rank_within(group[rows])
    of = group[rows]
    order = np.lexsort((rows, of, -sizes[of], rank, covered[of]))[:n]
    return Selection(rows[order], sizes[of[order]].astype(np.float64))


def balanced(
    clusters: Rows, confidence: NDArray[np.floating], n: int, *, start: Sequence[int], allowed: Rows
) -> Selection:
    """Choose equally many samples of each cluster, the most certain first.

    Args:
        clusters: cluster of every sample `[n]`.
        confidence: confidence of every sample `[n]`.
        n: number of samples.
        start: rows that were chosen before; they count for their clusters.
        allowed: rows among which to choose, each once.

    Returns:
        The rows, one of each cluster after the other; a score is the confidence.

    Raises:
        InputError: fewer than n rows remain.
    """
    left = _left(len(clusters), n, start, allowed)
    before = np.bincount(clusters[list(start)], minlength=int(clusters.max(initial=0)) + 1)
    rows = np.flatnonzero(left)
    rows = rows[np.lexsort((rows, -confidence[rows]))]
    turn = _rank_within(clusters[rows]) + before[clusters[rows]]
    chosen = rows[np.lexsort((clusters[rows], turn))[:n]]
    return Selection(chosen, confidence[chosen].astype(np.float64))


def near(
    x: Tensor, query: Tensor, n: int, *, start: Sequence[int] = (), allowed: Rows
) -> Selection:
    """Choose the samples most similar to a query `[d]`; a score is the cosine.

    Raises:
        InputError: fewer than n rows remain.
    """
    left = _left(len(x), n, start, allowed)
    rows = np.flatnonzero(left)
    cosine = (x @ units(query[None])[0].float()).numpy()[rows]
    order = np.lexsort((rows, -cosine))[:n]
    return Selection(rows[order], cosine[order].astype(np.float64))


def held_out(
    groups: Sequence[Rows], clusters: Rows, share: float, *, allowed: Rows, seed: int = 0
) -> NDArray[np.bool_]:
    """Choose a part of the samples for validation, without a copy on the other side.

    Every cluster gives about the same share of its samples. Samples of a group of copies are on one
    side, that of the cluster of its first sample.

    Args:
        groups: rows of each group of copies, as of `Duplicates.groups`.
        clusters: cluster of every sample `[n]`.
        share: share of the samples to hold out, above 0 and below 1.
        allowed: rows to divide.
        seed: seed of the random choice.

    Returns:
        Whether each sample is held out `[n]`.

    Raises:
        InputError: `share` is out of range.
    """
    if not 0 < share < 1:
        raise InputError(f"the share to hold out is {share}; expected a number between 0 and 1")
    is_allowed = np.zeros(len(clusters), bool)
    is_allowed[allowed] = True
    unit = np.arange(len(clusters))
    for group in groups:
        unit[group] = group[0]
    sizes = np.bincount(unit[is_allowed], minlength=len(clusters))
    chosen = np.zeros(len(clusters), bool)
    rng = np.random.default_rng(seed)
    units_left = rng.permutation(np.flatnonzero(sizes))
    for cluster in np.unique(clusters[units_left]):
        members = units_left[clusters[units_left] == cluster]
        wanted = share * sizes[members].sum()
        # The units whose middle is within the wanted number, so that the share is met on average.
        ends = np.cumsum(sizes[members])
        chosen[members[ends - sizes[members] / 2 <= wanted]] = True
    return chosen[unit] & is_allowed


def _left(size: int, n: int, start: Sequence[int], allowed: Rows) -> NDArray[np.bool_]:
    """Return which rows may be chosen `[size]`."""
    left = np.zeros(size, bool)
    left[allowed] = True
    left[list(start)] = False
    if not 1 <= n <= left.sum():
        raise InputError(
            f"n is {n}; expected a number from 1 to {left.sum()}, the samples that remain"
        )
    return left


def _squared(x: Tensor, row: int) -> Tensor:
    """Return the squared distances of all directions to one of them `[n]`."""
    distance = (2 - 2 * (x @ x[row])).clamp_(0, 4)
    distance[row] = 0  # despite rounding
    return distance


def _rank_within(groups: Rows) -> Rows:
    """Return how many earlier entries are of the same group `[n]`."""
    order = np.argsort(groups, kind="stable")
    _, first, counts = np.unique(groups[order], return_index=True, return_counts=True)
    rank = np.empty(len(groups), np.int64)
    rank[order] = np.arange(len(groups)) - np.repeat(first, counts)
    return rank
