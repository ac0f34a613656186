"""Columns of a run's samples: filters, order, cells and charts."""

import json
import shutil

import numpy as np
import pyarrow as arrow
import pyarrow.parquet
import pytest

from ssl_kd import Run
from ssl_kd.errors import InputError
from ssl_kd.vision.samples import Samples
from ssl_kd.workbench.cluster_pages import ClusterPages
from ssl_kd.workbench.columns import CHARACTERS, DECIDED, Columns
from ssl_kd.workbench.decisions import Curation
from ssl_kd.workbench.metadata import join_table

ODD = ["Ähre", "ähre.JPG", "=cat", "<0.5", "..", "", None, "a\nb\0", "😀" * 900, "100 % cat"]


@pytest.fixture(scope="module")
def shared(photo_run, tmp_path_factory):
    """A run whose samples have odd columns of the user's own."""
    run = shutil.copytree(photo_run, tmp_path_factory.mktemp("columns") / "copy")
    samples = Samples(run)
    n, odd = len(samples), len(ODD)
    numbers = np.random.default_rng(0).normal(size=n)
    numbers[:3] = np.nan, np.inf, -np.inf
    table = {
        "file": samples.table["file"],
        "größe, in cm": arrow.array(numbers, from_pandas=False),
        "count": arrow.array([None, *range(-2, n - 3)], arrow.int64()),
        "flag": arrow.array([row % 3 == 0 for row in range(n)]),
        "text": [f"{row} {ODD[row % odd]}" if row >= odd else ODD[row] for row in range(n)],
        "kind": [ODD[row % odd] for row in range(n)],
        "nothing": arrow.nulls(n, arrow.string()),
        "cluster": ["mine"] * n,
    }
    path = run.parent / "table.parquet"
    pyarrow.parquet.write_table(arrow.table(table), path)
    join_table(samples, path)
    return run


@pytest.fixture
def samples(shared):
    yield Samples(shared)
    (shared / "curation.jsonl").unlink(missing_ok=True)


@pytest.fixture
def curation(samples):
    return Curation(samples)


@pytest.fixture
def columns(samples, curation):
    return Columns(samples, curation)


def column(columns, name):
    return [row[0] for row in columns.cells(range(columns._n), [name])]


def test_the_kinds_of_columns_and_their_order(columns):
    kinds = columns.kinds
    assert [*kinds][:6] == ["file", "cluster", "label", "confidence", "outlier", "split"]
    order = ["data_cluster", "checked", "excluded", "second"]
    assert [name for name in kinds if name in order] == order and "third" not in kinds
    assert kinds["file"] == kinds["text"] == "text" and kinds["second"] == "cluster"
    assert kinds["count"] == kinds["größe, in cm"] == "number"
    assert {kinds[n] for n in ("flag", "kind", "nothing", "label", "data_cluster")} == {"category"}


def test_filters_find_what_pandas_finds(samples, columns):
    frame = samples.table.to_pandas()
    wanted = {
        ("confidence", "<0.9"): frame.confidence < 0.9,
        ("confidence", " 0.9 .. .5"): frame.confidence.between(0.5, 0.9),
        ("label", "DIGIT 1"): frame.label == "digit 1",
        ("label", "!=digit 1"): frame.label != "digit 1",
        ("cluster", "2"): frame.cluster == 2,
        ("cluster", "!=2"): frame.cluster != 2,
        ("cluster", "1..5"): frame.cluster >= 1,
        ("file", "/000"): frame.file.str.contains("/000"),
        ("file", "=digit 0/0000.png"): frame.file == "digit 0/0000.png",
        ("", "= test"): frame.split == "test",
        ("", "!=test"): frame.split != "test",
        ("", "DIGIT 0/000"): frame.file.str.contains("digit 0/000"),
        ("split", ""): frame.split != "",
    }
    for (name, text), mask in wanted.items():
        assert np.array_equal(columns.find({name: text}), np.flatnonzero(mask)), (name, text)
    both = (frame.confidence < 0.9) & (frame.cluster == 1)
    assert np.array_equal(columns.find({"confidence": "<.9", "cluster": "1"}), np.flatnonzero(both))


