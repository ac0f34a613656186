import os
import pickle
import re

import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from safetensors.torch import save_file

from ssl_kd.core.errors import InputError
from ssl_kd.vision.data import FeatureDataset, UnreadableImage, open_features
from ssl_kd.vision.data.features import class_numbers
from tests.damage import Payload

X = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
Y = np.array([2, 0, 1, 2, 0])


def write_npy(path):
    np.save(path, X)
    np.save(path.with_name("f_labels.npy"), Y)


def write_table(path, **columns):
    parquet.write_table(pyarrow.table(columns), path)
    return path


NAMES = [f"s{i}" for i in range(5)]
WRITERS = {
    "npy": write_npy,
    "npz": lambda p: np.savez(p, features=X, labels=Y),
    "pt": lambda p: torch.save({"embeddings": torch.tensor(X), "labels": torch.tensor(Y)}, p),
    "safetensors": lambda p: save_file({"x": torch.tensor(X), "y": torch.tensor(Y)}, p),
    "parquet": lambda p: write_table(p, embedding_=Y, features=list(X), label=Y, id=NAMES),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_every_format_gives_the_same(tmp_path, kind):
    path = tmp_path / f"f.{kind}"
    WRITERS[kind](path)
    data = open_features(path)
    np.testing.assert_array_equal(data.features, X)
    assert data.labels is not None and data.labels.tolist() == Y.tolist()
    assert data.class_names == ("0", "1", "2")
    assert data.ids == (NAMES if kind == "parquet" else [*"01234"])
    assert len(data) == 5


@pytest.mark.parametrize("name", ["clip_emb", "a.b ☃"])
def test_the_only_list_column_has_the_features_whatever_its_name(tmp_path, name, caplog):
    caplog.set_level("INFO", "ssl_kd")
    path = write_table(tmp_path / "f.parquet", **{name: list(X), "label": Y, "url": ["a"] * 5})
    data = open_features(path)
    np.testing.assert_array_equal(data.features, X)
    assert data.labels is not None and data.labels.tolist() == Y.tolist()


def test_one_of_several_list_columns_must_be_chosen(tmp_path):
    two = {"clip": list(X), "dino": list(X * 2)}
    with pytest.raises(InputError, match="2 columns of lists, clip, dino: .*--column clip"):
        open_features(write_table(tmp_path / "f.parquet", **two))
    found = open_features(write_table(tmp_path / "g.parquet", **two, x=list(X * 3)))
    np.testing.assert_array_equal(found.features, X * 3)


@pytest.mark.parametrize("kind", ["parquet", "npz", "pt", "safetensors"])
def test_a_column_is_chosen_by_name(tmp_path, kind):
    path = tmp_path / f"f.{kind}"
    arrays = {"features": X, "mine": X * 2, "y": Y}
    tensors = {name: torch.tensor(values) for name, values in arrays.items()}
    write = {
        "parquet": lambda: write_table(path, features=list(X), mine=list(X * 2), y=Y),
        "npz": lambda: np.savez(path, **arrays),
        "pt": lambda: torch.save(tensors, path),
        "safetensors": lambda: save_file(tensors, path),
    }
    write[kind]()
    data = open_features(path, column="mine")
    np.testing.assert_array_equal(data.features, X * 2)
    assert data.features.dtype == np.float32
    assert data.labels is not None and data.labels.tolist() == Y.tolist()
    assert data.fingerprint != open_features(path, column="features").fingerprint
    with pytest.raises(InputError, match="has no column 'min'.*did you mean 'mine'") as error:
        open_features(path, column="min")
    assert "\n" not in str(error.value)


def test_a_column_that_holds_no_lists_or_cannot_be_is_refused(tmp_path):
    path = write_table(tmp_path / "f.parquet", clip=list(X), age=Y, **{"a\nb": Y})
    for column, message in (
        ("age", "COLUMN is 'age', whose type in .* is int64; expected lists"),
        ("Clip\n", "did you mean 'clip'"),
        ("", "has no column ''; expected one of clip, age"),
    ):
        with pytest.raises(InputError, match=message) as error:
            open_features(path, column=column)
        assert "\n" not in str(error.value)
    np.save(tmp_path / "f.npy", X)
    torch.save(torch.tensor(X), tmp_path / "f.pt")
    for name in ("f.npy", "f.pt"):
        with pytest.raises(InputError, match="one array without a name: remove --column"):
            open_features(tmp_path / name, column="clip")


# --- Pictures of rows ---------------------------------------------------------------------------


def pictured(folder, paths, **columns):
    """A file of features beside one picture, `a.png`, and its column of paths."""
    Image.new("RGB", (4, 4), "red").save(folder / "a.png")
    return write_table(folder / "f.parquet", clip=list(X), shown=paths, **columns)


@pytest.mark.parametrize("absolute", [False, True])
def test_a_column_of_image_paths_gives_the_pictures(tmp_path, absolute):
    name = str(tmp_path / "a.png") if absolute else "a.png"
    data = open_features(pictured(tmp_path, [None, name, name, "", name], note=["x.png y"] * 5))
    assert data.pictured and data.rows.image(1).getpixel((0, 0)) == (255, 0, 0)
    assert data.rows.image_file(4) == tmp_path / "a.png"
    for row in (0, 3):  # null and empty
        for give in (data.rows.image, data.rows.image_file):
            with pytest.raises(UnreadableImage, match="is not an image file"):
                give(row)


@pytest.mark.parametrize(
    "path",
    ["secret.txt", "text.png", "pipe.png", "link.png", "folder.png", "x\0.png", "é" * 400 + ".png",
     "/dev/zero", "gone.png", "\ud7ff\n.png"],
)  # fmt: skip
def test_only_image_files_are_opened_by_path(tmp_path, path):
    for name in ("secret.txt", "text.png"):
        (tmp_path / name).write_text("secret")
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "link.png").symlink_to("secret.txt")
    data = open_features(pictured(tmp_path, ["a.png", None, None, None, path]))
    if data.pictured:  # not where a row names no image at all
        for give in (data.rows.image, data.rows.image_file):
            with pytest.raises(UnreadableImage) as error:
                give(4)
            assert "\n" not in str(error.value)
    assert data.pictured == (path.endswith(".png"))


