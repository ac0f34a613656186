"""Read a cache of named columns: verify its files once, then memory-map them.

The files of a cache called `NAME`:

- `NAME.pt`, or `NAME_00000.pt`, `NAME_00001.pt`, ... if one shard cannot hold all rows. Each is a
  dictionary saved by `torch.save`. It contains the columns, each [m, ...], `indices` int64 [m] (the
  index of each row in the data set), and `ids` (uint8, the sample names as a JSON list).
- `NAME.json`, the manifest. It contains the fingerprint, the sizes, and the checksum and statistics
  of each shard.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ssl_kd.core.errors import UserError, brief
from ssl_kd.core.files import (
    CorruptFileError,
    atomic_write_json,
    load_tensors,
    sha256_file,
    size_of,
)
from ssl_kd.core.files.spill import LazyStrings
from ssl_kd.core.shards.fingerprint import BaseFingerprint, FingerprintMismatch

REBUILD = "--rebuild_damaged rebuilds this shard alone"
ANEW = "--force_recompute rebuilds the whole cache"

Manifest = dict[str, Any]
Content = dict[str, Tensor]
Columns = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Column name -> shape and dtype of one row."""


class NonFiniteRow(UserError, ValueError):
    """Raised for a row that is NaN, infinite or implausibly large: sample `row` of the data set."""

    def __init__(self, file: str, position: int, row: int, sample: str, what: str):
        self.file = file
        self.row = row
        self.sample = sample
        super().__init__(
            f"{file}, row {position} (row {row} of the data set, sample {sample!r}): {what}. "
            "Recompute its shard with --rebuild_damaged, remove the sample from the data, or "
            "exclude such rows with exclude_bad=True."
        )


