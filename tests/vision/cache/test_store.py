"""The store: rows round-trip, after failures of the writer, the disk or a file."""

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ssl_kd.core.files import CorruptFileError, sha256_file
from ssl_kd.core.files.lock import LockHeld
from ssl_kd.core.shards import Fingerprint, FingerprintMismatch, NonFiniteRow
from ssl_kd.core.shards.shards import read_manifest, write_manifest
from ssl_kd.vision.cache import EmbeddingStore, EmbeddingWriter, nearest_neighbors
from tests.damage import Payload
from tests.faults.matrix import row

N, D = 50, 6
FINGERPRINT = Fingerprint("pixels", "none", "28px", "float32", "digits")
IDS = [f"folder {i}/é{i}.png" for i in range(N)]
LABELS = torch.arange(N) % 3 - 1


def rows_of(n=N, d=D):
    """Embeddings that any process computes alike."""
    return torch.randn(n, d, generator=torch.Generator().manual_seed(7))


def make_writer(folder, fingerprint=FINGERPRINT, shard_rows: int | None = 12, **settings):
    settings = {"labels": LABELS, "ids": IDS, "class_names": ("a", "b")} | settings
    return EmbeddingWriter(folder, "train", fingerprint, N, D, shard_rows=shard_rows, **settings)


def fill(writer, x=None, batch=7):
    """What an extraction does: compute what is missing, in batches."""
    x = rows_of() if x is None else x
    computed = []
    for start, stop in writer.missing:
        for first in range(start, stop, batch):
            rows = torch.arange(first, min(first + batch, stop))
            computed += rows.tolist()
            writer.append(x[rows], rows)
    return computed


def write(folder, x=None, **settings) -> EmbeddingStore:
    with make_writer(folder, **settings) as writer:
        fill(writer, x)
        return writer.close()


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".lock"
    }


def shard_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.pt"))


def refit_checksum(path: Path):
    """Make the manifest agree with a shard that was changed: the fault is in the data."""
    manifest = read_manifest(path.parent / "embeddings_train.json")
    for entry in manifest["shards"]:
        if entry["file"] == path.name:
            entry |= {"sha256": sha256_file(path), "bytes": path.stat().st_size}
    write_manifest(path.parent / "embeddings_train.json", manifest)


def change_row(path: Path, row: int, value: float):
    shard = torch.load(path, weights_only=True)
    shard["embeddings"][row, 2] = value
    torch.save(shard, path)


# Writing and reading


@pytest.mark.parametrize("shard_rows", [None, 12])
def test_a_store_round_trips(tmp_path, shard_rows):
    x = rows_of()
    write(tmp_path, shard_rows=shard_rows)
    store = EmbeddingStore.open(tmp_path, "train", expect=FINGERPRINT)
    assert (store.n, len(store), store.dim, store.split) == (N, N, D, "train")
    assert torch.equal(store.tensor(), x)
    assert store.labels is not None and torch.equal(store.labels, LABELS)
    assert torch.equal(store.indices, torch.arange(N))
    assert store.ids == IDS
    assert store.class_names == ("a", "b")
    assert store.fingerprint == FINGERPRINT
    rows = torch.randint(0, N, (200,))
    assert torch.equal(store.gather(rows), x[rows])
    assert store.gather(rows[:0]).shape == (0, D)
    blocks = list(store.blocks(16))
    assert [start for start, _ in blocks] == [0, 16, 32, 48]
    assert torch.equal(torch.cat([block for _, block in blocks]), x)
    assert not (tmp_path / "embeddings_train.partial").exists()
    assert not list(tmp_path.rglob("*.tmp"))


def test_the_guides_one_line_opens_it(tmp_path):
    write(tmp_path, shard_rows=None)
    assert shard_names(tmp_path) == ["embeddings_train.pt"]
    shard = torch.load(tmp_path / "embeddings_train.pt", weights_only=True, mmap=True)
    assert torch.equal(shard["embeddings"], rows_of())
    assert torch.equal(shard["labels"], LABELS)
    assert torch.equal(shard["indices"], torch.arange(N))
    write(tmp_path / "large")
    assert shard_names(tmp_path / "large") == [f"embeddings_train_{i:05d}.pt" for i in range(5)]
    last = torch.load(tmp_path / "large" / "embeddings_train_00004.pt", weights_only=True)
    assert torch.equal(last["embeddings"], rows_of()[48:])
    assert last["indices"].tolist() == [48, 49]


