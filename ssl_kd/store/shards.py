"""Rows of named columns on disk: verified once, then taken from memory-mapped shards.

On disk, for a cache called `NAME`:

- `NAME.pt`, or `NAME_00000.pt`, `NAME_00001.pt`, ... where there are more rows than one shard
  holds. Each is what `torch.save` writes of a dictionary: the columns, each [m, ...]; `indices`
  int64 [m] (the rows of the data set); and `ids` (uint8, a JSON list of the samples' names).
- `NAME.json`, the manifest: fingerprint, sizes, and for each shard its checksum and statistics.
"""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import json
import mmap
import os
import sys
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ssl_kd.datasets.names import Names
from ssl_kd.errors import UserError
from ssl_kd.files import (
    CorruptFileError,
    atomic_write_json,
    load_tensors,
    sha256_file,
)
from ssl_kd.store.fingerprint import BaseFingerprint, FingerprintMismatch

# Mapped pages count as resident memory: they are released when there may be this much.
RESIDENT_BYTES = 512 << 20
# One touched row may bring in a whole huge page of the page cache.
BYTES_PER_TOUCH = 2 << 20

Manifest = dict[str, Any]
Content = dict[str, Tensor]
Columns = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""For each column the shape and dtype of one row."""


class NonFiniteRow(UserError, ValueError):
    """A row that is NaN, infinite or far out of range.

    Attributes:
        file: name of the shard.
        row: the sample's row in the data set.
        sample: its name.
    """

    def __init__(self, file: str, position: int, row: int, sample: str, what: str):
        self.file, self.row, self.sample = file, row, sample
        super().__init__(
            f"{file}, row {position} (row {row} of the data set, sample {sample!r}): {what}. "
            "Compute it again with --force-recompute, remove the sample from the data, "
            "or leave such rows out with exclude_bad=True."
        )


def _drop_pages(mapped: Tensor) -> bool:
    """Release a mapped tensor's pages; the system reads them again when they are needed.

    Where this is False, the file has to be mapped anew, which costs several times as much. torch
    owns the mapping, so Python's `mmap.madvise` cannot be used on it.
    """
    if sys.platform != "linux":
        return False
    page = mmap.PAGESIZE
    start = -(-mapped.data_ptr() // page) * page  # whole pages of this tensor alone
    length = (mapped.data_ptr() + mapped.nbytes) // page * page - start
    if length <= 0:
        return True
    address, size = ctypes.c_void_p(start), ctypes.c_size_t(length)
    return ctypes.CDLL(None).madvise(address, size, mmap.MADV_DONTNEED) == 0


def _checksum(manifest: Manifest) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write a manifest with its own checksum."""
    atomic_write_json(path, manifest | {"checksum": _checksum(manifest)})


def read_manifest(path: Path) -> Manifest:
    """Read a manifest.

    Raises:
        FileNotFoundError: there is none.
        CorruptFileError: it is not what was written.
    """
    try:
        manifest = json.loads(path.read_bytes())
        stated = manifest.pop("checksum")
        if stated != _checksum(manifest):
            raise ValueError("its checksum does not match")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CorruptFileError(
            f"{path} is damaged ({error}). Rebuild the cache with --force-recompute."
        ) from error
    if manifest.get("version") != 1:
        raise CorruptFileError(
            f"{path} has version {manifest.get('version')}, this library reads version 1. "
            "Use the library that wrote it, or --force-recompute."
        )
    return manifest


_FIELDS = {
    "fingerprint": dict,
    "n": int,
    "shard_rows": int,
    "unreadable": list,
    "statistics": dict,
    "shards": list,
}
_SHARD_FIELDS = {
    "file": str,
    "start": int,
    "stop": int,
    "rows": int,
    "bytes": int,
    "sha256": str,
    "unreadable": list,
    "statistics": dict,
}


def _lacks(values: object, kinds: Mapping[str, Any]) -> list[str]:
    """The fields that are missing or of another kind."""
    if not isinstance(values, dict):
        return list(kinds)
    return [name for name, kind in kinds.items() if not isinstance(values.get(name), kind)]


