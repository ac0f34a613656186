"""Exact and near duplicates of a store, from its neighbours: found once, cut anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import chain
from typing import Literal, NamedTuple, get_args

import numpy as np
import pyarrow as arrow
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from ssl_kd.errors import InputError
from ssl_kd.store import EmbeddingStore, find_neighbours
from ssl_kd.store.neighbours import nearest_among, search_on
from ssl_kd.workbench.curate.spacing import (
    SAME,
    Block,
    Progress,
    Spacing,
    neighbour_distances,
    similarity,
    units,
)

Rule = Literal["first", "typical", "largest"]
RULES: tuple[str, ...] = get_args(Rule)
NEIGHBOURS = 20
# Of the rows that "auto" calls copies, those that chance would make so.
CHANCE = 0.01
KEPT_SHARE = 0.25  # of the rows have a pair that is kept, unless a floor says otherwise
ROWS = 4096  # compared at once

Rows = NDArray[np.int64]


class Duplicates:
    """Pairs of samples that may be copies of each other; every threshold is cut from these.

    Args:
        store: the embeddings.
        first: `[m]` rows, the smaller of each pair.
        second: `[m]` rows.
        similarity: `[m]`, their cosines.
        chance: `[m]`, of a pair this close, relative to the distances around it, the share of such
            that is by chance; falling similarity, rising chance, but not in the same order.
        exact: `[n]`, the first row that is equal to each, in its embedding or its file.
        floor: the similarity down to which pairs were kept.
    """

    def __init__(
        self,
        store: EmbeddingStore,
        first: Rows,
        second: Rows,
        similarity: NDArray[np.float64],
        chance: NDArray[np.float64],
        exact: Rows,
        floor: float,
    ) -> None:
        order = np.lexsort((second, first, -similarity, chance))
        self.store, self.floor, self.first_equal = store, floor, exact
        self.first, self.second = first[order], second[order]
        self.similarity, self.chance = similarity[order], chance[order]

    def __len__(self) -> int:
        """How many pairs there are, at any threshold."""
        return len(self.first)

    def __repr__(self) -> str:
        return f"Duplicates({len(self)} pairs, {len(self.groups())} groups of {self.store.n} rows)"

    @cached_property
    def exact(self) -> list[Rows]:
        """Rows that are equal, in groups; each and all by their first rows, ascending."""
        return _groups(self.first_equal)

    def pairs(self, threshold: float | None = None) -> NDArray[np.bool_]:
        """Which pairs `[m]` count as copies.

        Args:
            threshold: cosine from which on two samples count as copies; None leaves it to the data:
                what is closer than chance makes it, beside the distances of other samples there, up
                to one in a hundred.

        Raises:
            InputError: below `floor`, down to which pairs were kept, or above 1.
        """
        if threshold is None:
            return self.chance <= CHANCE
        if not self.floor <= threshold <= 1:
            raise InputError(
                f"the threshold is {threshold}; expected a cosine of {self.floor:.4f} to 1: pairs "
                "were kept from there on. For more of them give near_duplicates a lower floor"
            )
        return self.similarity >= threshold

    def labels(self, threshold: float | None = None) -> Rows:
        """For each row `[n]` the first one of its group; its own number where it is alone."""
        chosen = self.pairs(threshold)
        return _first_linked(self.first[chosen], self.second[chosen], self.store.n)

    def groups(self, threshold: float | None = None) -> list[Rows]:
        """The groups of two and more copies: rows that are linked by pairs; as `exact`."""
        return _groups(self.labels(threshold))

    def kept(
        self,
        threshold: float | None = None,
        rule: Rule = "first",
        *,
        sizes: NDArray[np.number] | None = None,
    ) -> NDArray[np.bool_]:
        """What is left, `[n]`, when one sample of each group stays; of equals the first.

        Args:
            threshold: as for `pairs`.
            rule: `first`: the first row; `typical`: the one nearest to the group's mean;
                `largest`: that of the largest image.
            sizes: `[n]`, pixels of each image, for `largest`.

        Raises:
            InputError: no such rule, or no sizes for `largest`.
        """
        if rule not in RULES:
            raise InputError(f"rule is {rule!r}; expected one of {', '.join(RULES)}")
        if rule == "largest" and sizes is None:
            raise InputError("rule 'largest' needs the sizes of the images; give sizes")
        groups = self.groups(threshold)
        kept = np.ones(self.store.n, dtype=bool)
        for rows in groups:
            kept[rows] = False
            kept[rows[int(np.argmax(self._merit(rows, rule, sizes)))]] = True
        return kept

    def frame(
        self, threshold: float | None = None, kept: NDArray[np.bool_] | None = None
    ) -> arrow.Table:
        """A line for each row that has a copy, group by group.

        Args:
            threshold: as for `pairs`.
            kept: `[n]`, from `kept`; None: the first of each group.

        Returns:
            `group` (the first row of it), `row`, `file`, `size` of the group, `similarity` to the
            most similar row of the group, `exact` (whether another row is equal), `kept`.
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

    def _merit(
        self,
        rows: Rows,
        rule: str,
        sizes: NDArray[np.number] | None,
    ) -> NDArray[np.float64]:
        """Of the rows of a group: that with the most is kept. Rounded, so that equals are equal."""
        if rule == "first":
            return np.zeros(len(rows))
        if sizes is not None and rule == "largest":
            return np.asarray(sizes[rows], np.float64)
        x = units(self.store.gather(torch.from_numpy(rows)))
        return (x @ x.mean(0)).numpy().round(9)


