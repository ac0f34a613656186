"""Write a cache: shard by shard, killed at any moment, resumed at the next."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor
from typing_extensions import Self

from ssl_kd.files import CorruptFileError, save_tensors, sha256_file, sync_folder
from ssl_kd.lock import Lock
from ssl_kd.store.fingerprint import BaseFingerprint, FingerprintMismatch
from ssl_kd.store.shards import (
    Content,
    Manifest,
    NonFiniteRow,
    ShardStore,
    bad_row,
    write_manifest,
)

logger = logging.getLogger(__name__)

SHARD_BYTES = 256 << 20

S = TypeVar("S", bound=ShardStore)


class ShardWriter(Generic[S]):
    """Write a cache; complete shards of an earlier, interrupted writer are kept.

    Every row of the data set goes either to `put`, in the data set's order, or to `skip`. A shard
    is written when its last row came; until then no row of a later shard is taken. Until `close`
    everything goes to the folder `{name}.partial`, so an older cache stays readable to the end. One
    writer at a time: a lock is held from construction until `close` or the end of the `with` block.

    Args:
        kind: the store that reads it, which says what its columns are and what a bad row is.
        folder: where the cache goes.
        name: what its files are called.
        fingerprint: what the content is computed from.
        header: what else the manifest says, in JSON's types; decides the columns.
        ids: the samples' names, one for each row of the data set.
        shard_rows: rows of the data set in a shard; None makes shards of about 256 MiB.
        force: replace a cache of another fingerprint; in one of the same fingerprint, rebuild
            damaged shards alone (`missing` says what they held).
        exclude_bad: skip a bad row instead of raising.
        back: whether a sample that an earlier writer left out can be had now, by its entry in the
            manifest; the shard that lacks it is then missing.

    Raises:
        FingerprintMismatch: there is a cache of something else, or an interrupted writer's
            complete shards of it, and not `force`.
        CorruptFileError: the cache that is there is damaged, and not `force`.
        NonFiniteRow: it holds a bad row, and not `force`.
        LockHeld: another process is writing here.
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
        shard_rows: int | None = None,
        force: bool = False,
        exclude_bad: bool = False,
        back: Callable[[Manifest], bool] = lambda entry: False,
    ):
        self.kind, self.folder, self.name = kind, Path(folder), name
        self.fingerprint, self.exclude_bad, self._back = fingerprint, exclude_bad, back
        self.n = len(ids)
        self._ids = ids
        self._header = {"version": 1, "fingerprint": vars(fingerprint), "n": self.n, **header}
        self._columns = kind.columns(self._header)
        row = sum(torch.Size(shape).numel() * d.itemsize for shape, d in self._columns.values())
        self.shard_rows = max(1, SHARD_BYTES // row) if shard_rows is None else shard_rows
        if self.shard_rows < 1:
            raise ValueError(f"shard_rows is {shard_rows}; expected at least 1")
        self._partial = self.folder / f"{name}.partial"
        self._stored: dict[int, Manifest] = {}  # shard number -> its entry in the manifest
        self._left_out: dict[int, Manifest] = {}  # row -> what is listed, of shards not stored yet
        self._store: S | None = None
        self._closed = False
        self._lock = Lock(self.folder / f".{name}.lock")
        self._lock.__enter__()
        try:
            self._recover(force)
            self._begin_shard()
        except BaseException:
            self._release()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if kind is None:
            self.close()
        else:
            self._release()  # complete shards stay in the partial folder

    @property
    def missing(self) -> list[tuple[int, int]]:
        """Ranges `(start, stop)` of the data set's rows that are not stored yet."""
        ranges: list[tuple[int, int]] = []
        for shard in range(self._n_shards):
            if shard not in self._stored:
                start, stop = self._range(shard)
                if ranges and ranges[-1][1] == start:
                    start = ranges.pop()[0]
                ranges.append((start, stop))
        return ranges

    @property
    def done(self) -> int:
        """The first row of the data set that is not stored yet; n when all are."""
        missing = self.missing
        return missing[0][0] if missing else self.n

    def batches(self, batch_size: int) -> list[range]:
        """The batches, on one grid over the data set, that hold rows which are `missing`.

        A row's result may depend, in its rounding, on the others in its batch. On one grid it does
        not depend on where an earlier writer was interrupted.
        """
        starts = {
            at
            for start, stop in self.missing
            for at in range(start - start % batch_size, stop, batch_size)
        }
        return [range(at, min(at + batch_size, self.n)) for at in sorted(starts)]

    def put(self, content: Content, rows: Tensor) -> None:
        """Add some rows; those that are stored already are ignored.

        Args:
            content: the columns, each [b, ...], on any device.
            rows: int64 [b], their places in the data set, increasing.

        Raises:
            ValueError: rows came twice or out of order, or one before them never came.
            NonFiniteRow: one is bad and not `exclude_bad`; nothing of this call was taken then.
            OSError: the disk is full; complete shards are kept.
        """
        rows = torch.as_tensor(rows).to("cpu", torch.int64)
        self._check_rows(rows)
        order = [*self._rows[-1:], *rows.tolist()]
        for before, row in itertools.pairwise(order):
            if row <= before:
                raise ValueError(f"row {row} came after row {before}, not in the data set's order")
        content = {
            name: content[name].detach().to("cpu", dtype)
            for name, (_, dtype) in self._columns.items()
        }
        for name, (shape, _) in self._columns.items():
            if content[name].shape != (expected := (len(rows), *shape)):
                raise ValueError(
                    f"{name} of shape {tuple(content[name].shape)} for {len(rows)} rows; "
                    f"expected {expected}"
                )
        rows, content = self._without_bad(rows, content, whole=False)
        shards = rows // self.shard_rows
        for shard in shards.unique().tolist():
            if shard not in self._stored:
                at = (shards == shard).nonzero().squeeze(1)
                self._add(shard, {name: content[name][at] for name in content}, rows[at].tolist())
        self._write_complete()

    def skip(self, row: int, id: str, reason: str) -> None:
        """Leave a sample out; the manifest's `unreadable` lists it.

        Args:
            row: its row in the data set, in any shard that is not stored yet.
            id: its name.
            reason: what is wrong with it.
        """
        self._check_rows(torch.tensor([row]))
        if row // self.shard_rows not in self._stored:
            self._left_out[row] = {"row": row, "id": id, "reason": reason}
            self._write_complete()

    def close(self) -> S:
        """Make the finished cache visible and open it.

        Raises:
            ValueError: some rows were neither appended nor skipped. Complete shards are kept.
        """
        if self._store is None:
            try:
                self._check_complete(self.n)
                if self._unpublished:
                    self._publish()
                self._store = self.kind(
                    self.folder,
                    self.name,
                    expect=self.fingerprint,
                    verify=False,  # each shard was checked when it was written or recovered
                )
            finally:
                self._release()
        return self._store

    # Recovering what is there

    def _recover(self, force: bool) -> None:
        """Find the shards, of the finished cache or of an interrupted writer, that are good."""
        same: dict[Path, Manifest] = {}
        mismatch: FingerprintMismatch | None = None
        for place in (self.folder, self._partial):
            path = self._manifest_path(place)
            try:
                manifest, cached = self.kind.describe(path)
            except FileNotFoundError:
                continue
            except CorruptFileError as error:
                if place == self.folder and not force:
                    raise
                logger.warning("%s Starting over.", error)
                continue
            if differences := self._differences(manifest, cached):
                if place == self.folder or manifest["shards"]:  # else nothing would be lost
                    way_out = self.fingerprint.way_out
                    mismatch = mismatch or FingerprintMismatch(path, differences, way_out)
            else:
                same[place] = manifest
        if mismatch and not same and not force:
            raise mismatch

        for manifest in list(same.values())[:1]:  # a cache that is there keeps its shards' size
            self.shard_rows = manifest["shard_rows"]
        faults: list[Exception] = []
        for place, manifest in same.items():
            if manifest["shard_rows"] == self.shard_rows:
                for entry in manifest["shards"]:
                    faults += self._recover_shard(entry, manifest, place)
        missing = self.missing
        if faults and missing and self.folder in same and not force:
            raise faults[0]
        self._unpublished = bool(missing) or self._partial in same
        if missing:
            foreign = self._partial not in same
            if self._partial.exists() and foreign:
                shutil.rmtree(self._partial)
            self._partial.mkdir(parents=True, exist_ok=True)
            for stale in self._partial.glob(".*.tmp"):  # of a writer that was killed
                stale.unlink()
            self._write_partial_manifest()

    def _recover_shard(self, entry: Manifest, manifest: Manifest, place: Path) -> list[Exception]:
        shard = entry["start"] // self.shard_rows
        if shard in self._stored or any(map(self._back, entry["unreadable"])):
            return []
        # A writer killed while publishing leaves some of its shards in the folder already.
        places = [self.folder] if place == self.folder else [self._partial, self.folder]
        faults: list[Exception] = []
        for path in [folder / entry["file"] for folder in places]:
            try:
                for position, what in self.kind.check_shard(path, entry, manifest).items():
                    content = self.kind.read_shard(path, entry, manifest)
                    raise bad_row(content, path.name, position, what)
                self._stored[shard] = entry
                return []
            except (CorruptFileError, NonFiniteRow) as error:
                faults.append(error)
        logger.warning("Will be computed again: %s", faults[0])
        return faults

    def _differences(self, manifest: Manifest, cached: BaseFingerprint) -> list[str]:
        return cached.differences(self.fingerprint) + [
            f"{name}: cache has {manifest.get(name)}, this run asks for {value}"
            for name, value in self._header.items()
            if name not in ("version", "fingerprint") and manifest.get(name) != value
        ]

    # Shards

    @property
    def _n_shards(self) -> int:
        return -(-self.n // self.shard_rows)

    def _range(self, shard: int) -> tuple[int, int]:
        return shard * self.shard_rows, min((shard + 1) * self.shard_rows, self.n)

    def _file(self, shard: int) -> str:
        number = "" if self._n_shards == 1 else f"_{shard:05d}"
        return f"{self.name}{number}.pt"

    def _check_rows(self, rows: Tensor) -> None:
        if self._closed:
            raise ValueError("this writer is closed; make another to continue")
        if len(rows) and not 0 <= (first := int(rows.min())) <= (last := int(rows.max())) < self.n:
            raise ValueError(f"rows {first} to {last} of a data set of {self.n}")

    def _without_bad(self, rows: Tensor, content: Content, whole: bool) -> tuple[Tensor, Content]:
        """Leave out the rows that are bad, or raise; `whole`: these are all rows of a shard."""
        faults = self.kind.faults(content, whole=whole)
        for position, what in faults.items():
            row = int(rows[position])
            shard = row // self.shard_rows
            if not self.exclude_bad:
                place = row - shard * self.shard_rows
                raise NonFiniteRow(self._file(shard), place, row, self._ids[row], what)
            if shard not in self._stored:
                self._left_out[row] = {"row": row, "id": self._ids[row], "reason": what}
        if not faults:
            return rows, content
        good = torch.ones(len(rows), dtype=torch.bool)
        good[list(faults)] = False
        return rows[good], {name: column[good] for name, column in content.items()}

    def _begin_shard(self) -> None:
        """Make room for the first shard that is missing."""
        start, stop = self._range(self.done // self.shard_rows)
        self._rows: list[int] = []  # those that came, in order
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
        came = {*self._rows, *self._left_out}
        return [row for row in range(start, stop) if row not in came]

    def _write_complete(self) -> None:
        """Write the shards, from the first that is missing, all of whose rows came."""
        while self.done < self.n:
            start, stop = self._range(self.done // self.shard_rows)
            # The count alone says no at nearly every batch.
            if len(self._rows) + len(self._left_out) < stop - start or self._absent(start, stop):
                return
            self._write(start, stop)

    def _write(self, start: int, stop: int) -> None:
        keep = [at for at, row in enumerate(self._rows) if row not in self._left_out]
        rows, content = torch.tensor(self._rows, dtype=torch.int64)[keep], self._content
        if len(keep) < stop - start:  # a whole shard is saved as it is: this copies it
            content = {name: column[keep] for name, column in content.items()}
        # By the same rule that reading goes by.
        rows, content = self._without_bad(rows, content, whole=True)
        names = json.dumps([self._ids[row] for row in rows.tolist()]).encode()
        shard = start // self.shard_rows
        path = self._partial / self._file(shard)
        ids = torch.frombuffer(bytearray(names), dtype=torch.uint8)
        save_tensors(path, {**content, "indices": rows, "ids": ids})
        left_out = sorted(row for row in self._left_out if start <= row < stop)
        self._stored[shard] = {
            "file": path.name,
            "start": start,
            "stop": stop,
            "rows": len(rows),
            "bytes": path.stat().st_size,
            "sha256": sha256_file(path),
            "unreadable": [self._left_out.pop(row) for row in left_out],
            "statistics": self.kind.statistics(content),
        }
        self._write_partial_manifest()
        self._begin_shard()

    # The manifest

    def _manifest_path(self, folder: Path) -> Path:
        return folder / f"{self.name}.json"

    def _write_partial_manifest(self) -> None:
        entries = [self._stored[shard] for shard in sorted(self._stored)]
        manifest = self._header | {
            "shard_rows": self.shard_rows,
            "unreadable": [sample for entry in entries for sample in entry["unreadable"]],
            "statistics": self.kind.total(entries),
            "shards": entries,
        }
        write_manifest(self._manifest_path(self._partial), manifest)

    # The end

    def _check_complete(self, stop: int) -> None:
        """Raise an error if a shard before row `stop` is not stored."""
        self._write_complete()  # names the bad row again that kept a shard from being written
        absent = [
            row for first, last in self.missing for row in self._absent(first, min(last, stop))
        ]
        if absent:
            raise ValueError(
                f"{len(absent)} rows were neither appended nor skipped, the first is row "
                f"{absent[0]} ({self._ids[absent[0]]!r}). Complete shards are kept: run again to "
                "continue."
            )

    def _publish(self) -> None:
        """Move everything to its place, the manifest last.

        Killed in between, the next writer finds each shard in one place or the other.
        """
        self._write_partial_manifest()
        for shard in self._stored:
            if (self._partial / self._file(shard)).exists():
                os.replace(self._partial / self._file(shard), self.folder / self._file(shard))
        sync_folder(self.folder)
        os.replace(self._manifest_path(self._partial), self._manifest_path(self.folder))
        sync_folder(self.folder)
        shutil.rmtree(self._partial)
        current = {self._file(shard) for shard in self._stored}
        for path in self.folder.glob(f"{self.name}*.pt"):
            is_shard = re.fullmatch(rf"{self.name}(_\d{{5}})?\.pt", path.name)
            if is_shard and path.name not in current:  # of a cache that this one replaced
                path.unlink()

    def _release(self) -> None:
        self._closed = True
        self._rows, self._content = [], {}
        self._lock.__exit__()
