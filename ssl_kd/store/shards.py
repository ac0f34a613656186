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
import json
import math
import mmap
import os
import sys
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ssl_kd.datasets.lazy_strings import LazyStrings
from ssl_kd.errors import UserError
from ssl_kd.files import CorruptFileError, atomic_write_json, load_tensors, sha256_file, size_of
from ssl_kd.store.fingerprint import BaseFingerprint, FingerprintMismatch

# Mapped pages count as resident memory: they are released when there may be this much.
RESIDENT_BYTES = 512 << 20
# One touched row may bring in a whole huge page of the page cache.
BYTES_PER_TOUCH = 2 << 20
REBUILD = "--rebuild_damaged rebuilds this shard alone"
ANEW = "--force-recompute makes the whole cache anew"

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
            "Compute its shard again with --rebuild_damaged, remove the sample from the data, or "
            "leave such rows out with exclude_bad=True."
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
    size_of(path)
    try:
        manifest = json.loads(path.read_bytes())
        stated = manifest.pop("checksum")
        if stated != _checksum(manifest):
            raise ValueError("its checksum does not match")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CorruptFileError(f"{path} is damaged ({reason}). {ANEW}") from error
    if manifest.get("version") != 1:
        version = json.dumps(manifest.get("version"))[:50]
        raise CorruptFileError(
            f"{path} has version {version}, this library reads version 1. Use the library that "
            f"wrote it. {ANEW}"
        )
    return manifest


_BOTH = {"unreadable": list, "statistics": dict}
_FIELDS = {**_BOTH, "fingerprint": dict, "n": int, "shard_rows": int, "shards": list}
_PLACE = {"start": int, "stop": int, "rows": int}
_SHARD_FIELDS = {**_BOTH, **_PLACE, "file": str, "bytes": int, "sha256": str}
_LEFT_OUT = {"row": int, "id": str, "reason": str}


def odd_fields(values: object, kinds: Mapping[str, Any]) -> list[str]:
    """Return the names of fields that are missing, of another kind, or not from 0 to 2^53."""
    known = values if isinstance(values, dict) else {}
    return [
        name
        for name, kind in kinds.items()
        if type(value := known.get(name)) not in (kind if isinstance(kind, tuple) else (kind,))
        or (type(value) is int and not 0 <= value <= 1 << 53)
    ]


def shard_file(name: str, shard: int, n_shards: int) -> str:
    """Return the name of a shard's file, for a cache called `name`."""
    return f"{name}.pt" if n_shards == 1 else f"{name}_{shard:05d}.pt"


