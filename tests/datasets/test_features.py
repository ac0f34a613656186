import os
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ssl_kd.datasets import open_features
from ssl_kd.datasets.features import class_numbers
from tests.damage import Payload

X = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
Y = np.array([2, 0, 1, 2, 0])


def write_npy(path):
    np.save(path, X)
    np.save(path.with_name("f_labels.npy"), Y)


def write_parquet_list(path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"embedding_": Y, "features": list(X), "label": Y}), path)


def write_parquet_wide(path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {f"f{i}": X[:, i] for i in range(3)} | {"y": Y, "id": [f"s{i}" for i in range(5)]}
    parquet.write_table(pyarrow.table(columns), path)


WRITERS = {
    "npy": write_npy,
    "npz": lambda p: np.savez(p, features=X, labels=Y),
    "pt": lambda p: torch.save({"embeddings": torch.tensor(X), "labels": torch.tensor(Y)}, p),
    "safetensors": lambda p: save_file({"x": torch.tensor(X), "y": torch.tensor(Y)}, p),
    "parquet": write_parquet_list,
    "wide.parquet": write_parquet_wide,
}


@pytest.mark.parametrize("kind", WRITERS)
def test_every_format_gives_the_same(tmp_path, kind):
    path = tmp_path / f"f.{kind}"
    WRITERS[kind](path)
    data = open_features(path)
    np.testing.assert_array_equal(data.features, X)
    assert data.labels is not None and data.labels.tolist() == Y.tolist()
    assert data.class_names == ("0", "1", "2")
    assert data.ids == [f"s{i}" if kind == "wide.parquet" else str(i) for i in range(5)]
    assert len(data) == 5


def test_npy_stays_on_disk_and_labels_are_optional(tmp_path):
    np.save(tmp_path / "f.npy", X)
    data = open_features(tmp_path / "f.npy")
    assert isinstance(data.features, np.memmap)
    assert data.labels is None and data.class_names is None


def test_labels_that_are_all_unknown_count_as_none(tmp_path):
    np.savez(tmp_path / "f.npz", x=X, y=np.full(5, -1))
    data = open_features(tmp_path / "f.npz")
    assert data.labels is None and data.class_names is None


def test_plain_tensors_and_bfloat16(tmp_path):
    torch.save(torch.tensor(X).bfloat16(), tmp_path / "f.pt")
    data = open_features(tmp_path / "f.pt")
    np.testing.assert_allclose(data.features, X, rtol=1e-2)


def test_a_pickle_with_code_is_refused(tmp_path):
    marker = str(tmp_path / "executed")
    torch.save({"features": Payload(marker)}, tmp_path / "f.pt")
    (tmp_path / "g.pt").write_bytes(pickle.dumps(Payload(marker)))
    np.save(tmp_path / "f.npy", np.array([Payload(marker)], dtype=object), allow_pickle=True)
    for name in ("f.pt", "g.pt", "f.npy"):
        with pytest.raises(ValueError, match="is not a readable"):
            open_features(tmp_path / name)
    assert not os.path.exists(marker)


@pytest.mark.parametrize("kind", ["npy", "npz", "pt", "safetensors", "parquet"])
@pytest.mark.parametrize("content", [b"", b"\x00\x01garbage" * 9])
def test_broken_files_are_named(tmp_path, kind, content):
    path = tmp_path / f"f.{kind}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"f\.{kind}") as error:
        open_features(path)
    assert "\n" not in str(error.value)


def test_unfit_contents_are_described(tmp_path):
    path = tmp_path / "f.npz"
    np.savez(path, something=X)
    with pytest.raises(ValueError, match="holds \\['something'\\]"):
        open_features(path)
    for bad in (X[0], np.zeros((0, 3)), np.array([["a"]]), np.zeros((2, 2, 2))):
        np.savez(path, x=bad)
        with pytest.raises(ValueError, match="must be numbers"):
            open_features(path)
    np.savez(path, x=X, y=Y[:2])
    with pytest.raises(ValueError, match="5 rows of features, 2 labels"):
        open_features(path)
    with pytest.raises(FileNotFoundError, match="no file"):
        open_features(tmp_path / "absent.npy")


@pytest.mark.parametrize(
    ("labels", "numbers", "names"),
    [
        (["dog", "cat", "dog"], [1, 0, 1], ("cat", "dog")),
        ([7, 3, 7], [1, 0, 1], ("3", "7")),
        ([-1, 3, 5], [-1, 0, 1], ("3", "5")),
        ([1.0, float("nan"), 0.0], [1, -1, 0], ("0", "1")),
        ([None, "b", ""], [-1, 0, -1], ("b",)),
        ([True, False, True], [1, 0, 1], ("0", "1")),
        ([b"b", b"a", b"b"], [1, 0, 1], ("a", "b")),
        ([-1, -1], [-1, -1], ()),
    ],
)
def test_any_labels_become_numbers(labels, numbers, names):
    got, found = class_numbers(labels)
    assert got.dtype == np.int64 and got.tolist() == numbers and found == names


def test_labels_that_cannot_be_classes_are_refused():
    with pytest.raises(ValueError, match="fractions"):
        class_numbers([0.5, 1.0])
    with pytest.raises(ValueError, match="must be \\[samples\\]"):
        class_numbers(np.eye(2))
    with pytest.raises(ValueError, match="not among"):
        class_numbers(["new"], ("old",))
    assert class_numbers(["b"], ("a", "b"))[0].tolist() == [1]


def test_fingerprint_follows_values_and_labels(tmp_path):
    def fingerprint(x, y):
        np.savez(tmp_path / "f.npz", x=x, y=y)
        return open_features(tmp_path / "f.npz").fingerprint

    first = fingerprint(X, Y)
    assert fingerprint(X, Y) == first
    assert fingerprint(X + 1, Y) != first and fingerprint(X, Y[::-1]) != first
