"""Clusters of a run and their names after its decisions, except those that were undone."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from ssl_kd.core.errors import InputError
from ssl_kd.vision.samples import Samples

LAST_NUMBER = 10**7  # largest cluster number: the page counts clusters in an array
STEP = 1000  # clusters that people create are numbered from a multiple of this
RESERVED = 100  # numbers above K that are left to the clusters that extensions propose


class ClusterState:
    """Cluster of each sample and name of each cluster; `apply` changes them."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self.clusters = samples.column("cluster").astype(np.int64)  # [n], -1: no cluster
        self.excluded: NDArray[np.bool_] = np.zeros(len(self.clusters), bool)  # by a decision
        self.checked = self.excluded.copy()  # by a person
        self._ended: dict[int, str] = {}  # cluster -> which decision emptied it
        self.names: dict[int, str] = {}  # of the clusters that have a name
        self._count()

    def copy(self) -> Self:
        """Return an independent copy."""
        return copy.deepcopy(self, {id(self._samples): self._samples})

    def members(self, cluster: int) -> list[int]:
        """Return the rows of the samples of a cluster."""
        return np.flatnonzero(self.clusters == self._existing(cluster)).tolist()

    def tree_parts(self, cluster: int) -> tuple[str, list[int]]:
        """Return the coarsest tree level that splits a cluster, and all parts but the largest."""
        members = self.clusters == self._existing(cluster)
        for level in self._samples.levels:
            parts, sizes = np.unique(self._samples.column(level)[members], return_counts=True)
            if len(parts) > 1:
                order = np.argsort(-sizes, kind="stable")
                return level, parts[order][1:].tolist()
        raise InputError(
            f"no level of the tree splits cluster {cluster}: split it by selected samples instead"
        )

    def apply(self, line: Mapping[str, Any]) -> None:
        """Apply a decision that `line_format.check_line` accepted, except for an undo.

        After an InputError the state may be half changed and must be discarded.
        """
        before = self.sizes
        getattr(self, f"_{line['do']}")(line)
        by = f" by {line['by']}" if "by" in line else ""
        ended = f" since the {line['do']}{by} of {line['time']}"
        self._ended |= dict.fromkeys(before.keys() - self.sizes.keys(), ended)

    def _rename(self, line: Mapping[str, Any]) -> None:
        self._set_name(self._existing(line["cluster"]), line["name"])

    def _merge(self, line: Mapping[str, Any]) -> None:
        merged = sorted({self._existing(cluster) for cluster in line["clusters"]})
        if len(merged) < 2:
            raise InputError(
                f"a merge has the clusters {line['clusters']}; expected two different numbers or "
                "more"
            )
        names = [self.names[cluster] for cluster in merged if cluster in self.names]
        self._assign(np.flatnonzero(np.isin(self.clusters, merged)), merged[0])
        self._set_name(merged[0], line.get("name", names[0] if names else ""))

    def _split(self, line: Mapping[str, Any]) -> None:
        cluster = self._existing(line["cluster"])
        members = self.clusters == cluster
        if "parts" in line:
            self._split_by_tree(line, cluster, members)
            return
        rows = self._rows(line)
        if not members[rows].all():
            raise InputError(
                f"sample {int(rows[~members[rows]][0])} is not in cluster {cluster}: a split takes "
                "samples of that cluster only"
            )
        if len(rows) == members.sum():
            raise InputError(
                f"a split selects all samples of cluster {cluster}: leave at least one in it"
            )
        self._assign(rows, self._unused(line["new"]))
        self._set_name(line["new"], line.get("name", ""))

    def _split_by_tree(
        self, line: Mapping[str, Any], cluster: int, members: NDArray[np.bool_]
    ) -> None:
        levels, parts = self._samples.levels, [part for part, _ in line["parts"]]
        if line["level"] not in levels:
            raise InputError(
                f"a split has the tree level {line['level']!r}; expected {', '.join(levels)}"
            )
        level = self._samples.column(line["level"])
        inside = np.unique(level[members]).tolist()
        if len({*parts}) < len(parts) or not {*parts} < {*inside}:
            raise InputError(
                f"a split of cluster {cluster} moves the parts {parts} of {line['level']}; "
                f"expected some, but not all, of {inside}, each once"
            )
        for part, new in line["parts"]:
            self._assign(np.flatnonzero(members & (level == part)), self._unused(new))

    def _move(self, line: Mapping[str, Any]) -> None:
        if "into" in line:
            self._assign(self._rows(line), self._existing(line["into"]))
        else:
            self._assign(self._rows(line), self._unused(line["new"]))
            self._set_name(line["new"], line.get("name", ""))

    def _exclude(self, line: Mapping[str, Any]) -> None:
        self._assign(self._rows(line), -1)

    def _check(self, line: Mapping[str, Any]) -> None:
        self.checked[self._rows(line)] = True

    def _assign(self, rows: NDArray[np.int64], cluster: int) -> None:
        """Put samples into a cluster, or exclude them if it is -1; drop names of empty clusters."""
        self.clusters[rows], self.excluded[rows] = cluster, cluster < 0
        self._count()
        self.names = {k: name for k, name in self.names.items() if k in self.sizes}

    def _count(self) -> None:
        """Set `sizes`: cluster number -> number of samples, without empty clusters."""
        counts = np.bincount(self.clusters + 1)[1:]
        used = np.flatnonzero(counts)
        self.sizes = dict(zip(used.tolist(), counts[used].tolist(), strict=True))

    def _set_name(self, cluster: int, name: str) -> None:
        """Give a cluster a name that no other one has, ignoring case; "" removes its name."""
        self.names.pop(cluster, None)
        if not (name := name.strip()):
            return
        for other, text in self.names.items():
            if text.casefold() == name.casefold():
                raise InputError(
                    f"cluster {other} is called {text!r} already: merge the two clusters, or "
                    "choose another name"
                )
        self.names[cluster] = name

    def _existing(self, cluster: int) -> int:
        if cluster not in self.sizes:
            known = ", ".join(map(str, list(self.sizes)[:12]))
            more = ", ..." if len(self.sizes) > 12 else ""
            raise InputError(
                f"there is no cluster {cluster}{self._ended.get(cluster, '')}; expected one of "
                f"{known}{more}"
            )
        return cluster

    def _unused(self, number: int) -> int:
        first = self._samples.n_clusters
        if not first <= number < LAST_NUMBER or number in self.sizes:
            raise InputError(
                f"a new cluster has the number {number!r}; expected an unused number from {first} "
                f"to {LAST_NUMBER - 1}"
            )
        return number

    def _rows(self, line: Mapping[str, Any]) -> NDArray[np.int64]:
        rows, n = np.unique(np.asarray(line["rows"], np.int64)), line["samples"]
        if rows[-1] >= n:
            raise InputError(f"there is no sample {rows[-1]}; expected numbers from 0 to {n - 1}")
        return rows


