"""Find the label column of a table or of a file of arrays."""

import logging

import numpy as np
import pyarrow as arrow
import pytest
import torch
from pyarrow import parquet

from ssl_kd.core.errors import InputError
from ssl_kd.vision.data import open_dataset, open_features
from ssl_kd.vision.data.catalog import open_rows

N = 40
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 3)).astype(np.float32)
PLACES = RNG.normal(size=N)
CLASSES = [0, 1, 2, 3] * 10


def table(folder, **columns):
    path = folder / "t.parquet"
    parquet.write_table(arrow.table({"embedding": list(X), **columns}), path)
    return path


def left_out(data):
    return {part.what: part.reason for part in data.usage.left_out}


def test_coordinates_of_a_map_are_not_labels(tmp_path):
    whole = RNG.integers(0, 4, N)  # few values, as of classes
    for x, y in ((PLACES, PLACES), (whole, whole)):
        path = table(tmp_path, x=x, y=y)
        data = open_features(path)
        assert data.labels is None and data.class_names is None
        assert "column x it holds coordinates" in left_out(data)["column y as labels"]
        rows = open_rows(str(path), "train", column=None, media=None)
        assert set(rows.columns()) == {"x", "y"}  # shown as the other columns are
    assert open_features(path, label_column="y").class_names == ("0", "1", "2", "3")
    texts = open_features(table(tmp_path, x=whole, y=["a", "b"] * 20))
    assert texts.class_names == ("a", "b")


@pytest.mark.parametrize("name", ["target", "targets", "y"])
def test_measurements_are_not_labels(tmp_path, name):
    reasons = {"fractions": PLACES, "40 values are all different": range(N)}
    reasons["14 different values in 40 rows"] = [k % 14 for k in range(N)]
    for reason, values in reasons.items():
        data = open_features(table(tmp_path, **{name: values}))
        assert data.labels is None and reason in left_out(data)[f"column {name} as labels"]
    data = open_features(table(tmp_path, **{name: CLASSES}))
    assert data.class_names == ("0", "1", "2", "3") and left_out(data) == {}


@pytest.mark.parametrize("kind", ["npz", "pt"])
def test_arrays_x_and_y_are_features_with_labels_or_coordinates(tmp_path, kind):
    path = tmp_path / f"f.{kind}"

    def opened(**arrays):
        tensors = {name: torch.tensor(np.asarray(array)) for name, array in arrays.items()}
        np.savez(path, **arrays) if kind == "npz" else torch.save(tensors, path)
        return open_features(path)

    many = [k % 14 for k in range(N)]  # as from scikit-learn's (X, y)
    assert len(opened(x=X, y=many).class_names) == 14
    assert opened(x=X, y=PLACES).labels is None
    on_map = opened(x=PLACES, y=CLASSES, embeddings=X)
    assert on_map.labels is None and np.array_equal(on_map.features, X)
    assert opened(x=X * 2, y=CLASSES, features=X).class_names == ("0", "1", "2", "3")


def test_coordinates_of_cells_are_not_labels(tmp_path):
    h5py, path = pytest.importorskip("h5py"), tmp_path / "cells.h5ad"
    with h5py.File(path, "w") as file:
        obs = file.create_group("obs")
        obs.attrs["_index"] = "_index"
        obs["_index"] = [f"cell{i}" for i in range(N)]
        obs["x"], obs["y"], obs["kind"] = PLACES, PLACES, CLASSES
        file["obsm/X_pca"] = X
    data = open_features(path)
    assert data.labels is None and "column y as labels" in left_out(data)
    assert open_features(path, label_column="kind").class_names == ("0", "1", "2", "3")


