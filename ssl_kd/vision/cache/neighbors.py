"""Find exact nearest neighbors without storing all N² similarities.

Queries and candidates are processed in blocks. For each query block, the k best candidates so far
are kept.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from firstnan.finite import safe_normalize
from ssl_kd.core.errors import InputError
from ssl_kd.vision.cache.embeddings import EmbeddingStore

BLOCK_ROWS = 4096
"""Rows in a block of queries or candidates; memory grows with the square."""

Search = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""Function of queries `[b, D]`, candidates `[c, D]` and k.

It returns the k largest dot products of each query, `[b, k]`, and the rows of those candidates.
"""


def _with_one(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones_like(x[:, :1])], 1)


def _with_length(x: Tensor) -> Tensor:
    return torch.cat([x, -x.square().sum(1, keepdim=True) / 2], 1)


METRICS = {"cosine": (safe_normalize, safe_normalize), "euclidean": (_with_one, _with_length)}
"""Metric -> transforms of queries and candidates after which dot products rank the candidates."""


def nearest_neighbors(
    embeddings: EmbeddingStore | Tensor,
    k: int,
    *,
    metric: str = "cosine",
    device: str | torch.device = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Find the k nearest other rows of every row by comparing all pairs: int64 `[n, k]` on the CPU.

    A row is never its own neighbor, but duplicates of it are neighbors like any other. A row of
    zeros is equally far from all rows. The nearest comes first; the order of ties is arbitrary.
    For `metric="euclidean"`, center the rows first, since distances are computed in float32.
    `progress` is called with (rows done, n) after each block.

    Raises:
        InputError: k is out of range, or a row is not finite.

    >>> nearest_neighbors(torch.tensor([[1.0, 0.0], [2.0, 1.0], [0.0, 1.0]]), 1).tolist()
    [[1], [0], [1]]
    """
    n = len(embeddings)
    device = torch.device(device)
    check_k(k, n)
    search = search_on(device)
    if metric not in METRICS:
        raise ValueError(f"metric is {metric!r}; expected one of {', '.join(METRICS)}")
    as_query, as_candidate = METRICS[metric]

    def prepared(prepare: Callable[[Tensor], Tensor]) -> Iterator[tuple[int, Tensor]]:
        for start, block in _blocks(embeddings, BLOCK_ROWS):
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
            raise InputError(f"row {row} is not finite in float32: remove it, or scale the data")
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
    """Find the k candidates with the largest dot products with each query, except the query itself.

    The queries are `[b, D]` and `itself` their row numbers `[b]`; candidates are blocks of
    `(first row number, rows [c, D])`. Returns row numbers `[b, k]`, nearest first, or fewer columns
    if there are fewer candidates.
    """
    best = queries.new_empty(len(queries), 0)
    rows = itself.new_empty(len(queries), 0)
    for start, block in candidates:
        # One more than k, since the query itself may be among the results.
        scores, columns = search(queries, block, min(k + 1, len(block)))
        columns = columns + start
        scores = scores.masked_fill(columns == itself.unsqueeze(1), -torch.inf)
        scores, columns = torch.cat([best, scores], 1), torch.cat([rows, columns], 1)
        best, order = scores.topk(min(k, scores.shape[1]))
        rows = columns.gather(1, order)
    return rows


def check_k(k: int, n: int) -> None:
    """Raise InputError unless a number of neighbors k is from 1 to n - 1."""
    if not 1 <= k < n:
        raise InputError(f"k is {k}; expected 1 to {n - 1}, since there are {n} samples")


def _blocks(embeddings: EmbeddingStore | Tensor, rows: int) -> Iterator[tuple[int, Tensor]]:
    if isinstance(embeddings, EmbeddingStore):
        yield from embeddings.blocks(rows)
    else:
        for start in range(0, len(embeddings), rows):
            yield start, embeddings[start : start + rows].detach()


def search_on(device: torch.device) -> Search:
    """Return the search function for a device: FAISS on a Linux CPU, otherwise torch."""
    # On macOS the two OpenMP runtimes in one process may crash.
    use_faiss = device.type == "cpu" and sys.platform == "linux"
    return _faiss_search if use_faiss else _torch_search


def _torch_search(queries: Tensor, candidates: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return (queries @ candidates.T).topk(k)


def _faiss_search(queries: Tensor, candidates: Tensor, k: int) -> tuple[Tensor, Tensor]:
    faiss = load_faiss()
    scores, columns = faiss.knn(
        queries.numpy(), candidates.numpy(), k, metric=faiss.METRIC_INNER_PRODUCT
    )
    return torch.from_numpy(scores), torch.from_numpy(columns)


def load_faiss() -> Any:
    """Import `faiss`, and set its number of threads to that of torch."""
    with warnings.catch_warnings():  # FAISS's wrappers warn on import under Python 3.12
        warnings.simplefilter("ignore", DeprecationWarning)
        import faiss

    faiss.omp_set_num_threads(torch.get_num_threads())  # FAISS has its own OpenMP
    return faiss