def test_a_cache_of_version_1_opens(tmp_path):
    """Written by hand as version 1 laid it down: such files stay readable."""
    x, names = rows_of(), json.dumps(IDS).encode()
    path = tmp_path / "embeddings_train.pt"
    shard = {"embeddings": x, "labels": LABELS, "indices": torch.arange(N)}
    torch.save(shard | {"ids": torch.tensor(list(names), dtype=torch.uint8)}, path)
    fields = {"start": 0, "stop": N, "rows": N, "unreadable": []}
    statistics = {"min": x.min().item(), "max": x.max().item(), "mean_norm": 2.0, "zero_rows": 0}
    entry = fields | {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256_file(path)}
    manifest = {"version": 1, "split": "train", "n": N, "dim": D, "dtype": "float32"}
    manifest |= {"labelled": True, "class_names": ["a", "b"], "shard_rows": N, "unreadable": []}
    manifest |= {"fingerprint": vars(FINGERPRINT), "statistics": statistics | {"rows": N}}
    write_manifest(
        tmp_path / "embeddings_train.json",
        manifest | {"shards": [entry | {"statistics": statistics}]},
    )
    store = EmbeddingStore.open(tmp_path, "train", expect=FINGERPRINT)
    assert torch.equal(store.tensor(), x) and store.labels is not None
    assert torch.equal(store.labels, LABELS) and store.ids == IDS
    with make_writer(tmp_path, shard_rows=None) as writer:
        assert writer.missing == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_read_as_float32(tmp_path, dtype):
    store = write(tmp_path, dtype=dtype)
    expected = rows_of().to(dtype).float()
    assert torch.equal(store.tensor(), expected) and store.gather(torch.tensor([3])).dtype == (
        torch.float32
    )


def test_columns_are_copied_whether_mapped_or_in_memory(tmp_path):
    store, rows = write(tmp_path), torch.tensor([49, 0, 13, 13])
    assert store.take("indices", rows).tolist() == [49, 0, 13, 13]
    assert torch.equal(store.take("labels", rows), LABELS[rows])
    for taken in (store.gather(torch.arange(N)), store.tensor(), next(store.blocks(N))[1]):
        taken.zero_()
    assert torch.equal(store.take("embeddings", rows), rows_of()[rows])


@pytest.mark.parametrize("rows", [[-1], [N], [0, N + 5]])
def test_rows_that_are_not_there(tmp_path, rows):
    with pytest.raises(IndexError, match=f"expected 0 to {N - 1}"):
        write(tmp_path).gather(torch.tensor(rows))


def test_unreadable_samples_are_listed_and_have_no_row(tmp_path):
    gone = [0, 5, *range(12, 24), 49]  # one whole shard among them
    with make_writer(tmp_path) as writer:
        for row in reversed(gone):
            writer.skip(row, IDS[row], "truncated")
        keep = torch.tensor([row for row in range(N) if row not in gone])
        for rows in keep.split(9):
            writer.append(rows_of()[rows], rows)
    store = EmbeddingStore.open(tmp_path, "train")
    assert torch.equal(store.indices, keep)
    assert torch.equal(store.tensor(), rows_of()[keep])
    assert torch.equal(store.gather(torch.tensor([30, 1, 9])), rows_of()[keep[[30, 1, 9]]])
    assert store.labels is not None and torch.equal(store.labels, LABELS[keep])
    assert store.ids == [IDS[row] for row in keep]
    assert store.manifest["unreadable"] == [
        {"row": row, "id": IDS[row], "reason": "truncated"} for row in gone
    ]


def test_rows_out_of_order_are_refused_and_change_nothing(tmp_path):
    x = rows_of()
    with make_writer(tmp_path) as writer:
        writer.append(x[:8], torch.arange(8))
        for rows, message in [
            ([9, 8], "row 8 came after row 9"),
            ([8, 8], "row 8 came after row 8"),
            ([5], "row 5 came after row 7"),
            ([7, 8], "row 7 came after row 7"),
            ([12], r"4 rows were neither added nor skipped, .* row 8 \('folder 8"),
        ]:
            with pytest.raises(ValueError, match=message):
                writer.append(x[rows] * 2, torch.tensor(rows))
        writer.append(x[8:], torch.arange(8, N))
    assert torch.equal(EmbeddingStore.open(tmp_path, "train").tensor(), x)


