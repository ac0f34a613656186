"""Columns of a run's samples: filters, order, cells and charts, and the pages of clusters."""

import json
import shutil

import numpy as np
import pyarrow as arrow
import pyarrow.parquet
import pytest

from ssl_kd import Run
from ssl_kd.core.errors import InputError
from ssl_kd.vision.samples import Samples
from ssl_kd_explore.cluster_pages import ClusterPages
from ssl_kd_explore.columns import Columns
from ssl_kd_explore.decisions import Curation
from ssl_kd_explore.metadata import join_table

ODD = ["Ähre", "ähre.JPG", "=cat", "<0.5", "..", "", None, "a\nb\0", "😀" * 900, "100 % cat"]
SIZE = "größe, in cm"


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
        SIZE: arrow.array(numbers, from_pandas=False),
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
def curation(shared):
    yield Curation.open(shared)
    (shared / "curation.jsonl").unlink(missing_ok=True)


@pytest.fixture
def columns(curation):
    return Columns(curation.samples, curation)


def test_the_kinds_of_columns_and_their_order(columns):
    kinds = columns.kinds
    assert [*kinds][:6] == ["file", "cluster", "label", "confidence", "outlier", "split"]
    order = ["data_cluster", "checked", "excluded", "second"]
    assert [name for name in kinds if name in order] == order and "third" not in kinds
    assert kinds["file"] == kinds["text"] == "text" and kinds["second"] == "cluster"
    assert kinds["count"] == kinds[SIZE] == "number"
    assert {kinds[n] for n in ("flag", "kind", "nothing", "label", "data_cluster")} == {"category"}


def test_filters_find_what_pandas_finds(curation, columns):
    frame = curation.samples.table.to_pandas()
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
    for name in columns.kinds:
        rows, keys = columns.find({}, name, descending), columns.column(name).to_pylist()
        present = [row for row, key in enumerate(keys) if key is not None]
        present.sort(key=keys.__getitem__, reverse=descending)
        missing = [row for row, key in enumerate(keys) if key is None]
        assert rows.tolist() == [*present, *missing], name


FIRST = [  # the rows among the first ten that pass
    *((SIZE, "=", [0]), (SIZE, ">1e300", [1]), (SIZE, "<=-1e300", [2])),
    *(("count", "-2..-1", [1, 2]), ("count", "-2", [1]), ("count", "=-2", [1])),
    *(("count", "!=-2", [0, *range(2, 10)]), ("count", "<9e99", [*range(1, 10)])),
    *(("text", "ÄHRE", [0, 1]), ("kind", "ÄHRE", [0, 1]), ("text", "=ähre.jpg", [])),
    *(("text", "==cat", [2]), ("kind", "==cat", [2]), ("text", "<0.5", [3])),
    *(("text", "..", [4]), ("kind", "..", [4]), ("text", "a\nb\0", [7]), ("text", ".*", [])),
    *(("text", "=", [5, 6]), ("kind", "=", [5, 6]), ("text", "!=", [*range(5), 7, 8, 9])),
    *(("text", "😀", [8]), ("text", "100 %", [9]), ("nothing", "x", [])),
    *(("flag", "=true", [0, 3, 6, 9]), ("", "mine", [*range(10)])),
]


@pytest.mark.parametrize(("name", "text", "rows"), FIRST)
def test_numbers_and_texts_are_found_as_they_are(columns, name, text, rows):
    assert [row for row in columns.find({name: text}) if row < 10] == rows


def test_cells_and_charts_are_json_and_numbers_are_found_as_displayed(columns):
    cells = columns.cells(range(len(ODD)), [SIZE, "count", "text", "confidence"])
    assert cells[0][:3] == [None, None, ODD[0]] and cells[2][:2] == [None, -1]
    assert [text for _, _, text, _ in cells] == [text or None for text in ODD]
    for value in (cells, columns.chart(SIZE), columns.chart("nothing")):
        json.dumps(value, allow_nan=False)
    assert 0 in columns.find({"confidence": f"={cells[0][3]}"})


