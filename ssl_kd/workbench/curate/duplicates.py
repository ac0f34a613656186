"""Exact and near duplicates among the rows of a store."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import chain

import numpy as np
import pyarrow as arrow
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from ssl_kd.errors import InputError
from ssl_kd.store import EmbeddingStore, find_neighbors
from ssl_kd.store.neighbors import nearest_among, search_on
from ssl_kd.workbench.curate.neighbor_spacing import (
    SAME,
    Block,
    Progress,
    Spacing,
    neighbor_distances,
    similarity,
    units,
)

NEIGHBORS = 20
CHANCE = 0.01  # share of the rows with a copy, by the default threshold, that have one by chance
KEPT_SHARE = 0.25  # of the rows get a pair without a floor
ROWS = 4096  # compared at once

Rows = NDArray[np.int64]


class Duplicates:
    """Pairs of samples that may be copies; groups follow for any threshold without a new search.

    Args:
        store: n embeddings.
        first: the smaller row of each pair `[m]`.
        second: the other row `[m]`.
        similarity: cosines `[m]`.
        chance: share of the pairs this close, relative to the distances around them, that are so
            by chance `[m]`.
        first_equal: the first row with an equal embedding or file, for each row `[n]`.
        floor: the similarity down to which all pairs were kept.
    """

    def __init__(
        self,
        store: EmbeddingStore,
        first: Rows,
        second: Rows,
        similarity: NDArray[np.float64],
        chance: NDArray[np.float64],
        first_equal: Rows,
        floor: float,
    ) -> None:
        order = np.lexsort((second, first, -similarity, chance))
        self.store, self.floor, self.first_equal = store, floor, first_equal
        self.first, self.second = first[order], second[order]
        self.similarity, self.chance = similarity[order], chance[order]

    def __len__(self) -> int:
        """Return the number of pairs at any threshold."""
        return len(self.first)

    def __repr__(self) -> str:
        return f"Duplicates({len(self)} pairs, {len(self.groups())} groups of {self.store.n} rows)"

    @cached_property
    def exact(self) -> list[Rows]:
        """Groups of equal rows, each ascending, ordered by their first row."""
        return _groups(self.first_equal)

    def pairs(self, threshold: float | None = None) -> NDArray[np.bool_]:
        """Return which pairs `[m]` are copies.

        Args:
            threshold: the least cosine of copies; None: pairs that are closer than chance explains,
                given the distances around them, up to a false discovery rate of 1 %.

        Raises:
            InputError: it is below `floor` or above 1.
        """
        if threshold is None:
            return self.chance <= CHANCE
        if not self.floor <= threshold <= 1:
            raise InputError(
                f"the threshold is {threshold}; expected a cosine of {self.floor:.4f} to 1. For "
                "lower ones pass a lower floor to near_duplicates"
            )
        return self.similarity >= threshold

    def labels(self, threshold: float | None = None) -> Rows:
        """Return the first row of each row's group `[n]`; its own number if it has no copy."""
        chosen = self.pairs(threshold)
        return _first_linked(self.first[chosen], self.second[chosen], self.store.n)

    def groups(self, threshold: float | None = None) -> list[Rows]:
        """Return the groups of rows that pairs link, each ascending, ordered by first row."""
        return _groups(self.labels(threshold))

    def kept(
        self, threshold: float | None = None, *, sizes: NDArray[np.number] | None = None
    ) -> NDArray[np.bool_]:
        """Return which rows `[n]` remain if each group keeps one: its first, or its largest image.

        Args:
            threshold: as for `pairs`.
            sizes: pixels of each image `[n]`, to keep the largest; the first of equal ones.
        """
        kept = np.ones(self.store.n, dtype=bool)
        for rows in self.groups(threshold):
            kept[rows] = False
            kept[rows[0 if sizes is None else int(np.argmax(sizes[rows]))]] = True
        return kept

    def frame(
        self, threshold: float | None = None, kept: NDArray[np.bool_] | None = None
    ) -> arrow.Table:
        """Return a table with a row for each sample that has a copy, group by group.

        Args:
            threshold: as for `pairs`.
            kept: as `kept` returns it `[n]`; None: the first of each group.

        Returns:
            `group` (its first row), `row`, `file`, `size` of the group, `similarity` to the most
            similar row of the group, `exact` (whether another row is equal), `kept`.
        """
        groups, chosen = self.groups(threshold), self.pairs(threshold)
        kept = self.kept(threshold) if kept is None else kept
        best = np.full(self.store.n, -1.0)
        for ends in (self.first[chosen], self.second[chosen]):
            np.maximum.at(best, ends, self.similarity[chosen])
        equal = np.bincount(self.first_equal, minlength=self.store.n)[self.first_equal] > 1
        rows = np.concatenate([np.empty(0, np.int64), *groups])
        sizes = np.array([len(group) for group in groups], dtype=np.int64)
        first = np.array([group[0] for group in groups], dtype=np.int64)
        ids = self.store.ids
        return arrow.table(
            {
                "group": np.repeat(first, sizes),
                "row": rows,
                "file": arrow.array([ids[row] for row in rows.tolist()], arrow.string()),
                "size": np.repeat(sizes, sizes),
                "similarity": best[rows],
                "exact": arrow.array(equal[rows]),
                "kept": arrow.array(kept[rows]),
            }
        )