class ShardStore:
    """A verified cache. A subclass says which columns it has and what a bad row is.

    Rows are numbered 0 to n - 1 in the order of the data set; samples that were left out have no
    row.

    Attributes:
        folder: where the files are.
        name: what their names begin with.
        manifest: the manifest, as written.
        n: number of rows.
        indices: int64 [n], each row's place in the data set.
        fingerprint: what the content was computed from.
    """

    fingerprint_type: ClassVar[type[BaseFingerprint]]
    fields: ClassVar[Mapping[str, Any]]
    """What its manifest holds beyond every manifest's fields: name -> type."""

    @classmethod
    def describe(cls, path: Path) -> tuple[Manifest, BaseFingerprint]:
        """Read a manifest, and what it says that its cache was computed from.

        Raises:
            FileNotFoundError: there is none.
            CorruptFileError: it is damaged, or holds other fields than this version's.
        """
        manifest = read_manifest(path)
        odd = _lacks(manifest, {**_FIELDS, **cls.fields})
        if "shards" not in odd:
            odd += sorted({name for e in manifest["shards"] for name in _lacks(e, _SHARD_FIELDS)})
        if "fingerprint" not in odd:
            known = inspect.signature(cls.fingerprint_type).parameters.keys()
            odd += sorted(known ^ manifest["fingerprint"].keys())
        try:
            if odd:
                raise ValueError(f"{', '.join(odd)}: missing, of another kind or not known")
            cls.columns(manifest)
            return manifest, cls.fingerprint_type(**manifest["fingerprint"])
        except (AttributeError, TypeError, ValueError) as error:
            raise CorruptFileError(
                f"{path} is not one of this version ({error}). Use the version that wrote it, or "
                "--force-recompute."
            ) from error

    @classmethod
    def columns(cls, manifest: Manifest) -> Columns:
        """The columns of a cache with this manifest."""
        raise NotImplementedError

    @classmethod
    def faults(cls, content: Content, whole: bool) -> dict[int, str]:
        """What is wrong with rows, by position; `whole`: these are all rows of a shard."""
        raise NotImplementedError

    @classmethod
    def statistics(cls, content: Content) -> Manifest:
        """Finite statistics of a shard's rows."""
        raise NotImplementedError

    @classmethod
    def total(cls, entries: list[Manifest]) -> Manifest:
        """The `statistics` of all rows, from the manifest's entries of the shards."""
        raise NotImplementedError

    def __init__(
        self,
        folder: str | Path,
        name: str,
        *,
        expect: BaseFingerprint | None = None,
        verify: bool = True,
        exclude_bad: bool = False,
    ):
        self.folder, self.name = Path(folder), name
        path = self.folder / f"{name}.json"
        self.manifest, self.fingerprint = self.describe(path)
        manifest = self.manifest
        if expect is not None and (differences := self.fingerprint.differences(expect)):
            raise FingerprintMismatch(path, differences, expect.way_out)

        self._columns = self.columns(manifest)
        self._paths = [self.folder / entry["file"] for entry in manifest["shards"]]
        sizes = torch.tensor([entry["rows"] for entry in manifest["shards"]])
        self._stops = sizes.cumsum(0)
        self._starts = (self._stops - sizes).tolist()
        self._maps: dict[int, Content] = {}
        self._resident: dict[int, int] = {}
        self._named: tuple[int, list[str]] = (0, [])  # first row of a shard, and its names
        self._identity = [self._stat(shard) for shard in range(len(self._paths))]

        # Columns with one number per row are held in memory.
        small = ["indices", *(key for key, (shape, _) in self._columns.items() if not shape)]
        held: list[Content] = []
        good = []
        for shard, (shard_path, entry) in enumerate(
            zip(self._paths, manifest["shards"], strict=True)
        ):
            faults = self.check_shard(shard_path, entry, manifest) if verify else {}
            content = self.read_shard(shard_path, entry, manifest)
            for position, what in faults.items():
                if not exclude_bad:
                    raise bad_row(content, shard_path.name, position, what)
            keep = torch.ones(entry["rows"], dtype=torch.bool)
            keep[list(faults)] = False
            held.append({key: content[key][keep] for key in small})
            good.append(keep.nonzero().squeeze(1) + self._starts[shard])
        kept = torch.cat(good)
        self._kept = None if len(kept) == int(sizes.sum()) else kept
        self._held = {key: torch.cat([part[key] for part in held]) for key in small}
        self.n, self.indices = len(kept), self._held["indices"]

    @classmethod
    def read_shard(cls, path: Path, entry: Manifest, manifest: Manifest) -> Content:
        """Map a shard and compare its shapes with the manifest."""
        m = entry["rows"]
        expected = {
            key: ((m, *shape), dtype) for key, (shape, dtype) in cls.columns(manifest).items()
        } | {"indices": ((m,), torch.int64)}
        try:
            shard = load_tensors(path, mmap=True)
            found = {name: (tuple(shard[name].shape), shard[name].dtype) for name in shard}
        except (AttributeError, TypeError) as error:
            raise CorruptFileError(f"{path} is not a shard of a cache ({error})") from error
        if any(found.get(name) != value for name, value in expected.items()) or "ids" not in shard:
            raise CorruptFileError(f"{path} holds {found}, its manifest says {expected}")
        return shard

    @classmethod
    def check_shard(cls, path: Path, entry: Manifest, manifest: Manifest) -> dict[int, str]:
        """Compare a shard with its checksum and check every row.

        Returns:
            What is wrong with rows, by position.

        Raises:
            CorruptFileError: not the bytes that were written.
        """
        fault = ""
        faults: dict[int, str] = {}
        if not path.exists():
            fault = "is missing"
        elif (size := path.stat().st_size) != entry["bytes"]:
            fault = f"has {size} bytes where {entry['bytes']} were written"
        elif sha256_file(path) != entry["sha256"]:
            fault = "has another checksum than when it was written"
        try:
            shard = cls.read_shard(path, entry, manifest)
            faults = cls.faults(shard, whole=True)
            if fault and faults:  # more precise than the checksum
                fault += f"; {bad_row(shard, path.name, *next(iter(faults.items())))}"
        except (CorruptFileError, FileNotFoundError, ValueError) as error:
            fault = fault or f"cannot be used: {error}"
        if fault:
            rows = f"rows {entry['start']} to {entry['stop'] - 1} of the data set"
            raise CorruptFileError(
                f"{path} {fault}. It holds {rows}; --force-recompute rebuilds this shard alone."
            )
        return faults

    def __len__(self) -> int:
        return self.n

    @property
    def ids(self) -> Names:
        """The name of each row's sample; those of one shard are in memory at a time."""
        return Names(self.n, self._id)

    def _id(self, row: int) -> str:
        at = row if self._kept is None else int(self._kept[row])
        first, names = self._named
        if not first <= at < first + len(names):
            shard = int(torch.bucketize(at, self._stops, right=True))
            entry = self.manifest["shards"][shard]
            content = self.read_shard(self._paths[shard], entry, self.manifest)
            first, names = self._named = self._starts[shard], _decode_ids(content)
        return names[at - first]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content: what it was computed from, each shard, and rows left out."""
        parts = [self.fingerprint.digest, *(entry["sha256"] for entry in self.manifest["shards"])]
        if self._kept is not None:
            parts.append(hashlib.sha256(self._kept.numpy().tobytes()).hexdigest())
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()

    def take(self, column: str, rows: Tensor) -> Tensor:
        """A column of some rows, at a cost that does not grow with the store.

        Args:
            column: its name.
            rows: integers [b] in 0 ... n - 1, in any order, repeated or not.

        Returns:
            As stored, [b, ...], a copy.
        """
        rows = torch.as_tensor(rows).to("cpu", torch.int64)
        if len(rows) and not (0 <= int(rows.min()) and int(rows.max()) < self.n):
            raise IndexError(f"rows {int(rows.min())} to {int(rows.max())} of {self.n}")
        if column in self._held:
            return self._held[column][rows]
        if self._kept is not None:
            rows = self._kept[rows]
        shape, dtype = self._columns[column]
        shards = torch.bucketize(rows, self._stops, right=True)
        taken = torch.empty(len(rows), *shape, dtype=dtype)
        for shard in shards.unique().tolist():
            at = (shards == shard).nonzero().squeeze(1)
            mapped = self._map(shard, len(at))[column]
            taken[at] = mapped.index_select(0, rows[at] - self._starts[shard])
        return taken

    def _stat(self, shard: int) -> tuple[int, int, int]:
        try:
            found = os.stat(self._paths[shard])
        except FileNotFoundError as error:
            raise CorruptFileError(
                f"{self._paths[shard]} is missing; --force-recompute rebuilds it alone"
            ) from error
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _map(self, shard: int, rows: int) -> Content:
        # Pages that were touched stay resident: when they may be too many, all are released.
        size = self.manifest["shards"][shard]["bytes"]
        reach = min(rows * BYTES_PER_TOUCH, size)
        self._resident[shard] = min(self._resident.get(shard, 0) + reach, size)
        if sum(self._resident.values()) > RESIDENT_BYTES:
            columns = [column for content in self._maps.values() for column in content.values()]
            if not all(_drop_pages(column) for column in columns):
                self._maps.clear()
            self._resident = {shard: reach}
        mapped = self._maps.get(shard)
        if mapped is None:
            if self._stat(shard) != self._identity[shard]:
                raise CorruptFileError(f"{self._paths[shard]} was replaced while it was in use")
            entry = self.manifest["shards"][shard]
            mapped = self.read_shard(self._paths[shard], entry, self.manifest)
            self._maps[shard] = mapped
        return mapped


def bad_row(shard: Content, file: str, position: int, what: str) -> NonFiniteRow:
    """The error that names a row of a shard."""
    row = int(shard["indices"][position])
    return NonFiniteRow(file, position, row, _decode_ids(shard)[position], what)


def _decode_ids(shard: Content) -> list[str]:
    return json.loads(shard["ids"].numpy().tobytes())