def _checksum(manifest: Manifest) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write a manifest, with a checksum of the manifest itself."""
    atomic_write_json(path, manifest | {"checksum": _checksum(manifest)})


def read_manifest(path: Path) -> Manifest:
    """Read and verify a manifest.

    Raises CorruptFileError if it is damaged or was written by another version.
    """
    size_of(path)
    try:
        manifest = json.loads(path.read_bytes())
        stated = manifest.pop("checksum")
        if stated != _checksum(manifest):
            raise ValueError("the checksum does not match")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CorruptFileError(f"{path} is damaged ({brief(error)}). {ANEW}") from error
    if manifest.get("version") != 1:
        version = json.dumps(manifest.get("version"))[:50]
        raise CorruptFileError(
            f"{path} has version {version}; expected version 1. Use the version of ssl_kd that "
            f"wrote the file. {ANEW}"
        )
    return manifest


_BOTH = {"unreadable": list, "statistics": dict}
_FIELDS = {**_BOTH, "fingerprint": dict, "n": int, "shard_rows": int, "shards": list}
_PLACE = {"start": int, "stop": int, "rows": int}
_SHARD_FIELDS = {**_BOTH, **_PLACE, "file": str, "bytes": int, "sha256": str}
_LEFT_OUT = {"row": int, "id": str, "reason": str}


def odd_fields(values: object, kinds: Mapping[str, Any]) -> list[str]:
    """Return the names of fields that are missing, have a wrong type, or are outside 0 to 2^53."""
    known = values if isinstance(values, dict) else {}
    return [
        name
        for name, kind in kinds.items()
        if type(value := known.get(name)) not in (kind if isinstance(kind, tuple) else (kind,))
        or (type(value) is int and not 0 <= value <= 1 << 53)
    ]


def shard_file(name: str, shard: int, n_shards: int) -> str:
    """Return the file name of a shard of the cache `name`."""
    return f"{name}.pt" if n_shards == 1 else f"{name}_{shard:05d}.pt"


def _check_shards(manifest: Manifest, name: str, row_bytes: int) -> None:
    size = manifest["shard_rows"]
    n = manifest["n"]
    last = -1
    for entry in manifest["shards"]:
        shard, stop = entry["start"] // max(size, 1), min(entry["start"] + size, n)
        file, rows = shard_file(name, shard, -(-n // max(size, 1))), stop - entry["start"]
        if entry["file"] != file or shard <= last or entry["start"] != shard * size:
            raise ValueError(f"shard {entry['file'][:100]!r} is not {file!r}, or is out of place")
        if not 0 < rows == entry["stop"] - entry["start"] or rows != entry["rows"] + len(
            entry["unreadable"]
        ):
            raise ValueError(f"{file}: the row counts do not add up")
        if entry["bytes"] < entry["rows"] * row_bytes:
            raise ValueError(f"{file}: {entry['bytes']} bytes cannot hold {entry['rows']} rows")
        last = shard


class ShardStore:
    """A cache whose files are verified when it is opened.

    A subclass defines the columns, and which rows count as bad. Rows are numbered 0 to n - 1 in the
    order of the data set; samples that were left out have no row.
    """

    fingerprint_type: ClassVar[type[BaseFingerprint]]
    fields: ClassVar[Mapping[str, Any]]
    """Fields of the subclass's manifest in addition to the common ones: name -> type."""

    @classmethod
    def describe(cls, path: Path) -> tuple[Manifest, BaseFingerprint]:
        """Read a manifest, and return it with its fingerprint."""
        manifest = read_manifest(path)
        try:
            if odd := cls._odd(manifest):
                raise ValueError(f"the fields {', '.join(odd)} are missing, mistyped or unknown")
            fingerprint = cls.fingerprint_type(**manifest["fingerprint"])
            columns = cls.columns(manifest).values()
            row_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in columns)
            _check_shards(manifest, path.stem, row_bytes)
            shards = manifest["shards"]
            if manifest["statistics"].keys() != cls.total(shards).keys():
                raise ValueError("statistics: the names are those of another version")
            if manifest["unreadable"] != [left for e in shards for left in e["unreadable"]]:
                raise ValueError("unreadable: differs from the lists of the shards")
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise CorruptFileError(
                f"{path} was written by another version of ssl_kd ({brief(error, 300)}). Use that "
                f"version. {ANEW}"
            ) from error
        return manifest, fingerprint

    @classmethod
    def _odd(cls, manifest: Manifest) -> list[str]:
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
        """Return the columns of the cache that a manifest describes."""
        raise NotImplementedError

    @classmethod
    def faults(cls, content: Content, whole: bool) -> dict[int, str]:
        """Return the reason for each bad row, by position, of a `whole` shard or a part of it."""
        raise NotImplementedError

    @classmethod
    def statistics(cls, content: Content) -> Manifest:
        """Compute the statistics of a shard, as finite numbers for the manifest."""
        raise NotImplementedError

    @classmethod
    def total(cls, entries: list[Manifest]) -> Manifest:
        """Combine the statistics of all shards, given their entries in the manifest."""
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
                "computes the missing ones"
            )
        self._columns = self.columns(manifest)
        self._paths = [self.folder / entry["file"] for entry in manifest["shards"]]
        sizes = torch.tensor([entry["rows"] for entry in manifest["shards"]])
        self._stops = sizes.cumsum(0)
        self._starts = (self._stops - sizes).tolist()
        self._maps: dict[int, Content] = {}
        self._named: tuple[int, list[str]] = (0, [])  # first row of a shard, and its names
        self._identity = [self._stat(shard) for shard in range(len(self._paths))]

        # Columns with one number per row are kept in memory.
        small = ["indices", *(key for key, (shape, _) in self._columns.items() if not shape)]
        parts: list[Content] = []
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
            parts.append({key: content[key][keep] for key in small})
            good.append(keep.nonzero().squeeze(1) + self._starts[shard])
        rows = torch.cat(good)
        self._kept = None if len(rows) == int(sizes.sum()) else rows
        self._held = {key: torch.cat([part[key] for part in parts]) for key in small}
        self.n, self.indices = len(rows), self._held["indices"]

    @classmethod
    def read_shard(cls, path: Path, entry: Manifest, manifest: Manifest) -> Content:
        """Memory-map a shard; raise CorruptFileError if its shapes differ from the manifest."""
        m = entry["rows"]
        shapes = {
            key: ((m, *shape), dtype) for key, (shape, dtype) in cls.columns(manifest).items()
        }
        expected = {key: f"{dtype} {list(shape)}" for key, (shape, dtype) in shapes.items()}
        expected["indices"] = f"torch.int64 [{m}]"
        shard = load_tensors(path, mmap=True)
        content = shard if isinstance(shard, dict) else {}
        forms = {str(name): _form(value) for name, value in content.items()}
        if any(forms.get(name) != form for name, form in expected.items()):
            raise CorruptFileError(f"{path} contains {forms or 'no columns'}; expected {expected}")
        if not forms.get("ids", "").startswith("torch.uint8 ["):
            raise CorruptFileError(f"{path} contains no column ids; expected uint8")
        return content

    @classmethod
    def check_shard(cls, path: Path, entry: Manifest, manifest: Manifest) -> dict[int, str]:
        """Verify a shard's checksum, and return the reason for each bad row, by position.

        Raises CorruptFileError if the file is missing or has changed since it was written.
        """
        fault = ""
        faults: dict[int, str] = {}
        try:
            if (size := size_of(path)) != entry["bytes"]:
                fault = f"has {size} bytes; {entry['bytes']} were written"
            elif sha256_file(path) != entry["sha256"]:
                fault = "has another checksum than when it was written: its content has changed"
            shard = cls.read_shard(path, entry, manifest)
            _decode_ids(shard, path.name)
            rows = shard["indices"]
            if len(rows) and not (
                (rows.diff() > 0).all() and entry["start"] <= rows[0] and rows[-1] < entry["stop"]
            ):
                raise ValueError("its indices are not the rows of this shard in order")
            faults = cls.faults(shard, whole=True)
            if fault and faults:  # more precise than the checksum
                fault += f"; {bad_row(shard, path.name, *next(iter(faults.items())))}"
        except FileNotFoundError:
            fault = "is missing"
        except (CorruptFileError, ValueError) as error:
            fault = fault or f"cannot be used: {error}"
        if fault:
            rows = f"rows {entry['start']} to {entry['stop'] - 1} of the data set"
            raise CorruptFileError(f"{path} {fault}. The shard contains {rows}; {REBUILD}.")
        return faults

    def __len__(self) -> int:
        return self.n

    @property
    def ids(self) -> LazyStrings:
        """The sample name of each row. Only one shard's names are in memory at a time."""
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
        """SHA-256 of the fingerprint, the checksum of each shard, and the excluded rows."""
        parts = [self.fingerprint.digest, *(entry["sha256"] for entry in self.manifest["shards"])]
        if self._kept is not None:
            parts.append(hashlib.sha256(self._kept.numpy().tobytes()).hexdigest())
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()

    def take(self, column: str, rows: Tensor) -> Tensor:
        """Return a copy of some rows of a column, `[b, ...]` in the stored dtype."""
        rows = torch.as_tensor(rows).to("cpu", torch.int64)
        if len(rows) and not (0 <= int(rows.min()) and int(rows.max()) < self.n):
            low, high = int(rows.min()), int(rows.max())
            raise IndexError(f"rows is {low} to {high}; expected 0 to {self.n - 1}")
        if column in self._held:
            return self._held[column][rows]
        if self._kept is not None:
            rows = self._kept[rows]
        shape, dtype = self._columns[column]
        shards = torch.bucketize(rows, self._stops, right=True)
        result = torch.empty(len(rows), *shape, dtype=dtype)
        for shard in shards.unique().tolist():
            at = (shards == shard).nonzero().squeeze(1)
            mapped = self._map(shard)[column]
            result[at] = mapped.index_select(0, rows[at] - self._starts[shard])
        return result

    def _stat(self, shard: int) -> tuple[int, int, int]:
        try:
            stat = os.stat(self._paths[shard])
        except FileNotFoundError as error:
            raise CorruptFileError(f"{self._paths[shard]} is missing; {REBUILD}") from error
        return stat.st_ino, stat.st_size, stat.st_mtime_ns

    def _map(self, shard: int) -> Content:
        mapped = self._maps.get(shard)
        if mapped is None:
            if self._stat(shard) != self._identity[shard]:
                raise CorruptFileError(
                    f"{self._paths[shard]} was replaced by another process while it was in use: "
                    "run again to use the new cache"
                )
            entry = self.manifest["shards"][shard]
            mapped = self.read_shard(self._paths[shard], entry, self.manifest)
            self._maps[shard] = mapped
        return mapped


def bad_row(shard: Content, file: str, position: int, what: str) -> NonFiniteRow:
    """Create the error for a bad row of a shard."""
    row = int(shard["indices"][position])
    return NonFiniteRow(file, position, row, _decode_ids(shard, file)[position], what)


def _form(value: object) -> str:
    """Describe a value: a dense CPU tensor by dtype and shape, anything else by its kind."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    if value.layout != torch.strided or value.is_nested or value.device.type != "cpu":
        return f"{value.device.type} {value.layout}"
    form = f"{value.dtype} {list(value.shape)}"
    is_complete = value.is_quantized or value.untyped_storage().nbytes() >= value.nbytes
    return form if is_complete else f"expanded {form}"


def _decode_ids(shard: Content, file: str) -> list[str]:
    try:
        names = json.loads(shard["ids"].numpy().tobytes())
        good = [name for name in names if isinstance(name, str)]
        if type(names) is not list or not len(good) == len(names) == len(shard["indices"]):
            raise ValueError(f"{len(good)} names; expected {len(shard['indices'])}, one per row")
    except (RecursionError, TypeError, ValueError) as error:
        raise CorruptFileError(f"{file}: its ids are damaged ({error}); {REBUILD}") from error
    return names