def _check_shards(manifest: Manifest, name: str, row_bytes: int) -> None:
    """Raise ValueError where the shards are not what a writer lists, in its order."""
    size, n, last = manifest["shard_rows"], manifest["n"], -1
    for entry in manifest["shards"]:
        shard, stop = entry["start"] // max(size, 1), min(entry["start"] + size, n)
        file, rows = shard_file(name, shard, -(-n // max(size, 1))), stop - entry["start"]
        if entry["file"] != file or shard <= last or entry["start"] != shard * size:
            raise ValueError(f"shard {entry['file'][:100]!r}: expected {file!r}, each once")
        if not 0 < rows == entry["stop"] - entry["start"] or rows != entry["rows"] + len(
            entry["unreadable"]
        ):
            raise ValueError(f"{file}: rows that do not add up")
        if entry["bytes"] < entry["rows"] * row_bytes:
            raise ValueError(f"{file}: {entry['bytes']} bytes cannot hold {entry['rows']} rows")
        last = shard


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
        try:
            if odd := cls._odd(manifest):
                raise ValueError(f"{', '.join(odd)}: missing, of another kind or not known")
            fingerprint = cls.fingerprint_type(**manifest["fingerprint"])
            columns = cls.columns(manifest).values()
            row_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in columns)
            _check_shards(manifest, path.stem, row_bytes)
            shards = manifest["shards"]
            if manifest["statistics"].keys() != cls.total(shards).keys():
                raise ValueError("statistics: not those of this version")
            if manifest["unreadable"] != [left for e in shards for left in e["unreadable"]]:
                raise ValueError("unreadable: not those of its shards")
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:300]
            raise CorruptFileError(
                f"{path} is not one of this version ({reason}). Use the version that wrote it. "
                f"{ANEW}"
            ) from error
        return manifest, fingerprint

    @classmethod
    def _odd(cls, manifest: Manifest) -> list[str]:
        """Return the fields of a manifest that are missing, of another kind or not known."""
        odd = odd_fields(manifest, {**_FIELDS, **cls.fields})
        shards = [] if "shards" in odd else manifest["shards"]
        odd += sorted({name for entry in shards for name in odd_fields(entry, _SHARD_FIELDS)})
        if not odd:
            left_out = [left for entry in shards for left in entry["unreadable"]]
            odd += sorted({name for left in left_out for name in odd_fields(left, _LEFT_OUT)})
        if "fingerprint" not in odd:
            odd += cls.fingerprint_type.odd(manifest["fingerprint"])
        return odd

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

        n_shards = -(-manifest["n"] // manifest["shard_rows"]) if manifest["shard_rows"] else 0
        if not n_shards or len(manifest["shards"]) != n_shards:
            raise CorruptFileError(
                f"{path} lists {len(manifest['shards'])} of {n_shards} shards. --rebuild_damaged "
                "embeds the others"
            )
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
        shapes = {
            key: ((m, *shape), dtype) for key, (shape, dtype) in cls.columns(manifest).items()
        }
        expected = {key: f"{dtype} {list(shape)}" for key, (shape, dtype) in shapes.items()}
        expected["indices"] = f"torch.int64 [{m}]"
        shard = load_tensors(path, mmap=True)
        content = shard if isinstance(shard, dict) else {}
        found = {str(name): _form(value) for name, value in content.items()}
        if any(found.get(name) != form for name, form in expected.items()):
            raise CorruptFileError(f"{path} holds {found or 'no columns'}, expected {expected}")
        if not found.get("ids", "").startswith("torch.uint8 ["):
            raise CorruptFileError(f"{path} holds no ids, expected bytes")
        return content

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
        try:
            if (size := size_of(path)) != entry["bytes"]:
                fault = f"has {size} bytes where {entry['bytes']} were written"
            elif sha256_file(path) != entry["sha256"]:
                fault = "has another checksum than when it was written"
            shard = cls.read_shard(path, entry, manifest)
            _decode_ids(shard, path.name)
            rows = shard["indices"]
            if len(rows) and not (
                (rows.diff() > 0).all() and entry["start"] <= rows[0] and rows[-1] < entry["stop"]
            ):
                raise ValueError("its indices are not rows of this shard in order")
            faults = cls.faults(shard, whole=True)
            if fault and faults:  # more precise than the checksum
                fault += f"; {bad_row(shard, path.name, *next(iter(faults.items())))}"
        except FileNotFoundError:
            fault = "is missing"
        except (CorruptFileError, ValueError) as error:
            fault = fault or f"cannot be used: {error}"
        if fault:
            rows = f"rows {entry['start']} to {entry['stop'] - 1} of the data set"
            raise CorruptFileError(f"{path} {fault}. It holds {rows}; {REBUILD}.")
        return faults

    def __len__(self) -> int:
        return self.n

    @property
    def ids(self) -> LazyStrings:
        """The name of each row's sample; those of one shard are in memory at a time."""
        return LazyStrings(self.n, self._id)

    def _id(self, row: int) -> str:
        at = row if self._kept is None else int(self._kept[row])
        first, names = self._named
        if not first <= at < first + len(names):
            shard = int(torch.bucketize(at, self._stops, right=True))
            entry = self.manifest["shards"][shard]
            path = self._paths[shard]
            content = self.read_shard(path, entry, self.manifest)
            first, names = self._named = self._starts[shard], _decode_ids(content, path.name)
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
            raise CorruptFileError(f"{self._paths[shard]} is missing; {REBUILD}") from error
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
    return NonFiniteRow(file, position, row, _decode_ids(shard, file)[position], what)


def _form(value: object) -> str:
    """Return dtype and shape of a tensor that holds what it says; else what it is instead."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    if value.layout != torch.strided or value.is_nested or value.device.type != "cpu":
        return f"{value.device.type} {value.layout}"
    form = f"{value.dtype} {list(value.shape)}"
    whole = value.is_quantized or value.untyped_storage().nbytes() >= value.nbytes
    return form if whole else f"expanded {form}"


def _decode_ids(shard: Content, file: str) -> list[str]:
    """Return the names of a shard's rows.

    Raises:
        CorruptFileError: they are not as many names, or not text.
    """
    try:
        names = json.loads(shard["ids"].numpy().tobytes())
        good = [name for name in names if isinstance(name, str)]
        if type(names) is not list or not len(good) == len(names) == len(shard["indices"]):
            raise ValueError(f"{len(good)} names for {len(shard['indices'])} rows")
    except (RecursionError, TypeError, ValueError) as error:
        raise CorruptFileError(f"{file}: its ids are damaged ({error}); {REBUILD}") from error
    return names
