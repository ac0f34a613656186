"""Write the embeddings of one split: shard by shard, killed at any moment, resumed at the next."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from ssl_kd.guard.files import (
    CorruptFileError,
    Lock,
    save_tensors,
    sha256_file,
    sync_folder,
)
from ssl_kd.store.embeddings import (
    LARGEST,
    ROWS_PER_SCAN,
    EmbeddingStore,
    Manifest,
    NonFiniteRow,
    bad_row,
    check_shard,
    check_split,
    is_bad,
    manifest_path,
    read_manifest,
    read_shard,
    row_peaks,
    write_manifest,
)
from ssl_kd.store.fingerprint import Fingerprint, FingerprintMismatch

logger = logging.getLogger(__name__)

SHARD_BYTES = 256 << 20
MISSING, GIVEN, SKIPPED = 0, 1, 2


class _Pending:
    """A shard in memory: the rows `start` to `stop` of the data set, as far as they came."""

    def __init__(self, start: int, stop: int, dim: int, dtype: torch.dtype):
        self.start, self.stop = start, stop
        self.embeddings = torch.empty(stop - start, dim, dtype=dtype)
        self.state = torch.zeros(stop - start, dtype=torch.uint8)
        self.unreadable: dict[int, Manifest] = {}


class EmbeddingWriter:
    """Write a cache; what an earlier, interrupted writer has finished is kept.

    Every row of the data set is either given to `append` or to `skip`, in any order, best in the
    data set's. A shard is written when its last row came. Until `close` everything goes to the
    folder `embeddings_{split}.partial`, so an older cache stays readable to the end. One writer at
    a time: a lock is held from construction until `close` or the end of the `with` block.

    Args:
        folder: where the cache goes.
        split: `train` or `test`.
        fingerprint: what the embeddings are computed from.
        n: number of samples in the data set, with those that will turn out unreadable.
        dim: length of an embedding.
        dtype: what is stored: float32, float16 or bfloat16 (reading gives float32).
        labels: int64 [n], -1 for unknown; None when there are none.
        ids: the samples' names, n of them.
        class_names: names of the labels 0, 1, ...
        shard_rows: samples in a shard; None makes shards of about 256 MiB.
        force: replace a cache of another fingerprint; in one of the same fingerprint, rebuild
            damaged shards alone (`missing` says what they held).
        exclude_bad: skip an embedding that is NaN, infinite or out of range instead of raising.

    Raises:
        FingerprintMismatch: there is a cache of something else, or an interrupted writer's
            complete shards of it, and not `force`.
        CorruptFileError: the cache that is there is damaged, and not `force`.
        NonFiniteRow: it holds a bad row, and not `force`.
        LockHeld: another process is writing here.
    """

    def __init__(
        self,
        folder: str | Path,
        split: str,
        fingerprint: Fingerprint,
        n: int,
        dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        labels: Tensor | None = None,
        ids: Sequence[str],
        class_names: Sequence[str] | None = None,
        shard_rows: int | None = None,
        force: bool = False,
        exclude_bad: bool = False,
    ):
        if n < 1 or dim < 1:
            raise ValueError(f"n is {n} and dim is {dim}; a cache needs at least 1 of each")
        if len(ids) != n or (labels is not None and labels.shape != (n,)):
            shape = None if labels is None else tuple(labels.shape)
            raise ValueError(f"{len(ids)} ids and labels of shape {shape} for n = {n} samples")
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"dtype is {dtype}; expected float32, float16 or bfloat16")
        self.folder, self.split, self.fingerprint = Path(folder), check_split(split), fingerprint
        self.n, self.dim, self.dtype, self.exclude_bad = n, dim, dtype, exclude_bad
        self._ids = ids
        self._labels = None if labels is None else labels.detach().to("cpu", torch.int64)
        self._class_names = None if class_names is None else list(class_names)
        default_rows = max(1, SHARD_BYTES // (dim * dtype.itemsize))
        self.shard_rows = default_rows if shard_rows is None else shard_rows
        if self.shard_rows < 1:
            raise ValueError(f"shard_rows is {shard_rows}; expected at least 1")
        self._partial = self.folder / f"embeddings_{split}.partial"
        self._stored: dict[int, Manifest] = {}  # shard number -> its entry in the manifest
        self._pending: dict[int, _Pending] = {}
        self._store: EmbeddingStore | None = None
        self._closed = False
        self._lock = Lock(self.folder / f".embeddings_{split}.lock")
        self._lock.__enter__()
        try:
            self._recover(force)
        except BaseException:
            self._release()
            raise

    def __enter__(self) -> EmbeddingWriter:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if kind is None:
            self.close()
        else:
            self._release()  # complete shards stay in the partial folder

    @property
    def missing(self) -> list[tuple[int, int]]:
        """Ranges `(start, stop)` of the data set's rows that are not safely stored yet."""
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
        """The first row of the data set that is not safely stored yet; n when all are."""
        missing = self.missing
        return missing[0][0] if missing else self.n

    def append(self, embeddings: Tensor, rows: Tensor) -> None:
        """Add some samples' embeddings; those that are safely stored already are passed over.

        Args:
            embeddings: floating [b, D], on any device.
            rows: int64 [b], their rows in the data set.

        Raises:
            NonFiniteRow: one is bad and not `exclude_bad`; nothing of this call was taken then.
            OSError: the disk is full; complete shards are kept.
        """
        rows = torch.as_tensor(rows).to("cpu", torch.int64)
        embeddings = embeddings.detach().to("cpu", self.dtype)
        if embeddings.shape != (len(rows), self.dim):
            raise ValueError(
                f"embeddings of shape {tuple(embeddings.shape)} for {len(rows)} rows; "
                f"expected {(len(rows), self.dim)}"
            )
        if not len(rows):
            return
        self._check_rows(int(rows.min()), int(rows.max()))
        peaks = row_peaks(embeddings)
        bad = ~(peaks <= LARGEST)
        if bad.any() and not self.exclude_bad:
            at = int(bad.nonzero()[0, 0])
            raise self._bad_row(int(rows[at]), peaks[at].item())
        shards = rows // self.shard_rows
        for shard in shards.unique().tolist():
            if shard in self._stored:
                continue
            at = ((shards == shard) & ~bad).nonzero().squeeze(1)
            pending = self._open(shard)
            pending.embeddings[rows[at] - pending.start] = embeddings[at]
            pending.state[rows[at] - pending.start] = GIVEN
            for position in ((shards == shard) & bad).nonzero().squeeze(1).tolist():
                self._skip_bad(pending, int(rows[position]), peaks[position].item())
            self._write_if_complete(shard)

    def skip(self, row: int, id: str, reason: str) -> None:
        """Leave a sample out; the manifest's `unreadable` lists it.

        Args:
            row: its row in the data set.
            id: its name.
            reason: what is wrong with it.
        """
        self._check_rows(row, row)
        shard = row // self.shard_rows
        if shard not in self._stored:
            pending = self._open(shard)
            pending.state[row - pending.start] = SKIPPED
            pending.unreadable[row] = {"row": row, "id": id, "reason": reason}
            self._write_if_complete(shard)

    def close(self) -> EmbeddingStore:
        """Make the finished cache visible and open it.

        Raises:
            ValueError: some rows came neither to `append` nor to `skip`. Complete shards are kept.
        """
        if self._store is None:
            try:
                self._check_complete()
                if self._unpublished:
                    self._publish()
                self._store = EmbeddingStore.open(
                    self.folder,
                    self.split,
                    expect=self.fingerprint,
                    verify=False,  # each shard was looked at when it was written or recovered
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
            path = manifest_path(place, self.split)
            try:
                manifest = read_manifest(path)
            except FileNotFoundError:
                continue
            except CorruptFileError as error:
                if place == self.folder and not force:
                    raise
                logger.warning("%s Starting over.", error)
                continue
            if differences := self._differences(manifest):
                if place == self.folder or manifest["shards"]:  # else nothing would be lost
                    mismatch = mismatch or FingerprintMismatch(path, differences)
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
        if missing and self.folder in same and not force:
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
        if shard in self._stored:
            return []
        # A writer killed while publishing leaves some of its shards in the folder already.
        places = [self.folder] if place == self.folder else [self._partial, self.folder]
        faults: list[Exception] = []
        for path in [folder / entry["file"] for folder in places]:
            try:
                bad, peaks = check_shard(path, entry, manifest)
                if bad.any():
                    position = int(bad.nonzero()[0, 0])
                    content = read_shard(path, entry, manifest)
                    raise bad_row(content, path.name, position, peaks[position].item())
                self._stored[shard] = entry
                return []
            except (CorruptFileError, NonFiniteRow) as error:
                faults.append(error)
        logger.warning("Will be computed again: %s", faults[0])
        return faults

    def _differences(self, manifest: Manifest) -> list[str]:
        cached = Fingerprint(**manifest["fingerprint"])
        mine = {"n": self.n, "dim": self.dim, "dtype": str(self.dtype).removeprefix("torch.")}
        return cached.differences(self.fingerprint) + [
            f"{name}: cache has {manifest[name]}, this run asks for {value}"
            for name, value in mine.items()
            if manifest[name] != value
        ]

    # Shards

    @property
    def _n_shards(self) -> int:
        return -(-self.n // self.shard_rows)

    def _range(self, shard: int) -> tuple[int, int]:
        return shard * self.shard_rows, min((shard + 1) * self.shard_rows, self.n)

    def _file(self, shard: int) -> str:
        number = "" if self._n_shards == 1 else f"_{shard:05d}"
        return f"embeddings_{self.split}{number}.pt"

    def _open(self, shard: int) -> _Pending:
        if shard not in self._pending:
            self._pending[shard] = _Pending(*self._range(shard), self.dim, self.dtype)
        return self._pending[shard]

    def _check_rows(self, first: int, last: int) -> None:
        if self._closed:
            raise ValueError("this writer is closed; make another to go on")
        if not 0 <= first <= last < self.n:
            raise ValueError(f"rows {first} to {last} of a data set of {self.n}")

    def _bad_row(self, row: int, peak: float) -> NonFiniteRow:
        shard = row // self.shard_rows
        position = row - shard * self.shard_rows
        return NonFiniteRow(self._file(shard), position, row, self._ids[row], peak)

    def _skip_bad(self, pending: _Pending, row: int, peak: float) -> None:
        reason = "embedding is NaN" if peak != peak else f"embedding is out of range ({peak:.3g})"
        pending.state[row - pending.start] = SKIPPED
        pending.unreadable[row] = {"row": row, "id": self._ids[row], "reason": reason}

    def _write_if_complete(self, shard: int) -> None:
        pending = self._pending[shard]
        if (pending.state == MISSING).any():
            return
        given = (pending.state == GIVEN).nonzero().squeeze(1)
        peaks = row_peaks(pending.embeddings)[given]
        bad = is_bad(peaks)  # by the same rule that reading goes by
        for at in bad.nonzero().squeeze(1).tolist():
            row = int(given[at]) + pending.start
            if not self.exclude_bad:
                raise self._bad_row(row, peaks[at].item())
            self._skip_bad(pending, row, peaks[at].item())
        given = given[~bad]
        # A whole shard is saved as it is: indexing would copy it.
        whole = len(given) == len(pending.state)
        embeddings = pending.embeddings if whole else pending.embeddings[given]
        rows = given + pending.start
        names = json.dumps([self._ids[row] for row in rows.tolist()]).encode()
        unknown = torch.full((len(rows),), -1)
        path = self._partial / self._file(shard)
        save_tensors(
            path,
            {
                "embeddings": embeddings,
                "labels": unknown if self._labels is None else self._labels[rows],
                "indices": rows,
                "ids": torch.frombuffer(bytearray(names), dtype=torch.uint8),
            },
        )
        self._stored[shard] = {
            "file": path.name,
            "start": pending.start,
            "stop": pending.stop,
            "rows": len(rows),
            "bytes": path.stat().st_size,
            "sha256": sha256_file(path),
            "unreadable": [
                pending.unreadable[row]
                for row in sorted(pending.unreadable)
                if pending.state[row - pending.start] == SKIPPED
            ],
            "statistics": _statistics(embeddings),
        }
        del self._pending[shard]
        self._write_partial_manifest()

    # The manifest

    def _manifest(self) -> Manifest:
        entries = [self._stored[shard] for shard in sorted(self._stored)]
        kept = [entry for entry in entries if entry["rows"]]
        rows = sum(entry["rows"] for entry in kept)
        of = {name: [e["statistics"][name] for e in kept] for name in _statistics(torch.ones(1, 1))}
        norms = sum(e["rows"] * e["statistics"]["mean_norm"] for e in kept)
        return {
            "version": 1,
            "split": self.split,
            "fingerprint": asdict(self.fingerprint),
            "n": self.n,
            "dim": self.dim,
            "dtype": str(self.dtype).removeprefix("torch."),
            "labelled": self._labels is not None,
            "class_names": self._class_names,
            "shard_rows": self.shard_rows,
            "unreadable": [sample for entry in entries for sample in entry["unreadable"]],
            "statistics": {
                "rows": rows,
                "min": min(of["min"], default=None),
                "max": max(of["max"], default=None),
                "mean_norm": norms / rows if rows else None,
                "zero_rows": sum(of["zero_rows"]),
            },
            "shards": entries,
        }

    def _write_partial_manifest(self) -> None:
        write_manifest(manifest_path(self._partial, self.split), self._manifest())

    # The end

    def _check_complete(self) -> None:
        if not (missing := self.missing):
            return
        absent = [
            row
            for start, stop in missing
            for row in range(start, stop)
            if (pending := self._pending.get(row // self.shard_rows)) is None
            or pending.state[row - pending.start] == MISSING
        ]
        raise ValueError(
            f"{len(absent)} rows came neither to append nor to skip, the first is row {absent[0]} "
            f"({self._ids[absent[0]]!r}). Complete shards are kept: run again to go on."
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
        os.replace(manifest_path(self._partial, self.split), manifest_path(self.folder, self.split))
        sync_folder(self.folder)
        shutil.rmtree(self._partial)
        current = {self._file(shard) for shard in self._stored}
        for path in self.folder.glob(f"embeddings_{self.split}*.pt"):
            mine = re.fullmatch(rf"embeddings_{self.split}(_\d{{5}})?\.pt", path.name)
            if mine and path.name not in current:  # of a cache that this one replaced
                path.unlink()

    def _release(self) -> None:
        self._closed = True
        self._pending.clear()
        self._lock.__exit__()


def _statistics(embeddings: Tensor) -> Manifest:
    """Finite statistics of a shard, a block at a time."""
    low, high, norms, zeros = [], [], 0.0, 0
    for block in embeddings.split(ROWS_PER_SCAN):
        if block.numel():
            block = block.float()
            norm = torch.linalg.vector_norm(block, dim=1)
            low.append(block.min().item())
            high.append(block.max().item())
            norms += norm.sum(dtype=torch.float64).item()
            zeros += int((norm == 0).sum())
    return {
        "min": min(low, default=None),
        "max": max(high, default=None),
        "mean_norm": norms / len(embeddings) if len(embeddings) else None,
        "zero_rows": zeros,
    }