class History:
    """All lines of a `curation.jsonl`, and the clusters after the lines that are not undone."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self.lines: list[dict[str, Any]] = []  # oldest first
        self.active: set[str] = set()  # IDs of the lines that are not undone; an undo is a line
        self._by_id: dict[str, dict[str, Any]] = {}
        self._last_number = -1
        self.state = ClusterState(samples)

    def copy(self) -> Self:
        """Return an independent copy."""
        other = copy.copy(self)
        other.lines, other.active = self.lines.copy(), self.active.copy()
        other._by_id = self._by_id.copy()
        return other

    @property
    def next_number(self) -> int:
        """The number for the next new cluster; no cluster has or ever had it."""
        first = -(-(self._samples.n_clusters + RESERVED) // STEP) * STEP
        return max(first, self._last_number + 1)

    def record(self, line: dict[str, Any]) -> None:
        """Append a line without updating `state`; call `replay` after the last line."""
        if line["id"] in self._by_id:
            raise InputError(f"the id {line['id']} is the id of an earlier line; expected a new id")
        if line["do"] == "undo" and line["of"] not in self.active:
            if line["of"] not in self._by_id:
                raise InputError(f"an undo names the id {line['of']!r}, which no earlier line has")
            raise InputError(f"the decision {line['of']} is undone already")
        new = [line["new"]] if "new" in line else [number for _, number in line.get("parts", [])]
        end = self.next_number + STEP
        if new and (min(new) <= self._last_number or max(new) >= end):
            # A number far above the others would leave none for later clusters.
            raise InputError(
                f"a new cluster has the number {max(new)}; expected a number below {end} and above "
                "all that were used before"
            )
        self.lines.append(line)
        self._by_id[line["id"]] = line
        self._last_number = max([self._last_number, *new])
        self.active.add(line["id"])
        while line["do"] == "undo":  # which may undo an undo
            line = self._by_id[line["of"]]
            self.active ^= {line["id"]}

    def append(self, line: dict[str, Any]) -> None:
        """Append a line and update `state`."""
        self.record(line)
        if line["do"] != "undo":
            self.state = self.state.copy()
            self.state.apply(line)
            return
        try:
            self.replay()
        except LineError as error:
            later = error.line
            raise InputError(
                f"{later['do']} in line {error.number} (id {later['id']}) needs the decision "
                f"{line['of']}: undo {later['id']} first ({error})"
            ) from error

    def replay(self) -> None:
        """Compute `state` from the active lines; raise LineError for one that is not valid."""
        self.state = ClusterState(self._samples)
        for number, line in enumerate(self.lines, 1):
            if line["id"] in self.active and line["do"] != "undo":
                try:
                    self.state.apply(line)
                except InputError as error:
                    raise LineError(number, line, error) from error


class LineError(InputError):
    """A line of `curation.jsonl` does not fit the clusters; `number` counts lines from 1."""

    def __init__(self, number: int, line: dict[str, Any], error: InputError) -> None:
        super().__init__(str(error))
        self.number, self.line = number, line
