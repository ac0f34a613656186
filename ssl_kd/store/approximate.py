"""Nearest neighbours of very many rows: an inverted file of FAISS whose vectors stay on the disk.

k-means puts every row into one of about `2 sqrt(n)` cells; a row is compared with those of the
`nprobe` cells nearest to it, rounded to float16. Of some rows the exact neighbours are found first:
`nprobe` is the fewest cells that hold enough of those of one half, and the recall is measured on
the other.

References:
    Jegou et al., Product quantization for nearest neighbor search, PAMI 2011, section IV (IVF).
    Douze et al., The Faiss library, 2024.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
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
from ssl_kd.files.lock import Lock
from ssl_kd.guard.finite import safe_normalize
from ssl_kd.guard.memory import give_back_memory, leave_to_the_system
from ssl_kd.store.embeddings import EmbeddingStore
from ssl_kd.store.neighbours import (
    cached_neighbours,
    check_k,
    kept_exactly,
    load_faiss,
    nearest_among,
    search_on,
)
from ssl_kd.training.clock import Clock

logger = logging.getLogger(__name__)

SEARCHES = ("auto", "exact", "ivf")
EXACT_ROWS = 100_000  # up to which all pairs are compared: minutes
CELLS_PER_ROOT, MOST_CELLS = 2, 65_536
POINTS_PER_CELL = 64  # of k-means
# Cells are probed until this share of the neighbours of some rows is in them; of others, whose
# recall is then measured, at least RECALL should be found.
SOUGHT, RECALL = 0.995, 0.99
QUERY_ROWS = 2048  # one half to choose by, the other to measure
SEED = 0
BLOCK_BYTES = 64 << 20  # of vectors that are read at once
PART_BYTES = 256 << 20  # of an index in memory, before it goes to the disk
ROWS_PER_FILE = 131_072  # that a kill may lose

Progress = Callable[[int, int], None]


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
        device: where all pairs are compared; an inverted file is searched on the CPU.
        progress: called with (rows done, n).

    Returns:
        Integer `[n, k]`, nearest first; and a record, of which `index` is `exact` or that of
        `indexed_neighbours`.

    Raises:
        ValueError: a search of another name.
        InputError, LockHeld: as `indexed_neighbours`.
    """
    if by_index(store, search):
        return indexed_neighbours(store, k, progress=progress)
    found = cached_neighbours(store, k, device=device, progress=progress)
    return found, {"index": "exact", "recall": 1.0}


def by_index(store: EmbeddingStore, search: str = "auto") -> bool:
    """Whether `find_neighbours` looks in an inverted file, and maps what it found.

    Raises:
        ValueError: a search of another name.
    """
    if search not in SEARCHES:
        raise ValueError(f"search is {search!r}; expected one of {', '.join(SEARCHES)}")
    return search == "ivf" or (search == "auto" and store.n > EXACT_ROWS)


def kept_neighbours(
    store: EmbeddingStore, k: int, *, search: str = "auto", verify: bool = True
) -> Tensor | None:
    """The neighbours that are kept beside the store; None where `find_neighbours` would search.

    Args:
        store: the embeddings.
        k: how many.
        search: `exact`, `ivf` or `auto`.
        verify: read a mapped file once, for its checksum.
    """
    if not by_index(store, search):
        return kept_exactly(store, k)
    kept = _kept(store, k, verify)
    return None if kept is None else kept[0]