@pytest.mark.parametrize("descending", [False, True])
def test_every_column_sorts_with_missing_values_last(columns, descending):
    for name, kind in columns.kinds.items():
        rows, keys = columns.find({}, name, descending), columns.column(name).to_pylist()
        gone = np.array([key is None for key in keys])
        assert not {"", -1}.intersection(keys) or kind == "number" or name in DECIDED
        present = sorted(np.flatnonzero(~gone), key=keys.__getitem__, reverse=descending)
        assert rows.tolist() == [*present, *np.flatnonzero(gone)], name


def test_numbers_may_be_negative_missing_or_infinite(columns):
    size = "größe, in cm"
    assert columns.find({size: "="}).tolist() == [0] and len(columns.find({size: "!="})) > 200
    assert columns.find({size: ">1e300"}).tolist() == [1]
    assert columns.find({size: "<=-1e300"}).tolist() == [2]
    assert columns.find({"count": "-2..-1"}).tolist() == [1, 2]
    assert columns.find({"count": "-2"}).tolist() == columns.find({"count": "=-2"}).tolist() == [1]
    assert 0 in columns.find({"count": "!=-2"}) and 0 not in columns.find({"count": "<9e99"})
    assert column(columns, size)[:3] == [None] * 3 and column(columns, "count")[:2] == [None, -2]
    json.dumps(columns.chart(size), allow_nan=False)
    assert columns.find({"confidence": f"={column(columns, 'confidence')[0]}"}).size


def test_texts_are_found_as_they_are(columns):
    def first(text, name="text"):
        rows = columns.find({name: text})
        return rows[rows < len(ODD)].tolist()

    assert first("ÄHRE") == first("ÄHRE", "kind") == [0, 1] and first("=ähre.jpg") == []
    assert first("==cat") == first("==cat", "kind") == [2] and first("<0.5") == [3]
    assert first("..") == first("..", "kind") == [4] and first("a\nb\0") == [7]
    assert first("=") == first("=", "kind") == [5, 6] and 6 in first("!=cat")
    assert first("😀") == [8] and first("100 %") == [9] and first(".*") == []
    assert columns.find({"nothing": "x"}).size == 0 and columns.find({"flag": "=true"})[1] == 3
    assert columns.chart("nothing")["values"] == [] and columns.find({"": "mine"}).size > 200


INVALID = {
    "a number": ({"confidence": "high"}, "filter of column 'confidence' is 'high'; expected a nu"),
    "half a comparison": ({"confidence": "<"}, "is '<'; expected a number, such as 3, <0.5"),
    "half a range": ({"count": "1.."}, r"is '1..'; expected a number.* or 0.2..0.5"),
    "no range": ({"count": ".."}, "expected a number"),
    "nan": ({"count": "nan"}, "expected a number"),
    "other digits": ({"count": "٣"}, "expected a number"),
    "many digits": ({"count": "1" * CHARACTERS + "x"}, "expected a text of at most 1000 char"),
    "a long text": ({"file": "x" * 10**6}, "is 'xxxxxxxxxxxx...x*'; expected a text of at most"),
    "half a character": ({"file": "\ud800"}, "expected a text of at most"),
    "no text": ({"count": 3}, "is 3; expected a text"),
    "a level's name": ({"second": "zeros"}, "of column 'second' is 'zeros'; expected a number"),
    "no column": ({"confidenc": "1"}, r"no column 'confidenc'; .* Did you mean confidence\?"),
    "a long column": ({"x" * 10**6: "1"}, "no column 'xxxx.*xx'; expected file, cluster"),
}


@pytest.mark.parametrize(("filter", "why"), INVALID.values(), ids=INVALID.keys())
def test_an_invalid_filter_is_a_short_error(columns, filter, why):
    with pytest.raises(InputError, match=why) as error:
        columns.find(filter)
    assert len(str(error.value)) < 400 and "\n" not in str(error.value)


