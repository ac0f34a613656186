"""Write a cache shard by shard, so that an interrupted run resumes at the first missing shard."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import secrets
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor
from typing_extensions import Self

from ssl_kd.core.files import CorruptFileError, save_tensors, sha256_file
from ssl_kd.core.files.lock import Lock
from ssl_kd.core.shards.fingerprint import BaseFingerprint
from ssl_kd.core.shards.ledger import Ledger
from ssl_kd.core.shards.shards import Content, Manifest, NonFiniteRow, ShardStore, bad_row

logger = logging.getLogger(__name__)

SHARD_BYTES = 256 << 20
S = TypeVar("S", bound=ShardStore)


class ShardWriter(Generic[S]):
    """Write a cache, reusing the complete shards of an earlier, interrupted writer.

    Pass every row of the data set either to `put`, in the order of the data set, or to `skip`. A
    shard is written when its last row arrives; until then, rows of later shards are refused. Before
    `close`, all files are in the folder `{name}.partial`, so an older cache stays readable.

    A writer of all shards holds an exclusive lock from construction until `close` or the end of the
    `with` block. Alongside it or in its place, any number of writers, on any machines that share
    the folder, may each write some shards (`only`). If two writers compute the same shard, the
    first one to add it to the manifest wins.

    Args:
        kind: store class that reads the cache and defines its columns and bad rows.
        header: further fields of the manifest, in JSON's types. They determine the columns.
        adopt: fields of `header` that an existing cache of the same fingerprint overrides.
        ids: sample names, one for each row of the data set.
        shard_rows: rows of the data set per shard; None: shards of about 256 MiB. An existing cache
            of the same fingerprint overrides it.
        only: shards to write, such as `slice(rank, None, world)`; None: all.
        force: recompute all shards. With `only`, the writer joins an unfinished new cache and drops
            only its own shards; `slice(0)` starts a new cache for writers without `force` to join.
        rebuild: recompute damaged shards; `missing` lists their rows.
        back: function that decides, from the manifest entry of a sample that was skipped earlier,
            whether the sample is available now. If so, its shard is recomputed.

    Raises:
        FingerprintMismatch: without `force`, the folder contains shards computed from other inputs.
        CorruptFileError: without `force` and `rebuild`, the existing cache is damaged.
        NonFiniteRow: without `force` and `rebuild`, the existing cache contains a bad row.
        LockHeld: another process is writing all shards in this folder.
    """

    def __init__(
        self,
        kind: type[S],
        folder: str | Path,
        name: str,
        fingerprint: BaseFingerprint,
        header: Manifest,
        *,
        ids: Sequence[str],
        adopt: Collection[str] = (),
        shard_rows: int | None = None,
        only: slice | None = None,
        force: bool = False,
        rebuild: bool = False,
        back: Callable[[Manifest], bool] = lambda entry: False,
    ):
        self.kind = kind
        self.folder = Path(folder)
        self.name = name
        self.fingerprint, self._back = fingerprint, back
        self.n = len(ids)
        self._ids, self._only = ids, only
        header = {"version": 1, "fingerprint": vars(fingerprint), "n": self.n, **header}
        columns = kind.columns(header)
        row = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in columns.values())
        size = max(1, SHARD_BYTES // row) if shard_rows is None else shard_rows
        if size < 1:
            raise ValueError(f"shard_rows is {shard_rows}; expected at least 1")
        self._ledger = Ledger(
            kind,
            self.folder,
            name,
            fingerprint,
            header,
            shard_rows=size,
            adopt=adopt,
            force=force,
            rebuild=rebuild,
            shared=only is not None,
        )
        self._stored: dict[int, Manifest] = {}  # shard number -> entry in the manifest
        self._left_out: dict[int, Manifest] = {}  # skipped row of an unfinished shard -> entry
        self._store: S | None = None
        self._closed = False
        self._lock: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if only is None:
            self._lock = Lock(self.folder / f".{name}.lock")
        self._lock.__enter__()
        try:
            self._recover()
            self._columns = kind.columns(self._ledger.header)
            self._begin_shard()
        except BaseException:
            self._release()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if kind is None and self._only is None:
            self.close()
        else:
            self._release()  # complete shards stay in the partial folder

    @property
    def missing(self) -> list[tuple[int, int]]:
        """Ranges `(start, stop)` of the rows that this writer still has to compute."""
        ranges: list[tuple[int, int]] = []
        for start, stop in map(self._ledger.rows, self.absent):
            if ranges and ranges[-1][1] == start:
                start = ranges.pop()[0]
            ranges.append((start, stop))
        return ranges

    @property
    def shard_rows(self) -> int:
        """Rows of the data set per shard."""
        return self._ledger.shard_rows

    @property
    def shards(self) -> range:
        """Numbers of the shards that this writer has to provide."""
        return range(self._ledger.n_shards)[slice(None) if self._only is None else self._only]

    @property
    def n_shards(self) -> int:
        """Number of shards of the whole data set."""
        return self._ledger.n_shards

    @property
    def absent(self) -> list[int]:
        """Numbers of the shards that this writer still has to compute."""
        return [shard for shard in self.shards if shard not in self._stored]

    @property
    def rows(self) -> int:
        """Number of rows in all `shards` of this writer."""
        return sum(stop - start for start, stop in map(self._ledger.rows, self.shards))

    @property
    def done(self) -> int:
        """The first row that this writer still has to compute; n if there is none."""
        missing = self.missing
        return missing[0][0] if missing else self.n

    def lacks(self, row: int) -> bool:
        """Return whether this writer still has to compute the shard of a row."""
        return self._awaits(row // self.shard_rows)

    def _awaits(self, shard: int) -> bool:
        return shard in self.shards and shard not in self._stored

    def batches(self, batch_size: int) -> list[range]:
        """Return batches of consecutive rows that cover the `missing` rows.

        Batches start at multiples of `batch_size`, so they do not depend on where an earlier writer
        was interrupted: the rounding of a row may depend on the other rows of its batch.
        """
        starts = {
            at
            for start, stop in self.missing
            for at in range(start - start % batch_size, stop, batch_size)
        }
        return [range(at, min(at + batch_size, self.n)) for at in sorted(starts)]

    def put(self, content: Content, rows: Tensor) -> None:
        """Add columns `[b, ...]` of increasing rows `[b]`, ignoring shards of other writers.

        Raises ValueError if rows are repeated or an earlier one is missing, and NonFiniteRow for a
        bad row; then none was added. Complete shards are kept, also if the disk is full (OSError).
        """
        rows = torch.as_tensor(rows).to("cpu", torch.int64)
        self._check_rows(rows)
        order = [*self._rows[-1:], *rows.tolist()]
        for before, row in itertools.pairwise(order):
            if row <= before:
                raise ValueError(f"row {row} came after row {before}; expected increasing rows")
        content = {
            name: content[name].detach().to("cpu", dtype)
            for name, (_, dtype) in self._columns.items()
        }
        for name, (shape, _) in self._columns.items():
            if content[name].shape != (expected := (len(rows), *shape)):
                raise ValueError(
                    f"the column {name} has shape {tuple(content[name].shape)}; expected {expected}"
                )
        self._check_content(content, rows, whole=False)
        shards = rows // self.shard_rows
        for shard in shards.unique().tolist():
            if self._awaits(shard):
                at = (shards == shard).nonzero().squeeze(1)
                self._add(shard, {name: content[name][at] for name in content}, rows[at].tolist())
        self._write_complete()

    def skip(self, row: int, id: str, reason: str) -> None:
        """Leave out a row, and list it with its name and the reason in the manifest."""
        self._check_rows(torch.tensor([row]))
        if self.lacks(row):
            self._left_out[row] = {"row": row, "id": id, "reason": reason}
            self._write_complete()

    def publish(self) -> Manifest | None:
        """Publish the cache and return its manifest; None if a shard of another writer is missing.

        Raises ValueError if some rows of this writer were neither added nor skipped.
        """
        self._check_complete(self.n)
        return self._ledger.publish()

    def close(self) -> S:
        """Publish the finished cache and open it; raise ValueError if rows are missing."""
        if self._store is None:
            try:
                if self.publish() is None:
                    raise ValueError(f"{self.name}: shards of other writers are not stored yet")
                # Each shard was checked when it was written or recovered.
                self._store = self.kind(
                    self.folder, self.name, expect=self.fingerprint, verify=False
                )
            finally:
                self._release()
        return self._store

    def _recover(self) -> None:
        same, refused = self._ledger.look(), []
        if self._ledger.force:
            if self.shards or self._only == slice(0):
                self._ledger.begin_anew(self.shards, join=self._only not in (None, slice(0)))
            return
        faults: list[Exception] = []
        for place, manifest in same.items():
            for entry in manifest["shards"]:
                if self._awaits(self._ledger.shard_of(entry)):
                    shard_faults = self._recover_shard(entry, manifest, place)
                    if shard_faults is not None:
                        refused.append(entry)
                        faults += shard_faults
        if not self.missing:
            return
        if faults and self.folder in same and not self._ledger.rebuild:
            raise faults[0]
        self._ledger.begin(self._stored, refused)

    def _recover_shard(
        self, entry: Manifest, manifest: Manifest, place: Path
    ) -> list[Exception] | None:
        """Accept an intact shard and return None, or return the reasons to recompute the shard."""
        if any(map(self._back, entry["unreadable"])):
            return []
        faults: list[Exception] = []
        for path in self._ledger.paths(entry, place):
            try:
                for position, what in self.kind.check_shard(path, entry, manifest).items():
                    content = self.kind.read_shard(path, entry, manifest)
                    raise bad_row(content, path.name, position, what)
                self._stored[self._ledger.shard_of(entry)] = entry
                return None
            # Another writer may just have moved the file to its final place.
            except (CorruptFileError, NonFiniteRow, FileNotFoundError) as error:
                faults.append(error)
        logger.warning("a shard will be recomputed: %s", faults[0])
        return faults

    def _check_rows(self, rows: Tensor) -> None:
        if self._closed:
            raise ValueError("this writer is closed: create another one to continue")
        if len(rows) and not 0 <= (first := int(rows.min())) <= (last := int(rows.max())) < self.n:
            raise ValueError(f"rows is {first} to {last}; expected 0 to {self.n - 1}")

    def _check_content(self, content: Content, rows: Tensor, whole: bool) -> None:
        """Raise NonFiniteRow for the first bad row; `whole`: these are all rows of a shard."""
        for position, what in self.kind.faults(content, whole=whole).items():
            row = int(rows[position])
            shard, place = divmod(row, self.shard_rows)
            raise NonFiniteRow(self._ledger.file(shard), place, row, self._ids[row], what)

    def _begin_shard(self) -> None:
        start, stop = self._ledger.rows(self.absent[0]) if self.absent else (0, 0)
        self._rows: list[int] = []  # rows added to this shard, in order
        self._content = {
            name: torch.empty(stop - start, *shape, dtype=dtype)
            for name, (shape, dtype) in self._columns.items()
        }

    def _add(self, shard: int, content: Content, rows: list[int]) -> None:
        if self.done < shard * self.shard_rows:
            self._check_complete(shard * self.shard_rows)
        first = len(self._rows)
        for name, column in self._content.items():
            column[first : first + len(rows)] = content[name]
        self._rows += rows
        for row in rows:
            self._left_out.pop(row, None)

    def _absent(self, start: int, stop: int) -> list[int]:
        known = {*self._rows, *self._left_out}
        return [row for row in range(start, stop) if row not in known]

    def _write_complete(self) -> None:
        while self.done < self.n:
            start, stop = self._ledger.rows(self.done // self.shard_rows)
            # Comparing the counts is enough for nearly every batch.
            if len(self._rows) + len(self._left_out) < stop - start or self._absent(start, stop):
                return
            self._write(start, stop)

    def _write(self, start: int, stop: int) -> None:
        keep = [at for at, row in enumerate(self._rows) if row not in self._left_out]
        rows, content = torch.tensor(self._rows, dtype=torch.int64)[keep], self._content
        if len(keep) < stop - start:  # a complete shard is not copied
            content = {name: column[keep] for name, column in content.items()}
        self._check_content(content, rows, whole=True)  # as when the shard is read
        names = json.dumps([self._ids[row] for row in rows.tolist()]).encode()
        tensors = {
            **content,
            "indices": rows,
            "ids": torch.frombuffer(bytearray(names), dtype=torch.uint8),
        }
        left_out = sorted(row for row in self._left_out if start <= row < stop)
        entry = {
            "file": self._ledger.file(start // self.shard_rows),
            "start": start,
            "stop": stop,
            "rows": len(rows),
            "unreadable": [self._left_out[row] for row in left_out],
            "statistics": self.kind.statistics(content),
        }
        for attempts_left in (2, 1, 0):
            try:
                self._save(entry, tensors)
                break
            except FileNotFoundError:  # another writer published the cache and removed the folder
                if not attempts_left:
                    raise
        for row in left_out:
            del self._left_out[row]
        self._begin_shard()

    def _save(self, entry: Manifest, tensors: Content) -> None:
        """Write the file of a shard, and add it to the manifest."""
        ready = self._ledger.partial / f".{entry['file']}.{secrets.token_hex(4)}.tmp"
        try:
            save_tensors(ready, tensors)
            entry |= {"bytes": ready.stat().st_size, "sha256": sha256_file(ready)}
            counts = self._ledger.add(ready, entry, self._stored)
        finally:
            ready.unlink(missing_ok=True)
        self._stored[self._ledger.shard_of(entry)] = counts

    def _check_complete(self, stop: int) -> None:
        """Raise ValueError if this writer has not stored all shards before row `stop`."""
        self._write_complete()  # raises again if a bad row blocks a shard
        absent = [
            row for first, last in self.missing for row in self._absent(first, min(last, stop))
        ]
        if absent:
            raise ValueError(
                f"{len(absent)} rows were neither added nor skipped, the first is row {absent[0]} "
                f"({self._ids[absent[0]]!r}). Complete shards are kept: run again for the rest."
            )

    def _release(self) -> None:
        self._closed = True
        self._rows, self._content = [], {}
        self._lock.__exit__(None, None, None)