def near_duplicates(
    store: EmbeddingStore,
    *,
    floor: float | None = None,
    same: NDArray[np.integer] | None = None,
    progress: Progress | None = None,
) -> Duplicates:
    """Find the pairs of samples that may be copies of each other.

    Each row is compared with its 20 nearest others, read from the store if it has them. Equal rows
    are all linked; of more than 20 near copies of one sample, each is linked with the nearest 20.
    Memory grows by some 40 bytes a row, and with the pairs.

    How close distinct samples come by chance is estimated from the distances: the ratio of those to
    the nearest and the 20th neighbor shows in how many dimensions the samples spread (`Spacing`).
    This gives the expected number of rows with another one as close as each pair, relative to the
    20th neighbor; its share of the rows that do have one is the pair's `chance` (Benjamini and
    Hochberg). No constant depends on the teacher.

    Args:
        store: n embeddings.
        floor: the cosine down to which all pairs are kept, besides those beyond chance. None: until
            a quarter of the rows has one.
        same: equal numbers for equal files `[n]`, if known.
        progress: called with (rows done, n).

    Raises:
        InputError: `floor` is not between -1 and 1, or a row is not finite.
    """
    if floor is not None and not -1 <= floor <= 1:
        raise InputError(f"floor is {floor}; expected a cosine, -1 to 1")
    n = store.n
    same = np.arange(n) if same is None else np.unique(same, return_inverse=True)[1]
    if n < 2:
        none, empty = np.empty(0, np.int64), np.empty(0)
        return Duplicates(store, none, none, empty, empty, np.arange(n), floor or 0.0)
    k = min(NEIGHBORS, n - 1)
    neighbors, _ = find_neighbors(store, k, search="auto")
    spacing = Spacing.measure(store, neighbors, progress)
    equal, crowded = _equal_rows(store, neighbors, spacing, same)
    max_distance, max_closeness = _limits(spacing, floor)
    close = spacing.nearest <= max_closeness * spacing.scale
    near = np.flatnonzero((spacing.nearest <= max_distance) | close)
    pairs = [(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))]
    for rows, others, distance in chain(
        neighbor_distances(store, neighbors[near], near),
        _between_crowds(store, equal, crowded, k),
    ):
        rows = np.broadcast_to(rows[:, None], others.shape)
        closeness = spacing.closeness(rows, others, distance)
        chosen = (distance <= max_distance) | (closeness <= max_closeness)
        chosen &= equal[rows] != equal[others]
        one, other = rows[chosen], others[chosen]
        pairs.append((np.minimum(one, other), np.maximum(one, other), distance[chosen]))
    first, second, distance = (np.concatenate(part) for part in zip(*pairs, strict=True))
    keys, at = np.unique(first * np.int64(n) + second, return_index=True)
    first, second, distance = keys // n, keys % n, distance[at]
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
        float(similarity(np.array(max_distance))) if floor is None else floor,
    )


