"""Test rows 1 to 14 and 85: data and store."""

import contextlib
import json
import os
import pickle
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ssl_kd.core.files import CorruptFileError, sha256_file
from ssl_kd.core.files.lock import Lock
from ssl_kd.core.precision import Precision
from ssl_kd.core.runs.writer import Writer
from ssl_kd.core.shards import NonFiniteRow
from ssl_kd.core.shards.shards import read_manifest, write_manifest
from ssl_kd.vision.cache import find_neighbors
from ssl_kd.vision.data import FeatureDataset
from ssl_kd.vision.estimator import MultiHeadClusterer
from ssl_kd.vision.extract import Extraction
from ssl_kd.vision.run import run
from ssl_kd.vision.teachers import Features
from tests.damage import Payload
from tests.faults.inject import (
    all_finite,
    assignments,
    cache,
    content,
    flip_bit,
    metrics,
    no_run,
    one_line,
    opened,
    weights,
)
from tests.faults.matrix import row
from tests.kill_writers import kill_again_and_again

SHARD = "embeddings_train_00002.pt"  # rows 32 to 47


def _refit_checksum(path):
    """Match the manifest to a changed shard, so that only its data are at fault."""
    manifest = read_manifest(path.parent / "embeddings_train.json")
    for entry in manifest["shards"]:
        if entry["file"] == path.name:
            entry |= {"sha256": sha256_file(path), "bytes": path.stat().st_size}
    write_manifest(path.parent / "embeddings_train.json", manifest)


@row(1, 2)
@pytest.mark.parametrize("fitting", [True, False], ids=["fitting checksum", "other checksum"])
@pytest.mark.parametrize(
    ("value", "reason"),
    [(float("nan"), "is NaN"), (float("inf"), "out of range"), (-1e30, "out of range")],
)
def test_a_bad_row_is_named(settings, train_py, value, fitting, reason):
    before = cache(settings()).tensor()
    path = Path(settings().embeddings_dir) / SHARD
    shard = torch.load(path, weights_only=True)
    shard["embeddings"][5, 3] = value
    torch.save(shard, path)
    if fitting:
        _refit_checksum(path)
    harmed = content(path.parent)

    code, error = train_py(settings())
    line = one_line(error)
    assert code == 1 and f"{SHARD}, row 5 (row 37 of the data set, sample '37')" in line
    assert reason in line and "--rebuild_damaged" in line
    assert content(path.parent) == harmed and no_run(settings())
    if fitting:  # excluded only on request
        kept = opened(settings(), exclude_bad=True)
        others = torch.tensor([i for i in range(64) if i != 37])
        assert torch.equal(kept.indices, others) and torch.equal(kept.tensor(), before[others])
    with pytest.raises(NonFiniteRow if fitting else CorruptFileError):
        opened(settings())


@row(3)
def test_a_zero_embedding_is_counted_and_harms_nothing(settings, tmp_path, digits):
    x = digits[0][:64].reshape(64, -1).astype(np.float32)
    x[9] = 0
    np.savez(tmp_path / "zero.npz", features=x, labels=digits[1][:64])
    path = run(settings(dataset=str(tmp_path / "zero.npz")))
    assert opened(settings()).manifest["statistics"]["zero_rows"] == 1
    assert all_finite(path) and len(assignments(path)) == 64


HARM = {
    "one bit": flip_bit,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 3]),
}  # tests/store has other kinds


@row(4, 5)
@pytest.mark.parametrize("harm", HARM)
def test_a_damaged_shard_is_named_and_rebuilt_alone(settings, train_py, harm):
    cache(settings())
    folder = Path(settings().embeddings_dir)
    whole = content(folder)
    HARM[harm](folder / SHARD)
    damaged = content(folder)
    code, error = train_py(settings())
    line = one_line(error)
    assert code == 1 and SHARD in line
    assert "rows 32 to 47" in line and "--rebuild_damaged rebuilds this shard alone" in line
    assert content(folder) == damaged and no_run(settings())

    others = {p.name: p.stat().st_mtime_ns for p in folder.glob("*.pt") if p.name != SHARD}
    code, _ = train_py(settings(), "--rebuild_damaged")
    assert code == 0
    now = content(folder)
    assert {name: now[name] for name in whole} == whole  # the run added the neighbors
    touched = {p.name: p.stat().st_mtime_ns for p in folder.glob("*.pt") if p.name in others}
    assert touched == others


