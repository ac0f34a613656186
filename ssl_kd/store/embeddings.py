"""The embeddings of one split: a cache whose columns are `embeddings` [m, D] and `labels` [m].

For a split `train` it is called `embeddings_train`; `ssl_kd.store.shards` says which files that
makes. Labels are int64, -1 where unknown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssl_kd.files import CorruptFileError
from ssl_kd.store.fingerprint import Fingerprint
from ssl_kd.store.shards import ANEW, Columns, Content, Manifest, ShardStore
from ssl_kd.store.writer import ShardWriter

# A larger value is not plausible in an embedding: the square of its norm nears float32's limit.
LARGEST = 1e12
# Nor is one that is this many times the typical row's largest value.
LARGEST_RATIO = 1e6
# Embeddings of real samples differ in size by ten or so, by twenty or fifty where their tails are
# heavy (Student's t, lognormal). Beyond that a few rows may hold more of the sum of squares, by
# which the heads' input is scaled, than all others together; only then are they spoken of.
EXTREME_RATIO = 30
# Cosines of rows whose directions spread by s differ by s squared: below a few units of float32's
# resolution the nearest neighbours are rounding errors. Embeddings spread by 0.1 to 1.
LEAST_SPREAD = (10 * torch.finfo(torch.float32).eps) ** 0.5
ROWS_PER_SCAN = 8192
STORED = ("float32", "float16", "bfloat16")


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


def odd_rows(blocks: Iterable[Tensor], n_clusters: int) -> str:
    """What is strange about embeddings though they are finite, in words; empty as a rule.

    Args:
        blocks: all rows in order, `[b, D]` each.
        n_clusters: how many clusters are to be found in them.

    Returns:
        How many rows outweigh all others together, and how many are zero, with the first of each;
        that there are fewer distinct rows than clusters, or that all point the same way.
    """
    peaks, distinct, n_units, units = [], set(), 0, torch.zeros((), dtype=torch.float64)
    enough = max(2, n_clusters)
    for block in (part for whole in blocks for part in whole.split(ROWS_PER_SCAN)):
        peaks.append(row_peaks(block))
        if len(distinct) < enough:  # -0 and 0 are equal, their bytes are not
            for row in (block + 0.0).cpu().numpy():
                distinct.add(row.tobytes())
                if len(distinct) == enough:
                    break
        norms = torch.linalg.vector_norm(block, dim=1, keepdim=True, dtype=torch.float64)
        n_units += int((norms > 0).sum())
        units = units + torch.where(norms > 0, block.double() / norms, 0.0).sum(0)
    found = _odd_sizes(torch.cat(peaks))
    spread = max(0.0, 1 - float((units / max(n_units, 1)).square().sum())) ** 0.5
    if len(distinct) == 1:
        found.append("all rows are the same: there is nothing to tell apart")
    elif len(distinct) < n_clusters:
        found.append(
            f"{len(distinct)} distinct rows, {n_clusters} clusters: some of them must stay empty, "
            "so ask for fewer"
        )
    elif n_units > 1 and spread < LEAST_SPREAD:
        found.append(
            f"all rows point almost the same way (their directions spread by {spread:.2g}), so "
            "that float32 cannot tell which are nearest by cosine: subtract each column's mean "
            "before you give or save them"
        )
    return "; ".join(found)


def _odd_sizes(peaks: Tensor) -> list[str]:
    """What is strange about the sizes of rows, by their `row_peaks`."""
    found, typical = [], peaks[peaks > 0]
    if len(typical):
        ratio = (peaks / typical.median()).double()
        far = ratio >= EXTREME_RATIO
        if far.any() and ratio[far].square().sum() > ratio[~far].square().sum():
            first = int(far.nonzero()[0])
            found.append(
                f"{int(far.sum())} of {len(peaks)} rows are {EXTREME_RATIO} times as large as the "
                f"typical one or more, first row {first} ({float(ratio[first]):.2g} times): beside "
                "them all others look alike, so take them out of the data"
            )
    if len(zero := (peaks == 0).nonzero()):
        found.append(
            f"{len(zero)} of {len(peaks)} rows are zero throughout, first row {int(zero[0])}: they "
            "are as near to one sample as to any other"
        )
    return found


def _name(split: str) -> str:
    """What a split's files are called: the split becomes part of it."""
    if not re.fullmatch(r"[A-Za-z0-9-]+", split):
        raise ValueError(f"split is {split!r}; expected letters, digits and hyphens, like 'train'")
    return f"embeddings_{split}"