def test_urls_are_not_pictures_and_that_is_logged(tmp_path, caplog):
    caplog.set_level("INFO")
    urls = [f"https://example.org/{i}.jpg" for i in range(5)]
    data = open_features(pictured(tmp_path, urls))
    assert not data.pictured and "no images are shown, since the column shown" in caplog.text


def test_npy_stays_on_disk_and_labels_are_optional(tmp_path):
    np.save(tmp_path / "f.npy", X)
    data = open_features(tmp_path / "f.npy")
    assert isinstance(data.features, np.memmap)
    assert data.labels is None and data.class_names is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_plain_tensors_of_types_that_numpy_lacks(tmp_path, dtype):
    x = torch.tensor(X).to(dtype)
    torch.save(x, tmp_path / "f.pt")
    assert open_features(tmp_path / "f.pt").features.tolist() == x.float().tolist()


def test_a_pickle_with_code_is_refused(tmp_path):
    marker = str(tmp_path / "executed")
    torch.save({"features": Payload(marker)}, tmp_path / "f.pt")
    (tmp_path / "g.pt").write_bytes(pickle.dumps(Payload(marker), protocol=2))
    np.save(tmp_path / "f.npy", np.array([Payload(marker)], dtype=object), allow_pickle=True)
    for name in ("f.pt", "g.pt", "f.npy"):
        with pytest.raises(ValueError, match="nothing was executed|Python objects") as refused:
            open_features(tmp_path / name)
        advice = ("weights_only", "allow_pickle", "unsafe", "likely succeed", "\n", "\x1b")
        assert not [word for word in advice if word in str(refused.value)]
    assert not os.path.exists(marker)