def _equal_rows(
    store: EmbeddingStore, neighbors: Tensor, spacing: Spacing, same: Rows
) -> tuple[Rows, NDArray[np.bool_]]:
    """Return the first equal row of each `[n]`, and which have only equal neighbors `[n]`."""
    n = store.n
    suspects = np.flatnonzero(spacing.nearest <= SAME)
    seen: dict[bytes, int] = {}
    first = np.arange(n)
    for rows in (suspects[i : i + ROWS] for i in range(0, len(suspects), ROWS)):
        x = store.gather(torch.from_numpy(rows)) + 0.0  # -0 and 0 are equal, their bytes are not
        for row, values in zip(rows.tolist(), x.numpy(), strict=True):
            first[row] = seen.setdefault(values.tobytes(), row)
    _, files = np.unique(same, return_index=True)
    equal = _first_linked(np.tile(np.arange(n), 2), np.concatenate([first, files[same]]), n)
    crowded = np.zeros(n, dtype=bool)
    around = equal[neighbors[torch.from_numpy(suspects)].numpy()]
    crowded[suspects] = (around == equal[suspects, None]).all(1)
    return equal, crowded


def _first_linked(first: Rows, second: Rows, n: int) -> Rows:
    """Return the first row that each of n rows is linked with by pairs, directly or not."""
    links = coo_array((np.ones(len(first), np.int8), (first, second)), shape=(n, n))
    _, codes = connected_components(links, directed=False)
    _, firsts, inverse = np.unique(codes, return_index=True, return_inverse=True)
    return firsts[inverse].astype(np.int64)


def _limits(spacing: Spacing, floor: float | None) -> tuple[float, float]:
    """Return the limits of distance and closeness; a pair within either of them is kept."""
    closeness = spacing.nearest / np.maximum(spacing.scale, np.finfo(float).tiny)
    beyond_chance = closeness[spacing.excess(closeness) <= CHANCE]
    apart = spacing.nearest[spacing.nearest > SAME]
    if floor is not None:
        distance = float(np.sqrt(2 - 2 * floor))
    else:
        distance = float(np.quantile(apart, KEPT_SHARE)) if len(apart) else SAME
    return distance, float(beyond_chance.max()) if len(beyond_chance) else 0.0


def _between_crowds(
    store: EmbeddingStore, equal: Rows, crowded: NDArray[np.bool_], k: int
) -> Iterator[Block]:
    """Yield the neighbors of rows whose nearest are all equal to them, among different rows."""
    queries, others = np.unique(equal[crowded]), np.flatnonzero(equal == np.arange(store.n))
    k = min(k, len(others) - 1)
    if not k or not len(queries):
        return
    search = search_on(torch.device("cpu"))
    for rows in (queries[i : i + ROWS] for i in range(0, len(queries), ROWS)):
        x = units(store.gather(torch.from_numpy(rows)))
        blocks = (
            (start, units(store.gather(torch.from_numpy(others[start : start + ROWS]))).float())
            for start in range(0, len(others), ROWS)
        )
        excluded = torch.from_numpy(np.searchsorted(others, rows))
        nearest = nearest_among(x.float(), excluded, blocks, k, search)
        yield from neighbor_distances(store, torch.from_numpy(others)[nearest], rows)


def _chance(
    spacing: Spacing, first: Rows, second: Rows, distance: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the share by chance among the rows with a pair as close as each `[m]`."""
    if not len(first):
        return np.empty(0)
    closeness = spacing.closeness(first, second, distance)
    best = np.full(len(spacing.nearest), np.inf)
    for ends in (first, second):
        np.minimum.at(best, ends, closeness)
    ordered = np.sort(best[np.isfinite(best)])
    share = spacing.excess(ordered)
    return share[np.searchsorted(ordered, closeness, "right") - 1]


def _groups(labels: Rows) -> list[Rows]:
    order = np.argsort(labels, kind="stable")
    starts = np.flatnonzero(np.diff(labels[order], prepend=-1))
    parts = np.split(order, starts[1:])
    return [part for part in parts if len(part) > 1]
