"""Test rows 86 to 95: files are checked, omissions are reported, no code from a file runs."""

import json
import logging
import os
import pickle
import re
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from firstnan import Event
from ssl_kd import MultiHeadClusterer, cli
from ssl_kd.core.files import CorruptFileError
from ssl_kd.core.precision import Precision
from ssl_kd.core.runs.fault_bundle import save_bundle
from ssl_kd.core.shards.shards import read_manifest, write_manifest
from ssl_kd.language.models.causal import files_id
from ssl_kd.vision.data import UnreadableImage, decode, open_dataset
from ssl_kd.vision.fit import make_trainer
from ssl_kd.vision.model import ClusterModel
from ssl_kd.vision.replay import bundle_of, replay
from ssl_kd.vision.report import write_report
from ssl_kd.vision.run import run
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.teachers import Pixels
from ssl_kd.vision.train.heads import TEMIHead
from ssl_kd.vision.train.learner import HeadFault
from tests.damage import Payload
from tests.faults.inject import cache, metrics, no_run, one_line, opened, weights
from tests.faults.matrix import row

decoding = sys.modules[decode.__module__]
DIM, CLUSTERS = 4, 3


class OwnHead(TEMIHead):
    """A custom head."""


OWN = f"{OwnHead.__module__}.{OwnHead.__qualname__}"


# --- 86: a file never decides what is imported ----------------------------------------------------


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """Yield the import path of a class whose module writes `trace` when it is imported."""
    folder = tmp_path / "model"
    folder.mkdir()
    code = "import pathlib, ssl_kd.heads\npathlib.Path(__file__).with_name('trace').touch()\n"
    (folder / "evil.py").write_text(code + "class Head(ssl_kd.heads.TEMIHead):\n    pass\n")
    monkeypatch.syspath_prepend(str(folder))
    yield "evil.Head"
    sys.modules.pop("evil", None)


def saved_model(folder, head):
    """Save a model whose config.json names a head."""
    model = ClusterModel(DIM, DIM, CLUSTERS, 2, hidden_dim=6, bottleneck_dim=4)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"head": head}))
    return model


@row(86)
@pytest.mark.parametrize("kind", [MultiHeadClusterer, ClusterModel])
def test_a_head_that_a_folder_names_is_not_imported(kind, evil, tmp_path, caplog):
    folder = tmp_path / "model"
    saved_model(folder, evil)
    with pytest.raises(ValueError, match=r"config.json.* 'evil.Head'.*head='evil.Head'"):
        kind.from_pretrained(folder)
    assert not (folder / "trace").exists() and "evil" not in sys.modules
    with caplog.at_level("INFO", "ssl_kd"):  # a head that the caller names is imported
        kind.from_pretrained(folder, head=evil)
    assert (folder / "trace").exists()
    assert f"evil.Head: imported the module from {folder / 'evil.py'}" in caplog.text


@row(86)
@pytest.mark.parametrize("name", ["os.PathLike", "ssl_kd.__main__.main", "ssl_kd.cli.Head", 5, []])
def test_only_heads_of_this_library_are_imported_from_files(name, tmp_path):
    saved_model(tmp_path, name)
    with pytest.raises(ValueError, match="nothing was imported"):
        ClusterModel.from_pretrained(tmp_path)


@row(86)
def test_a_loss_named_in_a_folder_is_not_imported(tmp_path):
    saved_model(tmp_path, "ssl_kd.heads.TEMIHead")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"settings": {"LOSS": "a.B"}}))
    with pytest.raises(ValueError, match=r"loss=\'a.B\'"):
        MultiHeadClusterer.from_pretrained(tmp_path)
    assert MultiHeadClusterer.from_pretrained(tmp_path, loss="mine.Own").loss == "mine.Own"


