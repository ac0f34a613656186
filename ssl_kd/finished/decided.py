"""A run's clusters while one decision after the other is followed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from ssl_kd.errors import InputError
from ssl_kd.finished.samples import Samples

LAST_NUMBER = 10**7  # of a cluster: their sizes are an array


class Clusters:
    """Who is where, and what the clusters are called; each step is whole, or refused.

    Attributes:
        clusters: `[n]` int64, each sample's; -1 in none.
        excluded: `[n]`, whether it was taken out.
        names: of the clusters that have one.
    """

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self.clusters = samples.column("cluster").astype(np.int64)
        self.excluded: NDArray[np.bool_] = np.zeros(len(samples), bool)
        self.names: dict[int, str] = {}

    def copy(self) -> Self:
        """Another, which changes by itself."""
        other = type(self)(self._samples)
        other.clusters, other.excluded = self.clusters.copy(), self.excluded.copy()
        other.names = dict(self.names)
        return other

    def sizes(self) -> dict[int, int]:
        """The samples in each cluster that has any, by number."""
        count = np.bincount(self.clusters[self.clusters >= 0])
        return {int(k): int(count[k]) for k in np.flatnonzero(count)}

    def parts(self, cluster: int) -> tuple[str, list[int]]:
        """The coarsest level of the tree that parts a cluster, and its parts but the largest.

        Raises:
            InputError: no such cluster, or none parts it.
        """
        members = self.clusters == self._there(cluster)
        for level in self._samples.levels:
            found, sizes = np.unique(self._samples.column(level)[members], return_counts=True)
            found, sizes = found[found >= 0], sizes[found >= 0]
            if len(found) > 1:
                order = np.argsort(-sizes, kind="stable")
                return level, [int(part) for part in found[order][1:]]
        raise InputError(
            f"no level of the tree parts cluster {cluster}: select the samples that are to leave it"
        )

    def follow(self, line: Mapping[str, Any]) -> None:
        """Do what a line says, which `ssl_kd.finished.lines.checked` let pass.

        Raises:
            InputError: it cannot be done, and nothing was.
        """
        steps = {
            "rename": self._rename,
            "merge": self._merge,
            "split": self._split,
            "move": self._move,
            "exclude": self._exclude,
        }
        steps[line["do"]](line)

    def _rename(self, line: Mapping[str, Any]) -> None:
        cluster = self._there(line["cluster"])
        self._call(cluster, self._name(line["name"], cluster))

    def _merge(self, line: Mapping[str, Any]) -> None:
        wanted = sorted({self._there(cluster) for cluster in line["clusters"]})
        if len(wanted) < 2:
            raise InputError(f"clusters are {line['clusters']}; expected two or more to merge")
        named = [self.names[k] for k in wanted if k in self.names]
        name = self._name(line["name"] if "name" in line else (named or [""])[0], *wanted)
        self.clusters[np.isin(self.clusters, wanted)] = wanted[0]
        for cluster in wanted:
            self._call(cluster, name if cluster == wanted[0] else "")

    def _split(self, line: Mapping[str, Any]) -> None:
        cluster = self._there(line["cluster"])
        members = self.clusters == cluster
        if "rows" in line:
            rows, new = self._rows(line), self._new(line["new"])
            if not members[rows].all():
                other = int(rows[~members[rows]][0])
                raise InputError(f"sample {other} is not in cluster {cluster}")
            if len(rows) == members.sum():
                raise InputError(f"they are all of cluster {cluster}: nothing is left to part from")
            name = self._name(line.get("name", ""))
            self.clusters[rows] = new
            self._call(new, name)
            return
        if line["level"] not in self._samples.levels:
            raise InputError(f"there is no level {line['level']!r} of the tree")
        level = self._samples.column(line["level"])
        moved = [(members & (level == part), self._new(new)) for part, new in line["parts"]]
        taken = sum(int(mask.sum()) for mask, _ in moved)
        if not moved or not all(mask.any() for mask, _ in moved) or taken >= members.sum():
            raise InputError(f"{line['level']} does not part cluster {cluster} so")
        if len({new for _, new in moved}) < len(moved):
            raise InputError(f"parts are {line['parts']}: two of one number")
        for mask, new in moved:
            self.clusters[mask] = new

    def _move(self, line: Mapping[str, Any]) -> None:
        rows, name = self._rows(line), self._name(line.get("name", ""))
        into = self._new(line["new"]) if "new" in line else self._there(line["into"])
        if name and "into" in line:
            raise InputError(f"cluster {into} is there: rename it to call it {name!r}")
        self.clusters[rows], self.excluded[rows] = into, False
        if name:
            self._call(into, name)
        self._forget_empty()

    def _exclude(self, line: Mapping[str, Any]) -> None:
        rows = self._rows(line)
        self.clusters[rows], self.excluded[rows] = -1, True
        self._forget_empty()

    def _forget_empty(self) -> None:
        sizes = self.sizes()
        self.names = {k: name for k, name in self.names.items() if k in sizes}

    def _call(self, cluster: int, name: str) -> None:
        self.names.pop(cluster, None)
        if name:
            self.names[cluster] = name

    def _name(self, name: str, *clusters: int) -> str:
        """A name that no other cluster than these has."""
        for other, own in self.names.items():
            if other not in clusters and own.casefold() == name.strip().casefold():
                raise InputError(
                    f"cluster {other} is called {own!r} already: merge the two, or say what sets "
                    "them apart"
                )
        return name.strip()

    def _there(self, cluster: int) -> int:
        sizes = self.sizes()
        if cluster not in sizes:
            known = ", ".join(map(str, list(sizes)[:12])) + (" ..." if len(sizes) > 12 else "")
            raise InputError(f"there is no cluster {cluster!r} (any more), only {known}")
        return cluster

    def _new(self, number: int) -> int:
        """The number of a cluster that is made."""
        own = self._samples.n_clusters
        if not own <= number < LAST_NUMBER or number in self.sizes():
            raise InputError(
                f"a new cluster cannot have the number {number!r}: expected one from {own} to "
                f"{LAST_NUMBER - 1} that no other has"
            )
        return number

    def _rows(self, line: Mapping[str, Any]) -> NDArray[np.int64]:
        rows, n = np.unique(np.asarray(line["rows"], np.int64)), line["samples"]
        if rows[-1] >= n:
            raise InputError(f"there is no sample {rows[-1]}; expected 0 to {n - 1}")
        return rows