@pytest.mark.filterwarnings("ignore:Validating sparse tensor")
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(3, 2).to_sparse(), "pass a dense tensor"),
        ([[1.0, 2.0], [3.0]], "inhomogeneous"),
        (torch.zeros(3, 2, dtype=torch.complex64), "expected numbers"),
        (torch.zeros(3, 0), "expected numbers"),
    ],
)
def test_values_that_are_not_plain_numbers_are_refused_in_one_line(tmp_path, value, words):
    torch.save({"features": value}, tmp_path / "f.pt")
    with pytest.raises(ValueError, match=re.escape(words)) as refused:
        open_features(tmp_path / "f.pt")
    assert "f.pt" in str(refused.value) and "\n" not in str(refused.value)


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
    with pytest.raises(ValueError, match="contains \\['something'\\]"):
        open_features(path)
    np.savez(path, x=X, junk=np.array([Payload("/nowhere")], dtype=object))
    assert open_features(path).features.tolist() == X.tolist()  # nothing else is read
    for bad in (X[0], np.zeros((0, 3)), np.array([["a"]]), np.zeros((2, 2, 2))):
        np.savez(path, x=bad)
        with pytest.raises(ValueError, match="expected numbers"):
            open_features(path)
    np.savez(path, x=X, y=Y[:2])
    with pytest.raises(ValueError, match="has 2 labels; expected 5"):
        open_features(path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
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
        ([-1, 1, -1], [0, 1, 0], ("-1", "1")),
        ([1.0, -1.0, float("nan")], [1, 0, -1], ("-1", "1")),
        ([-1, 1, 0], [-1, 1, 0], ("0", "1")),
        ([-2, 1, 1], [-1, 0, 0], ("1",)),
        ([b"b", None, b""], [0, -1, -1], ("b",)),
        ([b"\xe9", b"b"], [0, 1], ("\\xe9", "b")),
        (["\ud800", "b"], [0, 1], ("\\ud800", "b")),
    ],
)
def test_any_labels_become_numbers(labels, numbers, names):
    got, found = class_numbers(labels)
    assert got.dtype == np.int64 and got.tolist() == numbers and found == names


def test_labels_that_cannot_be_classes_are_refused():
    with pytest.raises(ValueError, match="labels contain fractions"):
        class_numbers([0.5, 1.0])
    with pytest.raises(ValueError, match="expected \\[samples\\]"):
        class_numbers(np.eye(2))
    for huge in ([1e30, 2e30], np.array([1, 2**64 - 1], np.uint64)):
        with pytest.raises(ValueError, match="below 2\\*\\*63"):
            class_numbers(huge)
    with pytest.raises(ValueError, match="expected classes of the other split"):
        class_numbers(["new"], ("old",))
    assert class_numbers(["b"], ("a", "b"))[0].tolist() == [1]
    assert class_numbers([-1, -1], ("-1", "1"))[0].tolist() == [0, 0]


# --- Parquet ------------------------------------------------------------------------------------


def test_a_table_without_a_list_column_is_described(tmp_path):
    path = write_table(tmp_path / "f.parquet", a=X[:, 0], y=Y)
    with pytest.raises(ValueError, match=r"has the columns \['a', 'y'\]; expected a column with a"):
        open_features(path)


def test_the_use_of_labels_is_logged(tmp_path, caplog):
    caplog.set_level("INFO", "ssl_kd")
    np.savez(tmp_path / "f.npz", x=X, y=[-1, 1, 1, -1, 1])
    assert open_features(tmp_path / "f.npz").class_names == ("-1", "1")
    assert "the labels -1 and 1 are used as two classes" in caplog.text
    np.savez(tmp_path / "f.npz", x=X, y=[-1, 1, 0, -1, 1])
    assert open_features(tmp_path / "f.npz").class_names == ("0", "1")
    assert "2 of 5 samples have no label" in caplog.text


