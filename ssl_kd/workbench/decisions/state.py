"""The clusters of a run and their names after a sequence of decisions, some of them undone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from ssl_kd.errors import InputError
from ssl_kd.vision.samples import Samples

LAST_NUMBER = 10**7  # of a cluster: the page counts clusters in an array
STEP = 1000  # clusters that people create are numbered from a multiple of this
RESERVED = 100  # numbers above K that are left to the clusters that extensions propose


class ClusterState:
    """Each sample's cluster, and the names of the clusters.

    Attributes:
        clusters: `[n]` int64; -1: in none.
        excluded: `[n]`, whether a decision took the sample out.
        names: names of the clusters that have one, by number.
        sizes: how many samples each cluster has, by number; no cluster is empty.
    """

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self.clusters = samples.column("cluster").astype(np.int64)
        self.excluded: NDArray[np.bool_] = np.zeros(len(self.clusters), bool)
        self.names: dict[int, str] = {}
        self._count()

    def copy(self) -> Self:
        """Return an independent copy."""
        other = object.__new__(type(self))
        arrays = {"clusters": self.clusters.copy(), "excluded": self.excluded.copy()}
        other.__dict__ = vars(self) | arrays | {"names": dict(self.names)}
        return other

    def tree_parts(self, cluster: int) -> tuple[str, list[int]]:
        """Return the coarsest level of the tree that splits a cluster, and its smaller parts.

        Raises:
            InputError: there is no such cluster, or no level splits it.
        """
        members = self.clusters == self._existing(cluster)
        for level in self._samples.levels:
            parts, sizes = np.unique(self._samples.column(level)[members], return_counts=True)
            parts, sizes = parts[parts >= 0], sizes[parts >= 0]
            if len(parts) > 1:
                order = np.argsort(-sizes, kind="stable")
                return level, parts[order][1:].tolist()
        raise InputError(
            f"no level of the tree splits cluster {cluster}: select the samples to take out of it"
        )

    def apply(self, line: Mapping[str, Any]) -> None:
        """Carry out one decision other than `undo`, as `line_format.check_line` accepts it.

        Raises:
            InputError: it cannot be carried out; this object must not be used any more.
        """
        getattr(self, f"_{line['do']}")(line)

    def _rename(self, line: Mapping[str, Any]) -> None:
        cluster = self._existing(line["cluster"])
        self._set_name(cluster, self._free_name(line["name"], cluster))

    def _merge(self, line: Mapping[str, Any]) -> None:
        merged = sorted({self._existing(cluster) for cluster in line["clusters"]})
        if len(merged) < 2:
            raise InputError(f"clusters are {line['clusters']}; expected two or more to merge")
        names = [self.names[cluster] for cluster in merged if cluster in self.names]
        name = self._free_name(line["name"] if "name" in line else (names or [""])[0], *merged)
        self._assign(np.flatnonzero(np.isin(self.clusters, merged)), merged[0])
        self._set_name(merged[0], name)

    def _split(self, line: Mapping[str, Any]) -> None:
        cluster = self._existing(line["cluster"])
        members = self.clusters == cluster
        if "rows" in line:
            self._split_rows(line, cluster, members)
            return
        if line["level"] not in self._samples.levels:
            raise InputError(f"there is no level {line['level']!r} of the tree")
        level = self._samples.column(line["level"])
        parts = [(members & (level == part), self._unused(new)) for part, new in line["parts"]]
        n_moved = sum(int(mask.sum()) for mask, _ in parts)
        if not all(mask.any() for mask, _ in parts) or n_moved >= members.sum():
            raise InputError(f"{line['level']} does not split cluster {cluster} like this")
        if len({new for _, new in parts}) < len(parts):
            raise InputError(f"parts are {line['parts']}: two have the same number")
        for mask, new in parts:
            self._assign(np.flatnonzero(mask), new)

    def _split_rows(
        self, line: Mapping[str, Any], cluster: int, members: NDArray[np.bool_]
    ) -> None:
        rows, new = self._rows(line), self._unused(line["new"])
        if not members[rows].all():
            raise InputError(f"sample {int(rows[~members[rows]][0])} is not in cluster {cluster}")
        if len(rows) == members.sum():
            raise InputError(f"these are all samples of cluster {cluster}: leave some in it")
        name = self._free_name(line.get("name", ""))
        self._assign(rows, new)
        self._set_name(new, name)

    def _move(self, line: Mapping[str, Any]) -> None:
        rows, name = self._rows(line), self._free_name(line.get("name", ""))
        target = self._unused(line["new"]) if "new" in line else self._existing(line["into"])
        if name and "into" in line:
            raise InputError(f"cluster {target} exists: rename it to call it {name!r}")
        self._assign(rows, target)
        if name:
            self._set_name(target, name)

    def _exclude(self, line: Mapping[str, Any]) -> None:
        self._assign(self._rows(line), -1)

    def _assign(self, rows: NDArray[np.int64], cluster: int) -> None:
        """Put samples into a cluster, or exclude them if it is -1; drop names of empty clusters."""
        self.clusters[rows], self.excluded[rows] = cluster, cluster < 0
        self._count()
        self.names = {k: name for k, name in self.names.items() if k in self.sizes}

    def _count(self) -> None:
        counts = np.bincount(self.clusters + 1)[1:]
        used = np.flatnonzero(counts)
        self.sizes = dict(zip(used.tolist(), counts[used].tolist(), strict=True))

    def _set_name(self, cluster: int, name: str) -> None:
        self.names.pop(cluster, None)
        if name:
            self.names[cluster] = name

    def _free_name(self, name: str, *clusters: int) -> str:
        """Return a name without outer spaces; no cluster but the given ones may have it."""
        folded = name.strip().casefold()
        for other, text in self.names.items() if folded else ():
            if text.casefold() == folded and other not in clusters:
                raise InputError(
                    f"cluster {other} is called {text!r} already: merge the two, or choose "
                    "another name"
                )
        return name.strip()

    def _existing(self, cluster: int) -> int:
        if cluster not in self.sizes:
            known = ", ".join(map(str, list(self.sizes)[:12]))
            more = " ..." if len(self.sizes) > 12 else ""
            raise InputError(f"there is no cluster {cluster!r}; there are {known}{more}")
        return cluster

    def _unused(self, number: int) -> int:
        first = self._samples.n_clusters
        if not first <= number < LAST_NUMBER or number in self.sizes:
            raise InputError(
                f"a new cluster cannot have the number {number!r}: expected an unused one from "
                f"{first} to {LAST_NUMBER - 1}"
            )
        return number

    def _rows(self, line: Mapping[str, Any]) -> NDArray[np.int64]:
        rows, n = np.unique(np.asarray(line["rows"], np.int64)), line["samples"]
        if rows[-1] >= n:
            raise InputError(f"there is no sample {rows[-1]}; expected 0 to {n - 1}")
        return rows


class History:
    """The lines of a file of decisions, and the state after those that are not undone.

    Attributes:
        lines: all lines, the oldest first.
        held: ids of the lines that are not undone; an undo can be undone itself.
        state: the clusters after the held lines.
    """

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self.lines: list[dict[str, Any]] = []
        self.held: set[str] = set()
        self._ids: set[str] = set()
        self._last_number = -1
        self.state = ClusterState(samples)

    def copy(self) -> Self:
        """Return an independent copy."""
        other = object.__new__(type(self))
        other.__dict__ = vars(self) | {"lines": self.lines.copy(), "_ids": self._ids.copy()}
        return other

    @property
    def next_number(self) -> int:
        """A number that no cluster has or ever had."""
        first = -(-(self._samples.n_clusters + RESERVED) // STEP) * STEP
        return max(first, self._last_number + 1)

    def record(self, line: dict[str, Any]) -> None:
        """Append a line without changing the state; `replay` or `append` does that.

        Raises:
            InputError: its id or a cluster number was used before, or it cannot be undone.
        """
        if line["id"] in self._ids:
            raise InputError(f"the id {line['id']} is that of an earlier line")
        if line["do"] == "undo" and line["of"] not in self.held:
            if line["of"] not in self._ids:
                raise InputError(f"no decision before it has the id {line['of']!r}")
            raise InputError(f"the decision {line['of']} is undone already")
        new, end = new_numbers(line), self.next_number + STEP
        if new and (min(new) <= self._last_number or max(new) >= end):
            raise InputError(  # a number far above would leave none for later clusters
                f"a new cluster cannot have the number {max(new)}: expected one below {end} and "
                "above all that were used before"
            )
        self.lines.append(line)
        self._ids.add(line["id"])
        self._last_number = max([self._last_number, *new])
        self.held = held_ids(self.lines) if line["do"] == "undo" else self.held | {line["id"]}

    def append(self, line: dict[str, Any]) -> None:
        """Append a line and update the state.

        Raises:
            InputError: it cannot be carried out, or a later decision needs the one it undoes.
        """
        self.record(line)
        if line["do"] != "undo":
            self.state = self.state.copy()
            self.state.apply(line)
            return
        try:
            self.replay()
        except LineError as error:
            needs = error.line
            raise InputError(
                f"{needs['do']} in line {error.number} (id {needs['id']}) needs it: undo that one "
                f"first ({error})"
            ) from error

    def replay(self) -> None:
        """Compute the state anew from the held lines.

        Raises:
            LineError: one of them cannot be carried out.
        """
        self.state = ClusterState(self._samples)
        for number, line in enumerate(self.lines, 1):
            if line["id"] in self.held and line["do"] != "undo":
                try:
                    self.state.apply(line)
                except InputError as error:
                    raise LineError(number, line, error) from error


class LineError(InputError):
    """A line that cannot be carried out; `number` counts from 1."""

    def __init__(self, number: int, line: dict[str, Any], error: InputError) -> None:
        super().__init__(str(error))
        self.number, self.line = number, line


def held_ids(lines: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the ids of the lines that no held line undoes."""
    held: set[str] = set()
    undone: set[str] = set()
    for line in reversed(lines):
        if line["id"] not in undone:
            held.add(line["id"])
            if line["do"] == "undo":
                undone.add(line["of"])
    return held


def new_numbers(line: Mapping[str, Any]) -> list[int]:
    """Return the numbers of the clusters that a line creates."""
    new = [line["new"]] if "new" in line else []
    return new + [number for _, number in line.get("parts", [])]