def indexed_neighbours(
    store: EmbeddingStore, k: int, *, progress: Progress | None = None
) -> tuple[Tensor, dict[str, Any]]:
    """The k nearest other rows by cosine; only k-means' sample, 128 sqrt(n) rows, grows in memory.

    They are kept beside the store: `neighbours_{split}.npy`, and `neighbours_{split}.json` which
    says how they were found. A process that is killed goes on where it was; the same embeddings and
    number of threads give the same neighbours.

    Args:
        store: the embeddings.
        k: how many, 1 ... n - 1.
        progress: called with (rows done, n).

    Returns:
        int32 (int64 from 2^31 rows on) `[n, k]`, nearest first, mapped from the file; and the
        record: `index`, `nlist`, `nprobe`, `recall` against the exact neighbours of `queries` rows,
        `compared` (the share of all pairs), `seconds`.

    Raises:
        InputError: the disk has no room for the index.
        LockHeld: another process searches here.
    """
    check_k(k, store.n)
    work, (path, about) = store.folder / f"neighbours_{store.split}.partial", _paths(store)
    if not work.exists() and (kept := _kept(store, k)):
        return kept
    with Lock(store.folder / f".neighbours_{store.split}.lock"):
        if kept := _kept(store, k):  # another process has just found them, or was killed at the end
            shutil.rmtree(work, ignore_errors=True)
            return kept
        _begin(work, store, k)
        index, built = _index(work, store)
        plan = _plan(work, store, index, k)
        index.nprobe = plan["nprobe"]
        parts, compared, seconds = _search(work, store, index, k, progress)
        _finish(path, store.n, k, parts)
        found = torch.from_numpy(np.load(path, mmap_mode="c"))  # torch knows no read-only tensors
        rows, truth = plan["queries"], plan["truth"]
        record = {
            "digest": store.digest,
            "k": k,
            "index": f"IVF{index.nlist},SQfp16",
            "nlist": index.nlist,
            "nprobe": index.nprobe,
            "recall": _recall(found[rows], truth),
            "queries": len(rows),
            "compared": compared / (store.n * (store.n - 1.0)),
            "seconds": {**built, **plan["seconds"], "search": round(seconds, 2)},
            "threads": torch.get_num_threads(),
            "sha256": sha256_file(path),
        }
        atomic_write_json(about, record)
        del index  # which maps files of the folder
        shutil.rmtree(work, ignore_errors=True)
    if record["recall"] < RECALL:
        logger.warning(
            "recall of the neighbours is %.3f where %.2f is wanted: with a smaller PCA_DIM the "
            "index finds more of them",
            record["recall"],
            RECALL,
        )
    return found, record


def _paths(store: EmbeddingStore) -> tuple[Path, Path]:
    """The neighbours, and the record of how they were found."""
    stem = store.folder / f"neighbours_{store.split}"
    return stem.with_suffix(".npy"), stem.with_suffix(".json")


def _kept(
    store: EmbeddingStore, k: int, verify: bool = True
) -> tuple[Tensor, dict[str, Any]] | None:
    """What was written for these embeddings and this or a larger k; else None."""
    path, about = _paths(store)
    try:
        record = json.loads(about.read_text(encoding="utf-8"))
        if record["digest"] != store.digest or record["k"] < k:
            return None
        if verify and sha256_file(path) != record["sha256"]:
            raise CorruptFileError(f"{path} has another checksum than when it was written")
        found = torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))
        return found[:, :k], record
    except FileNotFoundError:
        return None
    except (CorruptFileError, ValueError, KeyError, TypeError) as error:
        logger.warning("neighbours are computed again: %s", error)
        return None


def _begin(work: Path, store: EmbeddingStore, k: int) -> None:
    """A folder to work in: that of an earlier process for the same, or an empty one.

    Raises:
        InputError: what will be written does not fit on the disk.
    """
    # The index knows its cells by their path.
    task = {"digest": store.digest, "k": k, "faiss": load_faiss().__version__}
    task["folder"] = str(work.resolve())
    try:
        if json.loads((work / "task.json").read_text(encoding="utf-8")) == task:
            logger.info("the search for neighbours goes on in %s", work)
            return
    except (FileNotFoundError, ValueError):
        pass
    shutil.rmtree(work, ignore_errors=True)
    # The index in parts, which hold the centroids as well, and whole; the neighbours.
    needed = store.n * (2.25 * (2 * store.dim + 8) + 2 * 8 * k)
    free = shutil.disk_usage(store.folder).free
    if needed > free:
        raise InputError(
            f"the neighbours of {store.n:,} rows need {needed / 2**30:.1f} GiB in {store.folder} "
            f"while they are searched, and {free / 2**30:.1f} GiB are free: make room, or name "
            "another folder by --embeddings_dir"
        )
    work.mkdir()
    atomic_write_json(work / "task.json", task)


def _unit(embeddings: Tensor) -> Tensor:
    """Rows of length 1; a row of zeros stays zero."""
    return safe_normalize(embeddings).contiguous()