@pytest.mark.parametrize(
    "kind", [pyarrow.list_(pyarrow.float32()), pyarrow.list_(pyarrow.float32(), 2)]
)
def test_missing_lists_are_rows_without_features(tmp_path, kind):
    lists = [[1.0, 2.0], None, [3.0, None], [5.0, 6.0]]
    data = open_features(write_table(tmp_path / "f.parquet", x=pyarrow.array(lists, kind)))
    assert data.features[[0, 3]].tolist() == [[1, 2], [5, 6]]
    assert data.missing == {1: "features are NaN or missing", 2: "features contain NaN"}


def test_lists_of_every_kind_are_features(tmp_path):
    flat = pyarrow.array(X.ravel())
    rows = [row.tolist() for row in X]
    for column in (
        pyarrow.FixedShapeTensorArray.from_numpy_ndarray(X),
        pyarrow.FixedSizeListArray.from_arrays(flat, 3),
        pyarrow.array(rows, pyarrow.large_list(pyarrow.float32())),
    ):
        data = open_features(write_table(tmp_path / "f.parquet", vector=column, tags=[["a"]] * 5))
        np.testing.assert_array_equal(data.features, X)


def test_lists_of_different_lengths_are_refused(tmp_path):
    for lists, message in (
        ([[1.0, 2.0], [1.0]], r"f.parquet.*column x have the lengths \[1, 2\]"),
        ([None, []], "column x are empty"),
    ):
        path = write_table(
            tmp_path / "f.parquet", x=pyarrow.array(lists, pyarrow.list_(pyarrow.float32()))
        )
        with pytest.raises(ValueError, match=message):
            open_features(path)
    empty = pyarrow.array([[], [1.0], None], pyarrow.list_(pyarrow.float32()))
    assert list(open_features(write_table(tmp_path / "f.parquet", x=empty)).missing) == [0, 2]


# --- Rows without features ------------------------------------------------------------------------


def test_rows_that_are_not_finite_are_missing_and_named(tmp_path):
    x = X.astype(np.float64)
    x[1, 0], x[3, 2], x[4, 1] = np.nan, -np.inf, 1e39  # too large for float32
    np.savez(tmp_path / "f.npz", x=x, ids=NAMES)
    data = open_features(tmp_path / "f.npz")
    infinite = "features contain infinity"
    assert data.missing == {1: "features contain NaN", 3: infinite, 4: infinite}
    assert data.usage.used.startswith("2 rows of features, 3 wide")
    whats = {part.what: list(part.names) for part in data.usage.left_out}
    assert whats == {"1 of 5 rows": ["row 1 (s1)"], "2 of 5 rows": ["row 3 (s3)", "row 4 (s4)"]}


def with_zeros(x, rows=(2, 5)):
    x = np.array(x)
    x[list(rows)] = 0
    return x


def test_rows_of_zeros_among_embeddings_are_missing():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 8)).astype(np.float32)
    relu = np.where(rng.random((50, 8)) < 0.05, 0, np.abs(x))  # a few zeros in every row
    for features in (with_zeros(x), with_zeros(relu), -with_zeros(x).astype(np.float16)):
        missing = FeatureDataset("f", "train", features).missing
        assert list(missing) == [2, 5] and "zero" in missing[2]


def test_rows_of_zeros_may_be_samples():
    rng = np.random.default_rng(0)
    dense = rng.normal(size=(50, 8))
    sparse = np.where(rng.random((50, 8)) < 0.5, 0, dense)  # such as TF-IDF
    for features in (
        with_zeros(rng.poisson(5, (50, 8))),  # counts
        with_zeros(rng.integers(0, 2, (50, 8)).astype(np.float32)),  # bits
        with_zeros(sparse),
        with_zeros(dense, [2]),  # one row may be the origin
        np.zeros((5, 3)),
    ):
        assert FeatureDataset("f", "train", features).missing == {}
