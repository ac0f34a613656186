"""Exact nearest neighbors, without the sample itself, in memory that does not grow with N².

Both sides are cut into blocks; of the candidates in each pair of blocks the best k so far are kept.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssl_kd.errors import InputError
from ssl_kd.files import CorruptFileError, load_tensors, save_tensors
from ssl_kd.guard.finite import safe_normalize
from ssl_kd.store.embeddings import EmbeddingStore

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "faiss", "torch")

Search = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""Queries `[b, D]`, candidates `[c, D]`, k -> the k largest dot products, and their columns."""


def _with_one(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones_like(x[:, :1])], 1)


def _with_length(x: Tensor) -> Tensor:
    return torch.cat([x, -x.square().sum(1, keepdim=True) / 2], 1)


METRICS = {"cosine": (safe_normalize, safe_normalize), "euclidean": (_with_one, _with_length)}
"""Metric -> transforms of queries and of candidates, so that the dot product ranks them."""


def nearest_neighbors(
    embeddings: EmbeddingStore | Tensor,
    k: int,
    *,
    metric: str = "cosine",
    backend: str = "auto",
    device: str | torch.device = "cpu",
    block_rows: int = 4096,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Find the k nearest other rows of every row by comparing all pairs.

    The row itself is excluded by its number, so a duplicate of it is a neighbor like any other. A
    row of zeros is equally far from everything.

    Args:
        embeddings: a store, or floating [n, D], finite.
        k: number of neighbors, 1 ... n - 1.
        metric: `cosine` or `euclidean`; center the rows first for the latter (float32).
        backend: `faiss` (CPU only), `torch`, or `auto`: FAISS on a Linux CPU, torch elsewhere (two
            OpenMP runtimes in one process may crash on macOS).
        device: device of the torch backend.
        block_rows: rows in a block on either side; memory grows with its square.
        progress: called with (rows done, n) after each block.

    Returns:
        int64 [n, k] on the CPU, nearest first; ties in any order.

    >>> nearest_neighbors(torch.tensor([[1.0, 0.0], [2.0, 1.0], [0.0, 1.0]]), 1).tolist()
    [[1], [0], [1]]
    """
    n = len(embeddings)
    device = torch.device(device)
    check_k(k, n)
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; expected one of {', '.join(BACKENDS)}")
    if block_rows < 1:
        raise ValueError(f"block_rows is {block_rows}; expected at least 1")
    if backend == "faiss" and device.type != "cpu":
        raise ValueError(f"backend 'faiss' computes on the CPU, device is {device}; use 'torch'")
    search = search_on(device, backend)
    if metric not in METRICS:
        raise ValueError(f"metric is {metric!r}; expected one of {', '.join(METRICS)}")
    as_query, as_candidate = METRICS[metric]

    def prepared(prepare: Callable[[Tensor], Tensor]) -> Iterator[tuple[int, Tensor]]:
        for start, block in _blocks(embeddings, block_rows):
            yield start, prepare(block.float()).to(device)

    on_gpu: list[tuple[int, Tensor]] | None = None
    if device.type == "cuda":
        dim = embeddings.dim if isinstance(embeddings, EmbeddingStore) else embeddings.shape[1]
        if 3 * n * dim * 4 < torch.cuda.mem_get_info(device)[0]:
            on_gpu = list(prepared(as_candidate))

    neighbors = torch.empty(n, k, dtype=torch.int64)
    for first, queries in prepared(as_query):
        if not (finite := queries.isfinite().all(1)).all():
            row = first + int((~finite).nonzero()[0, 0])
            raise InputError(f"row {row} is not finite in float32, so it has no nearest neighbors")
        itself = torch.arange(first, first + len(queries), device=device)
        candidates = on_gpu or prepared(as_candidate)
        rows = nearest_among(queries, itself, candidates, k, search)
        neighbors[first : first + len(queries)] = rows.cpu()
        if progress is not None:
            progress(first + len(queries), n)
    return neighbors


def nearest_among(
    queries: Tensor,
    itself: Tensor,
    candidates: Iterable[tuple[int, Tensor]],
    k: int,
    search: Search,
) -> Tensor:
    """Return the k candidates with the largest dot products, without the query itself.

    Args:
        queries: float32 `[b, D]`.
        itself: int64 `[b]`, the row number of each query.
        candidates: blocks of rows `[c, D]`, each with the number of its first row.
        k: number of neighbors.
        search: a function returned by `search_on`.

    Returns:
        int64 `[b, k]`, row numbers, nearest first; fewer columns if there are fewer rows.
    """
    best = queries.new_empty(len(queries), 0)
    rows = itself.new_empty(len(queries), 0)
    for start, block in candidates:
        # One more than k: the row itself may be among them.
        scores, columns = search(queries, block, min(k + 1, len(block)))
        columns = columns + start
        scores = scores.masked_fill(columns == itself.unsqueeze(1), -torch.inf)
        scores, columns = torch.cat([best, scores], 1), torch.cat([rows, columns], 1)
        best, order = scores.topk(min(k, scores.shape[1]))
        rows = columns.gather(1, order)
    return rows


def cached_neighbors(
    store: EmbeddingStore,
    k: int,
    *,
    device: str | torch.device = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Compute `nearest_neighbors` of a store, and keep them in `neighbours_{split}.pt`.

    The file is reused for the same embeddings and the same or a smaller k; otherwise, or if it is
    damaged, it is replaced.
    """
    check_k(k, store.n)
    if (kept := kept_exactly(store, k)) is not None:
        return kept
    neighbors = nearest_neighbors(store, k, device=device, progress=progress)
    small = neighbors.int() if store.n < 2**31 else neighbors
    tensors = {"neighbours": small, "key": _key(store), "checksum": _checksum(small)}
    try:
        save_tensors(_path(store), tensors)
    except OSError as error:
        logger.warning("neighbors are not kept for the next run: %s", error)
    return neighbors


def kept_exactly(store: EmbeddingStore, k: int) -> Tensor | None:
    """Return what `cached_neighbors` saved for these embeddings and k or more; else None."""
    path = _path(store)
    try:
        saved = load_tensors(path)
        neighbors = saved["neighbours"]
        if saved["checksum"] != _checksum(neighbors):
            raise CorruptFileError(f"{path} has another checksum than when it was written")
        if saved["key"] == _key(store) and neighbors.shape[1] >= k:
            return neighbors[:, :k].long()
    except FileNotFoundError:
        pass
    except (CorruptFileError, KeyError, TypeError, AttributeError) as error:
        logger.warning("neighbors are computed again: %s", error)
    return None


def _path(store: EmbeddingStore) -> Path:
    return store.folder / f"neighbours_{store.split}.pt"


def _key(store: EmbeddingStore) -> str:
    return f"{store.digest} cosine"


def check_k(k: int, n: int) -> None:
    """Raise InputError unless 1 <= k < n."""
    if not 1 <= k < n:
        raise InputError(
            f"k is {k}, but each of {n} samples has {max(n - 1, 0)} other samples: expected "
            "1 <= k < n"
        )


def _checksum(neighbors: Tensor) -> str:
    return hashlib.sha256(neighbors.contiguous().numpy().tobytes()).hexdigest()


def _blocks(embeddings: EmbeddingStore | Tensor, rows: int) -> Iterator[tuple[int, Tensor]]:
    if isinstance(embeddings, EmbeddingStore):
        yield from embeddings.blocks(rows)
    else:
        for start in range(0, len(embeddings), rows):
            yield start, embeddings[start : start + rows].detach()


def search_on(device: torch.device, backend: str = "auto") -> Search:
    """Return the search function for a device."""
    if backend == "auto":
        backend = "faiss" if device.type == "cpu" and sys.platform == "linux" else "torch"
    return _faiss_search if backend == "faiss" else _torch_search


def _torch_search(queries: Tensor, candidates: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return (queries @ candidates.T).topk(k)


def _faiss_search(queries: Tensor, candidates: Tensor, k: int) -> tuple[Tensor, Tensor]:
    faiss = load_faiss()
    scores, columns = faiss.knn(
        queries.numpy(), candidates.numpy(), k, metric=faiss.METRIC_INNER_PRODUCT
    )
    return torch.from_numpy(scores), torch.from_numpy(columns)


def load_faiss() -> Any:
    """Import `faiss`, with as many threads as torch."""
    with warnings.catch_warnings():  # its wrappers warn on import under Python 3.12
        warnings.simplefilter("ignore", DeprecationWarning)
        import faiss

    faiss.omp_set_num_threads(torch.get_num_threads())  # its OpenMP is not torch's
    return faiss
