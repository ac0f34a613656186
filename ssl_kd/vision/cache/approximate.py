"""Find approximate nearest neighbors of many rows, with an IVF index of FAISS on disk.

k-means assigns every row to one of about `2 sqrt(n)` cells. A row is compared, in float16, only
with the rows in the `nprobe` cells nearest to it. To choose `nprobe`, the exact neighbors of a
sample of rows are computed: one half of the sample determines `nprobe`, and the recall is measured
on the other half.

References:
    Jegou et al., Product quantization for nearest neighbor search, PAMI 2011, section IV (IVF).
    Douze et al., The Faiss library, 2024.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from torch import Tensor

from firstnan.finite import safe_normalize
from ssl_kd.core.errors import InputError
from ssl_kd.core.files import CorruptFileError, atomic_write, atomic_write_json, sha256_file
from ssl_kd.core.files.lock import Lock
from ssl_kd.core.memory import give_back_memory
from ssl_kd.core.runs.clock import Clock
from ssl_kd.vision.cache.embeddings import EmbeddingStore
from ssl_kd.vision.cache.neighbors import (
    check_k,
    load_faiss,
    nearest_among,
    nearest_neighbors,
    search_on,
)

logger = logging.getLogger(__name__)

EXACT_ROWS = 100_000  # largest set for which all pairs are compared, in minutes
PAIRS_ROWS = 20_000  # largest set in memory for which a CPU compares all pairs, in seconds
CELLS_PER_ROOT, MOST_CELLS = 2, 65_536
POINTS_PER_CELL = 64  # of k-means
# nprobe is chosen for the recall SOUGHT on one half of the sampled rows. A warning is logged if the
# recall on the other half is below RECALL.
SOUGHT, RECALL = 0.995, 0.99
QUERY_ROWS = 2048  # sampled rows, both halves
SEED = 0
BLOCK_BYTES = 64 << 20  # size of the vectors read at once
PART_BYTES = 256 << 20  # largest size of an index in memory

Progress = Callable[[int, int], None]


def find_neighbors(
    store: EmbeddingStore,
    k: int,
    *,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Find the k nearest other rows by cosine similarity, and save them in the store's folder.

    Up to `EXACT_ROWS` rows, all pairs are compared. Beyond that, an index on disk is searched on
    the CPU; it needs memory for the k-means sample, 128 sqrt(n) rows, and a few bytes per row.
    The same embeddings and number of threads give the same neighbors. `progress` is called with
    (rows done, n).

    Returns:
        The neighbors, integers `[n, k]`, nearest first, and a record of the search: `index` and
        `recall`; for an index also `nlist`, `nprobe`, `queries` (rows on which the recall was
        measured), `compared` (fraction of all pairs) and `seconds`. Neighbors from an index are
        int32 (int64 from 2^31 rows on), memory-mapped from `neighbours_{split}.npy`.

    Raises:
        InputError: k is out of range, or the disk has too little space for the index.
        LockHeld: another process is searching in this folder.
    """
    check_k(k, store.n)
    saved = _saved(store, k)
    if not by_index(store):
        neighbors = saved[0].long() if saved else _all_pairs(store, k, device, progress)
        return neighbors, {"index": "exact", "recall": 1.0}
    if saved:
        return saved
    with Lock(store.folder / f".neighbours_{store.split}.lock"):
        if saved := _saved(store, k):  # another process has just finished
            return saved
        work = store.folder / f"neighbours_{store.split}.partial"
        shutil.rmtree(work, ignore_errors=True)
        _check_space(store, k)
        work.mkdir()
        try:
            neighbors, record = _searched(store, k, work, progress)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    if record["recall"] < RECALL:
        text = "the recall of the neighbors is %.3f; expected at least %.2f: set a smaller PCA_DIM"
        logger.warning(text, record["recall"], RECALL)
    return neighbors, record


