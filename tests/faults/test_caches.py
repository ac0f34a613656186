"""Test rows 165 to 167 and 170: caches with impossible content, and folders of caches."""

import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from ssl_kd.core.files import CorruptFileError, load_tensors, save_tensors, sha256_file
from ssl_kd.core.shards import Fingerprint
from ssl_kd.core.shards.shards import read_manifest, write_manifest
from ssl_kd.vision import run as run_module
from ssl_kd.vision.cache import EmbeddingStore, EmbeddingWriter
from ssl_kd.vision.run import run
from ssl_kd.vision.settings import VisionSettings
from tests.faults.matrix import row

N, D = 10, 4
FINGERPRINT = Fingerprint("pixels", "none", "28px", "float32", "digits")
NAME = "embeddings_train"


@pytest.fixture
def folder(tmp_path):
    x, ids = torch.arange(N * D).reshape(N, D).float() + 1, [f"é{i}" for i in range(N)]
    labels = torch.arange(N) % 2
    options = {"ids": ids, "labels": labels, "class_names": ["a", "b"], "shard_rows": 5}
    with EmbeddingWriter(tmp_path / "cache", "train", FINGERPRINT, N, D, **options) as writer:
        writer.append(x, torch.arange(N))
    return tmp_path / "cache"


def refused(folder, **options):
    """Return the one-line error of opening a cache."""
    with pytest.raises(CorruptFileError) as error:
        EmbeddingStore.open(folder, "train", **options)
    line = str(error.value)
    assert str(folder) in line and "\n" not in line and len(line) < 1500
    return line


def at(*path, value):
    """Return a change that sets the manifest entry at `path`."""

    def change(manifest):
        *inner, last = path
        for key in inner:
            manifest = manifest[key]
        manifest[last] = value

    return change


MANIFESTS = {
    "shard_rows 0": at("shard_rows", value=0),
    "shard_rows negative": at("shard_rows", value=-5),
    "shard_rows a boolean": at("shard_rows", value=True),
    "shard_rows huge": at("shard_rows", value=10**30),
    "n huge": at("n", value=2**52),
    "n 0": at("n", value=0),
    "dim 0": at("dim", value=0),
    "dim huge": at("dim", value=2**40),
    "dim a boolean": at("dim", value=True),
    "dtype load": at("dtype", value="load"),
    "dtype complex": at("dtype", value="complex64"),
    "no shards": at("shards", value=[]),
    "half of the shards": lambda m: m["shards"].pop(),
    "shards in another order": lambda m: m["shards"].reverse(),
    "a shard twice": lambda m: m["shards"].append(m["shards"][1]),
    "a file of another": at("shards", 1, "file", value=NAME + "_00000.pt"),
    "a file above": at("shards", 1, "file", value="../" + NAME + "_00001.pt"),
    "an absolute file": at("shards", 1, "file", value="/dev/zero"),
    "a file with NUL": at("shards", 1, "file", value="a\0b"),
    "a shard's rows": at("shards", 1, "rows", value=2**50),
    "a shard's rows, a boolean": at("shards", 1, "rows", value=True),
    "a shard's start": at("shards", 1, "start", value=7),
    "a shard's stop": at("shards", 1, "stop", value=2**50),
    "a shard's bytes": at("shards", 1, "bytes", value=3),
    "a shard's statistics": at("shards", 1, "statistics", value={}),
    "a shard's statistics of text": at("shards", 1, "statistics", "mean_norm", value="x"),
    "statistics": at("statistics", value={}),
    "unreadable": at("unreadable", value=[{"row": 1, "id": "a", "reason": "b"}]),
    "a shard's unreadable": at("shards", 1, "unreadable", value=[{"row": "x"}]),
    "class names of numbers": at("class_names", value=[1, 2]),
    "fewer class names": at("class_names", value=["a"]),
    "a teacher of numbers": at("fingerprint", "teacher", value=7),
    "brackets": lambda m: None,
    "another encoding": lambda m: None,
}
OTHER_VERSIONS = {  # by the field that is named
    "colour": at("fingerprint", "colour", value="red"),
    "weights": lambda m: m["fingerprint"].pop("weights"),
    "fingerprint": at("fingerprint", value=[]),
    "dim": lambda m: m.pop("dim"),
    "float12": at("dtype", value="float12"),
    "sha256": lambda m: m["shards"][1].pop("sha256"),
    "file, rows": at("shards", 1, value="x"),
    "shards": at("shards", value={}),
    "unreadable": at("unreadable", value=3),
}


