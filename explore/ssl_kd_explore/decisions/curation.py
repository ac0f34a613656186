"""Record decisions about the clusters of a run in its `curation.jsonl`, one per line.

Lines are only appended; an undo appends a line as well. No other file of the run changes.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssl_kd.core.errors import InputError
from ssl_kd.core.files import atomic_write_bytes, remove_orphans
from ssl_kd.core.files.lock import Lock
from ssl_kd.vision.samples import Samples
from ssl_kd_explore.decisions.line_format import (
    check_field,
    check_line,
    line_fault,
    parse_lines,
    read_file,
    without_person,
)
from ssl_kd_explore.decisions.state import History, LineError

FILE = "curation.jsonl"
LOCK = ".curation.lock"
WAIT = 10.0
Line = dict[str, Any]
_MUTEX = threading.RLock()  # a thread of this process sees a change completely or not at all


class Curation:
    """Rename, merge and split the clusters of a run, move, exclude and check samples, and undo.

    Each decision is a line of `curation.jsonl` and a dict in Python, with the fields `id`, `time`
    (UTC), `samples` and `digest` (they identify the run), `do` (`rename`, `merge`, `split`, `move`,
    `exclude`, `check` or `undo`), possibly `by`, and the arguments of the decision.

    New clusters are numbered from a multiple of 1,000 that is at least 100 above K, so that their
    numbers differ from those of clusters that an extension of the run adds. A merged cluster keeps
    the lowest number of its parts. No number is used twice, even after an undo.

    Several programs and threads may decide at the same time: each decision is checked against the
    current content of the file before it is appended.

    Args:
        samples: the samples of the run.
        by: who decides, one line of at most 200 characters; None leaves this out.

    Attributes:
        by: who decides, written into every new decision.
        path: path of `curation.jsonl`, which the first decision creates.

    Raises:
        CorruptFileError: a line is damaged, belongs to another run, or names a cluster that does
            not exist; the message has the number of the line.
        InputError: `by` is empty or not one line.
    """

    def __init__(self, samples: Samples, by: str | None = None) -> None:
        if by is not None:
            check_field("by", by)
        self.samples = samples
        self.path = samples.path / FILE
        self.by = by
        self._digests: dict[int, str] = {}
        self._words: tuple[NDArray[np.int64], dict[int, str]] | None = None  # for these clusters
        self._content, self._history = b"", History(samples)
        remove_orphans(self.path)
        self.refresh()

    @classmethod
    def open(cls, path: str | Path | Samples, by: str | None = None) -> Curation:
        """Open the decisions of a run, given its folder or its `Samples`."""
        return cls(path if isinstance(path, Samples) else Samples(path), by)

    @property
    def clusters(self) -> NDArray[np.int64]:
        """Cluster of each sample after all decisions, `[n]`; -1 for no cluster."""
        return self._history.state.clusters.copy()

    @property
    def excluded(self) -> NDArray[np.bool_]:
        """True for each sample that a decision excluded, `[n]`."""
        return self._history.state.excluded.copy()

    @property
    def checked(self) -> NDArray[np.bool_]:
        """True for each sample that a person checked, `[n]`."""
        return self._history.state.checked.copy()

    @property
    def names(self) -> dict[int, str]:
        """Cluster number -> name, for the clusters that have a name."""
        return dict(sorted(self._history.state.names.items()))

    @property
    def words(self) -> dict[int, str]:
        """Cluster number -> words that tell its texts apart, for clusters of texts without a name.

        A cluster whose words are the name of another one gets its number as well.
        """
        clusters, names = self.clusters, self.names
        samples_words = self.samples.words
        if samples_words is None:
            return {}
        if self._words is None or not np.array_equal(self._words[0], clusters):
            self._words = clusters, samples_words.names(clusters)
        given = {name.casefold() for name in names.values()}
        return {
            cluster: f"{words} ({cluster})" if words.casefold() in given else words
            for cluster, words in self._words[1].items()
            if cluster not in names
        }

    @property
    def sizes(self) -> dict[int, int]:
        """Cluster number -> number of samples."""
        return dict(self._history.state.sizes)

    @property
    def lines(self) -> list[Line]:
        """All decisions, oldest first; `undone` is True where a later line undoes the decision."""
        self.refresh()
        history = self._history
        return [line | {"undone": line["id"] not in history.active} for line in history.lines]

    def rename(self, cluster: int, name: str) -> Line:
        """Give a cluster a name; an empty name removes the present one.

        Raises:
            InputError: the cluster does not exist, another cluster has the name, or the name is not
                one line of at most 200 characters.
        """
        return self.decide({"do": "rename", "cluster": cluster, "name": name})

    def merge(self, clusters: Iterable[int], name: str | None = None) -> Line:
        """Merge clusters into the one with the lowest number.

        Args:
            clusters: numbers of two clusters or more.
            name: name of the merged cluster; None keeps the name of the lowest-numbered cluster
                that has a name.

        Raises:
            InputError: there are fewer than two different numbers, or a cluster does not exist.
        """
        decision = {"do": "merge", "clusters": np.unique(list(clusters)).tolist()}
        return self.decide(decision if name is None else decision | {"name": name})

    def split(
        self, cluster: int, rows: Sequence[int] | NDArray[Any] | None = None, name: str = ""
    ) -> Line:
        """Split a cluster: take samples out of it, or follow the run's tree of levels.

        Args:
            cluster: number of the cluster; the samples that stay keep its number and name.
            rows: samples that form the new cluster, as numbers or as a mask `[n]`. None splits the
                cluster by the coarsest tree level that divides it: the largest part stays, and each
                other part becomes a new cluster.
            name: name of the new cluster; used with `rows` only.

        Raises:
            InputError: the cluster does not exist, `rows` are not in it or are all of it, or no
                tree level splits it.
        """
        if rows is None:
            return self.decide({"do": "split", "cluster": cluster})
        decision = {"do": "split", "cluster": cluster, "rows": self._rows(rows), "new": None}
        return self.decide(decision | ({"name": name} if name else {}))

    def move(
        self, rows: Sequence[int] | NDArray[Any], cluster: int | None = None, name: str = ""
    ) -> Line:
        """Move samples to another cluster or a new one; excluded samples are included again.

        Args:
            rows: numbers of samples, or a mask `[n]`.
            cluster: number of the target; None makes a new cluster.
            name: name of the new cluster.

        Raises:
            InputError: the cluster or a sample does not exist, or there is a `name` although the
                cluster exists.
        """
        target = {"new": None} if cluster is None else {"into": cluster}
        decision = {"do": "move", "rows": self._rows(rows), **target}
        return self.decide(decision | ({"name": name} if name else {}))

    def exclude(self, rows: Sequence[int] | NDArray[Any]) -> Line:
        """Remove samples from their clusters; exports leave excluded samples out.

        Raises:
            InputError: a sample does not exist.
        """
        return self.decide({"do": "exclude", "rows": self._rows(rows)})

    def check(
        self, rows: Sequence[int] | NDArray[Any] | None = None, *, cluster: int | None = None
    ) -> Line:
        """Mark samples as checked by a person; later moves keep the mark.

        Args:
            rows: numbers of samples, or a mask `[n]`.
            cluster: number of a cluster whose present samples are marked, instead of `rows`.

        Raises:
            InputError: a sample or the cluster does not exist, or both or none are given.
        """
        decision: Line = {"do": "check"} | ({} if rows is None else {"rows": self._rows(rows)})
        return self.decide(decision if cluster is None else decision | {"cluster": cluster})

    def decide(self, request: Any) -> Line:
        """Append a decision: a dict as the page sends it, without the fields that identify it.

        Raises:
            InputError: it does not fit `schema(is_request=True)` or the present clusters.
        """
        if isinstance(request, dict):  # JSON cannot store integers of NumPy
            numbers = {k: int(v) for k, v in request.items() if isinstance(v, np.integer)}
            request = request | numbers
        check_line(request, is_request=True)
        with self._extended() as history:
            history.append(self._completed(request, history))
        return history.lines[-1]

    def undo(self, id: str | None = None) -> Line:
        """Undo a decision by appending a line. To redo the decision, undo the id of that line.

        Args:
            id: id of the decision; None undoes the last decision that is not undone.

        Raises:
            InputError: there is nothing to undo, no decision has the id, the decision is undone
                already, or a later decision needs it.
        """
        if id is None:
            active = [n["id"] for n in self.lines if n["do"] != "undo" and not n["undone"]]
            if not active:
                raise InputError(f"{self.path} has no decision that could be undone")
            id = active[-1]
        return self.decide({"do": "undo", "of": id})

    def apply(self, path: str | Path) -> list[Line]:
        """Append all decisions of another `curation.jsonl`, or none if one of them is not valid.

        Args:
            path: the file, for example from a copy of the run's folder.

        Returns:
            The appended decisions. Lines that this run has already are skipped.

        Raises:
            CorruptFileError: a line is damaged, belongs to another run, or does not fit the
                clusters.
        """
        path = Path(path).expanduser()
        lines = parse_lines(path, read_file(path))
        with self._extended() as history:
            known, n_known = {line["id"]: line for line in history.lines}, len(history.lines)
            for number, line in enumerate(lines, 1):
                try:
                    if without_person(known.get(line["id"], {})) != without_person(line):
                        self._check_run(line)
                        history.append(line)
                except InputError as error:
                    raise line_fault(path, number, error) from error
        return history.lines[n_known:]

    @contextmanager
    def _extended(self) -> Iterator[History]:
        """Lock and read the file, yield a copy of its history, and write the lines added to it."""
        with _MUTEX, Lock(self.path.parent / LOCK, wait=WAIT):
            self.refresh()
            history = self._history.copy()
            yield history
            if new := history.lines[len(self._history.lines) :]:
                text = "".join(json.dumps(line) + "\n" for line in new)
                content = self._content + text.encode()
                atomic_write_bytes(self.path, content)
                self._content, self._history = content, history

    def refresh(self) -> None:
        """Read `curation.jsonl` again if its content changed."""
        with _MUTEX:
            try:
                content = read_file(self.path)
            except FileNotFoundError:
                content = b""
            if content == self._content:
                return
            history = History(self.samples)
            try:
                for line in parse_lines(self.path, content):
                    self._check_run(line)
                    history.record(line)
                history.replay()
            except InputError as error:
                bad = error.number if isinstance(error, LineError) else len(history.lines) + 1
                raise line_fault(self.path, bad, error) from error
            self._content, self._history = content, history

    def _completed(self, request: Line, history: History) -> Line:
        """Return a request as a line, with the fields that identify it and numbers of new clusters.

        A split by the tree gets its parts here, and the check of a cluster its samples, because
        another program may have changed the cluster since the decision was requested.
        """
        line = dict(request)
        new = history.next_number
        n = len(self.samples)
        if line["do"] == "split" and "rows" not in line:
            level, parts = history.state.tree_parts(line["cluster"])
            line |= {"level": level, "parts": [[part, new + k] for k, part in enumerate(parts)]}
        elif line["do"] == "check" and "cluster" in line:
            line["rows"] = history.state.members(line.pop("cluster"))
        elif "new" in line:
            line["new"] = new
        time = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        about = {"id": secrets.token_hex(6), "time": time, "samples": n, "digest": self._digest(n)}
        by = {} if self.by is None else {"by": self.by}
        return check_line(about | by | line)

    def _check_run(self, line: Mapping[str, Any]) -> None:
        ends = {rows.stop for rows in self.samples.splits.values()}
        if line["samples"] not in ends or line["digest"] != self._digest(line["samples"]):
            raise InputError(
                f"the decision is about another run than {self.samples.path}, or the assignments "
                "of that run were edited"
            )

    def _digest(self, n: int) -> str:
        """Return a hash of the file names and clusters of the first n samples."""
        if n not in self._digests:
            clusters = self.samples.column("cluster")[:n].astype("<i8")
            digest = hashlib.sha256(clusters.tobytes())
            for file in self.samples.table.column("file")[:n].to_pylist():
                digest.update(str(file).encode() + b"\0")
            self._digests[n] = digest.hexdigest()[:16]
        return self._digests[n]

    def _rows(self, rows: Sequence[int] | NDArray[Any]) -> list[int]:
        numbers, n = np.asarray(rows), len(self.samples)
        if numbers.dtype == bool and numbers.shape == (n,):
            numbers = np.flatnonzero(numbers)
        is_integer = np.issubdtype(numbers.dtype, np.integer)
        if numbers.ndim != 1 or not is_integer or not len(numbers):
            raise InputError(
                f"`rows` is a {numbers.dtype} array of shape {list(numbers.shape)}; expected the "
                f"numbers of at least one sample, or a boolean mask of shape [{n}]"
            )
        return np.unique(numbers).tolist()