def test_decisions_change_columns(columns, curation):
    rows = columns.find({"cluster": "1"})
    curation.rename(1, "Round ones")
    curation.exclude(rows[:2])
    curation.check(rows=rows[2:5].tolist())
    assert columns.find({"excluded": "yes"}).tolist() == rows[:2].tolist()
    assert columns.find({"checked": "=yes"}).tolist() == rows[2:5].tolist()
    assert columns.find({"cluster": "ROUND"}).tolist() == rows[2:].tolist()
    others = np.setdiff1d(np.arange(columns._n), rows[2:]).tolist()
    for text in ("!=1", "!=Round ones"):
        assert columns.find({"cluster": text}).tolist() == others
    assert columns.find({"cluster": "="}).tolist() == rows[:2].tolist()
    assert columns.find({"": "round"}, "checked", True)[:3].tolist() == rows[2:5].tolist()
    assert columns.cells(rows[:1], ["cluster", "excluded", "checked"]) == [[None, "yes", ""]]
    assert columns.find({"cluster": "zebra"}).size == 0
    run = Run.open(curation.samples.path)
    assert run.find({"cluster": "round"}, "confidence").size == len(rows) - 2


def test_charts_count_by_cluster(samples, columns):
    frame = samples.table.to_pandas()
    chart = columns.chart("confidence")
    for entry in chart["clusters"]:
        members = frame.confidence[frame.cluster == entry["cluster"]]
        assert entry["n"] == len(members)
        inside = [(members <= x).mean() for x in entry["quantiles"]]
        assert inside == pytest.approx([0.05, 0.25, 0.5, 0.75, 0.95], abs=0.06)
    chart = columns.chart("label")
    counts = frame.groupby(["cluster", "label"]).size()
    assert chart["values"][0] == frame.label.value_counts().index[0]
    for entry in chart["clusters"]:
        known = dict(zip(chart["values"], entry["counts"], strict=True))
        assert known == {x: counts.get((entry["cluster"], x), 0) for x in known}
    chart = columns.chart("kind")
    assert len(chart["values"]) == 8 and "other" not in chart["values"]  # 10 less two missing
    with pytest.raises(InputError, match="'file' has texts, which have no chart"):
        columns.chart("file")


def test_cells_name_what_does_not_exist(columns):
    for row in (-1, columns._n, 10**15):
        with pytest.raises(InputError, match=f"no sample {row}; expected 0 to"):
            columns.cells([row], ["file"])
    with pytest.raises(InputError, match="no column 'fil'"):
        columns.cells([0], ["fil"])


def test_centroids_follow_decisions_as_if_computed_anew(samples, curation, columns):
    pages = ClusterPages(samples, curation, columns)
    pages._centroids(curation.clusters)
    rows = np.flatnonzero(curation.clusters == 0)
    curation.move(rows[:20])
    curation.merge([1, 2])
    curation.exclude(rows[20:25])
    numbers, means = pages._centroids(curation.clusters)
    again, anew = ClusterPages(samples, curation, columns)._centroids(curation.clusters)
    assert numbers == again == [0, 1, 1000] and np.allclose(means, anew, atol=1e-9)


def test_a_cluster_page_compares_neighbors(samples, curation, columns):
    pages = ClusterPages(samples, curation, columns)
    page = pages.describe_cluster(1)
    assert page["size"] == max(page["size"], *curation.sizes.values()) or page["nearest"]
    numbers, means = pages._centroids(curation.clusters)
    x = samples.embeddings(range(len(samples))).double().numpy()
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    here, there = (means[numbers.index(k)] for k in (1, page["nearest"][0]["cluster"]))
    gaps = np.abs(x @ (here - there))
    members = np.isin(curation.clusters, [1, page["nearest"][0]["cluster"]])
    assert page["nearest"][0]["similarity"] == pytest.approx(here @ there, abs=1e-4)
    between = page["nearest"][0]["between"]
    assert gaps[between] == pytest.approx(np.sort(gaps[members])[:12], abs=1e-6)
    labels = page["nearest"][0]["columns"][0]
    assert labels["column"] == "label" and "% digit" in labels["here"]
    assert all(0 < pages.describe_cluster(k)["agreement"] <= 1 for k in numbers)
    curation.merge([0, 1, 2])
    assert pages.describe_cluster(0)["nearest"] == []
    curation.exclude(np.arange(len(samples)))
    assert pages.list_clusters() == []
    with pytest.raises(InputError, match="no cluster 0"):
        pages.describe_cluster(0)
