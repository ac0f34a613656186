"""Find exact and near duplicates among the rows of a store."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import pyarrow as arrow
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from ssl_kd.core.errors import InputError
from ssl_kd.vision.cache import EmbeddingStore, find_neighbors
from ssl_kd_explore.curate.image_checks import ImageChecks
from ssl_kd_explore.curate.look_alikes import look_alikes
from ssl_kd_explore.curate.neighbor_spacing import (
    SAME,
    Progress,
    Spacing,
    neighbor_distances,
    similarity,
)

NEIGHBORS = 20
CHANCE = 0.01  # false discovery rate: share of the rows with a copy that have it by chance
KEPT_SHARE = 0.25  # share of the rows that get a pair when there is no floor
ROWS = 4096  # rows that are compared at once

Rows = NDArray[np.int64]
Reals = NDArray[np.float64]


class Duplicates:
    """Pairs of samples that may be copies; form groups at any threshold without a new search.

    Args:
        store: n embeddings.
        first: smaller row number of each pair `[m]`.
        second: larger row number of each pair `[m]`.
        similarity: cosine of each pair `[m]`.
        chance: estimated share of pairs at least this close that are close by chance `[m]`.
        first_equal: for each row, the first row with an equal embedding `[n]`.
        same_picture: whether the images of each pair look the same `[m]`, see `look_alikes`. These
            pairs are copies whatever their embeddings are.
        floor: all pairs with at least this cosine are included.
    """

    def __init__(
        self,
        store: EmbeddingStore,
        first: Rows,
        second: Rows,
        similarity: Reals,
        chance: Reals,
        first_equal: Rows,
        same_picture: NDArray[np.bool_],
        floor: float,
    ) -> None:
        order = np.lexsort((second, first, -similarity, chance))
        self.store = store
        self.floor = floor
        self.first_equal = first_equal
        self.first, self.second = first[order], second[order]
        self.similarity, self.chance = similarity[order], chance[order]
        self.same_picture = same_picture[order]

    def __len__(self) -> int:
        """Return the number of pairs, whatever their similarity."""
        return len(self.first)

    def __repr__(self) -> str:
        return f"Duplicates({len(self)} pairs, {len(self.groups())} groups of {self.store.n} rows)"

    @cached_property
    def exact(self) -> list[Rows]:
        """Groups of rows with equal embeddings; row numbers ascend within and between groups."""
        return _groups(self.first_equal)

    def pairs(self, threshold: float | None = None) -> NDArray[np.bool_]:
        """Return a mask `[m]` that is True for the pairs that count as copies.

        Args:
            threshold: minimum cosine of copies. None accepts pairs that are closer than chance
                explains, given the distances around them, at a false discovery rate of 1 %. Pairs
                of the same picture count at any threshold.

        Raises:
            InputError: the threshold is below `floor` or above 1.
        """
        if threshold is None:
            return (self.chance <= CHANCE) | self.same_picture
        if not self.floor <= threshold <= 1:
            raise InputError(
                f"threshold is {threshold}; expected a cosine from {self.floor:.4f} to 1. For a "
                "lower threshold, pass a lower floor to near_duplicates"
            )
        return (self.similarity >= threshold) | self.same_picture

    def labels(self, threshold: float | None = None) -> Rows:
        """Return the first row of each row's group, `[n]`; its own number if it has no copy."""
        chosen = self.pairs(threshold)
        return _first_linked(self.first[chosen], self.second[chosen], self.store.n)

    def groups(self, threshold: float | None = None) -> list[Rows]:
        """Return the groups of copies; row numbers ascend within and between groups."""
        return _groups(self.labels(threshold))

    def kept(
        self, threshold: float | None = None, *, sizes: NDArray[np.number] | None = None
    ) -> NDArray[np.bool_]:
        """Return a mask `[n]` of the rows to keep: one of each group, and all rows without a copy.

        Args:
            threshold: minimum cosine of copies, see `pairs`.
            sizes: number of pixels of each image `[n]`, to keep the largest image of a group. None
                keeps the first.
        """
        kept = np.ones(self.store.n, dtype=bool)
        for rows in self.groups(threshold):
            kept[rows] = False
            kept[rows[0 if sizes is None else int(np.argmax(sizes[rows]))]] = True
        return kept

    def frame(
        self, threshold: float | None = None, kept: NDArray[np.bool_] | None = None
    ) -> arrow.Table:
        """Return a table with one row per sample that has a copy, group by group.

        Args:
            threshold: minimum cosine of copies, see `pairs`.
            kept: mask of the rows to keep `[n]`; None for the first of each group.

        Returns:
            The columns `group` (first row of the group), `row`, `file`, `size` (number of rows in
            the group), `similarity` (to the most similar row of the group), `exact` (True if
            another row is equal), `same_picture` (True if another row is the same picture, shrunk
            or compressed again) and `kept`.
        """
        labels, chosen = self.labels(threshold), self.pairs(threshold)
        kept = self.kept(threshold) if kept is None else kept
        best = np.full(self.store.n, -1.0)
        for ends in (self.first[chosen], self.second[chosen]):
            np.maximum.at(best, ends, self.similarity[chosen])
        same_picture = np.zeros(self.store.n, bool)
        for ends in (self.first, self.second):
            same_picture[ends[self.same_picture]] = True
        equal = np.bincount(self.first_equal, minlength=self.store.n)[self.first_equal] > 1
        rows, sizes = np.argsort(labels, kind="stable"), np.bincount(labels)[labels]
        rows, ids = rows[sizes[rows] > 1], self.store.ids
        return arrow.table(
            {
                "group": labels[rows],
                "row": rows,
                "file": arrow.array([ids[row] for row in rows.tolist()], arrow.string()),
                "size": sizes[rows],
                "similarity": best[rows],
                "exact": arrow.array(equal[rows]),
                "same_picture": arrow.array(same_picture[rows]),
                "kept": arrow.array(kept[rows]),
            }
        )


