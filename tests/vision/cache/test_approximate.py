"""Neighbors by an index or of all pairs, saved beside the store: recall, memory, reuse."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ssl_kd.core.errors import InputError
from ssl_kd.core.files.lock import Lock, LockHeld
from ssl_kd.vision.cache import (
    EmbeddingStore,
    find_neighbors,
    nearest_neighbors,
    neighbors_in_memory,
)
from ssl_kd.vision.cache import approximate as ivf
from tests.vision.cache.test_neighbors import assert_exact, write

N, DIM, K = 3000, 16, 10


@pytest.fixture
def x():
    g = torch.Generator().manual_seed(0)
    centres = torch.randn(60, DIM, generator=g)
    return centres[torch.randint(60, (N,), generator=g)] + torch.randn(N, DIM, generator=g) / 2


@pytest.fixture
def indexed(monkeypatch):
    monkeypatch.setattr(ivf, "EXACT_ROWS", 0)


@pytest.fixture
def small(indexed, monkeypatch):
    """Sizes of blocks and parts that a few thousand rows fill many times."""
    monkeypatch.setattr(ivf, "BLOCK_BYTES", 350 * 4 * DIM)
    monkeypatch.setattr(ivf, "PART_BYTES", 700 * (2 * DIM + 8))


def found_of(truth, found):
    return float((truth.unsqueeze(2) == found.unsqueeze(1)).any(2).double().mean())


def files(folder):
    return {p.name for p in folder.iterdir() if "neighbours" in p.name and p.suffix != ".lock"}


def test_approximate_search_finds_nearly_all_neighbors(tmp_path, x, small):
    store = write(tmp_path, x, shard_rows=800)
    found, record = find_neighbors(store, K)
    assert found.shape == (N, K) and found.dtype == torch.int32
    assert not (found == torch.arange(N).unsqueeze(1)).any(), "a row is its own neighbour"
    assert all(len(set(row)) == K for row in found.tolist())
    whole = found_of(nearest_neighbors(store, K), found)
    assert whole > 0.985 and abs(record["recall"] - whole) < 0.01
    assert record["compared"] < 0.25 and record["index"] == f"IVF{2 * 54},SQfp16"
    assert record == json.loads((tmp_path / "neighbours_train.json").read_text())
    assert files(tmp_path) == {"neighbours_train.npy", "neighbours_train.json"}


@pytest.fixture(params=["exact", "ivf"])
def searches(request, monkeypatch):
    """Both searches; counts how often neighbors are really computed."""
    monkeypatch.setattr(ivf, "EXACT_ROWS", 0 if request.param == "ivf" else 1000)
    calls = []
    for name in ("_searched", "_all_pairs"):
        search = getattr(ivf, name)
        monkeypatch.setattr(
            ivf, name, lambda *given, search=search: calls.append(given[1]) or search(*given)
        )
    return calls


def test_saved_for_the_next_time_and_for_no_other_embeddings(tmp_path, x, searches):
    store = write(tmp_path, x[:200])
    first, record = find_neighbors(store, K)
    again, kept = find_neighbors(EmbeddingStore.open(tmp_path, "train"), K)
    assert torch.equal(again, first) and kept == record and again.dtype == first.dtype
    assert torch.equal(find_neighbors(store, 3)[0], first[:, :3])
    assert searches == [K]
    find_neighbors(store, K + 1)
    assert searches == [K, K + 1]
    (tmp_path / "embeddings_train_00001.pt").write_bytes(b"")  # the same teacher, other rows
    other = write(tmp_path, x[200:400], force=True)
    assert not torch.equal(find_neighbors(other, K)[0], first) and len(searches) == 3


@pytest.mark.parametrize("damage", ["bit", "other values", "no record", "a list", "no json"])
def test_a_damaged_file_is_computed_again(tmp_path, x, searches, caplog, damage):
    store = write(tmp_path, x[:200])
    first = find_neighbors(store, K)[0].clone()  # mapped from the file that will be damaged
    path, record = tmp_path / "neighbours_train.npy", tmp_path / "neighbours_train.json"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    if damage == "bit":
        path.write_bytes(data)
    elif damage == "other values":
        np.save(path, first.numpy()[::-1])
    else:
        record.write_text({"no record": "{}", "a list": "[1, 2]", "no json": "{"}[damage])
    for _ in range(2):
        assert torch.equal(find_neighbors(store, K)[0], first)
    assert searches == [K, K] and "computed again" in caplog.text


def test_an_excluded_row_is_not_a_neighbor(tmp_path, x):
    find_neighbors(store := write(tmp_path, x[:80]), 5)
    store._kept = torch.arange(1, 80)  # as with exclude_bad
    store.n = 79
    del store.digest
    assert_exact(x[1:80], find_neighbors(store, 5)[0], 5)


def test_a_folder_that_cannot_be_written_costs_only_the_saved_file(
    tmp_path, x, monkeypatch, caplog
):
    def full(path, value):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(ivf, "atomic_write", full)
    assert_exact(x[:40], find_neighbors(write(tmp_path, x[:40]), 3)[0], 3)
    assert "cannot save the neighbors" in caplog.text and not files(tmp_path)


def test_where_all_cells_are_probed_it_is_the_exact_search(tmp_path, x, small, monkeypatch):
    x = x[:400].half().float()  # what the index keeps is rounded no further
    monkeypatch.setattr(ivf, "_unit", lambda embeddings: embeddings)
    monkeypatch.setattr(ivf, "_probes", lambda index, *_: index.nlist)
    found, record = find_neighbors(write(tmp_path, x), K)
    products = (x @ x.T).fill_diagonal_(-torch.inf)
    torch.testing.assert_close(products.gather(1, found.long()), products.topk(K).values)
    assert record["compared"] == pytest.approx(400 / 399) and record["nprobe"] == 40


def test_few_rows_are_searched_exactly(tmp_path, x, monkeypatch):
    store = write(tmp_path, x[:200])
    found, record = find_neighbors(store, K)
    assert record == {"index": "exact", "recall": 1.0} and found.dtype == torch.int64
    assert torch.equal(found, nearest_neighbors(store, K))
    monkeypatch.setattr(ivf, "EXACT_ROWS", 199)
    assert find_neighbors(store, K + 1)[1]["index"] == "IVF28,SQfp16"
    with pytest.raises(InputError, match="k is 200; expected 1 to 199"):
        find_neighbors(store, 200)


def test_duplicates_zeros_and_empty_cells(tmp_path, x, small):
    x = x[:600].clone()
    x[100:400] = x[3]
    x[500:520] = 0
    found, _ = find_neighbors(write(tmp_path, x), K)
    assert not (found == torch.arange(600).unsqueeze(1)).any()
    assert all(len(set(row)) == K for row in found.tolist()) and found.min() >= 0
    same = {3, *range(100, 400)}
    assert all(set(found[row].tolist()) <= same for row in same)


def test_a_row_that_is_not_finite_ends_the_search_with_its_number(x):
    index = ivf.load_faiss().IndexIVFFlat(ivf.load_faiss().IndexFlatIP(DIM), DIM, 2, 0)
    index.train(x[:100].numpy())
    index.add(x[:100].numpy())
    x[3, 0] = torch.nan
    with pytest.raises(InputError, match="row 3 has fewer than 10 neighbors"):
        ivf._lookup(index, x[:5], torch.arange(5), K)


@pytest.mark.parametrize("at", [0, 1])
def test_an_interrupted_search_leaves_no_file_and_starts_over(tmp_path, x, small, at):
    store = write(tmp_path, x[:1000])

    def interrupt(done, total):
        if done > at * 500:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        find_neighbors(store, K, progress=interrupt)
    assert not files(tmp_path)
    work = tmp_path / "neighbours_train.partial"  # of a killed process
    work.mkdir()
    (work / "cells.bin").write_bytes(b"half")
    assert find_neighbors(store, K)[1]["recall"] > 0.97 and not work.exists()


def test_two_searches_at_once_and_a_full_disk_are_refused(tmp_path, x, indexed, monkeypatch):
    store = write(tmp_path, x[:300])
    with Lock(tmp_path / ".neighbours_train.lock"), pytest.raises(LockHeld, match="one writer"):
        find_neighbors(store, K)
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(InputError, match="the neighbors of 300 rows takes .* are free"):
        find_neighbors(store, K)
    assert not files(tmp_path)


MEMORY = """
import sys, threading, time, torch
from pathlib import Path
from ssl_kd.vision.cache import EmbeddingStore, approximate as ivf
torch.set_num_threads(1)
store = EmbeddingStore.open(sys.argv[1], "train", verify=False)
ivf.EXACT_ROWS, ivf.BLOCK_BYTES, ivf.PART_BYTES, ivf.POINTS_PER_CELL = 0, 1 << 20, 1 << 22, 4
def resident():
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024
ivf.search_on(torch.device("cpu"))(torch.randn(9, 4), torch.randn(9, 4), 1)
before, peak = resident(), 0
def watch():
    global peak
    while True:
        peak = max(peak, resident())
        time.sleep(0.002)