def test_statistics(tmp_path):
    x = rows_of()
    x[[3, 20]] = 0
    store = write(tmp_path, x)
    assert 3 not in nearest_neighbors(store, 3)[3]
    statistics = store.manifest["statistics"]
    assert statistics["min"] == x.min().item() and statistics["max"] == x.max().item()
    assert statistics["mean_norm"] == pytest.approx(x.norm(dim=1).mean().item(), rel=1e-6)
    assert statistics["zero_rows"] == 2 and statistics["rows"] == N


@pytest.mark.parametrize("split", ["", "../train", "a/b", "train_00001", "é"])
def test_a_split_cannot_leave_its_folder(tmp_path, split):
    with pytest.raises(ValueError, match="split is"):
        EmbeddingStore.open(tmp_path, split)
    with pytest.raises(ValueError, match="split is"):
        EmbeddingWriter(tmp_path, split, FINGERPRINT, 1, D, ids=["a"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ids": IDS[:3]}, "ids has 3 entries"),
        ({"labels": LABELS[:3]}, r"shape \(3,\)"),
        ({"dtype": torch.int64}, "dtype is torch.int64"),
        ({"shard_rows": 0}, "shard_rows is 0"),
    ],
)
def test_bad_arguments(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        make_writer(tmp_path, **arguments)


def test_bad_rows_of_a_writer(tmp_path):
    with pytest.raises(ValueError, match="n is 0"):
        EmbeddingWriter(tmp_path, "train", FINGERPRINT, 0, D, ids=[])
    with make_writer(tmp_path) as writer:
        with pytest.raises(ValueError, match=r"expected \(2, 6\)"):
            writer.append(torch.zeros(2, D + 1), torch.arange(2))
        with pytest.raises(ValueError, match=f"rows is {N} to {N}; expected"):
            writer.append(torch.zeros(1, D), torch.tensor([N]))
        fill(writer)
    with pytest.raises(ValueError, match="closed"):
        writer.append(torch.zeros(1, D), torch.tensor([0]))
    with pytest.raises(FileNotFoundError):
        EmbeddingStore.open(tmp_path / "nothing", "train")


def test_missing_rows_are_an_error(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"1 rows were neither added nor skipped, .* row 30 \('folder 30/é30.png'\)",
    ):
        with make_writer(tmp_path) as writer:
            rows = torch.tensor([row for row in range(N) if row != 30])
            writer.append(rows_of()[rows], rows)
    with make_writer(tmp_path) as writer:
        assert writer.missing == [(24, N)]
        fill(writer)


def test_a_shard_replaced_in_use_is_noticed(tmp_path):
    store = write(tmp_path)
    write(tmp_path, rows_of() + 1, fingerprint=replace(FINGERPRINT, data="other"), force=True)
    with pytest.raises(CorruptFileError, match="embeddings_train_00000.pt was replaced"):
        store.gather(torch.tensor([0]))


# Fault rows 1, 2 and 3: bad rows


def test_an_implausible_cached_row_is_excluded_or_rebuilt(tmp_path):
    write(tmp_path)
    path = tmp_path / "embeddings_train_00002.pt"
    change_row(path, 7, 5e7)
    refit_checksum(path)
    with pytest.raises(NonFiniteRow, match="out of range") as caught:
        EmbeddingStore.open(tmp_path, "train")
    assert (caught.value.row, caught.value.sample) == (31, IDS[31])
    store = EmbeddingStore.open(tmp_path, "train", exclude_bad=True)
    keep = torch.tensor([row for row in range(N) if row != 31])
    assert torch.equal(store.indices, keep) and store.ids == [IDS[i] for i in keep]
    assert torch.equal(store.tensor(), rows_of()[keep])
    assert torch.equal(store.gather(torch.tensor([48, 31])), rows_of()[[49, 32]])
    assert store.digest != EmbeddingStore.open(tmp_path, "train", verify=False).digest
    with pytest.raises(NonFiniteRow):
        make_writer(tmp_path)
    with make_writer(tmp_path, rebuild=True) as writer:
        assert fill(writer) == list(range(24, 36))
    assert torch.equal(EmbeddingStore.open(tmp_path, "train").tensor(), rows_of())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30, 1e8])
