"""Nearest neighbours of very many rows: an inverted file (IVF) whose vectors stay on the disk.

k-means puts every row into one of about `4 sqrt(n)` cells. The rows of a cell are compared, by
exact products, with all rows of the `nprobe` cells whose centroids are nearest to its own: a cell
at a time and not a query at a time, so that the work is products of matrices, on any device. A
neighbour is missed only where its cell is not probed, so the recall for every `nprobe` is known
from the exact neighbours of some rows before the search begins.

In memory a row costs a few numbers, never its vector: those are copied once, normalised and in the
order of the cells, into a file that the search reads from.

References:
    Jegou et al., Product quantization for nearest neighbor search, PAMI 2011, section IV (IVF).
    Johnson et al., Billion-scale similarity search with GPUs, 2017.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from ssl_kd.errors import InputError
from ssl_kd.files import (
    CorruptFileError,
    atomic_write,
    atomic_write_json,
    load_tensors,
    save_tensors,
    sha256_file,
)
from ssl_kd.guard.finite import safe_normalize
from ssl_kd.lock import Lock
from ssl_kd.store.embeddings import EmbeddingStore
from ssl_kd.store.neighbours import (
    Search,
    cached_neighbours,
    check_k,
    nearest_among,
    search_on,
)
from ssl_kd.training.clock import Clock

logger = logging.getLogger(__name__)

SEARCHES = ("auto", "exact", "ivf")
EXACT_ROWS = 100_000  # up to which all pairs are compared: minutes
# Cells for the root of n rows; with more, putting rows into cells costs more than comparing them.
CELLS_PER_ROOT, MOST_CELLS = 4, 65_536
POINTS_PER_CELL, ROUNDS = 32, 8  # of k-means
# Cells are probed until this share of the neighbours of some rows is in them; of others, whose
# recall is then measured, at least RECALL should be found.
SOUGHT, RECALL = 0.995, 0.99
QUERY_ROWS = 2048  # one half to choose by, the other to measure
SEED = 0
BLOCK_BYTES = 64 << 20
QUERIES, CANDIDATES = 2048, 32_768  # compared at once
ROWS_PER_APPEND = 131_072  # that a kill may lose

Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class _Index:
    """Which rows are in which cell.

    Attributes:
        centroids: `[cell, D]` float32, of length 1.
        starts: int64 `[cell + 1]`, where each cell's rows begin in the order of the cells.
        order: `[n]` integer, the rows in that order.
        nprobe: cells that are probed, its own among them.
    """

    centroids: Tensor
    starts: Tensor
    order: Tensor
    nprobe: int

    def probed(self, cell: int, k: int) -> Tensor:
        """The cells to look into for rows of one, that one first; they hold more than k rows."""
        near = self.centroids @ self.centroids[cell]
        near[cell] = torch.inf
        count, sizes = self.nprobe, self.starts.diff()
        while True:
            cells = near.topk(min(count, len(near))).indices.cpu()
            if len(cells) == len(near) or int(sizes[cells].sum()) > k:
                return cells
            count *= 2


def find_neighbours(
    store: EmbeddingStore,
    k: int,
    *,
    search: str = "auto",
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """The k nearest other rows of a store by cosine, kept beside it, and how they were found.

    Args:
        store: the embeddings.
        k: how many, 1 ... n - 1.
        search: `exact`, `ivf`, or `auto`: exact up to `EXACT_ROWS` rows.
        device: where torch computes.
        progress: called with (rows done, n).

    Returns:
        Integer `[n, k]`, nearest first; and a record, of which `index` is `exact` or `IVF-Flat`.
        Up to `EXACT_ROWS` rows as `cached_neighbours` gives them, else as `indexed_neighbours`.

    Raises:
        ValueError: a search of another name.
        InputError, LockHeld: as `indexed_neighbours`.
    """
    if search not in SEARCHES:
        raise ValueError(f"search is {search!r}; expected one of {', '.join(SEARCHES)}")
    if search != "ivf" and store.n <= EXACT_ROWS:
        found = cached_neighbours(store, k, device=device, progress=progress)
        return found, {"index": "exact", "recall": 1.0}
    return indexed_neighbours(store, k, exact=search == "exact", device=device, progress=progress)


def kept_neighbours(
    store: EmbeddingStore, k: int, exact: bool = False
) -> tuple[Tensor, dict[str, Any]] | None:
    """What `indexed_neighbours` wrote for these embeddings and this or a larger k; else None.

    Where they are to be `exact`, those of an inverted file will not do.
    """
    path, about = _paths(store)
    try:
        record = json.loads(about.read_text(encoding="utf-8"))
        if record["digest"] != store.digest or record["k"] < k:
            return None
        if exact and record["index"] != "exact":
            return None
        if sha256_file(path) != record["sha256"]:
            raise CorruptFileError(f"{path} has another checksum than when it was written")
        # Copy on write: torch knows no read-only tensors.
        found = torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))
        return found[:, :k], record
    except FileNotFoundError:
        return None
    except (CorruptFileError, ValueError, KeyError, TypeError) as error:
        logger.warning("neighbours are computed again: %s", error)
        return None


def indexed_neighbours(
    store: EmbeddingStore,
    k: int,
    *,
    exact: bool = False,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """The k nearest other rows by cosine, in memory of some twenty bytes a row and no N².

    They are kept beside the store: `neighbours_{split}.npy`, and `neighbours_{split}.json` which
    says how they were found. A process that is killed goes on where it was; the same embeddings,
    device and number of threads give the same neighbours.

    Args:
        store: the embeddings.
        k: how many, 1 ... n - 1.
        exact: one cell, so that all pairs are compared.
        device: where torch computes.
        progress: called with (rows done, n).

    Returns:
        int32 (int64 from 2^31 rows on) `[n, k]`, nearest first, mapped from the file; and the
        record: `index`, `nlist`, `nprobe`, `recall` against the exact neighbours of `queries` rows,
        `compared` (the share of all pairs), `seconds`.

    Raises:
        InputError: the disk has no room for the copy of the embeddings.
        LockHeld: another process searches here.
    """
    check_k(k, store.n)
    if kept := kept_neighbours(store, k, exact):
        return kept
    device, work = torch.device(device), store.folder / f"neighbours_{store.split}.partial"
    with Lock(store.folder / f".neighbours_{store.split}.lock"):
        _begin(work, store, k, exact)
        search, clock = search_on(device), Clock()
        index, plan = _planned(work, store, k, exact, search, device)
        with clock("sort"):
            vectors = _sorted_vectors(work, store, index)
        record = {"digest": store.digest, "k": k, "index": "exact" if exact else "IVF-Flat"}
        record |= {"nlist": len(index.centroids), "nprobe": index.nprobe}
        lines = _search(work, vectors, index, k, search, device, progress)
        _finish(store, work, index, k)
        found = torch.from_numpy(np.load(_paths(store)[0], mmap_mode="c"))
        half = len(plan["queries"]) // 2
        truth, rows = plan["truth"][half:], plan["queries"][half:]
        record |= {
            "recall": _recall(found[rows], truth),
            "queries": len(rows),
            "compared": sum(line["compared"] for line in lines) / (store.n * (store.n - 1.0)),
            "seconds": {
                **plan["seconds"],
                **clock.stages,
                "search": round(sum(line["seconds"] for line in lines), 2),
            },
            "device": str(device),
            "threads": torch.get_num_threads(),
            "sha256": sha256_file(_paths(store)[0]),
        }
        atomic_write_json(_paths(store)[1], record)
        shutil.rmtree(work)
    if record["recall"] < RECALL:
        logger.warning(
            "recall of the neighbours is %.3f where %.2f is wanted: NEIGHBOURS_SEARCH exact finds "
            "all of them, in the time of all pairs",
            record["recall"],
            RECALL,
        )
    return found, record


def _paths(store: EmbeddingStore) -> tuple[Path, Path]:
    """The neighbours, and what is said of them."""
    stem = store.folder / f"neighbours_{store.split}"
    return stem.with_suffix(".npy"), stem.with_suffix(".json")


def _begin(work: Path, store: EmbeddingStore, k: int, exact: bool) -> None:
    """A folder to work in: that of an earlier process for the same, or an empty one.

    Raises:
        InputError: what will be written does not fit on the disk.
    """
    task = {"digest": store.digest, "k": k, "exact": exact}
    try:
        if json.loads((work / "task.json").read_text(encoding="utf-8")) == task:
            logger.info("the search for neighbours goes on in %s", work)
            return
    except (FileNotFoundError, ValueError):
        pass
    shutil.rmtree(work, ignore_errors=True)
    needed = store.n * (4 * store.dim + 2 * 4 * k + 4)
    free = shutil.disk_usage(store.folder).free
    if needed > free:
        raise InputError(
            f"the neighbours of {store.n:,} rows need {needed / 2**30:.1f} GiB in {store.folder} "
            f"while they are searched, and {free / 2**30:.1f} GiB are free: make room, or name "
            "another folder by --embeddings_dir"
        )
    work.mkdir()
    atomic_write_json(work / "task.json", task)


# The cells


def _planned(
    work: Path, store: EmbeddingStore, k: int, exact: bool, search: Search, device: torch.device
) -> tuple[_Index, dict[str, Any]]:
    """The index, from an earlier process if it got so far."""
    try:
        plan = load_tensors(work / "plan.pt")
    except (FileNotFoundError, CorruptFileError):
        clock = Clock()
        n_cells = 1 if exact else min(CELLS_PER_ROOT * math.isqrt(store.n), MOST_CELLS)
        with clock("train"):
            centroids = _train(store, n_cells, search, device)
        with clock("assign"):
            cells = torch.empty(store.n, dtype=torch.int32)
            for start, block in _unit_blocks(store, device):
                cells[start : start + len(block)] = _nearest(block, centroids, search).cpu()
        with clock("tune"):
            g = torch.Generator().manual_seed(SEED + 1)
            queries = torch.randperm(store.n, generator=g)[:QUERY_ROWS].clone()
            truth = nearest_among(
                _unit(store, queries, device),
                queries.to(device),
                _unit_blocks(store, device),
                k,
                search,
            ).cpu()
            half = len(queries) // 2
            nprobe = _probes(centroids.cpu(), cells, queries[:half], truth[:half])
        plan = {"centroids": centroids.cpu(), "cells": cells, "nprobe": nprobe}
        plan |= {"queries": queries, "truth": truth, "seconds": clock.stages}
        save_tensors(work / "plan.pt", plan)
    cells = plan.pop("cells")
    starts = torch.zeros(len(plan["centroids"]) + 1, dtype=torch.int64)
    starts[1:] = torch.bincount(cells, minlength=len(plan["centroids"])).cumsum(0)
    order = cells.sort(stable=True).indices.to(_row_dtype(store.n))
    return _Index(plan["centroids"].to(device), starts, order, plan["nprobe"]), plan


def _row_dtype(n: int) -> torch.dtype:
    return torch.int32 if n < 2**31 else torch.int64


def _unit(store: EmbeddingStore, rows: Tensor, device: torch.device) -> Tensor:
    """Some rows of length 1; a row of zeros stays zero."""
    return safe_normalize(store.gather(rows)).to(device)


def _unit_blocks(store: EmbeddingStore, device: torch.device) -> Iterator[tuple[int, Tensor]]:
    for start, block in store.blocks(max(1, BLOCK_BYTES // (4 * store.dim))):
        yield start, safe_normalize(block).to(device)


def _nearest(x: Tensor, centroids: Tensor, search: Search) -> Tensor:
    """The cell of each row, `[b]` int64."""
    return torch.cat([search(part, centroids, 1)[1][:, 0] for part in x.split(QUERIES)])


def _train(store: EmbeddingStore, n_cells: int, search: Search, device: torch.device) -> Tensor:
    """Centroids `[cell, D]` by spherical k-means on a random part of the rows."""
    g = torch.Generator().manual_seed(SEED)
    rows = torch.randperm(store.n, generator=g)[: POINTS_PER_CELL * n_cells].clone()
    centroids = _unit(store, rows[:n_cells], device)
    x = _unit(store, rows, device)
    for _ in range(ROUNDS if n_cells > 1 else 0):
        cells = _nearest(x, centroids, search)
        sums = torch.zeros_like(centroids).index_add_(0, cells, x)
        used = torch.bincount(cells, minlength=n_cells) > 0
        centroids = torch.where(used.unsqueeze(1), safe_normalize(sums), centroids)
    return centroids


def _probes(centroids: Tensor, cells: Tensor, queries: Tensor, truth: Tensor) -> int:
    """The fewest cells to probe that hold `SOUGHT` of the true neighbours of some rows."""
    ranks = []
    for rows, others in zip(queries.split(256), truth.split(256), strict=True):
        own = cells[rows].long().unsqueeze(1)
        near = centroids[own.squeeze(1)] @ centroids.T
        near.scatter_(1, own, torch.inf)
        theirs = near.gather(1, cells[others].long())
        below = torch.searchsorted(near.sort(dim=1).values, theirs, right=True)
        ranks.append(len(centroids) - below)
    ordered = torch.cat(ranks).flatten().sort().values
    return int(ordered[math.ceil(SOUGHT * len(ordered)) - 1]) + 1


# The vectors, in the order of the cells


def _sorted_vectors(work: Path, store: EmbeddingStore, index: _Index) -> Path:
    """A file of float32 `[n, D]`: the rows of length 1, cell after cell."""
    path, temporary = work / "vectors.bin", work / "vectors.tmp"
    if path.exists():
        return path
    place = torch.empty_like(index.order)  # of each row, in the order of the cells
    place[index.order.long()] = torch.arange(store.n, dtype=place.dtype)
    width = 4 * store.dim
    with open(temporary, "wb", buffering=0) as file:
        file.truncate(store.n * width)
        for start, block in _unit_blocks(store, torch.device("cpu")):
            to, rows = place[start : start + len(block)].long().sort()
            content = block[rows].numpy()
            first = torch.cat(
                [torch.zeros(1, dtype=torch.int64), 1 + (to.diff() != 1).nonzero()[:, 0]]
            )
            stops = [*first[1:].tolist(), len(to)]
            for begin, stop in zip(first.tolist(), stops, strict=True):  # a run of neighbours
                file.seek(int(to[begin]) * width)
                _write_all(file, content[begin:stop])
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return path


def _write_all(file: Any, content: np.ndarray) -> None:
    """Unbuffered files may write less than they are given."""
    left = np.ascontiguousarray(content).data.cast("B")
    while left:
        left = left[file.write(left) :]


def _read(file: Any, first: int, rows: int, dim: int) -> Tensor:
    file.seek(4 * dim * first)
    return torch.from_numpy(np.fromfile(file, np.float32, rows * dim).reshape(rows, dim))


# The search


def _search(
    work: Path,
    vectors: Path,
    index: _Index,
    k: int,
    search: Search,
    device: torch.device,
    progress: Progress | None,
) -> list[dict[str, Any]]:
    """Append the neighbours of the rows, in the order of the cells, to `found.bin`.

    Returns:
        One record for each append, those of an earlier process among them.
    """
    n, dtype = len(index.order), index.order.numpy().dtype
    lines = _appended(work, k * dtype.itemsize)
    done = sum(line["rows"] for line in lines)
    waiting: list[np.ndarray] = []
    compared, began = 0, time.perf_counter()
    with open(vectors, "rb", buffering=0) as file, open(work / "found.bin", "ab") as out:

        def append() -> None:
            nonlocal compared, began
            content = np.concatenate(waiting).astype(dtype)
            out.write(content.data)
            out.flush()
            os.fsync(out.fileno())
            now = time.perf_counter()
            line = {"rows": len(content), "seconds": now - began, "compared": compared}
            line["sha256"] = hashlib.sha256(content.data).hexdigest()
            with open(work / "found.jsonl", "a", encoding="utf-8") as log:
                log.write(json.dumps(line) + "\n")
            lines.append(line)
            waiting.clear()
            compared, began = 0, now

        first = done
        for stop, found, pairs in _of_each_cell(file, index, k, search, device, done):
            waiting.append(found)
            compared += pairs
            if stop - first >= ROWS_PER_APPEND or stop == n:
                append()
                first = stop
                if progress is not None:
                    progress(stop, n)
    return lines


def _appended(work: Path, row_bytes: int) -> list[dict[str, Any]]:
    """The appends that are whole; what is behind them is cut off."""
    lines, size = [], 0
    log, path = work / "found.jsonl", work / "found.bin"
    if log.exists() and path.exists():
        with open(path, "rb") as file:
            for text in log.read_text(encoding="utf-8").splitlines():
                try:
                    line = json.loads(text)
                    content = file.read(line["rows"] * row_bytes)
                    if hashlib.sha256(content).hexdigest() != line["sha256"]:
                        break
                except (ValueError, KeyError, TypeError):  # killed while it was written
                    break
                lines.append(line)
                size += len(content)
    with open(path, "ab") as file:
        file.truncate(size)
    log.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return lines


def _of_each_cell(
    file: BinaryIO, index: _Index, k: int, search: Search, device: torch.device, done: int
) -> Iterator[tuple[int, np.ndarray, int]]:
    """Neighbours of a block of rows after the other, from place `done` on.

    Yields:
        Where the block stops, row numbers `[b, k]`, and how many pairs were compared.
    """
    starts, dim = index.starts.tolist(), index.centroids.shape[1]
    for cell, (start, stop) in enumerate(zip(starts, starts[1:], strict=False)):
        if stop <= max(start, done):
            continue
        cells = index.probed(cell, k).tolist()
        numbers = torch.cat([index.order[starts[c] : starts[c + 1]] for c in cells])
        held = None
        if len(numbers) <= CANDIDATES:
            held = list(_candidates(file, starts, cells, dim, device))
        for first in range(start, stop, QUERIES):
            last = min(first + QUERIES, stop)
            if last <= done:
                continue
            queries = _read(file, first, last - first, dim).to(device)
            # Its own cell is the first, so a query's number is its place in it.
            itself = torch.arange(first - start, last - start, device=device)
            candidates = held or _candidates(file, starts, cells, dim, device)
            found = nearest_among(queries, itself, candidates, k, search).cpu()
            yield last, numbers[found].numpy(), len(queries) * (len(numbers) - 1)


def _candidates(
    file: BinaryIO, starts: list[int], cells: list[int], dim: int, device: torch.device
) -> Iterator[tuple[int, Tensor]]:
    """The rows of some cells, in blocks, numbered from 0."""
    waiting: list[Tensor] = []
    number = size = 0
    for cell in cells:
        for first in range(starts[cell], starts[cell + 1], CANDIDATES):
            rows = min(CANDIDATES, starts[cell + 1] - first)
            if size + rows > CANDIDATES:
                yield number, torch.cat(waiting).to(device)
                number, size, waiting = number + size, 0, []
            waiting.append(_read(file, first, rows, dim))
            size += rows
    if waiting:
        yield number, torch.cat(waiting).to(device)


# The end


def _finish(store: EmbeddingStore, work: Path, index: _Index, k: int) -> None:
    """`neighbours_{split}.npy`: what was found, in the order of the store's rows."""
    dtype = index.order.numpy().dtype
    place = np.empty(store.n, dtype)
    place[index.order.numpy()] = np.arange(store.n, dtype=dtype)
    found = np.memmap(work / "found.bin", dtype, "r", shape=(store.n, k))
    about = {"descr": dtype.str, "fortran_order": False, "shape": (store.n, k)}

    def write(file: BinaryIO) -> None:
        np.lib.format.write_array_header_1_0(file, about)
        for start in range(0, store.n, ROWS_PER_APPEND):
            file.write(found[place[start : start + ROWS_PER_APPEND]].data)

    atomic_write(_paths(store)[0], write)


def _recall(found: Tensor, truth: Tensor) -> float:
    """The share of true neighbours `[b, k]` that are among those found `[b, k]`."""
    return float((truth.unsqueeze(2) == found.unsqueeze(1)).any(2).double().mean())
