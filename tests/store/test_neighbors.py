"""Exact neighbors: never the row itself, whatever the blocks; kept beside the store."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ssl_kd.store import (
    EmbeddingStore,
    EmbeddingWriter,
    Fingerprint,
    cached_neighbors,
    nearest_neighbors,
    neighbors,
)

BACKENDS = ["faiss", "torch"]
FINGERPRINT = Fingerprint("pixels", "none", "28px", "float32", "digits")


def distances(x: torch.Tensor) -> torch.Tensor:
    """All pairs in float64, by the textbook; infinite on the diagonal."""
    x = x.double()
    norms = x.norm(dim=1)
    products = torch.outer(norms, norms)
    d = 1 - (x @ x.T) / torch.where(products > 0, products, 1)
    return d.fill_diagonal_(torch.inf)


def assert_exact(x, found, k, atol=1e-6):
    n = len(x)
    assert found.shape == (n, k) and found.dtype == torch.int64
    assert found.min() >= 0 and found.max() < n
    assert not (found == torch.arange(n)[:, None]).any(), "a row is its own neighbour"
    assert all(len(set(row)) == k for row in found.tolist()), "a neighbour twice"
    d = distances(x)
    ours, best = d.gather(1, found), d.sort(dim=1).values[:, :k]
    assert torch.allclose(ours, best, rtol=0, atol=atol)  # ties may swap rows, never distances


def write(folder, x, shard_rows=30, fingerprint=FINGERPRINT, force=False) -> EmbeddingStore:
    n, d = x.shape
    with EmbeddingWriter(
        folder, "train", fingerprint, n, d, ids=[str(i) for i in range(n)],
        shard_rows=shard_rows, force=force,
    ) as writer:  # fmt: skip
        writer.append(x, torch.arange(n))
        return writer.close()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("block_rows", "k"), [(2, 5), (16, 40), (100, 1), (101, 5), (4096, 40)])
def test_equals_brute_force_across_block_borders(backend, block_rows, k):
    x = torch.randn(101, 8)
    found = nearest_neighbors(x, k, backend=backend, block_rows=block_rows)
    assert_exact(x, found, k)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block_rows", [1, 7, 64])
def test_more_duplicates_than_neighbors(backend, block_rows):
    """Dropping the first column instead of the row itself fails here."""
    x = torch.randn(60, 5)
    x[10:35] = x[3]  # 26 of one, over many blocks
    x[50:52] = x[0]
    k = 6
    found = nearest_neighbors(x, k, backend=backend, block_rows=block_rows)
    assert_exact(x, found, k)
    same = {3, *range(10, 35)}
    for row in same:
        assert set(found[row].tolist()) <= same - {row}
    assert set(found[0, :2].tolist()) == {50, 51}


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_and_zero_rows_give_no_nan(backend):
    for x in (torch.ones(20, 4), torch.zeros(20, 4)):
        assert_exact(x, nearest_neighbors(x, 7, backend=backend, block_rows=3), 7)
    x = torch.randn(40, 6).abs()  # every true pair has a positive cosine
    x[[4, 30]] = 0
    found = nearest_neighbors(x, 5, backend=backend, block_rows=8)
    assert_exact(x, found, 5)
    others = torch.tensor([row for row in range(40) if row not in (4, 30)])
    assert not torch.isin(found[others], torch.tensor([4, 30])).any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("k", [1, 2])
def test_the_fewest_samples(backend, k):
    x = torch.tensor([[0.0, 1.0], [1.0, 1.0], [5.0, 1.0]])
    found = nearest_neighbors(x, k, backend=backend, block_rows=2)
    assert found.tolist() == [row[:k] for row in [[1, 2], [2, 0], [1, 0]]]


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float16, 1.0), (torch.bfloat16, 100.0), (torch.float64, 1e-6)]
)
def test_any_dtype_and_scale(dtype, scale):
    x = (torch.randn(50, 8) * scale).to(dtype).requires_grad_()
    found = nearest_neighbors(x, 3, block_rows=16)
    assert_exact(x.detach(), found, 3)


@pytest.mark.parametrize("k, n", [(5, 5), (1, 1), (1, 0), (0, 5), (-1, 5)])
def test_too_few_samples_says_both_numbers(k, n):
    with pytest.raises(ValueError, match=f"k is {k}, but each of {n} samples has"):
        nearest_neighbors(torch.randn(n, 3), k)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "annoy"}, "backend is 'annoy'; expected one of auto, faiss, torch"),
        ({"backend": "faiss", "device": "cuda"}, "backend 'faiss' computes on the CPU"),
        ({"block_rows": 0}, "block_rows is 0"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        nearest_neighbors(torch.randn(5, 3), 2, **arguments)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_row_is_named(value):
    x = torch.randn(30, 4)
    x[17, 2] = value
    with pytest.raises(ValueError, match="row 17 is not"):
        nearest_neighbors(x, 3, block_rows=8)


def test_progress():
    calls = []
    nearest_neighbors(torch.randn(10, 3), 2, block_rows=4, progress=lambda *p: calls.append(p))
    assert calls == [(4, 10), (8, 10), (10, 10)]


@pytest.mark.gpu
@pytest.mark.parametrize("block_rows", [16, 4096])
def test_on_the_gpu(block_rows):
    x = torch.randn(500, 32)
    x[100:150] = x[3]
    found = nearest_neighbors(x, 10, device="cuda", block_rows=block_rows)
    assert_exact(x, found, 10, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_from_a_store_over_shards(tmp_path, backend):
    x = torch.randn(101, 8)
    store = write(tmp_path, x)
    found = nearest_neighbors(store, 4, backend=backend, block_rows=37)
    assert_exact(x, found, 4)


@pytest.mark.parametrize("first", ["faiss", "torch"])
def test_faiss_and_torch_in_one_process(first):
    """Both bring an OpenMP runtime; either import order must work, with several threads."""
    second = {"faiss": "torch", "torch": "faiss"}[first]
    script = f"""
