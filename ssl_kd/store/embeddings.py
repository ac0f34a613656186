"""Read the embeddings of one split: verified once, then gathered from memory-mapped shards.

On disk, for a split `train`:

- `embeddings_train.pt`, or `embeddings_train_00000.pt`, `..._00001.pt`, ... where there are more
  than one shard holds of. Each is what `torch.save` writes of a dictionary: `embeddings` [m, D],
  `labels` int64 [m] (-1: unknown), `indices` int64 [m] (the rows of the data set), and `ids`
  (uint8, a JSON list of the samples' names).
- `embeddings_train.json`, the manifest: fingerprint, shapes, and for each shard its checksum and
  statistics.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import re
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssl_kd.guard.files import (
    CorruptFileError,
    atomic_write_json,
    load_tensors,
    sha256_file,
)
from ssl_kd.store.fingerprint import Fingerprint, FingerprintMismatch

# A value beyond this is no embedding: the square of its norm is on its way out of float32.
LARGEST = 1e12
# So is one that is this many times the typical row's largest value.
LARGEST_RATIO = 1e6
# Mapped pages count as resident: let go of them when there may be this much.
RESIDENT_BYTES = 512 << 20
# One touched row may bring in a whole huge page of the page cache.
BYTES_PER_TOUCH = 2 << 20
ROWS_PER_SCAN = 8192

Manifest = dict[str, Any]


class NonFiniteRow(ValueError):
    """An embedding that is NaN, infinite or far out of range.

    Attributes:
        file: name of the shard.
        row: the sample's row in the data set.
        sample: its name.
    """

    def __init__(self, file: str, position: int, row: int, sample: str, value: float):
        self.file, self.row, self.sample = file, row, sample
        what = (
            "is NaN"
            if value != value
            else f"is out of range (largest absolute value {value:.3g}; "
            f"at most {LARGEST:g} and {LARGEST_RATIO:g} times the typical row's are plausible)"
        )
        super().__init__(
            f"{file}, row {position} (row {row} of the data set, sample {sample!r}) {what}. "
            "Compute it again with --force-recompute, take the sample out of the data, "
            "or leave such rows out with exclude_bad=True."
        )


def row_peaks(embeddings: Tensor) -> Tensor:
    """The largest absolute value of each row, float32; NaN for a row that holds one."""
    peaks = [
        torch.linalg.vector_norm(block, float("inf"), dim=1, dtype=torch.float32)
        for block in embeddings.split(ROWS_PER_SCAN)
    ]
    return torch.cat(peaks) if peaks else torch.empty(0)


def is_bad(peaks: Tensor) -> Tensor:
    """Which rows are NaN, infinite or out of range, by their `row_peaks`."""
    typical = peaks[peaks.isfinite() & (peaks > 0)]
    limit = LARGEST
    if len(typical):
        limit = min(limit, LARGEST_RATIO * typical.median().item())
    return ~(peaks <= limit)  # a NaN compares false


def _drop_pages(mapped: Tensor) -> bool:
    """Give a mapped tensor's pages back to the system, which reads them again when asked.

    Mapping the file anew does the same at 50 times the cost; where this is False it has to do.
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


def check_split(split: str) -> str:
    """A split's name becomes part of file names."""
    if not re.fullmatch(r"[A-Za-z0-9-]+", split):
        raise ValueError(f"split is {split!r}; expected letters, digits and hyphens, like 'train'")
    return split


def manifest_path(folder: Path, split: str) -> Path:
    """Where the manifest of a split is."""
    return folder / f"embeddings_{split}.json"


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
            raise ValueError("its checksum does not fit")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CorruptFileError(
            f"{path} is damaged ({error}). Rebuild the cache with --force-recompute."
        ) from error
    if manifest["version"] != 1:
        raise CorruptFileError(
            f"{path} has version {manifest['version']}, this library reads version 1. "
            "Use the library that wrote it, or --force-recompute."
        )
    return manifest


def decode_ids(shard: dict[str, Tensor]) -> list[str]:
    """The samples' names in a shard."""
    return json.loads(shard["ids"].numpy().tobytes())


def bad_row(shard: dict[str, Tensor], file: str, position: int, peak: float) -> NonFiniteRow:
    """The error that names a row of a shard."""
    row = int(shard["indices"][position])
    return NonFiniteRow(file, position, row, decode_ids(shard)[position], peak)