@row(92, 165)
@pytest.mark.parametrize("harm", [*MANIFESTS, *OTHER_VERSIONS])
def test_invalid_manifests_are_refused_despite_a_matching_checksum(folder, harm):
    path = folder / f"{NAME}.json"
    if harm == "brackets":
        path.write_text("[" * 100_000)
    elif harm == "another encoding":
        path.write_bytes(b"\xff\xfe{")
    else:
        manifest = read_manifest(path)
        (MANIFESTS | OTHER_VERSIONS)[harm](manifest)
        write_manifest(path, manifest)
    line = refused(folder, verify=False)
    assert "--" in line
    if harm in OTHER_VERSIONS:
        assert f"{path} was written by another version of ssl_kd (" in line and harm in line
        assert "--force_recompute" in line
    with EmbeddingWriter(
        folder, "train", FINGERPRINT, N, D, ids=[str(i) for i in range(N)], force=True
    ) as writer:
        writer.append(torch.ones(N, D), torch.arange(N))
    assert EmbeddingStore.open(folder, "train").n == N


def column(name, change):
    def harm(shard):
        shard[name] = change(shard[name])

    return harm


def text(value):
    return lambda ids: torch.frombuffer(bytearray(value), dtype=torch.uint8)


SHARDS = {
    "sparse": column("embeddings", torch.Tensor.to_sparse),
    "sparse by rows": column("embeddings", torch.Tensor.to_sparse_csr),
    "quantized": column("embeddings", lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)),
    "complex": column("embeddings", lambda x: x.to(torch.complex64)),
    "meta": column("embeddings", lambda x: x.to("meta")),
    "nested": column("embeddings", lambda x: torch.nested.nested_tensor(list(x))),
    "expanded": column("embeddings", lambda x: x[:1, :1].clone().expand(5, D)),
    "double": column("embeddings", torch.Tensor.double),
    "a list": column("embeddings", torch.Tensor.tolist),
    "wider": column("embeddings", lambda x: torch.cat([x, x], 1)),
    "no ids": lambda shard: shard.pop("ids"),
    "ids cut": column("ids", lambda ids: ids[:-3].clone()),
    "ids with NUL": column("ids", lambda ids: torch.cat([ids, torch.zeros(1, dtype=torch.uint8)])),
    "ids not UTF-8": column("ids", text(b'["\xff", "b", "c", "d", "e"]')),
    "ids of numbers": column("ids", text(b"[1, 2, 3, 4, 5]")),
    "fewer ids": column("ids", text(b'["a"]')),
    "ids an object": column("ids", text(b'{"a": 1}')),
    "ids a number": column("ids", text(b"5")),
    "ids of brackets": column("ids", text(b"[" * 100_000)),
    "ids of a list": column("ids", torch.Tensor.tolist),
    "ids wide": column("ids", torch.Tensor.long),
    "indices of others": column("indices", lambda rows: rows + 5),
    "indices backwards": column("indices", lambda rows: rows.flip(0)),
    "indices negative": column("indices", lambda rows: rows - 9),
    "labels beyond": column("labels", lambda labels: labels + 7),
    "labels below": column("labels", lambda labels: labels - 9),
}


@row(165)
@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:.*nested", "ignore:.*quantize")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("harm", SHARDS)
def test_invalid_shards_are_refused_despite_a_matching_checksum(folder, harm):
    path = folder / f"{NAME}_00000.pt"
    shard = load_tensors(path)
    SHARDS[harm](shard)
    save_tensors(path, shard)
    manifest = read_manifest(folder / f"{NAME}.json")
    manifest["shards"][0] |= {"sha256": sha256_file(path), "bytes": path.stat().st_size}
    write_manifest(folder / f"{NAME}.json", manifest)
    assert "--" in refused(folder)


@row(166)
@pytest.mark.skipif(os.name == "nt", reason="needs devices and pipes")
@pytest.mark.parametrize("file", [f"{NAME}.json", f"{NAME}_00000.pt"])
@pytest.mark.parametrize("kind", ["device", "link to a device", "pipe", "folder"])
def test_a_device_a_pipe_and_a_folder_are_not_read(folder, file, kind):
    path = folder / file
    path.unlink()
    if "device" in kind:
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    for verify in (True, False):
        assert "expected a regular file" in refused(folder, verify=verify)
    with pytest.raises(CorruptFileError, match="expected a regular file"):
        load_tensors(path)