@row(6)
def test_a_foreign_cache_is_replaced_only_on_request(settings, train_py, tmp_path):
    cache(settings())
    folder = Path(settings().embeddings_dir)
    before = content(folder)
    np.savez(tmp_path / "other.npz", features=np.random.rand(50, 8), labels=np.arange(50) % 10)
    other = settings(dataset=str(tmp_path / "other.npz"))
    code, error = train_py(other)
    line = one_line(error)
    assert code == 2 and "data: cache has" in line and "teacher: cache" not in line
    assert "--force_recompute" in line and "--embeddings_dir" in line
    assert content(folder) == before and no_run(settings())
    assert train_py(other, "--force-recompute")[0] == 0
    assert opened(other).n == 50


def embed_rows(folder):
    """Embed 1,500 rows into 30 shards."""
    data = FeatureDataset("x", "train", np.random.default_rng(0).normal(size=(1500, 32)))
    precision = Precision.for_device("cpu")
    Extraction(
        data, Features(32), folder, split="train", precision=precision, shard_rows=50
    ).store()


def shards(folder):
    """Return the shards listed in the manifest, with modification times."""
    for place in (folder / "embeddings_train.partial", folder):
        manifest = place / "embeddings_train.json"
        if manifest.exists():
            names = [entry["file"] for entry in json.loads(manifest.read_bytes())["shards"]]
            files = {name: [place / name, folder / name] for name in names}
            found = {name: next(f for f in at if f.exists()) for name, at in files.items()}
            return {(name, file.stat().st_mtime_ns) for name, file in found.items()}
    return set()


@row(7)
@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_killed_at_twenty_random_positions_no_complete_shard_is_lost(tmp_path):
    found = kill_again_and_again(embed_rows, shards, tmp_path, kills=20)
    assert found.kills == 20 and found.resumed > 10
    straight = content(found.straight)
    assert len(straight) == 31  # 30 shards and the manifest
    for folder in found.folders:
        assert content(folder) == straight