def near_duplicates(
    store: EmbeddingStore,
    *,
    floor: float | None = None,
    pictures: ImageChecks | None = None,
    progress: Progress | None = None,
) -> Duplicates:
    """Find the pairs of samples that may be copies of each other.

    Each row is compared with its 20 nearest neighbors, which are read from the store if it has
    them. Equal rows are always linked. Memory grows by about 40 bytes per row and per pair.

    The `chance` of a pair is a false discovery rate (Benjamini and Hochberg): the number of rows
    that would have so close a neighbor if no sample were a copy, divided by the number of rows that
    do. The expected number follows from the local dimension, estimated from the distances to the
    neighbors (`Spacing`); it needs no constant that depends on the teacher.

    Args:
        store: n embeddings.
        floor: minimum cosine of the pairs to return, in addition to pairs that are closer than
            chance explains. None sets it so that a quarter of the rows has a pair.
        pictures: the images of the rows, to find copies that were shrunk or compressed again, whose
            embeddings may be less alike than those of similar images.
        progress: called with (rows done, n).

    Raises:
        InputError: `floor` is not between -1 and 1, or a row is not finite.
    """
    if floor is not None and not -1 <= floor <= 1:
        raise InputError(f"floor is {floor}; expected a cosine from -1 to 1")
    n = store.n
    if n < 2:
        none, empty = np.empty(0, np.int64), np.empty(0)
        no_pair = np.empty(0, bool)
        return Duplicates(store, none, none, empty, empty, np.arange(n), no_pair, floor or 0.0)
    k = min(NEIGHBORS, n - 1)
    neighbors, _ = find_neighbors(store, k)
    measured = neighbor_distances(store, neighbors, progress=progress)
    spacing = Spacing((distance for _, _, distance in measured), k)
    equal = _first_equal(store, spacing)
    max_distance, max_closeness = _limits(spacing, floor)
    close = spacing.nearest <= max_closeness * spacing.scale
    near = np.flatnonzero((spacing.nearest <= max_distance) | close)
    pairs = [(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))]
    for rows, others, distance in neighbor_distances(store, neighbors[near], near):
        rows = np.broadcast_to(rows[:, None], others.shape)
        closeness = spacing.closeness(rows, others, distance)
        chosen = (distance <= max_distance) | (closeness <= max_closeness)
        chosen &= equal[rows] != equal[others]
        one, other = rows[chosen], others[chosen]
        pairs.append((np.minimum(one, other), np.maximum(one, other), distance[chosen]))
    alike, others_alike = _same_pictures(pictures, equal)
    if len(alike):
        blocks = neighbor_distances(store, torch.from_numpy(others_alike).unsqueeze(1), alike)
        distances = [distance[:, 0] for _, _, distance in blocks]
        pairs.append((alike, others_alike, np.concatenate(distances)))
    first, second, distance = (np.concatenate(part) for part in zip(*pairs, strict=True))
    keys, at = np.unique(first * np.int64(n) + second, return_index=True)
    first = keys // n
    second = keys % n
    distance = distance[at]
    same_picture = np.isin(keys, alike * np.int64(n) + others_alike)
    chance = _chance(spacing, first, second, distance)
    # Equal rows are in one group by their links to the first of them.
    copies = np.flatnonzero(equal != np.arange(n))
    return Duplicates(
        store,
        np.concatenate([equal[copies], first]),
        np.concatenate([copies, second]),
        np.concatenate([np.ones(len(copies)), similarity(distance)]),
        np.concatenate([np.zeros(len(copies)), chance]),
        equal,
        np.concatenate([np.zeros(len(copies), bool), same_picture]),
        float(similarity(np.array(max_distance))) if floor is None else floor,
    )