def test_a_bad_row_is_not_written(tmp_path, value):
    x = rows_of()
    x[20, 1] = value
    with pytest.raises(NonFiniteRow, match="row 20 of the data set, sample 'folder 20"):
        write(tmp_path, x)
    with make_writer(tmp_path) as writer:
        assert writer.done == 12
        fill(writer)


def test_a_bad_row_found_when_its_shard_is_complete_can_be_skipped_too(tmp_path):
    x = rows_of()
    x[20, 1] = 1e9  # plausible alone, not beside its neighbors
    with make_writer(tmp_path) as writer:
        with pytest.raises(NonFiniteRow) as caught:
            fill(writer, x)
        writer.skip(caught.value.row, caught.value.sample, "too large")
        fill(writer, rows_of())
    assert 20 not in EmbeddingStore.open(tmp_path, "train").indices


# Fault rows 4, 5 and 12: damaged files


def flip_bit(data: bytes) -> bytes:
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


DAMAGE = {
    "one bit": flip_bit,
    "first bit": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "truncated": lambda data: data[: len(data) // 3],
    "empty": lambda data: b"",
    "random": lambda data: bytes(torch.randint(0, 256, (len(data),), dtype=torch.uint8)),
    "longer": lambda data: data + b"x",
    "missing": lambda data: None,
}


@row(4, 5)
@pytest.mark.parametrize(("damage", "shard_rows"), [*((d, 12) for d in DAMAGE), ("one bit", None)])
def test_a_damaged_shard_is_named_and_rebuilt_alone(tmp_path, damage, shard_rows):
    write(tmp_path, shard_rows=shard_rows)
    whole = content(tmp_path)
    file = "embeddings_train_00001.pt" if shard_rows else "embeddings_train.pt"
    data = DAMAGE[damage](whole[file])
    if data is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(data)
    damaged = content(tmp_path)
    rows = list(range(12, 24)) if shard_rows else list(range(N))
    with pytest.raises(CorruptFileError, match=rf"{file}.*--rebuild_damaged rebuilds"):
        EmbeddingStore.open(tmp_path, "train")
    with pytest.raises(CorruptFileError, match=file):
        make_writer(tmp_path)
    assert content(tmp_path) == damaged

    others = {p.name: p.stat().st_mtime_ns for p in tmp_path.glob("*.pt") if p.name != file}
    with make_writer(tmp_path, rebuild=True) as writer:
        assert writer.missing == [(rows[0], rows[-1] + 1)]
        assert fill(writer) == rows
    assert content(tmp_path) == whole
    after = {p.name: p.stat().st_mtime_ns for p in tmp_path.glob("*.pt") if p.name != file}
    assert others == after  # not so much as touched


def test_a_size_that_does_not_fit_is_seen_without_reading(tmp_path):
    write(tmp_path)
    path = tmp_path / "embeddings_train_00001.pt"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(CorruptFileError, match=path.name):
        EmbeddingStore.open(tmp_path, "train", verify=False)


@pytest.mark.parametrize("form", ["pickle", "torch", "other tensors", "a list"])
def test_other_files_are_refused_despite_a_matching_checksum(tmp_path, form):
    write(tmp_path, shard_rows=None)
    path, trace = tmp_path / "embeddings_train.pt", tmp_path / "executed"
    if form == "pickle":
        path.write_bytes(pickle.dumps(Payload(trace)))
    elif form == "torch":
        torch.save({"embeddings": rows_of(), "x": Payload(trace)}, path)
    elif form == "other tensors":
        torch.save({"embeddings": rows_of(N, D + 1)}, path)
    else:
        torch.save([rows_of()], path)
    refit_checksum(path)
    for verify in (True, False):
        with pytest.raises(CorruptFileError, match="embeddings_train.pt"):
            EmbeddingStore.open(tmp_path, "train", verify=verify)
    assert not trace.exists()


@pytest.mark.parametrize("damage", ["one bit", "truncated", "empty", "random", "value"])
def test_a_damaged_manifest_is_named(tmp_path, damage):
    write(tmp_path)
    path = tmp_path / "embeddings_train.json"
    data = path.read_bytes()
    changed = data.replace(b'"shard_rows": 12', b'"shard_rows": 13')
    path.write_bytes(changed if damage == "value" else DAMAGE[damage](data) or b"")
    with pytest.raises(CorruptFileError, match="embeddings_train.json is damaged"):
        EmbeddingStore.open(tmp_path, "train")
    with pytest.raises(CorruptFileError, match="embeddings_train.json is damaged"):
        make_writer(tmp_path)
    write(tmp_path, force=True)
    assert torch.equal(EmbeddingStore.open(tmp_path, "train").tensor(), rows_of())


def test_a_manifest_of_a_later_version_is_named(tmp_path):
    write(tmp_path)
    path = tmp_path / "embeddings_train.json"
    write_manifest(path, read_manifest(path) | {"version": 2})
    with pytest.raises(CorruptFileError, match="version 2; expected version 1"):
        EmbeddingStore.open(tmp_path, "train")


# Fault row 6: a cache of something else


@row(6)
@pytest.mark.parametrize("field", ["teacher", "weights", "transform", "dtype", "data"])
def test_a_cache_of_something_else_is_refused_by_field(tmp_path, field):
    write(tmp_path)
    before = content(tmp_path)
    asked = replace(FINGERPRINT, **{field: "other"})
    cached = getattr(FINGERPRINT, field)
    difference = f"{field}: cache has '{cached}', this run needs 'other'"
    path = tmp_path / "embeddings_train.json"
    for attempt in (
        lambda: EmbeddingStore.open(tmp_path, "train", expect=asked),
        lambda: make_writer(tmp_path, fingerprint=asked),
    ):
        with pytest.raises(FingerprintMismatch) as caught:
            attempt()
        assert caught.value.path == path and caught.value.differences == [difference]
        message = f"{path} was computed from something else: {difference}. {FINGERPRINT.way_out}"
        assert str(caught.value) == message
    assert content(tmp_path) == before
    write(tmp_path, rows_of() * 2, fingerprint=asked, force=True)
    store = EmbeddingStore.open(tmp_path, "train", expect=asked)
    assert torch.equal(store.tensor(), rows_of() * 2)


def test_rebuilding_a_good_cache_computes_nothing(tmp_path):
    write(tmp_path)
    before = content(tmp_path)
    with make_writer(tmp_path, rebuild=True) as writer:
        assert writer.missing == [] and writer.done == N
        writer.append(rows_of() * 3, torch.arange(N))  # passed over
    assert content(tmp_path) == before


def test_the_old_cache_is_readable_until_the_new_one_is_whole(tmp_path):
    write(tmp_path)
    asked = replace(FINGERPRINT, teacher="other")
    writer = make_writer(tmp_path, fingerprint=asked, force=True, shard_rows=None)
    writer.append(rows_of()[:40] * 2, torch.arange(40))
    assert torch.equal(EmbeddingStore.open(tmp_path, "train").tensor(), rows_of())
    writer.append(rows_of()[40:] * 2, torch.arange(40, N))
    assert torch.equal(EmbeddingStore.open(tmp_path, "train").tensor(), rows_of())
    writer.close()
    assert torch.equal(EmbeddingStore.open(tmp_path, "train").tensor(), rows_of() * 2)
    assert shard_names(tmp_path) == ["embeddings_train.pt"]  # the old shards are gone


@pytest.mark.parametrize("change", ["teacher", "data"])
def test_an_unfinished_cache_without_a_shard_gives_way(tmp_path, change):
    with pytest.raises(KeyboardInterrupt):
        with make_writer(tmp_path) as writer:
            writer.append(rows_of()[:11], torch.arange(11))  # of the first shard's 12
            raise KeyboardInterrupt
    assert (tmp_path / "embeddings_train.partial").exists()
    asked = replace(FINGERPRINT, **{change: "other"})
    with make_writer(tmp_path, fingerprint=asked) as writer:
        assert fill(writer) == list(range(N))
    assert EmbeddingStore.open(tmp_path, "train").fingerprint == asked
    # A finished cache beside it is still refused.
    with pytest.raises(KeyboardInterrupt):
        with make_writer(tmp_path, force=True):
            raise KeyboardInterrupt
    with pytest.raises(FingerprintMismatch, match="weights: cache has"):
        make_writer(tmp_path, fingerprint=replace(asked, weights="third"))


# Fault row 7: interrupted and killed


def test_an_interrupted_writer_continues_at_the_last_complete_shard(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        with make_writer(tmp_path / "resumed") as writer:
            writer.skip(3, IDS[3], "unreadable")
            rows = torch.tensor([row for row in range(31) if row != 3])
            writer.append(rows_of()[rows], rows)
            raise KeyboardInterrupt
    with pytest.raises(FileNotFoundError):
        EmbeddingStore.open(tmp_path / "resumed", "train")
    with make_writer(tmp_path / "resumed") as writer:
        assert writer.done == 24 and writer.missing == [(24, N)]
        # On the grid that an uninterrupted writer's batches are on.
        assert writer.batches(20) == [range(20, 40), range(40, N)]
        assert fill(writer) == list(range(24, N))
    with make_writer(tmp_path / "straight") as writer:
        writer.skip(3, IDS[3], "unreadable")
        rows = torch.tensor([row for row in range(N) if row != 3])
        writer.append(rows_of()[rows], rows)
    assert content(tmp_path / "resumed") == content(tmp_path / "straight")


def test_a_damaged_shard_of_an_interrupted_writer_is_computed_again(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        with make_writer(tmp_path) as writer:
            writer.append(rows_of()[:40], torch.arange(40))
            raise KeyboardInterrupt
    path = tmp_path / "embeddings_train.partial" / "embeddings_train_00001.pt"
    path.write_bytes(flip_bit(path.read_bytes()))
    with make_writer(tmp_path) as writer:
        assert writer.done == 12 and writer.missing == [(12, 24), (36, N)]
        fill(writer)
    assert torch.equal(EmbeddingStore.open(tmp_path, "train").tensor(), rows_of())


@pytest.mark.parametrize(("after", "old"), [(0, True), (3, True), (5, True), (6, True), (5, False)])
def test_killed_while_publishing(tmp_path, monkeypatch, after, old):
    asked = replace(FINGERPRINT, teacher="other") if old else FINGERPRINT
    folder = tmp_path / "killed"
    if old:
        write(folder, rows_of() * 9)
    writer = make_writer(folder, fingerprint=asked, force=old)
    fill(writer)
    moves, move = [], os.replace

    def stop_after(source, target):
        if Path(target).parent == folder:
            if len(moves) == after:
                raise SystemExit
            moves.append(target)
        move(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", stop_after)
        if after < 6:  # five shards and the manifest
            with pytest.raises(SystemExit):
                writer.close()
        else:
            writer.close()
    with make_writer(folder, fingerprint=asked) as writer:  # no need to ask for force again
        assert writer.missing == []
    write(tmp_path / "straight", fingerprint=asked)
    assert content(folder) == content(tmp_path / "straight")


# Fault rows 8 and 13: a full disk, two writers


@row(13)
def test_two_writers_do_not_mix(tmp_path):
    with make_writer(tmp_path) as writer:
        for force in (False, True):
            with pytest.raises(LockHeld, match=f"process {os.getpid()} holds .*train.lock"):
                make_writer(tmp_path, force=force)
        with EmbeddingWriter(tmp_path, "test", FINGERPRINT, 1, D, ids=["a"]) as other:
            other.skip(0, "a", "another split is another cache")
        fill(writer)
    assert torch.equal(EmbeddingStore.open(tmp_path, "train").tensor(), rows_of())
    make_writer(tmp_path).close()


def test_names_that_are_not_utf8(tmp_path):
    ids = [os.fsdecode(b"caf\xe9"), *IDS[1:]]
    assert write(tmp_path, ids=ids).ids == ids
    assert json.loads((tmp_path / "embeddings_train.json").read_text())["n"] == N


def test_a_failure_gives_the_lock_back(tmp_path):
    write(tmp_path)
    with pytest.raises(FingerprintMismatch):
        make_writer(tmp_path, fingerprint=replace(FINGERPRINT, data="x"))
    with pytest.raises(ZeroDivisionError):
        with make_writer(tmp_path):
            _ = 1 / 0
    make_writer(tmp_path).close()
