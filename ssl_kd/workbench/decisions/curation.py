"""`curation.jsonl` in a run's folder: one line for each decision about its clusters.

Lines are only ever appended: an undo is a line, too. The run's own files stay unchanged.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssl_kd.errors import InputError
from ssl_kd.files import CorruptFileError, atomic_write_bytes, remove_orphans
from ssl_kd.files.lock import Lock
from ssl_kd.vision.samples import Samples
from ssl_kd.workbench.decisions.line_format import (
    check_line,
    describe_fault,
    parse_lines,
    read_file,
)
from ssl_kd.workbench.decisions.state import History, LineError

FILE, LOCK, WAIT = "curation.jsonl", ".curation.lock", 10.0
Line = dict[str, Any]
_MUTEX = threading.RLock()  # threads of this process see all of a change or nothing


class Curation:
    """Decisions about the clusters of one run, and the clusters after them.

    Each decision is a dict, as a line of the file: `id`, `time` (UTC), `samples` and `digest` (the
    run), `do` (`rename`, `merge`, `split`, `move`, `exclude` or `undo`), and what it needs.

    A cluster that people create is numbered from a multiple of 1,000 that is at least 100 above K,
    so that it differs from those that an extension of the run proposes. A merged cluster has the
    lowest number of its parts. No number is ever used twice, whatever is undone.

    Several programs and threads may decide at once: each decision is checked against, and appended
    to, the file as it is at that moment.

    Args:
        samples: the run.

    Attributes:
        samples: the run.
        path: the file; it exists from the first decision on.

    Raises:
        CorruptFileError: a line is damaged, belongs to another run, or names a cluster that does
            not exist; the message has its number.
    """

    def __init__(self, samples: Samples) -> None:
        self.samples, self.path = samples, samples.path / FILE
        self._digests: dict[int, str] = {}
        self._content, self._history = b"", History(samples)
        remove_orphans(self.path)
        self._refresh()

    @classmethod
    def open(cls, path: str | Path | Samples) -> Curation:
        """Open the decisions of a run's folder; raise what `Samples` raises."""
        return cls(path if isinstance(path, Samples) else Samples(path))

    @property
    def clusters(self) -> NDArray[np.int64]:
        """Each sample's cluster `[n]` after all decisions; -1: in none."""
        return self._history.state.clusters.copy()

    @property
    def excluded(self) -> NDArray[np.bool_]:
        """Whether a decision took the sample out `[n]`."""
        return self._history.state.excluded.copy()

    @property
    def names(self) -> dict[int, str]:
        """Names of the clusters that have one, by number."""
        return dict(sorted(self._history.state.names.items()))

    @property
    def sizes(self) -> dict[int, int]:
        """How many samples each cluster has, by number."""
        return dict(self._history.state.sizes)

    @property
    def lines(self) -> list[Line]:
        """Every line of the file, the oldest first; `undone`: whether a later line undoes it."""
        self._refresh()
        history = self._history
        return [line | {"undone": line["id"] not in history.held} for line in history.lines]

    def rename(self, cluster: int, name: str) -> Line:
        """Name a cluster; an empty name removes it.

        Raises:
            InputError: there is no such cluster, another one has this name, or the name is not one
                line of at most 200 characters.
        """
        return self._decide({"do": "rename", "cluster": _number(cluster), "name": name})

    def merge(self, clusters: Iterable[int], name: str | None = None) -> Line:
        """Merge clusters into the one with the lowest number.

        Args:
            clusters: at least two numbers.
            name: name of the merged cluster; None: the name of its lowest part that has one.

        Raises:
            InputError: fewer than two, or one does not exist.
        """
        numbers = sorted({_number(cluster) for cluster in clusters})
        decision: Line = {"do": "merge", "clusters": numbers}
        return self._decide(decision if name is None else decision | {"name": name})

    def split(
        self, cluster: int, rows: Sequence[int] | NDArray[Any] | None = None, name: str = ""
    ) -> Line:
        """Split a cluster by rows, or as the tree of the run does.

        Args:
            cluster: its number; the rest keeps number and name.
            rows: samples that become a new cluster, as numbers or as a mask `[n]`; None: the
                coarsest level of the tree that splits the cluster decides, its largest part stays,
                and each other part becomes a new cluster.
            name: name of the new cluster, with `rows`.

        Raises:
            InputError: there is no such cluster, `rows` are not in it or all of it, or no level
                splits it.
        """
        decision: Line = {"do": "split", "cluster": _number(cluster)}
        if rows is None:
            self._refresh()
            level, parts = self._history.state.tree_parts(decision["cluster"])
            return self._decide(decision | {"level": level, "parts": parts})
        decision |= {"rows": self._rows(rows), "new": None}
        return self._decide(decision | ({"name": name} if name else {}))

    def move(
        self, rows: Sequence[int] | NDArray[Any], cluster: int | None = None, name: str = ""
    ) -> Line:
        """Move samples, excluded ones too, to another or a new cluster.

        Args:
            rows: numbers of samples, or a mask `[n]`.
            cluster: the target; None: a new cluster.
            name: name of the new cluster.

        Raises:
            InputError: there is no such cluster or sample, or `name` comes with `cluster`.
        """
        target = {"new": None} if cluster is None else {"into": _number(cluster)}
        decision = {"do": "move", "rows": self._rows(rows), **target}
        return self._decide(decision | ({"name": name} if name else {}))

    def exclude(self, rows: Sequence[int] | NDArray[Any]) -> Line:
        """Take samples out of every cluster.

        Raises:
            InputError: there is no such sample.
        """
        return self._decide({"do": "exclude", "rows": self._rows(rows)})

    def decide(self, request: Any) -> Line:
        """Append a decision sent by the page; raise InputError if it is not valid."""
        if check_line(request, is_request=True)["do"] == "split" and "rows" not in request:
            return self.split(request["cluster"])
        return self._decide(request)

    def undo(self, id: str | None = None) -> Line:
        """Undo a decision by appending a line; to redo it, undo the undo by its id.

        Args:
            id: the decision; None: the last one that is not undone.

        Raises:
            InputError: there is nothing to undo, no line has this id, it is undone already, or a
                later decision needs it.
        """
        if id is None:
            held = [n["id"] for n in self.lines if n["do"] != "undo" and not n["undone"]]
            if not held:
                raise InputError(f"{self.path} has no decision that could be undone")
            id = held[-1]
        return self._decide({"do": "undo", "of": id})

    def apply(self, path: str | Path) -> list[Line]:
        """Append the decisions of another file: all of them, or none.

        Args:
            path: a `curation.jsonl`, for example of a copy of the run.

        Returns:
            Those that were appended; lines that are here already are skipped.

        Raises:
            CorruptFileError: a line is damaged, belongs to another run, or cannot be carried out.
        """
        path = Path(path).expanduser()
        return self._append(parse_lines(path, read_file(path)), path)

    def _decide(self, decision: Line) -> Line:
        return self._append([decision])[0]

    def _append(self, lines: list[Line], source: Path | None = None) -> list[Line]:
        """Check lines one after the other, and append them to the file with one write.

        Args:
            lines: decisions without id, time and run; complete lines where there is a `source`.
            source: the file that they are from.
        """
        with _MUTEX, Lock(self.path.parent / LOCK, wait=WAIT):
            self._refresh()
            first, history = len(self._history.lines), self._history.copy()
            known = {line["id"]: line for line in history.lines}
            for number, line in enumerate(lines, 1):
                try:
                    line = self._completed(line, history) if source is None else line
                    if known.get(line["id"]) != line:
                        self._check_run(line)
                        history.append(line)
                except InputError as error:
                    if source is None:
                        raise
                    raise CorruptFileError(describe_fault(source, number, error)) from error
            new = history.lines[first:]
            if new:
                text = "".join(json.dumps(line) + "\n" for line in new)
                content = self._content + text.encode()
                atomic_write_bytes(self.path, content)
                self._content, self._history = content, history
            return new

    def _refresh(self) -> None:
        """Read the file again if it changed on the disk."""
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
                raise CorruptFileError(describe_fault(self.path, bad, error)) from error
            self._content, self._history = content, history

    def _completed(self, decision: Line, history: History) -> Line:
        """Return a decision as a line: with id, time, run, and numbers for new clusters."""
        new, n = history.next_number, len(self.samples)
        if "new" in decision:
            decision = decision | {"new": new}
        if "parts" in decision:
            parts = [[part, new + k] for k, part in enumerate(decision["parts"])]
            decision = decision | {"parts": parts}
        time = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        about = {"id": secrets.token_hex(6), "time": time, "samples": n, "digest": self._digest(n)}
        return check_line(about | decision)

    def _check_run(self, line: Mapping[str, Any]) -> None:
        ends = {rows.stop for rows in self.samples.splits.values()}
        if line["samples"] not in ends or line["digest"] != self._digest(line["samples"]):
            raise InputError(
                f"it is about another run than {self.samples.path}, or its assignments were edited"
            )

    def _digest(self, n: int) -> str:
        """Return a hash of files and clusters of the first n samples; extensions append more."""
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
                f"rows are {numbers.dtype} {list(numbers.shape)}; expected numbers of samples, at "
                f"least one, or a mask [{n}]"
            )
        return np.unique(numbers).tolist()


def _number(cluster: Any) -> int:
    """Return a cluster's number; NumPy integers become plain ones in the file."""
    if isinstance(cluster, np.integer):
        return int(cluster)
    if type(cluster) is not int:
        raise InputError(f"{cluster!r} is not a cluster number; expected 0, 1, 2, ...")
    return cluster
