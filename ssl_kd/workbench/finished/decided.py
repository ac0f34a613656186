"""A run's clusters while one decision after the other is followed, and taken back.

Each decision keeps what it overwrote, so that an `undo` goes back to just before its decision and
follows only those after it once more.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from ssl_kd.errors import InputError
from ssl_kd.vision.samples import Samples

LAST_NUMBER = 10**7  # of a cluster: the page counts them in an array
MOST_KEPT = 1 << 24  # values that were overwritten; beyond, an undo starts from the run


class Clusters:
    """Who is where, and what the clusters are called.

    Attributes:
        clusters: `[n]` int64, each sample's; -1 in none.
        excluded: `[n]`, whether it was taken out.
        names: of the clusters that have one.
        lines: those that were followed, the oldest first.
        numbers: of each line by its id, from 1.
        undos: how many undos that hold there are of a line, by its id.
        last_made: the highest number that a line gave to a new cluster, or -1.
    """

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self.lines: list[dict[str, Any]] = []
        self.numbers: dict[str, int] = {}
        self.undos = Counter[str]()
        self.last_made = -1
        self._start()

    def _start(self) -> None:
        self.clusters = self._samples.column("cluster").astype(np.int64)
        self.excluded: NDArray[np.bool_] = np.zeros(len(self.clusters), bool)
        self._sizes = Counter(self.clusters.tolist())
        del self._sizes[-1]
        self.names: dict[int, str] = {}
        self._owners: dict[str, int] = {}  # of the names, casefolded
        # The decisions that hold: number of the line, and what it overwrote (None: not kept).
        self._steps: list[tuple[int, Any]] = []
        self._overwritten: list[Any] = []
        self._kept = 0

    def copy(self) -> Self:
        """Another, which changes by itself."""
        other = copy.copy(self)
        for name, value in vars(self).items():
            if name != "_samples" and hasattr(value, "copy"):
                setattr(other, name, value.copy())
        return other

    def is_undone(self, line: Mapping[str, Any]) -> bool:
        """Whether an undo that holds is of this line."""
        return self.undos[line["id"]] > 0

    @property
    def last(self) -> str | None:
        """The id of the last decision that holds, which is no undo."""
        return self.lines[self._steps[-1][0] - 1]["id"] if self._steps else None

    def sizes(self) -> dict[int, int]:
        """The samples in each cluster that has any, by number."""
        return dict(sorted(self._sizes.items()))

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

    def follow(self, line: dict[str, Any]) -> None:
        """Do what one more line says, which `ssl_kd.workbench.finished.lines.checked` let pass.

        Raises:
            InputError: it cannot be done; where it is an undo, what is left is of no use.
        """
        if line["id"] in self.numbers:
            raise InputError(f"the id {line['id']} is that of an earlier line")
        if line["do"] == "undo":
            self._undo(line["of"])
        else:
            self._do(line, len(self.lines) + 1)
        self.lines.append(line)
        self.numbers[line["id"]] = len(self.lines)
        self.last_made = max([self.last_made, *made_by(line)])

    def _undo(self, of: str) -> None:
        if of not in self.numbers:
            raise InputError(f"no decision before it has the id {of!r}")
        if self.undos[of]:
            raise InputError(f"the decision {of} is undone already")
        change = 1
        while True:
            number, before = self.numbers[of], self.undos[of]
            self.undos[of] += change
            if bool(before) == bool(self.undos[of]):
                return  # another undo of it holds
            if (line := self.lines[number - 1])["do"] != "undo":
                break
            of, change = line["of"], -change
        for again in sorted({*self._back_to(number)} ^ {number}):
            line = self.lines[again - 1]
            try:
                self._do(line, again)
            except InputError as error:
                raise InputError(
                    f"{line['do']} in line {again} (id {line['id']}) stands on it, and could "
                    f"not hold without it ({error}): undo that one first"
                ) from error

    def _back_to(self, number: int) -> list[int]:
        """Take back the decisions from this line on, and return the lines to be followed again."""
        cut = len(self._steps)
        while cut and self._steps[cut - 1][0] >= number:
            cut -= 1
        if any(overwritten is None for _, overwritten in self._steps[cut:]):
            held = [held for held, _ in self._steps]
            self._start()
            return held
        later, self._steps = self._steps[cut:], self._steps[:cut]
        for _, overwritten in reversed(later):
            for change in reversed(overwritten):
                (self._call if len(change) == 2 else self._set)(*change)
        return [held for held, _ in later]

    def _do(self, line: Mapping[str, Any], number: int) -> None:
        self._overwritten = []
        getattr(self, f"_{line['do']}")(line)
        self._steps.append((number, self._overwritten))
        self._kept += sum(len(change[0]) if len(change) == 3 else 1 for change in self._overwritten)
        if self._kept > MOST_KEPT:
            self._steps, self._kept = [(held, None) for held, _ in self._steps], 0

    def _rename(self, line: Mapping[str, Any]) -> None:
        cluster = self._there(line["cluster"])
        self._call(cluster, self._name(line["name"], cluster))

    def _merge(self, line: Mapping[str, Any]) -> None:
        wanted = sorted({self._there(cluster) for cluster in line["clusters"]})
        if len(wanted) < 2:
            raise InputError(f"clusters are {line['clusters']}; expected two or more to merge")
        named = [self.names[k] for k in wanted if k in self.names]
        name = self._name(line["name"] if "name" in line else (named or [""])[0], *wanted)
        self._put(np.flatnonzero(np.isin(self.clusters, wanted)), wanted[0])
        for cluster in reversed(wanted):  # the name of another one is free by then
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
            self._put(rows, new)
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
            self._put(np.flatnonzero(mask), new)

    def _move(self, line: Mapping[str, Any]) -> None:
        rows, name = self._rows(line), self._name(line.get("name", ""))
        into = self._new(line["new"]) if "new" in line else self._there(line["into"])
        if name and "into" in line:
            raise InputError(f"cluster {into} is there: rename it to call it {name!r}")
        self._put(rows, into)
        if name:
            self._call(into, name)
        self._forget_empty()

    def _exclude(self, line: Mapping[str, Any]) -> None:
        self._put(self._rows(line), -1)
        self._forget_empty()

    def _put(self, rows: NDArray[np.int64], cluster: int) -> None:
        """Put samples into a cluster; -1: take them out."""
        self._overwritten.append((rows, self.clusters[rows], self.excluded[rows]))
        self._set(rows, np.full(len(rows), cluster), np.full(len(rows), cluster < 0))

    def _set(
        self, rows: NDArray[np.int64], clusters: NDArray[np.int64], excluded: NDArray[np.bool_]
    ) -> None:
        self._sizes.subtract(self.clusters[rows].tolist())
        self._sizes.update(clusters.tolist())
        self._sizes = +self._sizes  # without zeros
        del self._sizes[-1]
        self.clusters[rows], self.excluded[rows] = clusters, excluded

    def _forget_empty(self) -> None:
        for cluster in self.names.keys() - self._sizes.keys():
            self._call(cluster, "")

    def _call(self, cluster: int, name: str) -> None:
        before = self.names.pop(cluster, "")
        self._overwritten.append((cluster, before))
        self._owners.pop(before.casefold(), None)
        if name:
            self.names[cluster], self._owners[name.casefold()] = name, cluster

    def _name(self, name: str, *clusters: int) -> str:
        """A name that no other cluster than these has."""
        other = self._owners.get(name.strip().casefold())
        if other is not None and other not in clusters:
            raise InputError(
                f"cluster {other} is called {self.names[other]!r} already: merge the two, or say "
                "what sets them apart"
            )
        return name.strip()

    def _there(self, cluster: int) -> int:
        if cluster not in self._sizes:
            sizes = self.sizes()
            known = ", ".join(map(str, list(sizes)[:12])) + (" ..." if len(sizes) > 12 else "")
            raise InputError(f"there is no cluster {cluster!r} (any more), only {known}")
        return cluster

    def _new(self, number: int) -> int:
        """The number of a cluster that is made."""
        own = self._samples.n_clusters
        if not own <= number < LAST_NUMBER or number in self._sizes:
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


def made_by(line: Mapping[str, Any]) -> list[int]:
    """Return the numbers of the clusters that a line made."""
    new = [line["new"]] if "new" in line else []
    return new + [number for _, number in line.get("parts", [])]