def read_shard(path: Path, entry: Manifest, manifest: Manifest) -> dict[str, Tensor]:
    """Map a shard and compare its shape with the manifest."""
    try:
        shard = load_tensors(path, mmap=True)
        found = {name: (tuple(shard[name].shape), shard[name].dtype) for name in shard}
        m = entry["rows"]
        dtype = getattr(torch, manifest["dtype"])
        expected = {
            "embeddings": ((m, manifest["dim"]), dtype),
            "labels": ((m,), torch.int64),
            "indices": ((m,), torch.int64),
        }
    except (AttributeError, TypeError) as error:
        raise CorruptFileError(f"{path} is not a shard of embeddings ({error})") from error
    if any(found.get(name) != value for name, value in expected.items()) or "ids" not in shard:
        raise CorruptFileError(f"{path} holds {found}, its manifest says {expected}")
    return shard


def check_shard(path: Path, entry: Manifest, manifest: Manifest) -> tuple[Tensor, Tensor]:
    """Compare a shard with its checksum and look at every row.

    Returns:
        Which rows are bad, bool [m], and the rows' peaks, float32 [m].

    Raises:
        CorruptFileError: not the bytes that were written.
    """
    fault = ""
    bad = peaks = torch.empty(0)
    if not path.exists():
        fault = "is missing"
    elif (size := path.stat().st_size) != entry["bytes"]:
        fault = f"has {size} bytes where {entry['bytes']} were written"
    elif sha256_file(path) != entry["sha256"]:
        fault = "has another checksum than when it was written"
    try:
        shard = read_shard(path, entry, manifest)
        peaks = row_peaks(shard["embeddings"])
        bad = is_bad(peaks)
        if fault and bad.any():  # say more than the checksum can
            position = int(bad.nonzero()[0, 0])
            fault += f"; {bad_row(shard, path.name, position, peaks[position].item())}"
    except (CorruptFileError, FileNotFoundError, ValueError) as error:
        fault = fault or f"cannot be used: {error}"
    if fault:
        rows = f"rows {entry['start']} to {entry['stop'] - 1} of the data set"
        raise CorruptFileError(
            f"{path} {fault}. It holds {rows}; --force-recompute rebuilds this shard alone."
        )
    return bad, peaks