def bundle_file(path, **changes):
    """Save a bundle of a healthy step with changed settings, and return its path."""
    settings = VisionSettings(n_heads=2, hidden_dim=8, batch_size=8)
    trainer = make_trainer(settings, DIM, CLUSTERS, Precision.for_device("cpu"))
    before = {name: tensor[:1].clone() for name, tensor in trainer.state.tensors().items()}
    event = Event(0, "head 0", "loss", "the loss is not finite", "skipped")
    views = torch.randn(2, 8, DIM)
    fault = HeadFault(0, event, torch.arange(16).view(2, 8), views, 1e-2, before, True)
    bundle = bundle_of(trainer, fault, {**vars(settings), **changes})
    save_bundle(path, bundle)
    return path


@row(86)
@pytest.mark.parametrize("what", ["head", "loss"])
def test_a_class_that_a_bundle_names_is_not_imported(what, evil, tmp_path, capfd):
    path = bundle_file(tmp_path / "b.safetensors", **{what: evil})
    assert cli.main(["replay", str(path)]) == 2
    assert f"If you trust it, use --{what} evil.Head" in one_line(capfd.readouterr().err)
    assert not (tmp_path / "model" / "trace").exists()
    with pytest.raises(ValueError, match="nothing was imported"):
        replay(path)


@row(86)
def test_a_replay_imports_the_requested_head(tmp_path, capfd):
    path = bundle_file(tmp_path / "b.safetensors", head="lost.Head")
    assert cli.main(["replay", "--head", OWN, str(path)]) == 1  # it runs and finds no fault
    assert "the same step is healthy" in capfd.readouterr().out
    assert cli.main(["replay", str(path), "--hed=x"]) == 2


# --- 87, 88: images ------------------------------------------------------------------------------


@row(87)
@pytest.mark.parametrize("name", ["photo.jpg", "photo.png", "photo.tif"])
def test_a_file_of_another_format_starts_no_program(name, tmp_path, monkeypatch):
    def started(*args, **kwargs):
        raise AssertionError("a program was started")

    monkeypatch.setattr("subprocess.check_call", started)
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", "gs")
    (tmp_path / name).write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n")
    with pytest.raises(UnreadableImage, match=f"{name}: UnidentifiedImageError"):
        decode(tmp_path / name)


