import datetime
import decimal
import os
import pickle
import re

import numpy as np
import pytest
import scipy.sparse
import torch
from PIL import Image
from safetensors.torch import save_file

from ssl_kd.datasets import UnreadableImage, open_features
from ssl_kd.datasets.features import class_numbers
from ssl_kd.errors import InputError
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


def list_columns(path, **columns):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), path)
    return path


@pytest.mark.parametrize("name", ["embedding", "clip_emb", "vector ☃", "a.b", "Features"])
def test_the_only_list_column_is_taken_whatever_it_is_called(tmp_path, name):
    path = list_columns(tmp_path / "f.parquet", **{name: list(X), "label": Y, "url": ["a"] * 5})
    data = open_features(path)
    np.testing.assert_array_equal(data.features, X)
    assert data.labels is not None and data.labels.tolist() == Y.tolist()


def test_of_several_list_columns_one_is_to_be_called_the_features(tmp_path):
    two = {"clip": list(X), "dino": list(X * 2)}
    with pytest.raises(InputError, match="2 columns of lists, clip, dino: .*--column clip"):
        open_features(list_columns(tmp_path / "f.parquet", **two))
    found = open_features(list_columns(tmp_path / "g.parquet", **two, x=list(X * 3)))
    np.testing.assert_array_equal(found.features, X * 3)


@pytest.mark.parametrize("kind", ["parquet", "npz", "pt", "safetensors"])
def test_a_column_is_taken_by_its_name(tmp_path, kind):
    path = tmp_path / f"f.{kind}"
    arrays = {"features": X, "mine": X * 2, "y": Y}
    tensors = {name: torch.tensor(values) for name, values in arrays.items()}
    write = {
        "parquet": lambda: list_columns(path, features=list(X), mine=list(X * 2), y=Y),
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
    path = list_columns(tmp_path / "f.parquet", clip=list(X), age=Y, **{"a\nb": Y})
    for column, message in (
        ("age", "its column 'age' is int64, expected lists"),
        ("Clip\n", "did you mean 'clip'"),
        ("", "has no column '', only clip, age"),
    ):
        with pytest.raises(InputError, match=message) as error:
            open_features(path, column=column)
        assert "\n" not in str(error.value)
    np.save(tmp_path / "f.npy", X)
    torch.save(torch.tensor(X), tmp_path / "f.pt")
    for name in ("f.npy", "f.pt"):
        with pytest.raises(InputError, match="one array without a name: leave --column out"):
            open_features(tmp_path / name, column="clip")


def test_a_column_of_categories_is_no_column_of_lists(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    kinds = pyarrow.array(list("aabba")).dictionary_encode()
    data = open_features(list_columns(tmp_path / "f.parquet", clip=list(X), kind=kinds))
    np.testing.assert_array_equal(data.features, X)


@pytest.mark.parametrize("rows", [[[1.0, None], [2.0, 3.0]], [[1.0], [2.0, 3.0]], [None, [1.0]]])
def test_lists_with_gaps_are_refused(tmp_path, rows):
    with pytest.raises(InputError, match="clip are of several lengths or null"):
        open_features(list_columns(tmp_path / "f.parquet", clip=rows))


# --- Pictures of rows ---------------------------------------------------------------------------


def pictured(folder, paths, **columns):
    """A file of features beside one picture, `a.png`, and its column of paths."""
    Image.new("RGB", (4, 4), "red").save(folder / "a.png")
    return list_columns(folder / "f.parquet", clip=list(X), shown=paths, **columns)


@pytest.mark.parametrize("absolute", [False, True])
def test_a_column_of_image_paths_gives_the_pictures(tmp_path, absolute):
    name = str(tmp_path / "a.png") if absolute else "a.png"
    data = open_features(pictured(tmp_path, [None, name, name, "", name], note=["x.png y"] * 5))
    assert data.pictured and data.image(1).getpixel((0, 0)) == (255, 0, 0)
    assert data.image_file(4) == tmp_path / "a.png"
    for row in (0, 3):  # null and empty
        for give in (data.image, data.image_file):
            with pytest.raises(UnreadableImage, match="no image file"):
                give(row)


def test_columns_of_numbers_have_pictures_too(tmp_path, caplog):
    Image.new("L", (4, 4)).save(tmp_path / "a.png")
    data = open_features(
        list_columns(tmp_path / "f.parquet", a=X[:, 0], b=X[:, 1], p=["a.png"] * 5)
    )
    assert data.features.shape == (5, 2) and data.image(2).size == (4, 4)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize(
    "path",
    ["secret.txt", "text.png", "pipe.png", "link.png", "folder.png", "x\0.png", "é" * 400 + ".png",
     "/dev/zero", "../../../../../etc/passwd", "gone.png", "https://a.org/a.png", "\ud7ff\n.png"],
)  # fmt: skip
def test_only_images_are_given_out_by_a_path(tmp_path, path):
    for name in ("secret.txt", "text.png"):
        (tmp_path / name).write_text("secret")
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "link.png").symlink_to("secret.txt")
    data = open_features(pictured(tmp_path, ["a.png", None, None, None, path]))
    if data.pictured:  # not where a row names no image at all
        for give in (data.image, data.image_file):
            with pytest.raises(UnreadableImage) as error:
                give(4)
            assert "\n" not in str(error.value)
    assert data.pictured == (path.endswith(".png"))


def test_addresses_are_no_pictures_and_that_is_logged(tmp_path, caplog):
    caplog.set_level("INFO")
    urls = [f"https://example.org/{i}.jpg" for i in range(5)]
    data = open_features(pictured(tmp_path, urls))
    assert not data.pictured and "no picture is shown, for its column shown" in caplog.text


def test_a_sparse_matrix_of_scipy_is_refused_by_name(tmp_path):
    scipy.sparse.save_npz(tmp_path / "s.npz", scipy.sparse.csr_array(X))
    with pytest.raises(InputError, match=r"s.npz is a sparse matrix of SciPy.*toarray\(\)"):
        open_features(tmp_path / "s.npz")


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
    (tmp_path / "g.pt").write_bytes(pickle.dumps(Payload(marker), protocol=2))
    np.save(tmp_path / "f.npy", np.array([Payload(marker)], dtype=object), allow_pickle=True)
    for name in ("f.pt", "g.pt", "f.npy"):
        with pytest.raises(ValueError, match="nothing was executed|Python objects") as refused:
            open_features(tmp_path / name)
        advice = ("weights_only", "allow_pickle", "unsafe", "likely succeed", "\n", "\x1b")
        assert not [word for word in advice if word in str(refused.value)]
    assert not os.path.exists(marker)


def test_what_a_pickle_asks_for_is_named(tmp_path):
    torch.save(torch.nn.Linear(2, 3), tmp_path / "f.pt")
    with pytest.raises(ValueError, match=r"f.pt .* asks for torch.nn.modules.linear.Linear, .*was"):
        open_features(tmp_path / "f.pt")


@pytest.mark.filterwarnings("ignore:Validating sparse tensor")
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(3, 2).to_sparse(), "sparse tensor: save its to_dense()"),
        (torch.zeros(3, 2, device="meta"), "meta tensor"),
        ([[1.0, 2.0], [3.0]], "inhomogeneous"),
        (torch.zeros(3, 2, dtype=torch.complex64), "must be numbers"),
        (torch.zeros(1, 1).expand(10**7, 10**5), "expanded tensor"),
        (torch.zeros(3, 0), "must be numbers"),
    ],
)
def test_tensors_that_are_no_plain_numbers_are_one_line(tmp_path, value, words):
    torch.save({"features": value}, tmp_path / "f.pt")
    with pytest.raises(ValueError, match=re.escape(words)) as refused:
        open_features(tmp_path / "f.pt")
    assert "f.pt" in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.filterwarnings("ignore")  # torch says that its quantised tensors are to go
