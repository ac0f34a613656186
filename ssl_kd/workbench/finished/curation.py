"""What people decided about a run's clusters: `curation.jsonl` in its folder, a line a decision.

Nothing is ever rewritten: to undo a decision is a line, too. The run's own files stay as they are.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssl_kd.errors import InputError
from ssl_kd.files import CorruptFileError, atomic_write_bytes, remove_orphans
from ssl_kd.files.lock import Lock
from ssl_kd.vision.samples import Samples
from ssl_kd.workbench.finished.decided import Clusters, made_by
from ssl_kd.workbench.finished.lines import ABOUT, at, checked, parsed, read_lines

FILE, LOCK, WAIT = "curation.jsonl", ".curation.lock", 10.0
MADE_FROM = 1000
_MUTEX = threading.RLock()  # what is in memory changes whole, for all threads of this process
OFFERED = 100  # numbers above K that are left to the clusters that extensions offer


@dataclass(frozen=True)
class Decision:
    """A line of the file.

    Attributes:
        id: its own, 12 hexadecimal digits.
        time: when it was made, UTC, as `2026-01-31T12:00:00Z`.
        do: `rename`, `merge`, `split`, `move`, `exclude` or `undo`.
        what: what it says: `cluster`, `name`, `rows`, `into` ...
        line: its number in the file, from 1.
        undone: whether a later line undoes it.
    """

    id: str
    time: str
    do: str
    what: dict[str, Any]
    line: int
    undone: bool = False


class Curation:
    """The decisions about one run, and its clusters as they are after them.

    A cluster that people make has a number of its own, from a full thousand on that is at least 100
    above K: so it is none that an extension of the run offers. A merged cluster has the lowest
    number of its parts, so that it stays one of the run's own where any of them is. No number is
    ever used twice, whatever is undone.

    Several programs and threads may decide at once: each decision is checked against, and added to,
    the file as it is by then.

    Args:
        samples: the run.

    Attributes:
        samples: the run.
        path: the file; it is there from the first decision on.

    Raises:
        CorruptFileError: a line is damaged, is about another run, or names a cluster that is gone;
            the message has its number.
    """

    def __init__(self, samples: Samples) -> None:
        self.samples, self.path = samples, samples.path / FILE
        self._digests: dict[int, str] = {}
        self._bytes, self._state = b"", Clusters(samples)
        remove_orphans(self.path)
        self._refresh()

    @classmethod
    def open(cls, path: str | Path | Samples) -> Curation:
        """That of a run's folder; raises what `Samples` raises."""
        return cls(path if isinstance(path, Samples) else Samples(path))

    # --- What holds now ---------------------------------------------------------------------------

    @property
    def clusters(self) -> NDArray[np.int64]:
        """Each sample's cluster `[n]`; -1 in none."""
        return self._state.clusters.copy()

    @property
    def excluded(self) -> NDArray[np.bool_]:
        """Whether people took a sample out `[n]`."""
        return self._state.excluded.copy()

    @property
    def names(self) -> dict[int, str]:
        """The names of those clusters that have one, by number."""
        return dict(sorted(self._state.names.items()))

    @property
    def sizes(self) -> dict[int, int]:
        """The samples in each cluster that has any, by number."""
        return self._state.sizes()

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Every line of the file as it stands there, the oldest first."""
        self._refresh()
        return [dict(line) for line in self._state.lines]

    @property
    def digest(self) -> str:
        """Of the samples and their clusters, as a new line has it."""
        return self._digest(len(self.samples))

    @property
    def history(self) -> list[Decision]:
        """Every line of the file, the oldest first."""
        state = self._state
        return [_decision(line, n, state.is_undone(line)) for n, line in enumerate(state.lines, 1)]

    # --- Decisions --------------------------------------------------------------------------------

    def rename(self, cluster: int, name: str) -> Decision:
        """Give a cluster a name; an empty one takes it away.

        Raises:
            InputError: there is no such cluster, or the name is too long or not one line of text.
        """
        return self._add([{"do": "rename", "cluster": _number(cluster), "name": name}])[0]

    def merge(self, clusters: Iterable[int], name: str | None = None) -> Decision:
        """Make several clusters one, with the lowest of their numbers.

        Args:
            clusters: at least two.
            name: the name; None: that of the lowest number that has one.

        Raises:
            InputError: fewer than two, or one of them is not there.
        """
        wanted = sorted({_number(cluster) for cluster in clusters})
        decision: dict[str, Any] = {"do": "merge", "clusters": wanted}
        return self._add([decision if name is None else decision | {"name": name}])[0]

    def split(
        self, cluster: int, rows: Sequence[int] | NDArray[Any] | None = None, name: str = ""
    ) -> Decision:
        """Part a cluster in two, or as the tree does.

        Args:
            cluster: its number; what is left of it keeps number and name.
            rows: the samples that leave it for a cluster of their own, numbers or a mask `[n]`;
                None: the coarsest level of the tree that parts it says which, its largest part
                stays, and each other part becomes a cluster.
            name: of the new cluster, where `rows` says which.

        Raises:
            InputError: no such cluster, samples that are not in it, all of it, or nothing that
                parts it.
        """
        if rows is None:
            self._refresh()
            level, parts = self._state.parts(_number(cluster))
            decision = {"do": "split", "cluster": _number(cluster), "level": level, "parts": parts}
            return self._add([decision])[0]
        decision = {
            "do": "split",
            "cluster": _number(cluster),
            "rows": self._rows(rows),
            "new": None,
        }
        return self._add([decision | ({"name": name} if name else {})])[0]

    def move(
        self, rows: Sequence[int] | NDArray[Any], cluster: int | None = None, name: str = ""
    ) -> Decision:
        """Put samples, wherever they are, excluded ones too, into a cluster or one of their own.

        Args:
            rows: numbers of samples, or a mask `[n]`.
            cluster: where to; None: a new cluster.
            name: of the new cluster.

        Raises:
            InputError: no such cluster or sample, or a name where the cluster has one.
        """
        where = {"new": None} if cluster is None else {"into": _number(cluster)}
        decision = {"do": "move", "rows": self._rows(rows), **where}
        return self._add([decision | ({"name": name} if name else {})])[0]

    def exclude(self, rows: Sequence[int] | NDArray[Any]) -> Decision:
        """Take samples out: they are in no cluster, and `excluded` says so.

        Raises:
            InputError: no such sample.
        """
        return self._add([{"do": "exclude", "rows": self._rows(rows)}])[0]

    def decide(self, asked: Any) -> Decision:
        """Add a decision sent by the page; raise InputError if it is not a valid one."""
        if checked(asked, asked=True)["do"] == "split" and "rows" not in asked:
            return self.split(asked["cluster"])
        return self._add([asked])[0]

    def undo(self, id: str | None = None) -> Decision:
        """Undo a decision, by a line that says so; to redo, undo the `undo` by its id.

        Args:
            id: which; None: the last that holds.

        Raises:
            InputError: nothing is left to undo, no line has this id, it is undone already, or a
                later decision stands on it.
        """
        self._refresh()
        if id is None and (id := self._state.last) is None:
            raise InputError(f"{self.path} has no decision that could be undone")
        return self._add([{"do": "undo", "of": id}])[0]

    def apply(self, path: str | Path) -> list[Decision]:
        """Add the decisions of another file: all of them, or none.

        Args:
            path: lines as those of `curation.jsonl`: of a copy, or from a static page.

        Returns:
            Those that were added; what is here already (the same id) is passed over.

        Raises:
            CorruptFileError: a line is damaged, about another run, or cannot be followed here.
        """
        path = Path(path).expanduser()
        return self._add(parsed(path, read_lines(path)), path)

    # --- The file ---------------------------------------------------------------------------------

    def _add(self, decision: list[dict[str, Any]], source: Path | None = None) -> list[Decision]:
        """Check decisions one after the other, and append them with one write."""
        with _MUTEX, Lock(self.path.parent / LOCK, wait=WAIT):
            self._refresh()
            before, state = len(self._state.lines), self._state.copy()
            for number, what in enumerate(decision, 1):
                try:
                    line = checked(self._stamped(what, state)) if source is None else what
                    there = state.numbers.get(line["id"])
                    if there is None or state.lines[there - 1] != line:
                        self._follow(state, line)
                except InputError as error:
                    if source is None:
                        raise
                    raise CorruptFileError(at(source, number, error)) from error
            new = state.lines[before:]
            if new:
                written = self._bytes + "".join(json.dumps(line) + "\n" for line in new).encode()
                atomic_write_bytes(self.path, written)
                self._bytes, self._state = written, state
            return [_decision(line, n) for n, line in enumerate(new, before + 1)]

    def _refresh(self) -> None:
        """Read the file again if it changed on the disk."""
        with _MUTEX:
            try:
                content = read_lines(self.path)
            except FileNotFoundError:
                content = b""
            if content == self._bytes:
                return
            state = Clusters(self.samples)
            for number, line in enumerate(parsed(self.path, content), 1):
                try:
                    self._follow(state, line)
                except InputError as error:
                    raise CorruptFileError(at(self.path, number, error)) from error
            self._bytes, self._state = content, state

    def _follow(self, state: Clusters, line: dict[str, Any]) -> None:
        """Let one more line change the state."""
        ends = {rows.stop for rows in self.samples.splits.values()}
        if line["samples"] not in ends or line["digest"] != self._digest(line["samples"]):
            raise InputError(
                f"it is about another run than {self.samples.path}, or its assignments were edited"
            )
        first, end = state.last_made + 1, self._next_number(state) + MADE_FROM
        state.follow(line)
        made = made_by(line)  # after a jump, later clusters would find no number
        if made and (min(made) < first or max(made) >= end):
            raise InputError(
                f"a new cluster cannot have the number {max(made)}: expected one below "
                f"{end} that is above all that were given"
            )

    def _stamped(self, decision: dict[str, Any], state: Clusters) -> dict[str, Any]:
        """A decision as a line: with an id, the time, the run, and numbers for what it makes."""
        n = len(self.samples)
        new = self._next_number(state)
        if "new" in decision:
            decision = decision | {"new": new}
        if "parts" in decision:
            decision = decision | {
                "parts": [[part, new + k] for k, part in enumerate(decision["parts"])]
            }
        time = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        about = {"id": secrets.token_hex(6), "time": time, "samples": n, "digest": self._digest(n)}
        return about | decision

    def _next_number(self, state: Clusters) -> int:
        """A number that no cluster has or ever had."""
        first = -(-(self.samples.n_clusters + OFFERED) // MADE_FROM) * MADE_FROM
        return max(first, state.last_made + 1)

    def _digest(self, n: int) -> str:
        """Which samples are meant: file and cluster of the first n; more come by an extension."""
        if n not in self._digests:
            clusters = self.samples.column("cluster")[:n].astype("<i8")
            digest = hashlib.sha256(clusters.tobytes())
            for file in self.samples.table.column("file")[:n].to_pylist():
                digest.update(str(file).encode() + b"\0")
            self._digests[n] = digest.hexdigest()[:16]
        return self._digests[n]

    def _rows(self, rows: Sequence[int] | NDArray[Any]) -> list[int]:
        found, n = np.asarray(rows), len(self.samples)
        if found.dtype == bool and found.shape == (n,):
            found = np.flatnonzero(found)
        if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer) or not len(found):
            raise InputError(
                f"rows are {found.dtype} {list(found.shape)}; expected numbers of samples, at "
                f"least one, or a mask [{n}]"
            )
        return np.unique(found).tolist()


def _number(cluster: Any) -> int:
    """A cluster's number: numpy's are plain numbers in the file."""
    if isinstance(cluster, np.integer):
        return int(cluster)
    if type(cluster) is not int:
        raise InputError(f"{cluster!r} is no cluster's number; expected 0, 1, 2, ...")
    return cluster


def _decision(line: Mapping[str, Any], number: int, undone: bool = False) -> Decision:
    what = {key: value for key, value in line.items() if key not in ABOUT}
    return Decision(line["id"], line["time"], line["do"], what, number, undone)