import warnings
warnings.simplefilter("ignore")
import {first}, {second}
import torch
from ssl_kd.store import nearest_neighbors
torch.set_num_threads(2)
x = torch.randn(1500, 32)
a = nearest_neighbors(x, 5, backend="faiss", block_rows=700)
y = (x @ x.T).softmax(1).sum()
b = nearest_neighbors(x, 5, backend="torch", block_rows=700)
assert (a == b).float().mean() > 0.999
import faiss
assert torch.get_num_threads() == faiss.omp_get_max_threads() == 2
print("fine")
"""
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert result.returncode == 0 and result.stdout == "fine\n", result.stderr


# Kept beside the store


@pytest.fixture
def counted(monkeypatch):
    """Counts how often neighbors are really computed."""
    calls, compute = [], neighbors.nearest_neighbors

    def count(store, k, **settings):
        calls.append(k)
        return compute(store, k, **settings)

    monkeypatch.setattr(neighbors, "nearest_neighbors", count)
    return calls


def test_kept_for_the_next_time(tmp_path, counted):
    x = torch.randn(80, 8)
    store = write(tmp_path, x)
    first = cached_neighbors(store, 10)
    assert (tmp_path / "neighbours_train.pt").exists()
    again = EmbeddingStore.open(tmp_path, "train")
    assert torch.equal(cached_neighbors(again, 10), first)
    smaller = cached_neighbors(again, 4)
    assert torch.equal(smaller, first[:, :4]) and smaller.dtype == torch.int64
    assert counted == [10]
    assert_exact(x, cached_neighbors(again, 12), 12)
    assert counted == [10, 12]


def test_other_embeddings_are_other_neighbors(tmp_path, counted):
    x = torch.randn(80, 8)
    cached_neighbors(write(tmp_path, x), 5)
    other = Fingerprint("other", "none", "28px", "float32", "digits")
    y = torch.randn(80, 8)
    store = write(tmp_path, y, fingerprint=other, force=True)
    assert_exact(y, cached_neighbors(store, 5), 5)
    # The same fingerprint, but a shard of other content (a teacher that is not deterministic).
    (tmp_path / "embeddings_train_00001.pt").write_bytes(b"")
    z = y + torch.randn(80, 8)
    store = write(tmp_path, z, fingerprint=other, force=True)
    assert_exact(store.tensor(), cached_neighbors(store, 5), 5)
    assert counted == [5, 5, 5]


def test_a_left_out_row_is_no_neighbour(tmp_path, counted):
    x = torch.randn(80, 8)
    store = write(tmp_path, x)
    cached_neighbors(store, 5)
    store._kept = torch.arange(1, 80)  # what exclude_bad leaves
    store.n = 79
    del store.digest
    assert_exact(x[1:], cached_neighbors(store, 5), 5)
    assert counted == [5, 5]


@pytest.mark.parametrize("damage", ["bit", "empty", "tensors", "list", "values"])
def test_a_damaged_file_is_computed_again(tmp_path, counted, caplog, damage):
    store = write(tmp_path, torch.randn(80, 8))
    first = cached_neighbors(store, 5)
    path = tmp_path / "neighbours_train.pt"
    data, saved = bytearray(path.read_bytes()), torch.load(path, weights_only=True)
    if damage in ("bit", "empty"):
        data[len(data) // 2] ^= 1
        path.write_bytes(data if damage == "bit" else b"")
    else:
        torch.save(
            {
                "tensors": {"neighbours": torch.zeros(80, 5)},
                "list": [1, 2],
                "values": saved | {"neighbours": first.int() * 0},
            }[damage],
            path,
        )
    for _ in range(2):
        assert torch.equal(cached_neighbors(store, 5), first)
    assert counted == [5, 5] and "computed again" in caplog.text


def test_a_folder_that_cannot_be_written_costs_only_the_cache(tmp_path, monkeypatch, caplog):
    x = torch.randn(40, 4)
    store = write(tmp_path, x)

    def full(path, value):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(neighbors, "save_tensors", full)
    assert_exact(x, cached_neighbors(store, 3), 3)
    assert "not kept for the next run" in caplog.text
