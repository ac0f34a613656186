"""Several files of one data set: shards and splits of Parquet files."""

import numpy as np
import pyarrow as arrow
import pytest
from PIL import Image
from pyarrow import parquet

from ssl_kd.core.errors import InputError
from ssl_kd.vision.data import FeatureDataset, NoSuchSplit, open_dataset, open_features
from ssl_kd.vision.data.catalog import open_rows

X = np.arange(24, dtype=np.float32).reshape(12, 2)


def write(path, rows, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow.table({"clip": list(X[rows]), **columns}), path)
    return path


def shards(folder, name="train", total=3):
    n = len(X) // total
    paths = [folder / f"{name}-{k:05}-of-{total:05}.parquet" for k in range(total)]
    for k, path in enumerate(paths):
        rows = slice(k * n, (k + 1) * n)
        write(path, rows, note=[f"{name}{row}" for row in range(rows.start, rows.stop)])
    return paths


def test_one_shard_stands_for_all(tmp_path):
    paths = shards(tmp_path)
    shards(tmp_path, "other")
    for path in (paths[0], paths[2]):
        data = open_features(path)
        assert np.array_equal(data.features, X) and "read from 3 files" in data.usage.used
        rows = open_rows(str(path), "train", column=None, media=None)
        assert rows.columns()["note"].to_pylist() == [f"train{row}" for row in range(12)]
    paths[1].unlink()
    missing = "one of 3 shards, but 1 of them is missing .* train-00001-of-00003.parquet"
    for path in (paths[0], paths[2]):
        with pytest.raises(InputError, match=missing):
            open_features(path)
        with pytest.raises(InputError, match=missing):
            open_dataset(str(path), "train")
    alone = write(tmp_path / "x-00000-of-00001.parquet", slice(0, 5))
    assert len(open_features(alone)) == 5


@pytest.mark.parametrize(
    "names",
    [
        [f"train-{k:05}-of-00012.parquet" for k in range(12)],
        [f"data/{k:05}.parquet" for k in range(12)],
        [f"img_emb_{k}.parquet" for k in range(12)],
        [f"train/{k:04}.parquet" for k in range(12)],
        [f"part-{k:05}-0f1e2d3c-aaaa-4bbb-8c0c-01ab-c000.snappy.parquet" for k in range(12)],
    ],
)
def test_a_folder_of_shards_is_read_whole_and_in_order(tmp_path, names):
    for row, name in enumerate(names):
        write(tmp_path / name, slice(row, row + 1))
    (tmp_path / "README.md").write_text("a data set")
    data = open_dataset(str(tmp_path), "train")
    assert isinstance(data, FeatureDataset) and np.array_equal(data.features, X)
    with pytest.raises(NoSuchSplit):
        open_dataset(str(tmp_path), "test")


def test_splits_of_a_folder_are_read_or_named(tmp_path):
    shards(tmp_path / "data", "train")
    shards(tmp_path / "data", "test", total=1)
    shards(tmp_path / "data", "validation", total=2)
    train = open_dataset(str(tmp_path), "train")
    assert len(train) == 12 and len(open_dataset(str(tmp_path), "test")) == 12
    assert [part.what for part in train.usage.left_out] == [f"split validation of {tmp_path}"]
    first = tmp_path / "data" / "train-00000-of-00003.parquet"
    test = open_rows(str(first), "test", column=None, media=None)
    assert test.columns()["note"][0].as_py() == "test0"
    (tmp_path / "data" / "validation-00000-of-00002.parquet").unlink()
    with pytest.raises(InputError, match="validation-00000-of-00002.parquet"):
        open_dataset(str(tmp_path), "train")


def test_tables_that_do_not_belong_together_are_refused_by_name(tmp_path):
    write(tmp_path / "cats.parquet", slice(0, 6))
    write(tmp_path / "dogs.parquet", slice(6, 12))
    with pytest.raises(InputError, match=r"several tables, such as cats.parquet, dogs.parquet"):
        open_dataset(str(tmp_path), "train")
    (tmp_path / "cats.parquet").rename(tmp_path / "dogs_2.parquet")
    assert len(open_dataset(str(tmp_path), "train")) == 12
    write(tmp_path / "dogs_3.parquet", slice(0, 2), age=[1, 2])
    with pytest.raises(InputError, match=r"dogs_3.parquet .*only one of them has the column 'age'"):
        open_dataset(str(tmp_path), "train")
    parquet.write_table(arrow.table({"clip": ["a", "b"]}), tmp_path / "dogs_3.parquet")
    with pytest.raises(InputError, match=r"dogs_3.parquet and .* are not shards of one table"):
        open_dataset(str(tmp_path), "train")


def test_shards_of_different_types_form_one_table(tmp_path):
    write(tmp_path / "0.parquet", slice(0, 6), label=arrow.array([None] * 6, arrow.null()))
    write(tmp_path / "1.parquet", slice(6, 12), label=arrow.array([0, 1] * 3, arrow.int32()))
    data = open_dataset(str(tmp_path), "train")
    assert data.labels.tolist() == [-1] * 6 + [0, 1] * 3


def test_shards_of_arrays_are_refused(tmp_path):
    for k in range(2):
        np.save(tmp_path / f"x-0000{k}-of-00002.npy", X)
    with pytest.raises(InputError, match="one of 2 shards, which are read together only from Par"):
        open_features(tmp_path / "x-00000-of-00002.npy")


def test_images_beside_a_table_are_a_folder_of_images(tmp_path):
    write(tmp_path / "metadata.parquet", slice(0, 2))
    Image.new("L", (3, 3)).save(tmp_path / "a.png")
    assert open_dataset(str(tmp_path), "train").ids == ["a.png"]