@row(166)
def test_a_link_to_a_shard_on_another_disk_is_read(folder, tmp_path):
    path = folder / f"{NAME}_00000.pt"
    path.rename(tmp_path / "elsewhere.pt")
    path.symlink_to(tmp_path / "elsewhere.pt")
    assert EmbeddingStore.open(folder, "train").tensor().shape == (N, D)


@row(166)
@pytest.mark.parametrize("how", ["deflated", "overlapping"])
def test_a_zip_that_is_larger_inside_is_refused_before_it_is_inflated(tmp_path, how, monkeypatch):
    path = tmp_path / "x.pt"
    torch.save({"x": torch.zeros(1 << 20)}, tmp_path / "y.pt")
    kind = zipfile.ZIP_DEFLATED if how == "deflated" else zipfile.ZIP_STORED
    with zipfile.ZipFile(tmp_path / "y.pt") as old, zipfile.ZipFile(path, "w", kind) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
        if how == "overlapping":
            new.filelist.append(new.getinfo("y/data/0"))
    assert path.stat().st_size < (5 << 20)
    monkeypatch.setattr(torch, "load", lambda *a, **k: pytest.fail("it was read"))
    with pytest.raises(CorruptFileError, match="compressed or overlap"):
        load_tensors(path)


# --- --force-recompute -------------------------------------------------------------------------


@row(167)
def test_force_recompute_embeds_everything_each_time(settings, train_py, caplog):
    run(settings())
    folder = Path(settings().embeddings_dir)
    for _ in range(2):
        before = {path.name: path.stat().st_ino for path in folder.glob("embeddings_*.pt")}
        code, _ = train_py(settings(), "--force-recompute")
        assert code == 0
        after = {path.name: path.stat().st_ino for path in folder.glob("embeddings_*.pt")}
        assert after and not before.items() & after.items()
    assert caplog.text.count("Embedded all 64 samples of train again") == 2


# --- a folder for each data set and teacher -------------------------------------------------


def plain(tmp_path, **changes):
    common = {"device": "cpu", "runs_dir": str(tmp_path / "runs"), "n_clusters": 3, "max_steps": 2}
    quick = {"n_heads": 2, "baselines": False}
    return VisionSettings(**common, **quick, **changes)


@row(170)
def test_each_data_set_and_teacher_has_a_cache_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    top = Path("data/embeddings")
    run(plain(tmp_path))
    first = {path.name: path.read_bytes() for path in top.glob("embeddings_*")}
    assert torch.load(top / f"{NAME}.pt", weights_only=True)["embeddings"].shape == (1437, 64)
    rng, caches = np.random.default_rng(0), set()
    for file in ("a b/x.npy", "ü/x.npy"):  # equal names, different content
        Path(file).parent.mkdir()
        np.save(file, rng.random((60, 5), np.float32))
        for _ in range(2):
            path = run(plain(tmp_path, dataset=file))
            config = json.loads((path / "config.json").read_text())
            cache = Path(config["settings"]["EMBEDDINGS_DIR"])
            assert cache.parent == top and cache.name.startswith("x.npy-features-")
            caches.add(cache)
    np.save("ü/x.npy", rng.random((60, 5), np.float32))  # changed content
    run(plain(tmp_path, dataset="ü/x.npy"))
    run(plain(tmp_path))
    assert len(caches) == 2 and len(list(top.glob("x.npy-features-*"))) == 3
    assert first.items() <= {p.name: p.read_bytes() for p in top.glob("embeddings_*")}.items()


@row(170)
@pytest.mark.parametrize(
    "name", [".", "../..", "-", "a" * 300, "\udcff", "名前", "a\nb", "con"], ids=ascii
)
def test_a_cache_folder_has_a_name_that_a_file_system_takes(name, monkeypatch):
    monkeypatch.setattr(run_module, "fingerprint", lambda *given: FINGERPRINT)
    settings, teacher = VisionSettings(), type("T", (), {"name": "timm:a/b.c" * 30})
    object.__setattr__(settings, "dataset", name)
    folder = run_module.cache_folder(settings, {"train": None}, teacher, None)
    assert folder.parent == Path("data/embeddings") and len(os.fsencode(folder.name)) < 250
    assert folder.name.isprintable() and not folder.name.startswith(".")