def png_of_zeros(path, width, height, depth):
    """Write a gray PNG of a few kilobytes that is large when decoded."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    rows = zlib.compressobj()
    line = bytes(1 + width * depth // 8)
    data = b"".join(rows.compress(line) for _ in range(height)) + rows.flush()
    header = struct.pack(">IIBBBBB", width, height, depth, 0, 0, 0, 0)
    chunks = [chunk(b"IHDR", header), chunk(b"IDAT", data), chunk(b"IEND", b"")]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))


@row(88)
def test_an_image_that_is_too_large_decoded_is_named_and_left_out(settings, tmp_path, monkeypatch):
    folder = tmp_path / "images"
    folder.mkdir()
    for i in range(6):
        png_of_zeros(folder / f"{i}.png", 8, 8 + i, 16)
    png_of_zeros(folder / "bomb.png", 2000, 900, 16)
    monkeypatch.setattr(decoding, "LARGEST", 3 << 20)
    path = run(settings(dataset=str(folder), image_size=8, n_clusters=2))
    (left_out,) = opened(settings()).manifest["unreadable"]
    assert left_out["id"] == "bomb.png" and metrics(path)["dataset"]["unreadable"] == 1
    assert (
        "decoding 2000 x 900 pixels (I;16) takes 13 MiB; expected at most 3" in left_out["reason"]
    )


# --- 89: a cache of data or weights that changed later --------------------------------------------


@row(89)
def test_a_row_that_was_replaced_in_a_file_is_noticed(settings, tmp_path, train_py):
    x = np.random.default_rng(0).random((5000, 4), np.float32)
    np.save(tmp_path / "x.npy", x)
    large = settings(dataset=str(tmp_path / "x.npy"), n_clusters=2, max_steps=2)
    cache(large, 5000)
    x[5] += 1
    np.save(tmp_path / "x.npy", x)
    code, error = train_py(large)
    assert code == 2 and "data: cache has" in one_line(error) and no_run(large)


@row(89)
@pytest.mark.parametrize("how", ["index", "configuration", "index of .bin"])
def test_weights_under_any_name_identify_a_language_model(how, tmp_path):
    def write(name, value):
        (tmp_path / name).write_text(value if isinstance(value, str) else json.dumps(value))

    write("config.json", {"transformers_weights": "own.safetensors"} if how[0] == "c" else {})
    write("own.safetensors", "one")
    write("second.bin", "two")
    index = {"weight_map": {"a": "own.safetensors", "b": "second.bin"}}
    if how[0] == "i":
        kind = "pytorch_model.bin" if "bin" in how else "model.safetensors"
        write(f"{kind}.index.json", index)
    found = [files_id(tmp_path)]
    for name, value in (("own.safetensors", "other"), ("second.bin", "another")):
        write(name, value)
        found.append(files_id(tmp_path))
    assert len(set(found)) == (2 if how[0] == "c" else 3)
    write("config.json" if how[0] == "c" else f"{kind}.index.json", "{")
    with pytest.raises(CorruptFileError, match="is damaged"):
        files_id(tmp_path)


# --- 90: misleading columns and labels ------------------------------------------------------------


@row(90)
def test_a_shuffled_frame_gives_the_same_run_as_the_unshuffled_one(settings, tmp_path, digits):
    pandas, _ = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    flat = pandas.DataFrame({"features": [*digits[0][:64].reshape(64, -1)], "name": "x"})
    shuffled = flat.sample(frac=1, random_state=0)
    shuffled.to_parquet(tmp_path / "shuffled.parquet")
    np.save(tmp_path / "plain.npy", np.stack(shuffled["features"]))
    found = []
    for file in ("shuffled.parquet", "plain.npy"):
        folders = {"dataset": str(tmp_path / file), "embeddings_dir": str(tmp_path / file[0])}
        found.append(weights(run(settings(**folders, n_clusters=10))))
    assert found[0] == found[1]


@row(90)
def test_labels_minus_one_and_one_are_two_classes(settings, tmp_path, digits):
    flat = digits[0][:64].reshape(64, -1)
    np.savez(tmp_path / "x.npz", x=flat, y=np.where(digits[1][:64] < 5, -1, 1))
    path = run(settings(dataset=str(tmp_path / "x.npz")))
    about = metrics(path)["dataset"]
    assert about["class_names"] == ["-1", "1"] and about["n_labelled"] == 64
    assert "64 samples in the right cluster" in write_report(path).read_text()


# --- 91: unreadable files -------------------------------------------------------------------------


@pytest.fixture
def closed(monkeypatch):
    """Return `closed(path)`, which denies access to a folder or file until `closed(None)`."""
    shut: list[str] = []
    scan, opening = os.scandir, Image.open

    def refuse(path):
        if str(path) in shut:
            raise PermissionError(13, "Permission denied", str(path))

    def scandir(path="."):
        refuse(path)
        return scan(path)

    def open_image(file, *args, **kwargs):
        refuse(getattr(file, "name", file))
        return opening(file, *args, **kwargs)

    monkeypatch.setattr(os, "scandir", scandir)
    monkeypatch.setattr(Image, "open", open_image)
    return lambda path: shut.clear() if path is None else shut.append(str(path))


def save_images(folder, images):
    folder.mkdir(parents=True)
    for i, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{i:02}.png")


@row(91)
def test_a_folder_that_may_not_be_listed_is_named(settings, tmp_path, digits, closed, caplog):
    for name, rows in (("one", slice(20)), ("two", slice(20, 40)), ("three", slice(40, 60))):
        save_images(tmp_path / "images" / name, digits[0][rows])
    closed(tmp_path / "images" / "two")
    odd = settings(dataset=str(tmp_path / "images"), image_size=8, n_clusters=2)
    path = run(odd)
    (left_out,) = opened(odd).manifest["unreadable"]
    assert (left_out["id"], left_out["reason"]) == ("two", "a folder that cannot be listed")
    assert "1 of 41 samples of train are left out: two (a folder that cannot be" in caplog.text
    assert "Left out as unreadable: 1 sample." in write_report(path).read_text()
    closed(tmp_path / "images")
    with pytest.raises(PermissionError, match="the folder cannot be listed"):
        run(odd)


@row(91)
def test_a_temporarily_missing_file_is_named_until_it_is_embedded(
    settings, tmp_path, digits, closed, caplog
):
    save_images(tmp_path / "images", digits[0][:20])
    odd = settings(dataset=str(tmp_path / "images"), image_size=8, n_clusters=2, max_steps=2)
    closed(tmp_path / "images" / "07.png")
    run(odd)
    before = opened(odd).tensor()
    for _ in range(2):  # in every run that uses the cache
        caplog.clear()
        run(odd)
        assert "1 of 20 samples of train are left out: 07.png (PermissionError" in caplog.text
        assert "can be read now" not in caplog.text
    closed(None)
    run(odd)
    assert (
        "1 left-out samples can be read now, first 07.png: to embed them, add --rebuild"
        in caplog.text
    )
    run(odd.replace(rebuild_damaged=True))
    store = opened(odd)
    assert store.n == 20 and not store.manifest["unreadable"] and store.ids[7] == "07.png"
    others = torch.tensor([i for i in range(20) if i != 7])
    assert torch.equal(store.tensor()[others], before)
    caplog.clear()
    run(odd)
    assert "left out" not in caplog.text


# --- 92: a manifest of another version, or a forged one -------------------------------------------


@row(92)
def test_a_manifest_with_other_fields_stops_a_run_until_it_is_forced(settings, train_py):
    before = cache(settings()).tensor()
    path = Path(settings().embeddings_dir) / "embeddings_train.json"
    write_manifest(path, {name: v for name, v in read_manifest(path).items() if name != "dim"})
    code, error = train_py(settings())
    assert code == 1 and "fields dim are missing" in one_line(error) and no_run(settings())
    assert train_py(settings(force_recompute=True))[0] == 0
    assert torch.equal(opened(settings()).tensor(), before)


# --- 93: a model's file that is damaged -----------------------------------------------------------


@row(93)
@pytest.mark.parametrize("kind", [MultiHeadClusterer, ClusterModel])
@pytest.mark.parametrize("damage", ["cut", "another model's", "config", "[1]", '{"settings": 1}'])
def test_a_damaged_model_is_named(kind, damage, tmp_path):
    saved_model(tmp_path, "ssl_kd.heads.TEMIHead")
    file = tmp_path / (
        "config.json" if damage[0] in "[{" or damage == "config" else "model.safetensors"
    )
    if damage == "another model's":
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"n_heads": 3}))
    else:
        file.write_bytes(damage.encode() if damage[0] in "[{" else file.read_bytes()[:-20])
    with pytest.raises(CorruptFileError, match=re.escape(str(file))) as refused:
        kind.from_pretrained(tmp_path)
    assert "\n" not in str(refused.value)


# --- 94: deceptive names --------------------------------------------------------------------------


@row(94)
def test_a_file_name_forges_no_line_and_sends_nothing_to_the_terminal(
    settings, tmp_path, digits, train_py, monkeypatch
):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    save_images(tmp_path / "images", digits[0][:20])
    forged = "a.png\nssl_kd: all is well\x1b[2J\u202e.png"
    (tmp_path / "images" / forged).write_bytes(b"no image")
    odd = settings(dataset=str(tmp_path / "images"), image_size=8, n_clusters=2, max_steps=2)
    code, error = train_py(odd)
    assert code == 0 and "\x1b" not in error and "\u202e" not in error
    assert not [line for line in error.splitlines() if line.startswith("ssl_kd: ")]
    assert "a.png\\nssl_kd: all is well\\x1b[2J\\u202e.png" in error
    for path in (tmp_path / "images").glob("[0-9]*"):
        path.write_bytes(b"no image")
    code, error = train_py(odd.replace(embeddings_dir=str(tmp_path / "other")))
    assert code == 2 and "\x1b" not in error and "not one of the 21" in one_line(error)


# --- 95: a teacher that fails ---------------------------------------------------------------------


class Fussy(Pixels):
    """A custom teacher that fails on one image, in `preprocess` or `embed`."""

    where = "preprocess"

    def __init__(self):
        super().__init__(8, 8, color=False)

    def preprocess(self, image):
        if self.where == "preprocess" and np.asarray(image).max() == 255:
            raise MemoryError("no room")
        return super().preprocess(image)

    def embed(self, batch):
        if self.where == "embed" and batch.max() == 255:
            raise IndexError("too bright")
        return super().embed(batch)


@row(95)
@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("preprocess", "05.png (row 5 of {}) cannot be prepared for the teacher {}: MemoryError"),
        ("embed", "teacher {1} fails on the batch of 00.png to 19.png: IndexError: too bright"),
    ],
)
def test_a_teacher_that_fails_names_the_image(
    settings, tmp_path, digits, train_py, monkeypatch, where, words
):
    images = digits[0][:20] // 2
    images[5] = 255
    save_images(tmp_path / "images", images)
    monkeypatch.setattr(Fussy, "where", where)
    name = f"{__name__}.Fussy"
    odd = settings(dataset=str(tmp_path / "images"), teacher=name)
    code, error = train_py(odd.replace(n_clusters=2))
    line = one_line(error)
    named = words.format(odd.dataset, f"'{name} (pixels)'")
    assert code == 1 and named in line and no_run(odd)


# --- found by testers --------------------------------------------------------------------------


@row(179)
def test_a_pickle_in_the_place_of_imagenets_meta_file_is_not_run(tmp_path):
    folder = tmp_path / "imagenet"
    for name in ("train/n01/a.png", "val/n01/b.png"):
        (folder / name).parent.mkdir(parents=True)
        Image.new("L", (3, 3)).save(folder / name)
    (folder / "meta.bin").write_bytes(pickle.dumps(Payload(tmp_path / "trace")))
    assert len(open_dataset("imagenet", "train", root=tmp_path)) == 1
    assert not (tmp_path / "trace").exists()


@row(177)
def test_zeros_that_were_trained_on_are_never_typical():
    x = np.random.default_rng(0).normal(size=(60, 9)).astype(np.float32)
    x[::2] = 0
    clusterer = MultiHeadClusterer(2, method="heads", n_heads=2, max_steps=2, device="cpu").fit(x)
    assert (clusterer.outlier_score_[::2] == 1).all()
    assert (clusterer.outlier_scores(np.full((3, 9), -7.0)) == 1).all()
    assert clusterer.outlier_score_[1::2].mean() < 0.8


@row(178)
@pytest.mark.parametrize(("distinct", "wanted"), [(40, 39), (40, 40), (3, 6), (1, 2)])
def test_clusters_that_a_vote_leaves_empty_are_filled_or_counted(distinct, wanted, caplog):
    rows = np.random.default_rng(0).normal(size=(distinct, 5))
    x = np.repeat(rows, 2, axis=0)
    options: Any = {"n_heads": 2, "max_steps": 2, "hidden_dim": 4}
    clusterer = MultiHeadClusterer(wanted, method="heads", device="cpu", **options).fit(x)
    kept = min(distinct, wanted)
    assert len(set(clusterer.labels_)) == kept
    assert (f"{wanted - kept} of the {wanted} clusters stay empty" in caplog.text) == (
        kept < wanted
    )