@contextlib.contextmanager
def _files_up_to(size):
    """Limit files of this process to `size` bytes; writing more fails with EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _large(settings, tmp_path):
    x = np.random.default_rng(0).normal(size=(8000, 64)).astype(np.float32)  # 2 MiB
    np.savez(tmp_path / "large.npz", features=x, labels=np.arange(8000) % 10)
    return settings(dataset=str(tmp_path / "large.npz"))


@row(8)
def test_no_room_for_a_shard_leaves_the_old_cache(settings, train_py, tmp_path):
    before = cache(settings()).tensor()
    folder, large = Path(settings().embeddings_dir), _large(settings, tmp_path)
    old = content(folder)
    with _files_up_to(1 << 20):
        code, error = train_py(large, "--force-recompute")
    line = one_line(error)
    assert code == 1 and "File too large" in line and "embeddings_train.pt" in line
    assert not list(tmp_path.rglob("*.tmp")) and no_run(settings())
    now = content(folder)
    assert {name: now[name] for name in old} == old
    assert torch.equal(opened(settings()).tensor(), before)


@row(8)
def test_no_room_for_a_checkpoint_leaves_the_one_before(settings, train_py, tmp_path):
    whole = run(settings(run_name="whole", checkpoint_every=30))
    size = (whole / "checkpoint" / "step_000000030.pt").stat().st_size
    cut = settings(run_name="cut", checkpoint_every=8)

    def full_from_the_second(folder, step, tensors, write=Writer._write_checkpoint):
        with _files_up_to(size // 2 if step == 16 else size * 2):
            write(folder, step, tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Writer, "_write_checkpoint", full_from_the_second)
        code, error = train_py(cut)
    line = one_line(error)
    assert code == 1 and "File too large" in line and "step_000000016.pt" in line
    assert not list(tmp_path.rglob("*.tmp"))
    names = {path.name for path in (tmp_path / "runs/cut/checkpoint").iterdir()}
    assert names == {"step_000000008.pt", "step_000000008.sha256"}
    assert train_py(cut, "--resume")[0] == 0  # resume with enough space
    assert weights(tmp_path / "runs/cut") == weights(whole)


@row(9)
def test_awkward_images_are_decoded_or_named(settings, tmp_path, train_py):
    folder = tmp_path / "images"
    folder.mkdir()
    grey = np.full((8, 8), 64, np.uint8)
    rgb = np.stack([grey, grey * 2, grey // 2], -1)
    Image.fromarray(grey[:1, :1]).save(folder / "1x1.png")
    Image.fromarray(grey).save(folder / "grey.png")
    Image.fromarray(rgb).save(folder / "colour.png")
    Image.fromarray(np.dstack([rgb, np.zeros_like(grey)])).save(folder / "transparent.png")
    Image.fromarray(rgb).convert("CMYK").save(folder / "cmyk.tif")
    Image.fromarray(np.full((8, 8), 64 * 257, np.uint16)).save(folder / "sixteen.png")
    Image.fromarray(np.full((8, 8), 65535, np.uint16)).save(folder / "sixteen_white.png")
    frames = [Image.fromarray(grey), Image.fromarray(grey * 3)]
    frames[0].save(folder / "animated.gif", save_all=True, append_images=frames[1:])
    Image.fromarray(grey).resize((64, 64)).save(folder / "whole.jpg")
    (folder / "cut.jpg").write_bytes((folder / "whole.jpg").read_bytes()[:300])
    (folder / "noise.png").write_bytes(np.random.bytes(200))
    (folder / "empty.png").write_bytes(b"")
    options = {"teacher": "pixels", "image_size": 8, "n_clusters": 2}
    images = settings(dataset=str(folder), run_name="a", **options)

    code, error = train_py(images)
    assert code == 0, error
    store = opened(images)
    unreadable = {entry["id"]: entry["reason"] for entry in store.manifest["unreadable"]}
    assert set(unreadable) == {"cut.jpg", "noise.png", "empty.png"} and all(unreadable.values())
    shades = {name: x.view(3, -1) for name, x in zip(store.ids, store.tensor(), strict=True)}
    for name in ("1x1.png", "grey.png", "sixteen.png", "animated.gif", "whole.jpg"):
        torch.testing.assert_close(shades[name], torch.full((3, 64), 64 / 255), rtol=0, atol=0.005)
    colour = torch.tensor([[64.0], [128.0], [32.0]]).expand(3, 64) / 255
    for name in ("colour.png", "cmyk.tif"):
        torch.testing.assert_close(shades[name], colour, rtol=0, atol=0.005)
    assert (shades["transparent.png"] == 1).all()  # on a white background
    assert (shades["sixteen_white.png"] == 1).all()
    assert len(assignments(tmp_path / "runs/a")) == 9
    assert metrics(tmp_path / "runs/a")["dataset"]["unreadable"] == 3


def _features(tmp_path, digits, n, **more):
    x = digits[0][:n].reshape(n, -1).astype(np.float32)
    np.savez(tmp_path / "few.npz", features=x, **more)
    return str(tmp_path / "few.npz")


@row(10)
@pytest.mark.parametrize(
    ("n", "changes"),
    [(20, {"batch_size": 256}), (5, {"n_neighbors": 20, "n_clusters": 3}), (2, {"n_clusters": 2})],
    ids=["a batch", "k neighbors", "two samples"],
)
def test_few_samples_work(settings, tmp_path, digits, n, changes):
    data = _features(tmp_path, digits, n, labels=digits[1][:n])
    path = run(settings(dataset=data, baselines=n == 2, **changes))
    assert len(assignments(path)) == n and all_finite(path)


@row(10)
@pytest.mark.parametrize("n", [1, 5])
def test_fewer_samples_than_clusters_are_refused(settings, tmp_path, digits, n, train_py):
    few = settings(dataset=_features(tmp_path, digits, n), n_clusters=6)
    code, error = train_py(few)
    line = one_line(error)
    assert (
        code == 2
        and "N_CLUSTERS is 6" in line
        and f"expected 2 to {n}, the number of samples" in line
    )
    assert no_run(few)


@row(10)
def test_an_empty_data_set_is_refused(settings, tmp_path, train_py):
    (tmp_path / "images").mkdir()
    code, error = train_py(settings(dataset=str(tmp_path / "images"), n_clusters=2))
    assert code != 0 and "no image in" in one_line(error)
    np.savez(tmp_path / "none.npz", features=np.empty((0, 8)))
    code, error = train_py(settings(dataset=str(tmp_path / "none.npz"), n_clusters=2))
    assert code != 0 and "at least one row" in one_line(error)
    assert no_run(settings()) and not list(tmp_path.glob("embeddings/*.pt"))


@row(11)
def test_labels_of_any_kind_train_the_same_heads(settings, tmp_path, digits):
    """Check that labels do not change the trained weights, to the bit."""
    labels = digits[1][:64]
    kinds = {
        "whole": labels,
        "absent": None,
        "partly, with gaps": np.where(np.arange(64) % 2, labels * 1000 + 7, -1),
        "none known": np.full(64, -1),
        "strings": np.array([f"class {label}" for label in labels]),
    }
    found = {}
    for kind, some in kinds.items():
        data = _features(tmp_path, digits, 64, **({} if some is None else {"labels": some}))
        free = {"embeddings_dir": str(tmp_path / kind), "n_clusters": 10, "max_steps": 5}
        path = run(settings(dataset=data, run_name=kind, **free))
        found[kind] = weights(path), metrics(path)
    assert len({tensors for tensors, _ in found.values()}) == 1
    scores = {kind: numbers["table"][0]["acc"] for kind, (_, numbers) in found.items()}
    assert scores["whole"] == scores["strings"] > 0 and scores["partly, with gaps"] > 0
    assert scores["absent"] is None is scores["none known"]
    for kind in ("absent", "none known"):
        assert found[kind][1]["linear_probe"] is None is found[kind][1]["knn_accuracy"]
        assert not found[kind][1]["dataset"]["labelled"]


@row(12)
@pytest.mark.parametrize("fitting", [True, False], ids=["fitting checksum", "other checksum"])
@pytest.mark.parametrize("form", ["pickle", "torch"])
def test_code_in_a_cache_is_refused(settings, train_py, tmp_path, form, fitting):
    cache(settings())
    path, trace = Path(settings().embeddings_dir) / SHARD, tmp_path / "executed"
    if form == "pickle":
        path.write_bytes(pickle.dumps(Payload(trace)))
    else:
        torch.save({"embeddings": Payload(trace)}, path)
    if fitting:
        _refit_checksum(path)
    code, error = train_py(settings())
    assert code == 1 and SHARD in one_line(error)
    assert not trace.exists() and no_run(settings())


@row(12)
@pytest.mark.parametrize("place", ["features", "teacher's weights"])
def test_code_in_a_users_file_is_refused(settings, train_py, tmp_path, place):
    path, trace = tmp_path / "file.pt", tmp_path / "executed"
    torch.save({"features": Payload(trace)}, path)
    if place == "features":
        harmed = settings(dataset=str(path), n_clusters=2)
    else:
        harmed = settings(dataset="digits", teacher="timm:resnet18", teacher_weights=str(path))
    code, error = train_py(harmed)
    assert code != 0 and str(path) in one_line(error)
    assert not trace.exists() and no_run(settings())


@row(12)
def test_code_in_a_checkpoint_is_refused_and_the_previous_one_used(settings, tmp_path, caplog):
    whole = run(settings(run_name="whole"))
    again = shutil.copytree(whole, whole.parent / "again")
    (again / "metrics.json").unlink()
    path, trace = again / "checkpoint" / "step_000000060.pt", tmp_path / "executed"
    torch.save({"step": 60, "tensors": Payload(trace)}, path)
    path.with_suffix(".sha256").write_text(sha256_file(path))
    run(settings(run_name="again", resume=True))
    assert "before step_000000060" in caplog.text and "nothing was executed" in caplog.text
    assert not trace.exists() and weights(again) == weights(whole)


@row(13)
def test_a_second_writer_fails_clearly_and_changes_nothing(settings, train_py):
    first = cache(settings()).tensor()
    folder = Path(settings().embeddings_dir)
    before = content(folder)
    lock = folder / ".embeddings_train.lock"
    with Lock(lock):
        code, error = train_py(settings(), "--rebuild_damaged")
        line = one_line(error)
        assert code == 1 and f"process {os.getpid()} holds {lock}" in line
        assert content(folder) == before and no_run(settings())
    assert train_py(settings(), "--force-recompute")[0] == 0  # rewrites the cache as one shard
    assert torch.equal(opened(settings()).tensor(), first)


@row(14)
def test_duplicates_are_neighbors_and_the_sample_itself_is_not(settings, tmp_path, digits):
    x = digits[0][:64].reshape(64, -1).astype(np.float32)
    x[:30] = x[0]
    np.savez(tmp_path / "copies.npz", features=x, labels=digits[1][:64])
    copies = settings(dataset=str(tmp_path / "copies.npz"))
    path = run(copies)
    neighbors, _ = find_neighbors(opened(copies), 5)
    assert not (neighbors == torch.arange(64).unsqueeze(1)).any() and (neighbors[:30] < 30).all()
    assert all_finite(path)
    lines = assignments(path)[:30]
    assert len({(line["cluster"], line["confidence"]) for line in lines}) == 1


@row(85)
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, ""),
        (
            2e4,
            "1 of 64 rows are at least 30 times as large as the median row, the first is row 7 (",
        ),
        (0.0, "2 of 64 rows contain only zeros, the first is row 7"),
        ("offset", "all rows have almost the same direction"),
        ("same", "all rows are the same"),
        ("few", "3 distinct rows cannot fill 4 clusters"),
    ],
)
def test_finite_but_implausible_rows_are_reported_with_their_number(
    value, words, settings, digits, tmp_path, caplog
):
    x = digits[0][:64].reshape(64, -1).astype(np.float32)
    if value == "offset":
        x[:, 0] = 1e6
    elif isinstance(value, str):
        x = x[np.arange(64) % {"same": 1, "few": 3}[value]]
    elif value is not None:
        x[7, 3] = value
    if value == 0:
        x[[7, 9]] = 0
    np.savez(tmp_path / "odd.npz", features=x)
    trained = [lambda: MultiHeadClusterer(4, n_heads=4, max_steps=2).fit(x)]
    if value in (None, 0.0):
        odd = settings(dataset=str(tmp_path / "odd.npz"), n_clusters=4, max_steps=2)
        trained.append(lambda: run(odd))
    for train in trained:
        caplog.clear()
        train()
        warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        messages = [message for message in warnings if "rows" in message]
        assert len(messages) == (value is not None) and all(words in m for m in messages)


@row(85)
def test_a_test_set_equal_to_the_training_set_is_reported(settings, digits, tmp_path, caplog):
    x = digits[0][:64].reshape(64, -1)
    for name, rows in (("a", x), ("same", x), ("other", x[::-1])):
        np.savez(tmp_path / f"{name}.npz", features=rows)
    for test in ("other", "same"):
        caplog.clear()
        given = {"dataset": str(tmp_path / "a.npz"), "dataset_test": str(tmp_path / f"{test}.npz")}
        folder = str(tmp_path / test)
        run(settings(**given, n_clusters=4, max_steps=2, embeddings_dir=folder))
        assert ("holds the same samples as DATASET" in caplog.text) == (test == "same")