def test_quantised_tensors_are_one_line(tmp_path):
    x = torch.quantize_per_tensor(torch.rand(3, 2), 0.1, 0, torch.qint8)
    torch.save({"features": x}, tmp_path / "f.pt")
    with pytest.raises(ValueError, match="quantised tensor: save its dequantize"):
        open_features(tmp_path / "f.pt")


def test_float8_and_files_of_torchs_older_format(tmp_path):
    x = torch.rand(3, 2).to(torch.float8_e4m3fn)
    torch.save(x, tmp_path / "f.pt")
    assert open_features(tmp_path / "f.pt").features.tolist() == x.float().tolist()


def test_only_what_is_asked_for_is_read(tmp_path):
    np.savez(tmp_path / "f.npz", x=X, junk=np.array([Payload("/nowhere")], dtype=object))
    assert open_features(tmp_path / "f.npz").features.tolist() == X.tolist()


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
    with pytest.raises(ValueError, match="fractions"):
        class_numbers([0.5, 1.0])
    with pytest.raises(ValueError, match="must be \\[samples\\]"):
        class_numbers(np.eye(2))
    for huge in ([1e30, 2e30], np.array([1, 2**64 - 1], np.uint64)):
        with pytest.raises(ValueError, match="below 2\\*\\*63"):
            class_numbers(huge)
    with pytest.raises(ValueError, match="not among"):
        class_numbers(["new"], ("old",))
    assert class_numbers(["b"], ("a", "b"))[0].tolist() == [1]
    assert class_numbers([-1, -1], ("-1", "1"))[0].tolist() == [0, 0]


def test_fingerprint_follows_values_and_labels(tmp_path):
    def fingerprint(x, y):
        np.savez(tmp_path / "f.npz", x=x, y=y)
        return open_features(tmp_path / "f.npz").fingerprint

    first = fingerprint(X, Y)
    assert fingerprint(X, Y) == first
    assert fingerprint(X + 1, Y) != first and fingerprint(X, Y[::-1]) != first


