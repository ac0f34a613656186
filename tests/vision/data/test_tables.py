"""Tables of embeddings: AnnData, saved Hugging Face data sets, and what their rows are."""

import io
from typing import Any

import datasets
import numpy as np
import pyarrow as arrow
import pytest
from PIL import Image
from pyarrow import parquet

from ssl_kd.core.errors import InputError
from ssl_kd.vision.data import (
    FeatureDataset,
    ImageDataset,
    UnreadableImage,
    open_dataset,
    open_features,
)
from ssl_kd.vision.data.catalog import open_rows
from ssl_kd.vision.data.media import LARGEST_SOUND

X = np.arange(12, dtype=np.float32).reshape(6, 2)


def rows_of(path, media=None, **options):
    return open_rows(str(path), "train", **{"column": None, "media": media, **options})


def opened(path, column=None):
    data = open_dataset(str(path), "train", column=column)
    assert isinstance(data, FeatureDataset)
    return data


def test_h5ad(tmp_path):
    """A file as anndata 0.8 and later write it."""
    h5py, path = pytest.importorskip("h5py"), tmp_path / "cells.h5ad"
    with h5py.File(path, "w") as file:
        obs = file.create_group("obs")
        obs.attrs["_index"] = "_index"
        obs["_index"] = [f"cell{i}" for i in range(6)]
        for name, codes in {"label": [0, 1, -1, 0, 1, 0], "tissue": [1] * 6}.items():
            obs[f"{name}/codes"], obs[f"{name}/categories"] = np.int8(codes), ["B", "T"]
        obs["n_genes"] = obs["age/values"] = np.arange(6)
        obs["age/mask"] = np.arange(6) == 1
        file["obsm/X_pca"], file["obsm/X_umap"] = X, -X
        file["X/data"], file["X/indices"] = np.ones(3), [0, 2, 1]
        file["X/indptr"] = [0, 2, 3, 3, 3, 3, 3]
        file["X"].attrs.update({"encoding-type": "csr_matrix", "shape": [6, 3]})
    data = opened(path)
    assert np.array_equal(data.features, X) and data.ids[5] == "cell5"
    assert data.labels.tolist() == [0, 1, -1, 0, 1, 0] and data.class_names == ("B", "T")
    genes = opened(path, "X").features
    assert genes.tolist() == [[1, 0, 1], [0, 1, 0], *[[0, 0, 0]] * 4]
    assert np.array_equal(opened(path, "X_umap").features, -X)
    columns = {name: values.to_pylist() for name, values in rows_of(path).columns().items()}
    assert columns["tissue"] == ["T"] * 6 and columns["n_genes"] == [*range(6)]
    assert columns["age"] == [0, None, 2, 3, 4, 5] and len(columns) == 3
    with pytest.raises(InputError, match="has no column 'X_pcb'.*did you mean 'X_pca'"):
        opened(path, "X_pcb")


@pytest.mark.parametrize("is_on_hub", [False, True])
def test_data_sets_of_hugging_face_with_pictures(tmp_path, is_on_hub):
    pictures: list[Any] = [Image.new("RGB", (4, 4), color) for color in ("red", "blue") * 3]
    pictures[2:4] = [{"bytes": b"x", "path": None}, None]
    columns = {"clip": list(X), "photo": pictures, "label": [0, 1] * 3, "note": ["a", None] * 3}
    data = datasets.Dataset.from_dict(columns).cast_column("photo", datasets.Image())
    data = data.cast_column("label", datasets.ClassLabel(names=["dog", "cat"]))
    path = tmp_path / ("data.parquet" if is_on_hub else "data")
    if is_on_hub:
        data.to_parquet(path)
    else:
        datasets.DatasetDict({"train": data, "validation": data.select([0])}).save_to_disk(path)
        assert len(open_dataset(str(path), "test")) == 1
    data, rows = opened(path), rows_of(path)
    assert np.array_equal(data.features, X) and data.pictured
    assert [(data.class_names or ())[k] for k in data.labels.tolist()] == ["dog", "cat"] * 3
    assert rows.image(1).getpixel((0, 0)) == (0, 0, 255) and rows.image_file(1) is None
    assert rows.columns()["note"].to_pylist() == ["a", None] * 3
    for damaged in (2, 3):
        with pytest.raises(UnreadableImage):
            rows.image(damaged)


def write(folder, **columns):
    parquet.write_table(arrow.table({"clip": list(X), **columns}), folder / "f.parquet")
    return folder / "f.parquet"


def test_displayed_values_are_found_by_filters(tmp_path):
    (tmp_path / "a.wav").write_bytes(b"RIFF")
    Image.new("L", (2, 2)).save(tmp_path / "a.png")
    sounds, links = ["a.wav", None] * 3, ["https://example.org/a.png"] * 6
    path = write(
        tmp_path, n=range(6), sound=sounds, url=links, text=["words"] * 6, photo=["a.png"] * 6
    )
    assert rows_of(path).media == {"kind": "image", "column": "photo"}
    for name, kind in {"sound": "audio", "url": "url", "text": "text"}.items():
        assert rows_of(path, name).kind == kind
    with pytest.raises(InputError, match="--media is 'n', whose type in .* is int64"):
        rows_of(path, "n")
    assert rows_of(write(tmp_path, url=links)).kind == "url"
    assert rows_of(write(tmp_path, url=links, text=["a"] * 6)).kind == "text"
    assert rows_of(write(tmp_path, title=["a"] * 6)).media is None


# --- Pictures without features ------------------------------------------------------------------


