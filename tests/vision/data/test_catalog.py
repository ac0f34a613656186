from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from ssl_kd.vision.data import (
    ArrayDataset,
    DatasetUnavailable,
    DatasetUnreachable,
    FeatureDataset,
    FolderDataset,
    NoSuchSplit,
    open_dataset,
)


def picture(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (3, 3)).save(path)


def test_digits_are_split_once_and_for_all():
    train, test = open_dataset("digits", "train"), open_dataset("digits", "test")
    assert isinstance(train, ArrayDataset) and isinstance(test, ArrayDataset)
    assert (len(train), len(test)) == (1437, 360)
    assert not set(train.ids) & set(test.ids)
    data: Any = load_digits()
    for part in (train, test):
        rows = [int(name.split("/")[1]) for name in part.ids]
        assert part.arrays is not None and part.labels is not None
        np.testing.assert_array_equal(part.arrays, data.images[rows] * 15)
        np.testing.assert_array_equal(part.labels, data.target[rows])
        assert np.bincount(part.labels).min() > 0.7 * len(part) / 10
    assert train.class_names == tuple("0123456789")
    assert open_dataset("digits", "train").fingerprint == train.fingerprint != test.fingerprint


@pytest.mark.parametrize("test_folder", ["test", "val", "Valid", "DEV"])
def test_folder_with_splits(tmp_path, test_folder):
    for name in ("train/ant/a.png", "train/bee/b.png", f"{test_folder}/bee/c.png"):
        picture(tmp_path / name)
    train = open_dataset(str(tmp_path), "train", labels="folders")
    test = open_dataset(str(tmp_path), "test", labels="folders")
    assert isinstance(train, FolderDataset) and isinstance(test, FolderDataset)
    assert train.ids == ["ant/a.png", "bee/b.png"] and test.ids == ["bee/c.png"]
    # The test split lacks a class, and numbers the others as training does.
    assert test.labels is not None and test.labels.tolist() == [1]
    assert test.class_names == train.class_names == ("ant", "bee")
    assert open_dataset(str(tmp_path), "test").labels is None  # not asked for


def opened(root, split="train", **options):
    """Return the ids, the class names and what is left out of one split of a folder."""
    data = open_dataset(str(root), split, **options)
    return data.ids, data.class_names, [str(part) for part in data.usage.left_out]


SPLIT_NAMES = [["bus", "car", "train"], ["bus", "Test"], ["train", "truck"], ["test", "val"]]


@pytest.mark.parametrize("names", SPLIT_NAMES)
def test_a_class_with_the_name_of_a_split_is_a_class(tmp_path, names):
    for name in names:
        picture(tmp_path / name / "a.png")
    ids, classes, left_out = opened(tmp_path, labels="folders")
    assert classes == tuple(sorted(names))
    assert ids == [f"{name}/a.png" for name in sorted(names)]
    assert left_out == []
    with pytest.raises(NoSuchSplit):
        opened(tmp_path, "test")
    assert opened(tmp_path, "test", whole=True)[0] == ids


def test_a_folder_train_beside_loose_images_is_a_folder_and_alone_it_is_the_split(tmp_path):
    picture(tmp_path / "train" / "ant" / "a.png")
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "a.txt").write_text("0")
    assert opened(tmp_path, labels="folders")[:2] == (["ant/a.png"], ("ant",))
    picture(tmp_path / "loose.png")
    assert opened(tmp_path)[0] == ["loose.png", "train/ant/a.png"]


def test_images_beside_the_splits_are_left_out_by_name_and_number(tmp_path):
    for name in ("train/a.png", "train/train/b.png", "test/c.png", "d.png"):
        picture(tmp_path / name)
    for i in range(3):
        picture(tmp_path / "valid" / f"{i}.png")
        picture(tmp_path / "unlabeled" / "deep" / f"{i}.png")
    ids, _, left_out = opened(tmp_path)
    splits = "the splits are train/ and test/"
    assert ids == ["a.png", "train/b.png"] and opened(tmp_path, "test") == (["c.png"], None, [])
    assert left_out == [
        f"1 image: {splits}",
        f"3 images in unlabeled/: {splits}; to use them: --dataset {tmp_path}/unlabeled",
        f"3 images in valid/: {splits}; to use them: --dataset_test {tmp_path}/valid",
    ]


