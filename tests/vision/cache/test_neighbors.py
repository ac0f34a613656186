"""Exact neighbors exclude the row itself, for any block size."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ssl_kd.core.shards import Fingerprint
from ssl_kd.vision.cache import EmbeddingStore, EmbeddingWriter, nearest_neighbors, neighbors

FINGERPRINT = Fingerprint("pixels", "none", "28px", "float32", "digits")


def distances(x: torch.Tensor) -> torch.Tensor:
    """All pairs in float64, by the textbook; infinite on the diagonal."""
    x = x.double()
    norms = x.norm(dim=1)
    products = torch.outer(norms, norms)
    d = 1 - (x @ x.T) / torch.where(products > 0, products, 1)
    return d.fill_diagonal_(torch.inf)


def assert_exact(x, indices, k, atol=1e-6):
    n = len(x)
    assert indices.shape == (n, k) and indices.dtype == torch.int64
    assert indices.min() >= 0 and indices.max() < n
    assert not (indices == torch.arange(n)[:, None]).any(), "a row is its own neighbor"
    assert all(len(set(row)) == k for row in indices.tolist()), "a neighbor twice"
    d = distances(x)
    ours, best = d.gather(1, indices), d.sort(dim=1).values[:, :k]
    assert torch.allclose(ours, best, rtol=0, atol=atol)  # ties may swap rows, never distances


def write(folder, x, shard_rows=30, fingerprint=FINGERPRINT, force=False) -> EmbeddingStore:
    n, d = x.shape
    with EmbeddingWriter(
        folder, "train", fingerprint, n, d, ids=[str(i) for i in range(n)],
        shard_rows=shard_rows, force=force,
    ) as writer:  # fmt: skip
        writer.append(x, torch.arange(n))
        return writer.close()


@pytest.fixture(params=["faiss", "torch"])
def find(request, monkeypatch):
    """Search by FAISS or by torch, in blocks of a given size."""
    search = neighbors.search_on(torch.device("cpu" if request.param == "faiss" else "cuda"))
    monkeypatch.setattr(neighbors, "search_on", lambda device: search)

    def find(x, k, block_rows=4096, **options):
        monkeypatch.setattr(neighbors, "BLOCK_ROWS", block_rows)
        return nearest_neighbors(x, k, **options)

    return find


@pytest.mark.parametrize(("block_rows", "k"), [(7, 5), (16, 40), (101, 5), (4096, 40)])
def test_equals_brute_force_across_block_borders(find, tmp_path, block_rows, k):
    x = torch.randn(101, 8)
    assert_exact(x, find(x, k, block_rows), k)
    assert_exact(x, find(write(tmp_path, x), k, block_rows), k)


@pytest.mark.parametrize("block_rows", [7, 64])
def test_more_duplicates_than_neighbors(find, block_rows):
    """Dropping the first column instead of the row itself fails here."""
    x = torch.randn(60, 5)
    x[10:35] = x[3]  # 26 equal rows, over many blocks
    x[50:52] = x[0]
    neighbors = find(x, 6, block_rows)
    assert_exact(x, neighbors, 6)
    same = {3, *range(10, 35)}
    for row in same:
        assert set(neighbors[row].tolist()) <= same - {row}
    assert set(neighbors[0, :2].tolist()) == {50, 51}


def test_equal_and_zero_rows_give_no_nan(find):
    for x in (torch.ones(20, 4), torch.zeros(20, 4)):
        assert_exact(x, find(x, 7, 3), 7)
    x = torch.randn(40, 6).abs()  # every true pair has a positive cosine
    x[[4, 30]] = 0
    neighbors = find(x, 5, 8)
    assert_exact(x, neighbors, 5)
    others = torch.tensor([row for row in range(40) if row not in (4, 30)])
    assert not torch.isin(neighbors[others], torch.tensor([4, 30])).any()


@pytest.mark.parametrize("k", [1, 2])
def test_the_fewest_samples(find, k):
    x = torch.tensor([[0.0, 1.0], [1.0, 1.0], [5.0, 1.0]])
    assert find(x, k, 2).tolist() == [row[:k] for row in [[1, 2], [2, 0], [1, 0]]]


def test_euclidean_neighbors(find):
    x = torch.randn(300, 7)
    distance = torch.cdist(x, x).fill_diagonal_(torch.inf)
    ours = distance.gather(1, find(x, 6, 64, metric="euclidean"))
    torch.testing.assert_close(ours, distance.topk(6, largest=False).values)


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float16, 1.0), (torch.bfloat16, 100.0), (torch.float64, 1e-6)]
)
def test_any_dtype_and_scale(dtype, scale):
    x = (torch.randn(50, 8) * scale).to(dtype).requires_grad_()
    assert_exact(x.detach(), nearest_neighbors(x, 3), 3)


@pytest.mark.parametrize("k, n", [(5, 5), (1, 1), (0, 5)])
def test_a_bad_k_is_named_with_its_range(k, n):
    with pytest.raises(ValueError, match=f"k is {k}; expected 1 to {n - 1}"):
        nearest_neighbors(torch.randn(n, 3), k)


def test_a_bad_metric_and_a_bad_row_are_named(find):
    x = torch.randn(30, 4)
    with pytest.raises(ValueError, match="metric is 'manhattan'; expected one of cosine, eucl"):
        find(x, 6, metric="manhattan")
    for value in (float("nan"), float("inf")):
        x[17, 2] = value
        with pytest.raises(ValueError, match="row 17 is not finite"):
            find(x, 3, 8)


def test_progress(find):
    calls = []
    find(torch.randn(10, 3), 2, 4, progress=lambda *p: calls.append(p))
    assert calls == [(4, 10), (8, 10), (10, 10)]


@pytest.mark.gpu
@pytest.mark.parametrize("block_rows", [16, 4096])
def test_on_the_gpu(monkeypatch, block_rows):
    monkeypatch.setattr(neighbors, "BLOCK_ROWS", block_rows)
    x = torch.randn(500, 32)
    x[100:150] = x[3]
    assert_exact(x, nearest_neighbors(x, 10, device="cuda"), 10, atol=1e-5)


@pytest.mark.slow  # the short tests import torch first, then FAISS
def test_faiss_may_be_imported_before_torch():
    """Both bring an OpenMP runtime: either import order must work, with several threads."""
    script = """
import warnings
warnings.simplefilter("ignore")
import faiss, torch
from ssl_kd.vision.cache import nearest_neighbors, neighbors
torch.set_num_threads(2)
x = torch.randn(1500, 32)
neighbors.BLOCK_ROWS = 700
a = nearest_neighbors(x, 5)
y = (x @ x.T).softmax(1).sum()
neighbors.search_on = lambda device: neighbors._torch_search
b = nearest_neighbors(x, 5)
assert (a == b).float().mean() > 0.999
assert torch.get_num_threads() == faiss.omp_get_max_threads() == 2
print("fine")
"""
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert result.returncode == 0 and result.stdout == "fine\n", result.stderr