class EmbeddingStore:
    """The embeddings of one split, verified, with what is known of each sample.

    Made by `open`. Rows are numbered 0 to n - 1 in the order of the data set; samples that could
    not be read have no row.

    Attributes:
        folder: where the files are.
        split: which split this is.
        manifest: the manifest, as written.
        n: number of rows.
        dim: length of a row.
        labels: int64 [n], -1 where unknown; None when the data set has none.
        indices: int64 [n], each row's place in the data set.
        class_names: names of the labels, or None.
        fingerprint: what the embeddings were computed from.
    """

    def __init__(self, folder: str | Path, split: str, verify: bool, exclude_bad: bool):
        self.folder, self.split = Path(folder), check_split(split)
        path = manifest_path(self.folder, split)
        self.manifest = manifest = read_manifest(path)
        self.fingerprint = Fingerprint(**manifest["fingerprint"])
        self.dim: int = manifest["dim"]
        names = manifest["class_names"]
        self.class_names: tuple[str, ...] | None = None if names is None else tuple(names)

        self._paths = [self.folder / entry["file"] for entry in manifest["shards"]]
        sizes = torch.tensor([entry["rows"] for entry in manifest["shards"]])
        self._stops = sizes.cumsum(0)
        self._starts = (self._stops - sizes).tolist()
        self._maps: dict[int, Tensor] = {}
        self._resident: dict[int, int] = {}
        self._identity = [self._stat(shard) for shard in range(len(self._paths))]

        labels, indices, good = [], [], []
        for shard, (shard_path, entry) in enumerate(
            zip(self._paths, manifest["shards"], strict=True)
        ):
            peaks = torch.zeros(entry["rows"])
            bad = peaks > 0
            if verify:
                bad, peaks = check_shard(shard_path, entry, manifest)
            content = read_shard(shard_path, entry, manifest)
            if bad.any() and not exclude_bad:
                position = int(bad.nonzero()[0, 0])
                raise bad_row(content, shard_path.name, position, peaks[position].item())
            labels.append(content["labels"][~bad])
            indices.append(content["indices"][~bad])
            good.append((~bad).nonzero().squeeze(1) + self._starts[shard])
        kept = torch.cat(good)
        self._kept = None if len(kept) == int(sizes.sum()) else kept
        self.n = len(kept)
        self.indices = torch.cat(indices)
        self.labels = torch.cat(labels) if manifest["labelled"] else None

    @classmethod
    def open(
        cls,
        folder: str | Path,
        split: str,
        *,
        expect: Fingerprint | None = None,
        verify: bool = True,
        exclude_bad: bool = False,
    ) -> EmbeddingStore:
        """Open the cache of one split.

        Args:
            folder: where it is.
            split: `train` or `test`.
            expect: what it must have been computed from; None takes any.
            verify: read everything once: checksums, and every row for NaN, infinities and values
                out of range. Sizes and shapes are always compared.
            exclude_bad: leave such rows out instead of raising; they have no row then.

        Raises:
            FileNotFoundError: there is no complete cache.
            FingerprintMismatch: it is of something else; the message names each difference.
            CorruptFileError: a file is damaged; the message names it.
            NonFiniteRow: a row is; the message names file, row and sample.
        """
        path = manifest_path(Path(folder), check_split(split))
        found = Fingerprint(**read_manifest(path)["fingerprint"])
        if expect is not None and (differences := found.differences(expect)):
            raise FingerprintMismatch(path, differences)
        return cls(folder, split, verify, exclude_bad)

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        return f"EmbeddingStore({str(self.folder)!r}, {self.split!r}, n={self.n}, dim={self.dim})"

    @cached_property
    def ids(self) -> list[str]:
        """The name of each row's sample."""
        names: list[str] = []
        for path, entry in zip(self._paths, self.manifest["shards"], strict=True):
            names += decode_ids(read_shard(path, entry, self.manifest))
        return names if self._kept is None else [names[row] for row in self._kept.tolist()]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content: what it was computed from, each shard, and rows left out."""
        parts = [self.fingerprint.digest, *(entry["sha256"] for entry in self.manifest["shards"])]
        if self._kept is not None:
            parts.append(hashlib.sha256(self._kept.numpy().tobytes()).hexdigest())
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()

    def gather(self, rows: Tensor) -> Tensor:
        """The embeddings of some rows; the cost does not depend on how many rows there are.

        Args:
            rows: integers [b] in 0 ... n - 1, in any order, repeated or not.

        Returns:
            float32 [b, D] of its own memory.
        """
        rows = torch.as_tensor(rows).to("cpu", torch.int64)
        if len(rows) and not (0 <= int(rows.min()) and int(rows.max()) < self.n):
            raise IndexError(f"rows {int(rows.min())} to {int(rows.max())} of {self.n}")
        if self._kept is not None:
            rows = self._kept[rows]
        shards = torch.bucketize(rows, self._stops, right=True)
        gathered = torch.empty(len(rows), self.dim)
        for shard in shards.unique().tolist():
            at = (shards == shard).nonzero().squeeze(1)
            mapped = self._map(shard, len(at))
            gathered[at] = mapped.index_select(0, rows[at] - self._starts[shard]).float()
        return gathered

    def tensor(self) -> Tensor:
        """All embeddings in memory, float32 [n, D]."""
        embeddings = torch.empty(self.n, self.dim)
        for start, block in self.blocks(ROWS_PER_SCAN):
            embeddings[start : start + len(block)] = block
        return embeddings

    def blocks(self, rows_per_block: int) -> Iterator[tuple[int, Tensor]]:
        """Go through the rows in order: `(first row, float32 [b, D])`, b <= `rows_per_block`."""
        for start in range(0, self.n, rows_per_block):
            yield start, self.gather(torch.arange(start, min(start + rows_per_block, self.n)))

    def _stat(self, shard: int) -> tuple[int, int, int]:
        try:
            found = os.stat(self._paths[shard])
        except FileNotFoundError as error:
            raise CorruptFileError(
                f"{self._paths[shard]} is missing; --force-recompute rebuilds it alone"
            ) from error
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _map(self, shard: int, rows: int) -> Tensor:
        # What was touched stays resident until it is let go, so all is when it may be too much.
        size = self.manifest["shards"][shard]["bytes"]
        reach = min(rows * BYTES_PER_TOUCH, size)
        self._resident[shard] = min(self._resident.get(shard, 0) + reach, size)
        if sum(self._resident.values()) > RESIDENT_BYTES:
            if not all(_drop_pages(mapped) for mapped in list(self._maps.values())):
                self._maps.clear()
            self._resident = {shard: reach}
        mapped = self._maps.get(shard)
        if mapped is None:
            if self._stat(shard) != self._identity[shard]:
                raise CorruptFileError(f"{self._paths[shard]} was replaced while it was in use")
            entry = self.manifest["shards"][shard]
            mapped = read_shard(self._paths[shard], entry, self.manifest)["embeddings"]
            self._maps[shard] = mapped
        return mapped