threading.Thread(target=watch, daemon=True).start()
ivf.find_neighbors(store, 5)
print(peak - before)
"""


@pytest.mark.slow  # needs many rows
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_of_the_cells_not_of_the_vectors(tmp_path):
    """60,000 rows of 1 KiB are 61 MB; all that may grow with them is some twenty bytes a row."""
    n, dim = 60_000, 256
    g = torch.Generator().manual_seed(0)
    write(tmp_path, torch.randn(300, dim, generator=g)[torch.randint(300, (n,), generator=g)]
          + torch.randn(n, dim, generator=g) / 4, shard_rows=20_000)  # fmt: skip
    result = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[3],
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 40 << 20


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_neighbors_in_memory_are_nearly_those_of_all_pairs(monkeypatch, metric):
    random = torch.Generator().manual_seed(0)
    centers = 3 * torch.randn(60, 16, generator=random)
    x = centers[torch.randint(60, (3000,), generator=random)]
    x = x + torch.randn(3000, 16, generator=random)
    exact, about = neighbors_in_memory(x, 10, metric=metric)
    assert about == {"index": "exact", "recall": 1.0}
    assert (exact == nearest_neighbors(x, 10, metric=metric)).all()
    monkeypatch.setattr(ivf, "PAIRS_ROWS", 1000)
    done = []
    near, about = neighbors_in_memory(
        x, 10, metric=metric, progress=lambda *numbers: done.append(numbers)
    )
    assert done[-1] == (3000, 3000)
    is_found = (exact.unsqueeze(2) == near.unsqueeze(1)).any(2).double().mean()
    assert is_found > 0.98
    assert about["recall"] == pytest.approx(float(is_found), abs=0.01)
    assert about["index"] == "IVF108,Flat"
    assert not (near == torch.arange(3000).unsqueeze(1)).any()


def test_neighbors_in_memory_name_a_row_that_is_not_finite(monkeypatch):
    monkeypatch.setattr(ivf, "PAIRS_ROWS", 10)
    x = torch.randn(20, 4)
    x[7, 1] = torch.nan
    with pytest.raises(InputError, match="row 7 is not finite"):
        neighbors_in_memory(x, 3)