class EmbeddingStore(ShardStore):
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

    fingerprint_type = Fingerprint
    fields = {
        "split": str,
        "dim": int,
        "dtype": str,
        "labelled": bool,
        "class_names": (list, type(None)),
    }
    fingerprint: Fingerprint

    def __init__(self, folder: str | Path, name: str, **settings: Any):
        super().__init__(folder, name, **settings)
        self.split: str = self.manifest["split"]
        self.dim: int = self.manifest["dim"]
        names = self.manifest["class_names"]
        self.class_names: tuple[str, ...] | None = None if names is None else tuple(names)
        self.labels = self._held["labels"] if self.manifest["labelled"] else None
        known = torch.iinfo(torch.int64).max if names is None else len(names)
        labels = self._held["labels"]
        if (
            not all(isinstance(n, str) for n in names or ())
            or len(labels)
            and not (-1 <= int(labels.min()) <= int(labels.max()) < known)
        ):
            raise CorruptFileError(
                f"{self.folder / name}.json: class names that are no text, or labels beyond them. "
                f"{ANEW}"
            )

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
            expect: what it must have been computed from; None accepts any.
            verify: read everything once: checksums, and every row for NaN, infinities and values
                out of range. Sizes and shapes are always compared.
            exclude_bad: leave such rows out instead of raising; they have no row then.

        Raises:
            FileNotFoundError: there is no complete cache.
            FingerprintMismatch: it is of something else; the message names each difference.
            CorruptFileError: a file is damaged; the message names it.
            NonFiniteRow: a row is; the message names file, row and sample.
        """
        name = _name(split)
        return cls(folder, name, expect=expect, verify=verify, exclude_bad=exclude_bad)

    def relabel(self, labels: Tensor | None, class_names: Sequence[str] | None) -> None:
        """Take other labels than those in the files, int64 [n], or none; the files stay."""
        self.labels = labels
        self.class_names = None if class_names is None else tuple(class_names)

    @classmethod
    def columns(cls, manifest: Manifest) -> Columns:
        """The columns of a cache with this manifest."""
        if manifest["dtype"] not in STORED or manifest["dim"] < 1:
            raise ValueError(f"dtype {manifest['dtype'][:50]!r} of width {manifest['dim']}")
        dtype = getattr(torch, manifest["dtype"])
        return {"embeddings": ((manifest["dim"],), dtype), "labels": ((), torch.int64)}

    @classmethod
    def faults(cls, content: Content, whole: bool) -> dict[int, str]:
        """Rows that are NaN, infinite or out of range; only a whole shard shows what is typical."""
        peaks = row_peaks(content["embeddings"])
        bad = is_bad(peaks) if whole else ~(peaks <= LARGEST)
        return {
            at: "embedding is NaN"
            if (peak := peaks[at].item()) != peak
            else f"embedding is out of range (largest absolute value {peak:.3g}; "
            f"at most {LARGEST:g} and {LARGEST_RATIO:g} times the typical row's are plausible)"
            for at in bad.nonzero().squeeze(1).tolist()
        }

    @classmethod
    def statistics(cls, content: Content) -> Manifest:
        """Extremes and norms of a shard, a block at a time."""
        embeddings = content["embeddings"]
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

    @classmethod
    def total(cls, entries: list[Manifest]) -> Manifest:
        """The `statistics` of all rows."""
        kept = [(entry["rows"], entry["statistics"]) for entry in entries if entry["rows"]]
        rows = sum(m for m, _ in kept)
        norms = sum(m * statistics["mean_norm"] for m, statistics in kept)
        return {
            "rows": rows,
            "min": min((statistics["min"] for _, statistics in kept), default=None),
            "max": max((statistics["max"] for _, statistics in kept), default=None),
            "mean_norm": norms / rows if rows else None,
            "zero_rows": sum(statistics["zero_rows"] for _, statistics in kept),
        }

    def __repr__(self) -> str:
        return f"EmbeddingStore({str(self.folder)!r}, {self.split!r}, n={self.n}, dim={self.dim})"

    def gather(self, rows: Tensor) -> Tensor:
        """The embeddings of some rows, at a cost that does not grow with the store.

        Args:
            rows: integers [b] in 0 ... n - 1, in any order, repeated or not.

        Returns:
            float32 [b, D], a copy.
        """
        return self.take("embeddings", rows).float()

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


class EmbeddingWriter(ShardWriter[EmbeddingStore]):
    """Write the cache of one split: a `ShardWriter` of embeddings and labels.

    Args:
        folder: where the cache goes.
        split: `train` or `test`.
        fingerprint: what the embeddings are computed from.
        n: number of samples in the data set, with those that turn out to be unreadable.
        dim: length of an embedding.
        dtype: what is stored: float32, float16 or bfloat16 (reading gives float32); None: what the
            fingerprint says that the teacher computed in, or what a cache of the same fingerprint
            that is there already stores.
        labels: int64 [n], -1 for unknown; None when there are none.
        ids: the samples' names, n of them.
        class_names: names of the labels 0, 1, ...
        shard_rows, only, force, rebuild, exclude_bad, back: as a `ShardWriter` takes them.

    Raises:
        FingerprintMismatch, CorruptFileError, NonFiniteRow, LockHeld: as a `ShardWriter`.
    """

    def __init__(
        self,
        folder: str | Path,
        split: str,
        fingerprint: Fingerprint,
        n: int,
        dim: int,
        *,
        dtype: torch.dtype | None = torch.float32,
        labels: Tensor | None = None,
        ids: Sequence[str],
        class_names: Sequence[str] | None = None,
        shard_rows: int | None = None,
        only: slice | None = None,
        force: bool = False,
        rebuild: bool = False,
        exclude_bad: bool = False,
        back: Callable[[Manifest], bool] = lambda entry: False,
    ):
        if n < 1 or dim < 1:
            raise ValueError(f"n is {n} and dim is {dim}; a cache needs at least 1 of each")
        if len(ids) != n or (labels is not None and labels.shape != (n,)):
            shape = None if labels is None else tuple(labels.shape)
            raise ValueError(f"{len(ids)} ids and labels of shape {shape} for n = {n} samples")
        stored = fingerprint.dtype if dtype is None else str(dtype).removeprefix("torch.")
        if stored not in STORED:
            raise ValueError(f"dtype is torch.{stored}; expected float32, float16 or bfloat16")
        self._labels = torch.full((n,), -1) if labels is None else labels.detach().cpu().long()
        name = _name(split)
        header = {
            "split": split,
            "dim": dim,
            "dtype": stored,
            "labelled": labels is not None,
            "class_names": None if class_names is None else list(class_names),
        }
        super().__init__(
            EmbeddingStore,
            folder,
            name,
            fingerprint,
            header,
            ids=ids,
            # Which labels are known is not part of what was computed; a run brings its own.
            adopt=("labelled", "class_names", *(("dtype",) if dtype is None else ())),
            shard_rows=shard_rows,
            only=only,
            force=force,
            rebuild=rebuild,
            exclude_bad=exclude_bad,
            back=back,
        )

    @property
    def dtype(self) -> torch.dtype:
        """What is stored."""
        return self._columns["embeddings"][1]

    def append(self, embeddings: Tensor, rows: Tensor) -> None:
        """Add some samples' embeddings; those that are stored already are ignored.

        Args:
            embeddings: floating [b, D], on any device.
            rows: int64 [b], their rows in the data set, increasing.

        Raises:
            ValueError: rows came twice or out of order, or one before them never came.
            NonFiniteRow: one is bad and not `exclude_bad`; nothing of this call was taken then.
            OSError: the disk is full; complete shards are kept.
        """
        rows = torch.as_tensor(rows).to("cpu", torch.int64)
        self._check_rows(rows)
        self.put({"embeddings": embeddings, "labels": self._labels[rows]}, rows)
