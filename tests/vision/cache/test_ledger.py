"""Several writers of one cache, in any order and after any kill, write the bytes of one."""

import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ssl_kd.core.files import CorruptFileError
from ssl_kd.core.files.lock import LockHeld
from ssl_kd.core.shards import Fingerprint, ledger
from ssl_kd.vision.cache import EmbeddingStore, EmbeddingWriter

N, D, ROWS = 50, 4, 8  # seven shards, the last of two rows
FINGERPRINT = Fingerprint("pixels", "none", "28px", "float32", "digits")
GONE = (3, 20, 49)


def x(scale=1.0):
    return torch.randn(N, D, generator=torch.Generator().manual_seed(7)) * scale


def writer(folder, only=None, fingerprint=FINGERPRINT, **options):
    options = {"ids": [str(i) for i in range(N)], "shard_rows": ROWS} | options
    return EmbeddingWriter(folder, "train", fingerprint, N, D, only=only, **options)


def fill(one, scale=1.0, most=None):
    """Whatever is missing, up to so many shards; the numbers of those that were written."""
    shards = one.absent[:most]
    for shard in shards:
        for row in range(shard * ROWS, min((shard + 1) * ROWS, N)):
            if row in GONE:
                one.skip(row, str(row), "truncated")
            else:
                one.append(x(scale)[row : row + 1], torch.tensor([row]))
    return shards


def content(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".lock"
    }


@pytest.fixture
def alone(tmp_path):
    with writer(tmp_path / "alone") as one:
        fill(one)
    return content(tmp_path / "alone")


@pytest.mark.parametrize("world", [2, 9])
def test_shares_one_after_the_other_give_the_bytes_of_one_writer(tmp_path, alone, world):
    folder, seen = tmp_path / "many", []
    for rank in reversed(range(world)):
        with writer(folder, slice(rank, None, world)) as one:
            assert one.rows == sum(min(ROWS, N - k * ROWS) for k in one.shards)
            seen += fill(one)
            manifest = one.publish()
            assert (manifest is None) == (len(seen) < 7)
    assert sorted(seen) == list(range(7))
    assert content(folder) == alone
    store = EmbeddingStore.open(folder, "train", expect=FINGERPRINT)
    assert [entry["row"] for entry in store.manifest["unreadable"]] == list(GONE)


def test_shares_at_once_and_one_that_has_all_of_them_again(tmp_path, alone):
    folder, published = tmp_path / "many", []

    def work(only):
        with writer(folder, only) as one:
            fill(one)
            published.append(one.publish() is not None)

    shares = [slice(0, None, 3), slice(1, None, 3), slice(2, None, 3), slice(0, None, 1)]
    threads = [threading.Thread(target=work, args=(only,)) for only in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(published) == 4 and any(published)
    assert content(folder) == alone


def test_a_share_that_ends_after_publication_changes_nothing(tmp_path, alone):
    folder = tmp_path / "many"
    late = [writer(folder, slice(0, 3)), writer(folder, slice(2, 4))]
    with writer(folder, slice(0, None)) as others:
        fill(others)
        assert others.publish()
    store, published = EmbeddingStore.open(folder, "train"), stamps(folder)
    for one in late:
        fill(one)
        assert one.absent == [] and one.publish()["shards"] == store.manifest["shards"]
    assert stamps(folder) == published and content(folder) == alone
    assert torch.equal(store.tensor(), EmbeddingStore.open(tmp_path / "alone", "train").tensor())


def test_a_share_that_starts_during_publication_changes_nothing(tmp_path, alone, monkeypatch):
    folder, begin = tmp_path / "many", ledger.Ledger.begin

    def publish_first(self, *given):
        monkeypatch.setattr(ledger.Ledger, "begin", begin)
        shutil.copytree(tmp_path / "alone", folder, dirs_exist_ok=True)
        published.update(stamps(folder))
        begin(self, *given)

    published = {}
    monkeypatch.setattr(ledger.Ledger, "begin", publish_first)
    with writer(folder, slice(0, 2)) as late:
        fill(late)
        assert late.publish()
    assert stamps(folder) == published and content(folder) == alone


def stamps(folder):
    """Which files there are, and when each was written."""
    files = [path for path in Path(folder).rglob("*") if path.suffix != ".lock"]
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}


def test_the_folder_may_go_while_a_shard_is_written(tmp_path, alone, monkeypatch):
    folder, late = tmp_path / "many", writer(tmp_path / "many", slice(0, 1))
    add, calls = ledger.Ledger.add, []

    def publish_first(self, *given):
        calls.append(1)
        if len(calls) == 1:  # its file is whole, and goes with the folder
            shutil.rmtree(folder / "embeddings_train.partial")
        return add(self, *given)

    monkeypatch.setattr(ledger.Ledger, "add", publish_first)
    fill(late)
    assert len(calls) == 2
    with writer(folder, slice(1, None)) as others:
        fill(others)
        assert others.publish()
    assert content(folder) == alone