def _same_pictures(pictures: ImageChecks | None, equal: Rows) -> tuple[Rows, Rows]:
    """Return the pairs of rows whose images look the same, but whose embeddings differ."""
    if pictures is None:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    first, second = look_alikes(
        pictures.small, pictures.measures["width"] / pictures.measures["height"]
    )
    differ = equal[first] != equal[second]
    return first[differ], second[differ]


def _first_equal(store: EmbeddingStore, spacing: Spacing) -> Rows:
    suspects = np.flatnonzero(spacing.nearest <= SAME)
    seen: dict[bytes, int] = {}
    first = np.arange(store.n)
    for rows in (suspects[i : i + ROWS] for i in range(0, len(suspects), ROWS)):
        x = store.gather(torch.from_numpy(rows)) + 0.0  # -0 and 0 are equal, their bytes are not
        for row, values in zip(rows.tolist(), x.numpy(), strict=True):
            first[row] = seen.setdefault(values.tobytes(), row)
    return first


def _first_linked(first: Rows, second: Rows, n: int) -> Rows:
    """Return the first row of each row's connected component, `[n]`; pairs are the edges."""
    links = coo_array((np.ones(len(first), np.int8), (first, second)), shape=(n, n))
    _, codes = connected_components(links, directed=False)
    _, firsts, inverse = np.unique(codes, return_index=True, return_inverse=True)
    return firsts[inverse].astype(np.int64)


def _limits(spacing: Spacing, floor: float | None) -> tuple[float, float]:
    """Return the maximum distance and the maximum closeness; either admits a pair."""
    closeness = spacing.nearest / np.maximum(spacing.scale, np.finfo(float).tiny)
    beyond_chance = closeness[spacing.excess(closeness, closeness) <= CHANCE]
    apart = spacing.nearest[spacing.nearest > SAME]
    if floor is not None:
        distance = float(np.sqrt(2 - 2 * floor))
    else:
        distance = float(np.quantile(apart, KEPT_SHARE)) if len(apart) else SAME
    return distance, float(beyond_chance.max()) if len(beyond_chance) else 0.0


def _chance(spacing: Spacing, first: Rows, second: Rows, distance: Reals) -> Reals:
    """Return the false discovery rate at the closeness of each pair, `[m]`."""
    if not len(first):
        return np.empty(0)
    closeness = spacing.closeness(first, second, distance)
    best = np.full(len(spacing.nearest), np.inf)
    for ends in (first, second):
        np.minimum.at(best, ends, closeness)
    return spacing.excess(best[np.isfinite(best)], closeness)


def _groups(labels: Rows) -> list[Rows]:
    order = np.argsort(labels, kind="stable")
    starts = np.flatnonzero(np.diff(labels[order], prepend=-1))
    parts = np.split(order, starts[1:])
    return [part for part in parts if len(part) > 1]