def test_a_column_of_labels_is_found_by_its_name_or_named(tmp_path):
    path = table(tmp_path, Class=CLASSES, site=["a", "b"] * 20, rows=range(N), **{"class ": PLACES})
    assert open_features(path).class_names == ("0", "1", "2", "3")
    sites = open_dataset(str(path), "train", label_column="site")
    assert sites.class_names == ("a", "b")
    rows = open_rows(str(path), "train", column=None, media=None, label_column="site")
    assert set(rows.columns()) == {"Class", "rows", "class "}
    none = open_dataset(str(path), "train", labels="none")
    assert none.labels is None and none.class_names is None
    digits = open_dataset("digits", "train", labels="none")
    assert digits.labels is None and digits.class_names is None
    for options, message in (
        ({"label_column": "Clas"}, "has no column 'Clas'.*did you mean 'Class'"),
        ({"label_column": "class "}, r"LABEL_COLUMN is 'class ', but .*fractions, such as 0\.\d+"),
        ({"label_column": "rows"}, "its 40 values in .* are all different"),
        ({"label_column": "embedding"}, "whose type in .* is .*; expected one value per row"),
        ({"label_column": "site", "labels": "none"}, "LABELS is 'none', but LABEL_COLUMN is"),
    ):
        with pytest.raises(InputError, match=message) as error:
            open_dataset(str(path), "train", **options)
        assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="LABEL_COLUMN is 'y', but digits has no columns"):
        open_dataset("digits", "train", label_column="y")


def test_the_exact_name_is_preferred(tmp_path):
    data = open_features(table(tmp_path, Label=CLASSES, Y=CLASSES, target=["a", "b"] * 20))
    assert data.class_names == ("a", "b")
    data = open_features(table(tmp_path, Label=CLASSES, label=["u", "v"] * 20))
    assert data.class_names == ("u", "v")


def test_a_column_label_with_unfit_values_is_named(tmp_path):
    path = table(tmp_path, label=[None, 0.5, *CLASSES[2:]])
    with pytest.raises(InputError, match=r"column label: .*such as 0\.5 in row 1.*--label_column"):
        open_features(path)
    assert open_dataset(str(path), "train", labels="none").labels is None
    captions = open_features(table(tmp_path, label=[f"photo {i}" for i in range(N)], y=CLASSES))
    assert "40 values are all different" in left_out(captions)["column label as labels"]
    assert captions.class_names == ("0", "1", "2", "3")  # from y, which has classes
    few: list[str | None] = [None] * N
    few[3], few[30] = "cat", "dog"  # one example of each class
    assert open_features(table(tmp_path, label=few)).class_names == ("cat", "dog")


@pytest.mark.parametrize(
    ("kind", "values", "names"),
    [
        (arrow.int64(), [-1, 0, 1, 10], ("0", "1", "10")),
        (arrow.int64(), [2**62 + 1, 0, 1, 1], ("0", "1", str(2**62 + 1))),
        (arrow.float64(), [-1.0, 0.0, 1.0, 10.0], ("0", "1", "10")),
        (arrow.decimal128(4, 1), [0, 1, 1, 10], ("0", "1", "10")),
        (arrow.bool_(), [True, False, True, False], ("0", "1")),
        (arrow.dictionary(arrow.int8(), arrow.int64()), [-1, 0, 1, 10], ("0", "1", "10")),
        (arrow.dictionary(arrow.int8(), arrow.string()), ["01", "", " ", "1"], ("01", "1")),
        (arrow.string(), ["01", "", "001", "1"], ("001", "01", "1")),
    ],
)
@pytest.mark.parametrize("has_null", [False, True])
def test_a_missing_label_changes_no_other(tmp_path, kind, values, names, has_null):
    values = values * 10
    if has_null:
        values[0] = None
    data = open_features(table(tmp_path, label=arrow.array(values, kind)))
    assert data.class_names == names
    assert not has_null or data.labels[0] == -1


def test_labels_of_a_test_split_are_those_of_the_training_split(tmp_path):
    for name, rows in (("train", N), ("test", 2)):
        columns = {"embedding": list(X[:rows]), "target": CLASSES[:rows]}
        parquet.write_table(arrow.table(columns), tmp_path / f"{name}.parquet")
    test = open_dataset(str(tmp_path / "train.parquet"), "test")
    assert test.class_names == ("0", "1", "2", "3") and test.labels.tolist() == [0, 1]


def test_used_columns_of_a_table_are_logged_once(tmp_path, caplog):
    caplog.set_level(logging.INFO, "ssl_kd")
    columns = {"id": [f"{i:04}" for i in range(N)], "other": list(X), "tags": [["a"]] * N}
    data = open_features(table(tmp_path, label=CLASSES, area=PLACES, **columns))
    data.usage.log("t.parquet")
    text = "40 rows of features, 3 wide; features from column embedding; names from column id; "
    assert text + "labels from column label; shown only: area; 4 classes" in caplog.text
    assert "not used: column other: add --column other" in caplog.text
    assert "not used: column tags" in caplog.text
    assert data.ids[7] == "0007"