def content(color, kind="PNG"):
    file = io.BytesIO()
    Image.new("RGB", (4, 4), color).save(file, kind)
    return file.getvalue()


COLORS = ["red", "blue"] * 3


@pytest.mark.parametrize("kind", ["parquet", "saved", "bytes", "paths"])
def test_a_table_of_pictures_is_a_data_set_of_images(tmp_path, kind):
    pictures: Any = [{"bytes": content(color), "path": None} for color in COLORS]
    if kind in ("parquet", "saved"):
        data = datasets.Dataset.from_dict({"image": pictures, "label": [0, 1] * 3})
        data = data.cast_column("image", datasets.Image())
        data = data.cast_column("label", datasets.ClassLabel(names=["dog", "cat"]))
        path = tmp_path / kind
        data.save_to_disk(path) if kind == "saved" else data.to_parquet(
            path := tmp_path / "f.parquet"
        )
    else:
        for row, color in enumerate(COLORS):
            (tmp_path / f"{row}.png").write_bytes(content(color))
        column = [f"{row}.png" for row in range(6)]
        if kind == "bytes":
            column = [content(color, "JPEG") for color in COLORS]
        path = tmp_path / "f.parquet"
        parquet.write_table(arrow.table({"jpg": column, "label": ["dog", "cat"] * 3}), path)
    data = open_dataset(str(path), "train")
    assert isinstance(data, ImageDataset) and len(data) == 6 and data.pictured
    assert data.class_names == ("cat", "dog") and data.labels.tolist() == [1, 0] * 3
    assert np.asarray(data.image(1))[0, 0, 2] > 250
    assert (data.image_file(1) is not None) == (kind == "paths")
    assert (
        data.usage.used.startswith("6 pictures; ") and "labels from column label" in data.usage.used
    )
    with pytest.raises(InputError, match="holds images, but no features"):
        open_features(path)


def test_the_fingerprint_of_a_table_of_pictures_is_that_of_its_content(tmp_path):
    def digest(colors):
        parquet.write_table(arrow.table({"png": [*map(content, colors)]}), tmp_path / "f.parquet")
        return open_dataset(str(tmp_path / "f.parquet"), "train").fingerprint

    first = digest(COLORS)
    assert digest(COLORS) == first != digest(COLORS[::-1])
    (tmp_path / "a.png").write_bytes(content("red"))
    parquet.write_table(arrow.table({"png": ["a.png"]}), tmp_path / "f.parquet")
    by_path = open_dataset(str(tmp_path / "f.parquet"), "train").fingerprint
    (tmp_path / "a.png").write_bytes(content("blue"))
    assert open_dataset(str(tmp_path / "f.parquet"), "train").fingerprint != by_path


def test_pictures_are_embedded_instead_of_features_on_request(tmp_path):
    masks = [content("white")] * 6
    path = write(tmp_path, jpg=[*map(content, COLORS)], mask=masks, hash=[b"abc"] * 6)
    data = opened(path)
    assert data.pictured and data.rows.image(0).getpixel((0, 0)) == (255, 0, 0)
    notes = {part.what: part.reason for part in data.usage.left_out}
    assert "--column mask" in notes["column mask"] and "not shown" in notes["column hash"]
    pictures = open_dataset(str(path), "train", column="mask")
    assert isinstance(pictures, ImageDataset)
    assert pictures.image(0).getpixel((0, 0)) == (255, 255, 255)
    with pytest.raises(InputError, match="COLUMN is 'hash', whose type in .* is binary"):
        opened(path, "hash")


def test_a_broken_or_missing_picture_of_a_table_is_unreadable(tmp_path):
    pictures = [content("red"), b"no picture", None, b""] + [content("blue")] * 2
    parquet.write_table(arrow.table({"webp": pictures}), tmp_path / "f.parquet")
    assert len(broken := opened_pictures(tmp_path / "f.parquet")) == 6
    for row in (1, 2, 3):
        with pytest.raises(UnreadableImage):
            broken.image(row)


def opened_pictures(path):
    data = open_dataset(str(path), "train")
    assert isinstance(data, ImageDataset)
    return data


def test_texts_that_are_long_or_not_utf8(tmp_path):
    broken = arrow.array([b"\xff<b>", b"x" * 10_000_000, "é".encode() * 9000, b"", None, b"a"])
    texts = arrow.Array.from_buffers(arrow.string(), 6, broken.buffers())
    rows = rows_of(write(tmp_path, text=texts))
    shown = [rows.text(row) for row in range(6)]
    assert shown == ["\\xff<b>", "x" * 10_000_000, "é" * 9000, "", "", "a"]
    assert rows.columns()["text"].to_pylist() == [*shown[:4], None, "a"]


def test_only_sound_files_are_served(tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "good.wav").write_bytes(b"x")
    (tmp_path / "link.wav").symlink_to("secret.txt")
    (tmp_path / "folder.wav").mkdir()
    with open(tmp_path / "large.wav", "wb") as file:
        file.truncate(LARGEST_SOUND + 1)
    hostile = ["/etc/passwd", "link.wav", "folder.wav", "../../etc/passwd", "/dev/zero\0.wav"]
    names = [*["good.wav"] * 20, *hostile, "large.wav"]  # the first 20 rows say what the column is
    table = arrow.table({"clip": [[1.0]] * len(names), "sound": names})
    parquet.write_table(table, tmp_path / "f.parquet")
    rows = rows_of(tmp_path / "f.parquet")
    assert rows.sound(0) == ("audio/wav", b"x")
    assert [rows.sound(row) for row in range(20, len(names))] == [None] * 6