# --- Parquet ------------------------------------------------------------------------------------


def test_an_index_of_pandas_is_no_feature(tmp_path):
    pandas, _ = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    frame = pandas.DataFrame(X, columns=list("abc")).assign(label=Y)
    order = [3, 1, 4, 0, 2]
    frame.to_parquet(tmp_path / "range.parquet")
    np.testing.assert_array_equal(open_features(tmp_path / "range.parquet").features, X)
    frame.iloc[order].to_parquet(tmp_path / "shuffled.parquet")
    frame.set_index(pandas.Index(Y * 100, name="row")).to_parquet(tmp_path / "named.parquet")
    shuffled, named = (open_features(tmp_path / f"{n}.parquet") for n in ("shuffled", "named"))
    np.testing.assert_array_equal(shuffled.features, X[order])
    np.testing.assert_array_equal(named.features, X)
    assert shuffled.labels is not None and shuffled.labels.tolist() == Y[order].tolist()


def test_an_index_that_another_program_kept_as_a_column_is_no_feature(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"a": X[:, 0], "b": X[:, 1], "__index_level_0__": Y * 1000}
    parquet.write_table(pyarrow.table(columns), tmp_path / "f.parquet")
    assert open_features(tmp_path / "f.parquet").features.shape == (5, 2)


def test_columns_that_are_no_numbers_are_named(tmp_path, caplog):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {
        "a": X[:, 0],
        "flag": X[:, 1] > 0,
        "price": [decimal.Decimal("1.5")] * 5,
        "species": ["x"] * 5,
        "when": [datetime.datetime(2026, 1, 1)] * 5,
        "kind": pyarrow.array(list("vwvwv")).dictionary_encode(),
    }
    (tmp_path / "part=3").mkdir()  # which pyarrow takes for a column, if asked for a data set
    path = tmp_path / "part=3" / "f.parquet"
    parquet.write_table(pyarrow.table(columns), path)
    data = open_features(path)
    np.testing.assert_allclose(data.features, np.c_[X[:, 0], X[:, 1] > 0, np.full(5, 1.5)])
    assert "3 columns are not numbers and are left out of the features: species (string), when" in (
        caplog.text
    )
    assert "kind (dictionary" in caplog.text and "called one of labels, label" in caplog.text


@pytest.mark.parametrize(
    ("names", "words"),
    [(["s", "t"], r"holds \['s', 't'\]; expected columns of numbers"), (["a", "a"], "of one name")],
)
def test_a_table_without_features_is_described(tmp_path, names, words):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.Table.from_arrays([pyarrow.array(["x"]), pyarrow.array(["y"])], names=names)
    parquet.write_table(table, tmp_path / "f.parquet")
    with pytest.raises(ValueError, match=words):
        open_features(tmp_path / "f.parquet")


def test_what_the_labels_were_taken_for_is_said(tmp_path, caplog):
    caplog.set_level("INFO", "ssl_kd")
    np.savez(tmp_path / "f.npz", x=X, y=[-1, 1, 1, -1, 1])
    assert open_features(tmp_path / "f.npz").class_names == ("-1", "1")
    assert "the labels -1 and 1 are taken as two classes" in caplog.text
    np.savez(tmp_path / "f.npz", x=X, y=[-1, 1, 0, -1, 1])
    assert open_features(tmp_path / "f.npz").class_names == ("0", "1")
    assert "2 of 5 samples have no label" in caplog.text


def test_columns_that_are_taken_for_labels_and_ids_are_said(tmp_path, caplog):
    pandas, _ = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    caplog.set_level("INFO", "ssl_kd")
    frame = pandas.DataFrame(X, columns=list("abc")).assign(y=Y, target=Y, id=Y)
    frame.to_parquet(tmp_path / "f.parquet")
    assert open_features(tmp_path / "f.parquet").features.shape == (5, 3)
    assert "column target is taken for the labels" in caplog.text
    assert "column id is taken for the ids" in caplog.text
    assert "called like labels or ids: y. Rename" in caplog.text


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"a": [1.0, None], "b": [1.0, 2.0]}, "1 columns have nulls, the first is a with 1"),
        ({"a": [1.0, 2.0], "b": [True, None]}, "1 columns have nulls, the first is b with 1"),
        ({"x": [[1.0, 2.0], [1.0]]}, "column x are of several lengths or null"),
        ({"x": [[1.0, 2.0], None]}, "column x are of several lengths or null"),
    ],
)
def test_rows_with_gaps_are_named_by_their_column(tmp_path, columns, words):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), tmp_path / "f.parquet")
    with pytest.raises(ValueError, match=words) as refused:
        open_features(tmp_path / "f.parquet")
    assert "f.parquet" in str(refused.value)
