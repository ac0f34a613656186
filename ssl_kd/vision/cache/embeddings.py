"""Store the embeddings of one split, with the columns `embeddings` [m, D] and `labels` [m].

The cache of the split `train` is called `embeddings_train`; `ssl_kd.core.shards.shards` describes
its files. Labels are int64, -1 where unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssl_kd.core.files import CorruptFileError
from ssl_kd.core.shards.fingerprint import Fingerprint
from ssl_kd.core.shards.shards import ANEW, Columns, Content, Manifest, ShardStore
from ssl_kd.core.shards.writer import ShardWriter

# Larger values are implausible: the square of the norm approaches float32's limit.
LARGEST = 1e12
# Values are also implausible if they exceed the largest value of the median row by this factor.
LARGEST_RATIO = 1e6
# Sizes of real embeddings differ by a factor of about ten, or fifty in heavy-tailed distributions.
# Larger rows are reported if they dominate the sum of squares that scales the heads' input.
EXTREME_RATIO = 30
# If directions spread by s, cosines differ by s squared. Below a few units of float32's resolution
# the nearest neighbors are decided by rounding errors. Real embeddings spread by 0.1 to 1.
LEAST_SPREAD = (10 * torch.finfo(torch.float32).eps) ** 0.5
ROWS_PER_SCAN = 8192
STORED = ("float32", "float16", "bfloat16")


def row_peaks(embeddings: Tensor) -> Tensor:
    """Return the largest absolute value of each row, float32; NaN for a row with a NaN."""
    peaks = [
        torch.linalg.vector_norm(block, float("inf"), dim=1, dtype=torch.float32)
        for block in embeddings.split(ROWS_PER_SCAN)
    ]
    return torch.cat(peaks) if peaks else torch.empty(0)


def is_bad(peaks: Tensor) -> Tensor:
    """Return which rows are NaN, infinite or implausibly large, given their `row_peaks`."""
    typical = peaks[peaks.isfinite() & (peaks > 0)]
    limit = LARGEST
    if len(typical):
        limit = min(limit, LARGEST_RATIO * typical.median().item())
    return ~(peaks <= limit)  # a NaN compares false


def odd_rows(blocks: Iterable[Tensor], n_clusters: int) -> str:
    """Describe problems of finite embeddings that make clustering meaningless, in one line or "".

    They are rows that outweigh all others together, rows of zeros, fewer distinct rows than
    clusters, and rows that all point in nearly the same direction. The blocks `[b, D]` are all
    rows in order.
    """
    peaks = []
    distinct = set()
    n_units = 0
    units = torch.zeros((), dtype=torch.float64)
    enough = max(2, n_clusters)
    for block in (part for wide in blocks for part in wide.split(ROWS_PER_SCAN)):
        peaks.append(row_peaks(block))
        if len(distinct) < enough:  # -0 and 0 are equal, their bytes are not
            for row in (block + 0.0).cpu().numpy():
                distinct.add(row.tobytes())
                if len(distinct) == enough:
                    break
        norms = torch.linalg.vector_norm(block, dim=1, keepdim=True, dtype=torch.float64)
        n_units += int((norms > 0).sum())
        units = units + torch.where(norms > 0, block.double() / norms, 0.0).sum(0)
    problems = _odd_sizes(torch.cat(peaks))
    spread = max(0.0, 1 - float((units / max(n_units, 1)).square().sum())) ** 0.5
    if len(distinct) == 1:
        problems.append("all rows are the same: there is nothing to cluster")
    elif len(distinct) < n_clusters:
        problems.append(
            f"{len(distinct)} distinct rows cannot fill {n_clusters} clusters: choose fewer"
        )
    elif n_units > 1 and spread < LEAST_SPREAD:
        problems.append(
            f"all rows have almost the same direction (spread {spread:.2g}; expected at least "
            f"{LEAST_SPREAD:.2g}), so float32 cannot rank neighbors by cosine: subtract the mean "
            "of each column"
        )
    return "; ".join(problems)


def _odd_sizes(peaks: Tensor) -> list[str]:
    problems, typical = [], peaks[peaks > 0]
    if len(typical):
        ratio = (peaks / typical.median()).double()
        far = ratio >= EXTREME_RATIO
        if far.any() and ratio[far].square().sum() > ratio[~far].square().sum():
            first = int(far.nonzero()[0])
            problems.append(
                f"{int(far.sum())} of {len(peaks)} rows are at least {EXTREME_RATIO} times as "
                f"large as the median row, the first is row {first} "
                f"({float(ratio[first]):.2g} times). They hide the differences between all other "
                "rows: remove them from the data"
            )
    if len(zero := (peaks == 0).nonzero()):
        problems.append(
            f"{len(zero)} of {len(peaks)} rows contain only zeros, the first is row "
            f"{int(zero[0])}. Their neighbors are arbitrary: remove them from the data"
        )
    return problems


def _name(split: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9-]+", split):
        raise ValueError(f"split is {split!r}; expected letters, digits or hyphens, like 'train'")
    return f"embeddings_{split}"


class EmbeddingStore(ShardStore):
    """The verified embeddings of one split, with labels and names. Use `open` to create one.

    Rows are numbered 0 to n - 1 in the order of the data set; samples that could not be read have
    no row.
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
        self.dim: int = self.manifest["dim"]  # length of a row
        names, labels = self.manifest["class_names"], self._held["labels"]
        self.class_names: tuple[str, ...] | None = None if names is None else tuple(names)
        # int64 `[n]`, -1 where unknown; None if the data set has no labels.
        self.labels = labels if self.manifest["labelled"] else None
        known = torch.iinfo(torch.int64).max if names is None else len(names)
        if (
            not all(isinstance(n, str) for n in names or ())
            or len(labels)
            and not (-1 <= int(labels.min()) <= int(labels.max()) < known)
        ):
            raise CorruptFileError(
                f"{self.folder / name}.json: expected strings as class names, and labels below "
                f"their number. {ANEW}"
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
        """Open the cache of one split, `train` or `test`.

        With `verify`, all files are read once, to check their checksums and all rows for NaN,
        infinities and implausibly large values; sizes and shapes are always checked. With
        `exclude_bad`, bad rows are excluded instead of raising.

        Raises:
            FileNotFoundError: there is no complete cache.
            FingerprintMismatch: the cache was computed from other inputs than `expect`.
            CorruptFileError: a file is damaged.
            NonFiniteRow: a row is bad, and `exclude_bad` is false.
        """
        name = _name(split)
        return cls(folder, name, expect=expect, verify=verify, exclude_bad=exclude_bad)

    def relabel(self, labels: Tensor | None, class_names: Sequence[str] | None) -> None:
        """Replace the labels (int64 [n], or None) in memory; the files are not changed."""
        self.labels = labels
        self.class_names = None if class_names is None else tuple(class_names)

    @classmethod
    def columns(cls, manifest: Manifest) -> Columns:
        """Return the columns of the cache that a manifest describes."""
        if manifest["dtype"] not in STORED or manifest["dim"] < 1:
            raise ValueError(
                f"dtype is {manifest['dtype'][:50]!r} and dim is {manifest['dim']}; expected one "
                f"of {', '.join(STORED)} and at least 1"
            )
        dtype = getattr(torch, manifest["dtype"])
        return {"embeddings": ((manifest["dim"],), dtype), "labels": ((), torch.int64)}

    @classmethod
    def faults(cls, content: Content, whole: bool) -> dict[int, str]:
        """Return the reason for each row that is NaN, infinite or implausibly large, by position.

        Rows are compared with the median row only if `whole`, that is, for a complete shard.
        """
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
        """Compute the extremes, the mean norm and the number of zero rows of a shard."""
        embeddings = content["embeddings"]
        low = []
        high = []
        norms = 0.0
        zeros = 0
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
        """Combine the statistics of all shards, given their entries in the manifest."""
        filled = [(entry["rows"], entry["statistics"]) for entry in entries if entry["rows"]]
        rows = sum(m for m, _ in filled)
        norms = sum(m * statistics["mean_norm"] for m, statistics in filled)
        return {
            "rows": rows,
            "min": min((statistics["min"] for _, statistics in filled), default=None),
            "max": max((statistics["max"] for _, statistics in filled), default=None),
            "mean_norm": norms / rows if rows else None,
            "zero_rows": sum(statistics["zero_rows"] for _, statistics in filled),
        }

    def gather(self, rows: Tensor) -> Tensor:
        """Return a copy of some rows, given by number in any order, as float32 [b, D]."""
        return self.take("embeddings", rows).float()

    def tensor(self) -> Tensor:
        """Return all embeddings as one tensor, float32 [n, D]."""
        embeddings = torch.empty(self.n, self.dim)
        for start, block in self.blocks(ROWS_PER_SCAN):
            embeddings[start : start + len(block)] = block
        return embeddings

    def blocks(self, rows_per_block: int) -> Iterator[tuple[int, Tensor]]:
        """Yield all rows in order, as `(number of the first row, float32 [b, D])`."""
        for start in range(0, self.n, rows_per_block):
            yield start, self.gather(torch.arange(start, min(start + rows_per_block, self.n)))


class EmbeddingWriter(ShardWriter[EmbeddingStore]):
    """Write the embeddings and labels of one split of n samples, including unreadable ones.

    Args:
        dtype: stored dtype, float32, float16 or bfloat16; rows are always read as float32. None:
            the dtype of an existing cache of the same fingerprint, otherwise `fingerprint.dtype`.
        labels: int64 [n], -1 where unknown; None if there are no labels.
        ids: names of the n samples.
        class_names: names of the classes 0, 1, ...
        options: other arguments of `ShardWriter`, which also lists the errors.
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
        **options: Any,
    ):
        if n < 1 or dim < 1:
            raise ValueError(f"n is {n} and dim is {dim}; expected at least 1 for both")
        if len(ids) != n or (labels is not None and labels.shape != (n,)):
            shape = None if labels is None else tuple(labels.shape)
            raise ValueError(
                f"ids has {len(ids)} entries, labels has the shape {shape}; expected {n} of both, "
                "one for each row of the embeddings"
            )
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
            # Labels do not affect the embeddings, so each run uses its own.
            adopt=("labelled", "class_names", *(("dtype",) if dtype is None else ())),
            **options,
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which embeddings are stored."""
        return self._columns["embeddings"][1]

    def append(self, embeddings: Tensor, rows: Tensor) -> None:
        """Add embeddings, floating-point [b, D], with increasing row numbers, int64 [b]."""
        rows = torch.as_tensor(rows).to("cpu", torch.int64)
        self._check_rows(rows)
        self.put({"embeddings": embeddings, "labels": self._labels[rows]}, rows)