def neighbors_in_memory(
    x: Tensor,
    k: int,
    *,
    metric: str = "cosine",
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Find the k nearest other rows of rows `[n, D]` in memory, by `metric`.

    Up to `PAIRS_ROWS` rows and on a GPU, all pairs are compared, as by `nearest_neighbors`. Beyond
    that, a row is compared with the rows in the cells of k-means that are nearest to it.

    Returns:
        The neighbors, int64 `[n, k]`, nearest first, and a record of the search as by
        `find_neighbors`: `index` and `recall`.

    Raises:
        InputError: k is out of range, or a row is not finite.
    """
    n = len(x)
    if n <= PAIRS_ROWS or torch.device(device).type != "cpu":
        neighbors = nearest_neighbors(x, k, metric=metric, device=device, progress=progress)
        return neighbors, {"index": "exact", "recall": 1.0}
    check_k(k, n)
    if not (finite := x.isfinite().all(1)).all():
        row = int((~finite).nonzero()[0, 0])
        raise InputError(f"row {row} is not finite in float32: remove it, or scale the data")
    rows = (_unit(x) if metric == "cosine" else x).float().contiguous()
    faiss, cells = load_faiss(), CELLS_PER_ROOT * math.isqrt(n)
    index = faiss.IndexIVFFlat(faiss.IndexFlatL2(rows.shape[1]), rows.shape[1], cells)
    index.cp.seed, index.cp.min_points_per_centroid = SEED, 1
    index.cp.max_points_per_centroid = POINTS_PER_CELL
    index.train(rows.numpy())
    index.add(rows.numpy())
    g = torch.Generator().manual_seed(SEED + 1)
    tuned, tested = torch.randperm(n, generator=g)[:QUERY_ROWS].chunk(2)

    def exact(queries: Tensor) -> Tensor:  # a copy of a row may come before the row itself
        near = torch.from_numpy(faiss.knn(rows[queries].numpy(), rows.numpy(), k + 1)[1])
        is_itself = near == queries.unsqueeze(1)
        is_itself[~is_itself.any(1), -1] = True
        return near[~is_itself].view(-1, k)

    index.nprobe = _probes(index, rows[tuned], rows[exact(tuned).flatten()])
    blocks = []
    for itself in torch.arange(n).split(max(1, BLOCK_BYTES // (4 * rows.shape[1]))):
        blocks.append(_lookup(index, rows[itself], itself, k))
        if progress is not None:
            progress(int(itself[-1]) + 1, n)
    neighbors = torch.cat(blocks)
    recall = _recall(exact(tested), neighbors[tested])
    return neighbors, {"index": f"IVF{cells},Flat", "nprobe": index.nprobe, "recall": recall}


def _recall(true: Tensor, found: Tensor) -> float:
    """Return the share of the true neighbors `[query, k]` that are among those that were found."""
    is_found = rearrange(true, "query k -> query k 1") == rearrange(found, "query k -> query 1 k")
    return float(is_found.any(2).double().mean())


def by_index(store: EmbeddingStore) -> bool:
    """Return whether `find_neighbors` searches with an index instead of comparing all pairs."""
    return store.n > EXACT_ROWS


def _all_pairs(
    store: EmbeddingStore, k: int, device: str | torch.device, progress: Progress | None
) -> Tensor:
    neighbors = nearest_neighbors(store, k, device=device, progress=progress)
    (path, record_path), small = _paths(store), neighbors.numpy().astype(np.int32)
    try:
        atomic_write(path, lambda file: np.save(file, small))
        record = {"digest": store.digest, "k": k, "index": "exact", "recall": 1.0}
        atomic_write_json(record_path, record | {"sha256": sha256_file(path)})
    except OSError as error:
        logger.warning("cannot save the neighbors for the next run: %s", error)
    return neighbors


def _paths(store: EmbeddingStore) -> tuple[Path, Path]:
    stem = store.folder / f"neighbours_{store.split}"
    return stem.with_suffix(".npy"), stem.with_suffix(".json")


def _saved(store: EmbeddingStore, k: int) -> tuple[Tensor, dict[str, Any]] | None:
    """Load neighbors and record; return None if they belong to other embeddings or are too few."""
    path, record_path = _paths(store)
    try:
        record = json.loads(record_path.read_text(encoding="utf-8"))
        if record["digest"] != store.digest or record["k"] < k:
            return None
        if sha256_file(path) != record["sha256"]:
            raise CorruptFileError(f"{path} has changed since it was written")
        return _mapped(path)[:, :k], record
    except FileNotFoundError:
        return None
    except (CorruptFileError, ValueError, KeyError, TypeError) as error:
        logger.warning("the saved neighbors cannot be used and are computed again: %s", error)
        return None


def _mapped(path: Path) -> Tensor:
    # Copy on write, since torch has no read-only tensors.
    return torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))


def _check_space(store: EmbeddingStore, k: int) -> None:
    needed = store.n * (2.25 * (2 * store.dim + 8) + 8 * k)
    free = shutil.disk_usage(store.folder).free
    if needed > free:
        raise InputError(
            f"searching the neighbors of {store.n:,} rows takes {needed / 2**30:.1f} GiB in "
            f"{store.folder}, but {free / 2**30:.1f} GiB are free: free some space, or choose "
            "another folder with --embeddings_dir"
        )


def _searched(
    store: EmbeddingStore, k: int, work: Path, progress: Progress | None
) -> tuple[Tensor, dict[str, Any]]:
    clock, (path, record_path) = Clock(), _paths(store)
    with clock("train"):
        index = _trained(store)
    with clock("add"):
        _fill(index, store, work)
    with clock("exact"):  # for some rows; for all it would take n / QUERY_ROWS times as long
        g = torch.Generator().manual_seed(SEED + 1)
        queries = torch.randperm(store.n, generator=g)[: min(QUERY_ROWS, store.n // 2 * 2)]
        x, search = _unit(store.gather(queries)), search_on(torch.device("cpu"))
        truth = nearest_among(x, queries, _unit_blocks(store), k, search)
        half = len(queries) // 2
    with clock("tune"):
        index.nprobe = _probes(index, x[:half], _unit(store.gather(truth[:half].flatten())))
    stats = load_faiss().cvar.indexIVF_stats
    stats.reset()
    with clock("search"):
        dtype, temporary = np.int32 if store.n < 2**31 else np.int64, work / path.name
        result = np.lib.format.open_memmap(temporary, "w+", dtype, (store.n, k))
        for start, block in _unit_blocks(store):
            stop = start + len(block)
            result[start:stop] = _lookup(index, block, torch.arange(start, stop), k).numpy()
            if progress is not None:
                progress(stop, store.n)
        result.flush()
    os.replace(temporary, path)
    neighbors = _mapped(path)
    record = {
        "digest": store.digest,
        "k": k,
        "index": f"IVF{index.nlist},SQfp16",
        "nlist": index.nlist,
        "nprobe": index.nprobe,
        "recall": _recall(truth[half:], neighbors[queries[half:]]),
        "queries": len(queries) - half,
        "compared": stats.ndis / (store.n * (store.n - 1.0)),
        "seconds": clock.stages,
        "threads": torch.get_num_threads(),
        "sha256": sha256_file(path),
    }
    atomic_write_json(record_path, record)
    return neighbors, record


def _unit(embeddings: Tensor) -> Tensor:
    return safe_normalize(embeddings).contiguous()


def _unit_blocks(store: EmbeddingStore) -> Iterator[tuple[int, Tensor]]:
    for start, block in store.blocks(max(1, BLOCK_BYTES // (4 * store.dim))):
        yield start, _unit(block)


def _trained(store: EmbeddingStore) -> Any:
    """Return an empty index, with cells from k-means on a random sample of the rows."""
    faiss, cells = load_faiss(), min(CELLS_PER_ROOT * math.isqrt(store.n), MOST_CELLS, store.n)
    index = faiss.IndexIVFScalarQuantizer(
        faiss.IndexFlatIP(store.dim),
        store.dim,
        cells,
        faiss.ScalarQuantizer.QT_fp16,
        faiss.METRIC_INNER_PRODUCT,
        False,  # vectors, not residuals, which would not be more precise
    )
    index.cp.seed, index.cp.spherical = SEED, True
    index.cp.min_points_per_centroid = 1  # FAISS warns below 39
    index.cp.max_points_per_centroid = POINTS_PER_CELL
    g = torch.Generator().manual_seed(SEED)
    rows = torch.randperm(store.n, generator=g)[: POINTS_PER_CELL * cells].sort().values
    x = torch.empty(len(rows), store.dim)
    for part in torch.arange(len(rows)).split(max(1, BLOCK_BYTES // (4 * store.dim))):
        x[part] = _unit(store.gather(rows[part]))
    index.train(x.numpy())
    give_back_memory()
    return index


def _fill(index: Any, store: EmbeddingStore, work: Path) -> None:
    """Add all rows to an empty index, in parts that fit in memory, and merge them on disk."""
    faiss, centroids = load_faiss(), 4 * index.nlist * store.dim  # bytes in each part
    most = max(1, max(PART_BYTES, 8 * centroids) // (2 * store.dim + 8))
    parts = []
    part = faiss.clone_index(index)
    rows = 0
    for start, block in _unit_blocks(store):
        part.add_with_ids(block.numpy(), np.arange(start, start + len(block)))
        rows += len(block)
        if rows >= most or start + len(block) == store.n:
            path = work / f"part_{start:012d}.faiss"
            faiss.write_index(part, str(path))
            parts.append(faiss.read_index(str(path), faiss.IO_FLAG_MMAP))
            path.unlink()  # stays mapped
            part, rows = faiss.clone_index(index), 0
            give_back_memory()  # the lists have grown in small steps
    lists = [part.invlists for part in parts]
    counts = np.array([[one.list_size(cell) for cell in range(index.nlist)] for one in lists])
    sizes = counts.sum(0).astype(np.uint64)
    # merge_from_multiple would print to stdout.
    merged = faiss.OnDiskInvertedLists(index.nlist, index.code_size, str(work / "cells.bin"))
    merged.set_all_lists_sizes(faiss.swig_ptr(sizes))
    merged.totsize = store.n * (index.code_size + 8)
    with open(work / "cells.bin", "wb") as file:
        file.truncate(merged.totsize)
    merged.do_mmap()
    for cell in range(index.nlist):
        start = 0
        for one, n in zip(lists, counts[:, cell].tolist(), strict=True):
            merged.update_entries(cell, start, n, one.get_ids(cell), one.get_codes(cell))
            start += n
    index.ntotal = store.n
    index.replace_invlists(merged, True)
    merged.this.disown()


def _probes(index: Any, x: Tensor, neighbors: Tensor) -> int:
    """Return how many cells must be searched to find `SOUGHT` of the neighbors of rows `[b, D]`."""
    cells = index.quantizer.search(neighbors.numpy(), 1)[1].reshape(len(x), -1, 1)
    ranks = [
        (index.quantizer.search(row[None], index.nlist)[1] == cell).argmax(1)
        for row, cell in zip(x.numpy(), cells, strict=True)
    ]
    ordered = np.sort(np.concatenate(ranks))
    return int(ordered[math.ceil(SOUGHT * len(ordered)) - 1]) + 1


def _lookup(index: Any, x: Tensor, itself: Tensor, k: int) -> Tensor:
    """Return the k nearest rows in the probed cells, except the row itself: int64 `[b, k]`."""
    rows = index.search(x.numpy(), k + 1)[1]
    nprobe = index.nprobe
    while (short := (rows < 0).any(1)).any():  # the cells have too few rows: probe more
        if nprobe == index.nlist:
            row = int(itself[torch.from_numpy(short)][0])
            raise InputError(
                f"row {row} has fewer than {k} neighbors: this or other rows are not finite"
            )
        nprobe = min(2 * nprobe, index.nlist)
        more = load_faiss().SearchParametersIVF(nprobe=nprobe)
        rows[short] = index.search(x.numpy()[short], k + 1, params=more)[1]
    is_itself: NDArray = rows == itself.unsqueeze(1).numpy()
    is_itself[~is_itself.any(1), -1] = True  # more than k duplicates
    return torch.from_numpy(rows[~is_itself].reshape(-1, k))