INVALID = {
    "a number": ({"confidence": "high"}, "filter of column 'confidence' is 'high'; expected a nu"),
    "half a range": ({"count": "1.."}, r"is '1..'; expected a number.* or 0.2..0.5"),
    "nan": ({"count": "nan"}, "expected a number"),
    "other digits": ({"count": "٣"}, "expected a number"),
    "a long text": ({"file": "x" * 10**6}, "is 'xxxxxxxxxxxx...x*'; expected a text of at most"),
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
    others = np.setdiff1d(np.arange(len(curation.clusters)), rows[2:])
    for name, text, expected in (
        *(("excluded", "yes", rows[:2]), ("checked", "=yes", rows[2:5])),
        *(("cluster", "ROUND", rows[2:]), ("cluster", "=", rows[:2]), ("cluster", "zebra", [])),
        *(("cluster", "!=1", others), ("cluster", "!=Round ones", others)),
    ):
        assert columns.find({name: text}).tolist() == [*expected], (name, text)
    assert columns.find({"": "round"}, "checked", True)[:3].tolist() == rows[2:5].tolist()
    assert columns.cells(rows[:1], ["cluster", "excluded", "checked"]) == [[None, "yes", ""]]
    run = Run.open(curation.samples.path)
    assert run.find({"cluster": "round"}, "confidence").size == len(rows) - 2


def test_charts_count_by_cluster(curation, columns):
    frame = curation.samples.table.to_pandas()
    for entry in columns.chart("confidence")["clusters"]:
        members = frame.confidence[frame.cluster == entry["cluster"]]
        assert entry["n"] == len(members)
        inside = [(members <= x).mean() for x in entry["quantiles"]]
        assert inside == pytest.approx([0.05, 0.25, 0.5, 0.75, 0.95], abs=0.06)
    chart, counts = columns.chart("label"), frame.groupby(["cluster", "label"]).size()
    assert chart["values"][0] == frame.label.value_counts().index[0]
    for entry in chart["clusters"]:
        known = dict(zip(chart["values"], entry["counts"], strict=True))
        assert known == {x: counts.get((entry["cluster"], x), 0) for x in known}
    chart = columns.chart("kind")
    assert len(chart["values"]) == 8 and "other" not in chart["values"]  # 10 less two missing
    assert {*columns.chart("second")["values"]} <= {"0", "1", "2"}


def test_a_cluster_page_follows_decisions_and_compares_neighbors(curation):
    samples = curation.samples
    pages = ClusterPages(samples, curation)
    pages.describe_cluster(1)
    rows = np.flatnonzero(curation.clusters == 0)
    curation.move(rows[:20])
    curation.exclude(rows[20:25])
    clusters = curation.clusters
    page = pages.describe_cluster(1)
    x = samples.embeddings(range(len(samples))).double().numpy()
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    means = {k: x[clusters == k].mean(0) for k in (0, 1, 2, 1000)}
    means = {k: mean / np.linalg.norm(mean) for k, mean in means.items()}
    similarities = {near["cluster"]: near["similarity"] for near in page["nearest"]}
    assert [*similarities] == sorted(similarities, key=lambda k: -similarities[k])
    assert similarities == pytest.approx({k: means[k] @ means[1] for k in (0, 2, 1000)}, abs=1e-4)
    near = page["nearest"][0]
    gaps = np.abs(x @ (means[1] - means[near["cluster"]]))
    members = np.isin(clusters, [1, near["cluster"]])
    assert gaps[near["between"]] == pytest.approx(np.sort(gaps[members])[:12], abs=1e-6)
    assert near["columns"][0]["column"] == "label" and "% digit" in near["columns"][0]["here"]
    assert all(0 < pages.describe_cluster(k)["agreement"] <= 1 for k in (0, 1, 2))
    curation.merge([0, 1, 2, 1000])
    assert pages.describe_cluster(0)["nearest"] == []
    curation.exclude(np.arange(len(samples)))
    assert pages.list_clusters() == []
    with pytest.raises(InputError, match="no cluster 0; the largest clusters are none"):
        pages.describe_cluster(0)