def test_a_damaged_shard_is_rebuilt_by_its_process_alone(tmp_path, alone):
    folder = tmp_path / "alone"
    for shard in (2, 5):
        path = folder / f"embeddings_train_{shard:05d}.pt"
        path.write_bytes(path.read_bytes()[:-30])
    writer(folder, slice(0, 2))  # others' shards are not read
    with pytest.raises(CorruptFileError, match="embeddings_train_00002.pt has .* bytes"):
        writer(folder, slice(0, None, 2))
    for rank in (0, 1):
        with writer(folder, slice(rank, None, 2), rebuild=True) as one:
            assert fill(one) == [[2], [5]][rank]
            one.publish()
    assert content(folder) == alone


def test_a_share_that_is_not_whole_is_not_published(tmp_path):
    with writer(tmp_path, slice(0, 2)) as one:
        one.append(x()[:2], torch.arange(2))
        with pytest.raises(ValueError, match="14 rows were neither .* the first is row 2"):
            one.publish()
    with pytest.raises(ValueError, match="shards of other writers are not stored yet"):
        with writer(tmp_path, slice(0, 1)) as one:
            fill(one)
            one.close()


def test_a_whole_writer_excludes_another_but_not_shares(tmp_path, alone):
    folder = tmp_path / "many"
    with writer(folder) as one:
        with pytest.raises(LockHeld):
            writer(folder)
        with writer(folder, slice(3, 5)) as two:
            fill(two)
            assert two.publish() is None
        fill(one)
    assert content(folder) == alone


def test_the_first_process_decides_the_shard_size(tmp_path, alone):
    with writer(tmp_path / "many", slice(0, 1)) as one:
        fill(one)
    with writer(tmp_path / "many", slice(1, None), shard_rows=13) as one:
        assert one.shard_rows == ROWS
        fill(one)
        assert one.publish()
    assert content(tmp_path / "many") == alone


# What is stored is what the teacher computes in


HALF = replace(FINGERPRINT, dtype="bfloat16")


def test_the_dtype_is_the_teachers_unless_a_cache_has_its_own(tmp_path):
    for folder, dtype in ((tmp_path / "new", None), (tmp_path / "old", torch.float32)):
        with writer(folder, fingerprint=HALF, dtype=dtype) as one:
            assert one.dtype == (dtype or torch.bfloat16)
            fill(one)
    new, old = (EmbeddingStore.open(tmp_path / n, "train", expect=HALF) for n in ("new", "old"))
    assert new.manifest["dtype"] == "bfloat16" and old.manifest["dtype"] == "float32"
    assert new.gather(torch.arange(3)).dtype == torch.float32
    assert torch.equal(new.tensor(), old.tensor().bfloat16().float())
    before = content(tmp_path / "old")
    path = tmp_path / "old" / "embeddings_train_00004.pt"
    path.write_bytes(b"")
    with writer(tmp_path / "old", fingerprint=HALF, dtype=None, rebuild=True) as one:
        assert one.dtype == torch.float32 and fill(one) == [4]  # the others are kept
    assert content(tmp_path / "old") == before


# A forced pass of several writers


def shares(world):
    return [slice(rank, None, world) for rank in range(world)]


@pytest.mark.parametrize(("world", "backwards"), [(1, False), (3, True)])
def test_forced_shares_compute_every_shard_once_and_keep_those_of_the_others(
    tmp_path, alone, world, backwards
):
    folder = tmp_path / "alone"
    for _ in range(2):
        before, seen = stamps(folder), []
        for only in shares(world)[:: -1 if backwards else 1]:
            with writer(folder, only, force=True) as one:
                seen += fill(one)
                one.publish()
        assert sorted(seen) == list(range(7)) and content(folder) == alone
        assert not [path for path, stamp in stamps(folder).items() if before.get(path) == stamp]


def test_a_killed_forced_share_recomputes_its_shards(tmp_path, alone):
    folder = tmp_path / "alone"
    with writer(folder, slice(0, None, 2), force=True) as one:
        fill(one)
    with writer(folder, slice(1, None, 2), force=True) as killed:
        assert fill(killed, most=1) == [1]
    assert EmbeddingStore.open(folder, "train").n == N - len(GONE)  # the old one
    kept = stamps(folder / "embeddings_train.partial")
    with writer(folder, slice(1, None, 2), force=True) as again:
        assert fill(again) == [1, 3, 5]
        for path in (p for p in kept if p.name.endswith(("0.pt", "2.pt", "4.pt", "6.pt"))):
            assert stamps(folder / "embeddings_train.partial")[path] == kept[path]
        assert again.publish()
    assert content(folder) == alone


def test_shares_without_force_join_a_new_cache_that_one_has_begun(tmp_path, alone):
    folder = tmp_path / "alone"
    with writer(folder, slice(0), force=True) as plan:  # begins it, and computes nothing
        assert plan.absent == []
    seen = []
    for only in shares(7):
        with writer(folder, only) as one:
            seen += fill(one)
            one.publish()
    with writer(folder, slice(3, 4)) as late:  # a task that is begun again
        assert late.absent == [] and late.publish()
    assert seen == list(range(7)) and content(folder) == alone


def test_a_forced_writer_of_all_keeps_nothing_of_a_forced_share(tmp_path, alone):
    folder = tmp_path / "alone"
    with writer(folder, slice(0, None, 2), force=True) as share:
        fill(share)
    with writer(folder, force=True) as one:
        assert fill(one) == list(range(7))
    assert content(folder) == alone