def _unit_blocks(store: EmbeddingStore) -> Iterator[tuple[int, Tensor]]:
    for start, block in store.blocks(max(1, BLOCK_BYTES // (4 * store.dim))):
        yield start, _unit(block)


def _index(work: Path, store: EmbeddingStore) -> tuple[Any, dict[str, float]]:
    """The filled index, its vectors mapped from the disk, and the seconds that it took."""
    faiss, path, about = load_faiss(), work / "index.faiss", work / "index.json"
    if not about.exists():
        clock = Clock()
        with clock("train"):
            empty = _trained(store)
        with clock("add"):
            parts = [*_filled(work, store, empty)]
            _merge(empty, parts, work / "cells.bin")
            _write(empty, path)
            for written in (path, work / "cells.bin"):
                with open(written, "rb+") as file:
                    os.fsync(file.fileno())
        atomic_write_json(about, clock.stages)  # the index is whole
        for part in parts:
            part.unlink()
    return faiss.read_index(str(path)), json.loads(about.read_text(encoding="utf-8"))


def _write(index: Any, path: Path) -> None:
    try:
        load_faiss().write_index(index, str(path))
    except RuntimeError as error:  # of C++, with no number of the system's
        raise OSError(errno.ENOSPC, "FAISS cannot write its index", str(path)) from error


def _merge(index: Any, parts: list[Path], cells: Path) -> None:
    """Fill an empty index with the vectors of others, in a file that it maps."""
    faiss = load_faiss()
    held = [faiss.read_index(str(part), faiss.IO_FLAG_MMAP) for part in parts]
    theirs = [faiss.downcast_InvertedLists(part.invlists) for part in held]
    each = np.array([[lists.list_size(i) for i in range(index.nlist)] for lists in theirs])
    sizes = each.sum(0).astype(np.uint64)
    whole = faiss.OnDiskInvertedLists(index.nlist, index.code_size, str(cells.resolve()))
    whole.set_all_lists_sizes(faiss.swig_ptr(sizes))
    index.ntotal, row_bytes, copied = int(sizes.sum()), index.code_size + 8, 0
    whole.totsize = index.ntotal * row_bytes
    with open(cells, "wb") as file:
        file.truncate(whole.totsize)
    whole.do_mmap()
    for cell, size in enumerate(sizes.tolist()):
        start = 0
        for lists, counts in zip(theirs, each, strict=True):
            n = int(counts[cell])
            whole.update_entries(cell, start, n, lists.get_ids(cell), lists.get_codes(cell))
            start += n
        copied += size * row_bytes
        if copied > BLOCK_BYTES or cell == index.nlist - 1:
            copied = 0
            for lists in (*theirs, whole):  # mapped twice, they would be resident twice
                leave_to_the_system(int(lists.ptr), lists.totsize)
    index.replace_invlists(whole, True)
    whole.this.disown()


def _trained(store: EmbeddingStore) -> Any:
    """An empty index whose cells are those of k-means on a random part of the rows."""
    faiss, cells = load_faiss(), min(CELLS_PER_ROOT * math.isqrt(store.n), MOST_CELLS, store.n)
    index = faiss.IndexIVFScalarQuantizer(
        faiss.IndexFlatIP(store.dim),
        store.dim,
        cells,
        faiss.ScalarQuantizer.QT_fp16,
        faiss.METRIC_INNER_PRODUCT,
        False,  # of each vector itself: a difference from its centroid would be rounded no better
    )
    index.cp.seed, index.cp.spherical = SEED, True
    index.cp.min_points_per_centroid = 1  # FAISS warns below; a small store has no more
    index.cp.max_points_per_centroid = POINTS_PER_CELL
    g = torch.Generator().manual_seed(SEED)
    rows = torch.randperm(store.n, generator=g)[: POINTS_PER_CELL * cells].sort().values
    x = torch.empty(len(rows), store.dim)
    for some in torch.arange(len(rows)).split(max(1, BLOCK_BYTES // (4 * store.dim))):
        x[some] = _unit(store.gather(rows[some]))
    index.train(x.numpy())
    give_back_memory()
    return index


def _filled(work: Path, store: EmbeddingStore, empty: Any) -> Iterator[Path]:
    """Files of indices that hold the rows, so many each as memory is to hold."""
    faiss, centroids = load_faiss(), 4 * empty.nlist * store.dim  # each part holds them
    most = max(1, max(PART_BYTES, 8 * centroids) // (2 * store.dim + 8))
    part, held = faiss.clone_index(empty), 0
    for start, block in _unit_blocks(store):
        part.add_with_ids(block.numpy(), np.arange(start, start + len(block)))
        held += len(block)
        if held >= most or start + len(block) == store.n:
            path = work / f"part_{start:012d}.faiss"
            _write(part, path)
            yield path
            part, held = faiss.clone_index(empty), 0
            give_back_memory()  # its lists grew piece by piece


def _plan(work: Path, store: EmbeddingStore, index: Any, k: int) -> dict[str, Any]:
    """How many cells to probe, and rows with their exact neighbours to measure by."""
    path = work / "probes.pt"
    try:
        return load_tensors(path)
    except (FileNotFoundError, CorruptFileError):
        pass
    clock = Clock()
    with clock("exact"):  # of some rows; all of them would take n / QUERY_ROWS times as long
        g = torch.Generator().manual_seed(SEED + 1)
        queries = torch.randperm(store.n, generator=g)[: min(QUERY_ROWS, store.n // 2 * 2)]
        x, search = _unit(store.gather(queries)), search_on(torch.device("cpu"))
        truth = nearest_among(x, queries, _unit_blocks(store), k, search)
        half = len(queries) // 2
    with clock("tune"):
        nprobe = _probes(index, x[:half], _unit(store.gather(truth[:half].flatten())))
    plan = {
        "nprobe": nprobe,
        "queries": queries[half:].clone(),
        "truth": truth[half:].clone(),
        "seconds": clock.stages,
    }
    save_tensors(path, plan)
    return plan


def _probes(index: Any, x: Tensor, neighbours: Tensor) -> int:
    """The fewest cells that hold `SOUGHT` of the neighbours `[b k, D]` of rows `[b, D]`."""
    cells = index.quantizer.search(neighbours.numpy(), 1)[1].reshape(len(x), -1, 1)
    ranks = [
        (index.quantizer.search(row[None], index.nlist)[1] == own).argmax(1)
        for row, own in zip(x.numpy(), cells, strict=True)
    ]
    ordered = np.sort(np.concatenate(ranks))
    return int(ordered[math.ceil(SOUGHT * len(ordered)) - 1]) + 1


def _lookup(index: Any, x: Tensor, itself: Tensor, k: int) -> Tensor:
    """The k nearest of the probed rows, without the row itself: `[b, k]` int64."""
    found = index.search(x.numpy(), k + 1)[1]
    nprobe = index.nprobe
    while (short := (found < 0).any(1)).any():  # these cells hold fewer: look into more of them
        if nprobe == index.nlist:
            row = int(itself[torch.from_numpy(short)][0])
            raise InputError(f"row {row} has no {k} neighbours: it, or others, are not finite")
        nprobe = min(2 * nprobe, index.nlist)
        more = load_faiss().SearchParametersIVF(nprobe=nprobe)
        found[short] = index.search(x.numpy()[short], k + 1, params=more)[1]
    own: NDArray = found == itself.unsqueeze(1).numpy()
    own[~own.any(1), -1] = True  # behind so many duplicates
    return torch.from_numpy(found[~own].reshape(-1, k))


def _recall(found: Tensor, truth: Tensor) -> float:
    """The share of true neighbours `[b, k]` that are among those found `[b, k]`."""
    return float((truth.unsqueeze(2) == found.unsqueeze(1)).any(2).double().mean())


def _search(
    work: Path, store: EmbeddingStore, index: Any, k: int, progress: Progress | None
) -> tuple[list[Path], float, float]:
    """Find the neighbours of so many rows after the other; those of an earlier process stay.

    Returns:
        Their files, in order; how many pairs were compared; seconds.
    """
    dtype = torch.int32 if store.n < 2**31 else torch.int64
    stats, paths, compared, seconds = load_faiss().cvar.indexIVF_stats, [], 0, 0.0
    for rows in (
        range(i, min(i + ROWS_PER_FILE, store.n)) for i in range(0, store.n, ROWS_PER_FILE)
    ):
        paths.append(work / f"found_{rows.start:012d}.pt")
        try:
            part = load_tensors(paths[-1])
        except (FileNotFoundError, CorruptFileError):
            clock = Clock()
            stats.reset()
            with clock("search"):
                blocks = torch.arange(rows.start, rows.stop).split(
                    max(1, BLOCK_BYTES // (4 * store.dim))
                )
                found = [_lookup(index, _unit(store.gather(block)), block, k) for block in blocks]
            part = {"found": torch.cat(found).to(dtype), "compared": stats.ndis}
            part["seconds"] = clock.stages["search"]
            save_tensors(paths[-1], part)
        compared, seconds = compared + part["compared"], seconds + part["seconds"]
        if progress is not None:
            progress(rows.stop, store.n)
    return paths, compared, seconds


def _finish(path: Path, n: int, k: int, parts: list[Path]) -> None:
    """The neighbours as one file of NumPy's."""
    dtype = np.dtype(np.int32 if n < 2**31 else np.int64)
    about = {"descr": dtype.str, "fortran_order": False, "shape": (n, k)}

    def write(file: BinaryIO) -> None:
        np.lib.format.write_array_header_1_0(file, about)
        for part in parts:
            file.write(load_tensors(part)["found"].contiguous().numpy().data)

    atomic_write(path, write)