def near_duplicates(
    store: EmbeddingStore,
    *,
    floor: float | None = None,
    same: NDArray[np.integer] | None = None,
    search: str = "auto",
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> Duplicates:
    """Find the pairs of samples that may be copies of each other.

    Each row is compared with its 20 nearest others, those that are kept beside the store where
    they are. Rows that are equal are linked however many they are; of more than 20 near copies of
    one sample each is linked with the nearest 20. Memory grows by some 40 bytes a row, and with
    the pairs.

    What chance would make is told from the distances themselves: samples that are no copies lie
    spread over some number of dimensions, and the ratio of the distances to the nearest and the
    20th neighbour shows how many (`Spacing`). From that follows how many rows would have another
    one as close, relative to the 20th, as each pair is. The share of these among the rows that do
    is the pair's `chance`, Benjamini and Hochberg's: none of it is a constant of a teacher.

    Args:
        store: n embeddings.
        floor: the cosine down to which all pairs are kept, beside those that chance does not
            explain. None: until a quarter of the rows has one.
        same: `[n]`, equal numbers for equal files, where they are known.
        search: as `find_neighbours` takes it.
        device: where all pairs are compared.
        progress: called with (rows done, n).

    Raises:
        InputError: `floor` is not between -1 and 1, or a row is not finite.
    """
    if floor is not None and not -1 <= floor <= 1:
        raise InputError(f"floor is {floor}; expected a cosine, -1 to 1")
    n = store.n
    same = np.arange(n) if same is None else np.unique(same, return_inverse=True)[1]
    if n < 2:
        none = np.empty(0, np.int64)
        empty = np.empty(0)
        return Duplicates(store, none, none, empty, empty, np.arange(n), floor or 0.0)
    k = min(NEIGHBOURS, n - 1)
    neighbours, _ = find_neighbours(store, k, search=search, device=device)
    spacing = Spacing.measure(store, neighbours, progress)
    exact, full = _equal_rows(store, neighbours, spacing, same)
    limits = _Limits.of(spacing, floor)
    near = limits.rows(spacing)
    found = [(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))]
    for rows, others, distance in chain(
        neighbour_distances(store, neighbours[near], near),
        _between_crowds(store, exact, full, k),
    ):
        rows = np.broadcast_to(rows[:, None], others.shape)
        taken = limits.reached(spacing, rows, others, distance) & (exact[rows] != exact[others])
        one, other = rows[taken], others[taken]
        found.append((np.minimum(one, other), np.maximum(one, other), distance[taken]))
    first, second, distance = (np.concatenate(part) for part in zip(*found, strict=True))
    keys, at = np.unique(first * np.int64(n) + second, return_index=True)
    first, second, distance = keys // n, keys % n, distance[at]
    chance = _chance(spacing, first, second, distance)
    # Equal rows are in one group by their links to the first of them.
    copies = np.flatnonzero(exact != np.arange(n))
    return Duplicates(
        store,
        np.concatenate([exact[copies], first]),
        np.concatenate([copies, second]),
        np.concatenate([np.ones(len(copies)), similarity(distance)]),
        np.concatenate([np.zeros(len(copies)), chance]),
        exact,
        float(similarity(np.array(limits.distance))) if floor is None else floor,
    )