def test_an_unlabeled_folder_beside_the_split_is_not_a_class(tmp_path):
    for name in ("train/ant/a.png", "train/bee/b.png", "unlabeled/c.png"):
        picture(tmp_path / name)
    ids, classes, left_out = opened(tmp_path, labels="folders")
    assert classes == ("ant", "bee") and len(ids) == 2
    assert left_out[0].startswith("1 image in unlabeled/: the splits are train/")


def test_fashion_mnist_from_the_original_archives(shared_data, tmp_path):
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for archive in (shared_data / "images" / "fashion_mnist").glob("*.gz"):
        (raw / archive.name).symlink_to(archive)
    test = open_dataset("fashion_mnist", "test", root=tmp_path)
    assert isinstance(test, ArrayDataset) and test.arrays is not None
    assert test.arrays.shape == (10000, 28, 28) and test.arrays.dtype == np.uint8
    assert test.labels is not None and np.bincount(test.labels).tolist() == [1000] * 10
    assert test.class_names is not None and test.class_names[9] == "Ankle boot"
    assert test.image(0).mode == "L"
    assert len(open_dataset("fashion_mnist", "train", root=tmp_path)) == 60000


@pytest.mark.parametrize("name", ["cifar10", "fashion_mnist", "imagenet"])
def test_a_missing_set_is_one_line_with_the_way_on(tmp_path, name):
    with pytest.raises(DatasetUnavailable) as error:
        open_dataset(name, "train", root=tmp_path)
    message = str(error.value)
    assert "\n" not in message and str(tmp_path) in message and name in message
    assert ("ILSVRC2012" if name == "imagenet" else "--download") in message
    assert not list(tmp_path.rglob("*.t*gz*"))


def test_a_failed_download_is_one_line(tmp_path, monkeypatch):
    from torchvision import datasets

    def refuse(*args, download, **kwargs):
        assert download
        raise OSError("<urlopen error\nno route>")

    monkeypatch.setattr(datasets, "CIFAR10", refuse)
    with pytest.raises(DatasetUnreachable, match="cifar10 could not be downloaded.*no route"):
        open_dataset("cifar10", "train", root=tmp_path, download=True)


def test_torchvision_sets_become_arrays(tmp_path, monkeypatch):
    from torchvision import datasets

    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (2, 3, 96, 96), dtype=np.uint8)
    stl = SimpleNamespace(data=images, labels=np.array([0, 9]), classes=[*"abcdefghij"])
    flat = rng.integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    cifar = SimpleNamespace(data=flat, targets=[2, 0, 1], classes=["x", "y", "z"])
    monkeypatch.setattr(datasets, "STL10", lambda root, split, download: stl)
    monkeypatch.setattr(datasets, "CIFAR10", lambda root, train, download: cifar)
    stl10 = open_dataset("stl10", "test", root=tmp_path)
    cifar10 = open_dataset("cifar10", "test", root=tmp_path)
    assert isinstance(stl10, ArrayDataset) and isinstance(cifar10, ArrayDataset)
    np.testing.assert_array_equal(stl10.arrays, images.transpose(0, 2, 3, 1))
    assert stl10.labels is not None and stl10.labels.tolist() == [0, 9]
    np.testing.assert_array_equal(cifar10.arrays, flat)
    assert cifar10.labels is not None and cifar10.labels.tolist() == [2, 0, 1]
    assert cifar10.class_names == ("x", "y", "z")


def test_feature_file_and_its_test_file(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, 3)).astype(np.float32)
    np.savez(tmp_path / "mine_train.npz", x=x, y=np.array([3, 5, 9, 3, 5, 9]))
    np.savez(tmp_path / "mine_test.npz", x=x[:2], y=np.array([9, 3]))
    train = open_dataset(str(tmp_path / "mine_train.npz"), "train")
    test = open_dataset(str(tmp_path / "mine_train.npz"), "test")
    assert isinstance(train, FeatureDataset) and isinstance(test, FeatureDataset)
    assert train.labels is not None and test.labels is not None
    assert train.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert test.labels.tolist() == [2, 0] and test.class_names == ("3", "5", "9")
    np.save(tmp_path / "alone.npy", x)
    with pytest.raises(NoSuchSplit):
        open_dataset(str(tmp_path / "alone.npy"), "test")


def test_unknown_names_get_a_hint():
    with pytest.raises(DatasetUnavailable, match="did you mean 'cifar10'"):
        open_dataset("cifar-10", "train")
    with pytest.raises(ValueError, match="split is 'val'; expected"):
        open_dataset("digits", "val")  # type: ignore[arg-type]