def _equal_rows(
    store: EmbeddingStore, neighbours: Tensor, spacing: Spacing, same: Rows
) -> tuple[Rows, NDArray[np.bool_]]:
    """The first row equal to each `[n]`; and whose neighbours are all equal to it, `[n]`."""
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
    full = np.zeros(n, dtype=bool)
    around = equal[neighbours[torch.from_numpy(suspects)].numpy()]
    full[suspects] = (around == equal[suspects, None]).all(1)
    return equal, full


def _first_linked(first: Rows, second: Rows, n: int) -> Rows:
    """Of each of n rows the first that it is linked with, by pairs, directly or not; or itself."""
    links = coo_array((np.ones(len(first), np.int8), (first, second)), shape=(n, n))
    _, codes = connected_components(links, directed=False)
    _, firsts, inverse = np.unique(codes, return_index=True, return_inverse=True)
    return firsts[inverse].astype(np.int64)


class _Limits(NamedTuple):
    """A pair is kept where its distance or its closeness is at most this."""

    distance: float
    closeness: float

    @classmethod
    def of(cls, spacing: Spacing, floor: float | None) -> _Limits:
        """All that may count as copies by chance's rule; and what is above the floor."""
        closeness = spacing.nearest / np.maximum(spacing.scale, np.finfo(float).tiny)
        certain = closeness[spacing.excess(closeness) <= CHANCE]
        apart = spacing.nearest[spacing.nearest > SAME]
        if floor is not None:
            distance = float(np.sqrt(2 - 2 * floor))
        else:
            distance = float(np.quantile(apart, KEPT_SHARE)) if len(apart) else SAME
        return cls(distance, float(certain.max()) if len(certain) else 0.0)

    def rows(self, spacing: Spacing) -> Rows:
        """Those that may have a pair."""
        close = spacing.nearest <= self.closeness * spacing.scale
        return np.flatnonzero((spacing.nearest <= self.distance) | close)

    def reached(
        self, spacing: Spacing, rows: Rows, others: Rows, distance: NDArray[np.float64]
    ) -> NDArray[np.bool_]:
        closeness = spacing.closeness(rows, others, distance)
        return (distance <= self.distance) | (closeness <= self.closeness)


def _between_crowds(
    store: EmbeddingStore, exact: Rows, full: NDArray[np.bool_], k: int
) -> Iterator[Block]:
    """The neighbours of rows whose own are all equal to them, among rows that differ."""
    asked, others = np.unique(exact[full]), np.flatnonzero(exact == np.arange(store.n))
    k = min(k, len(others) - 1)
    if not k or not len(asked):
        return
    search = search_on(torch.device("cpu"))
    for own in (asked[i : i + ROWS] for i in range(0, len(asked), ROWS)):
        at = units(store.gather(torch.from_numpy(own)))
        blocks = (
            (start, units(store.gather(torch.from_numpy(others[start : start + ROWS]))).float())
            for start in range(0, len(others), ROWS)
        )
        places = torch.from_numpy(np.searchsorted(others, own))
        found = nearest_among(at.float(), places, blocks, k, search)
        yield from neighbour_distances(store, torch.from_numpy(others)[found], own)


def _chance(
    spacing: Spacing, first: Rows, second: Rows, distance: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Of the rows with a pair at least as close as each `[m]`, the share that is by chance."""
    if not len(first):
        return np.empty(0)
    n = len(spacing.nearest)
    closeness = spacing.closeness(first, second, distance)
    best = np.full(n, np.inf)
    for ends in (first, second):
        np.minimum.at(best, ends, closeness)
    ordered = np.sort(best[np.isfinite(best)])
    share = spacing.excess(ordered)
    return share[np.searchsorted(ordered, closeness, "right") - 1]


def _groups(labels: Rows) -> list[Rows]:
    """The rows of each label that more than one has, by their first."""
    order = np.argsort(labels, kind="stable")
    starts = np.flatnonzero(np.diff(labels[order], prepend=-1))
    parts = np.split(order, starts[1:])
    return [part for part in parts if len(part) > 1]
