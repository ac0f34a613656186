"""The `Run` object: a finished run looked at, decided about and taken out of Python."""

import shutil
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from ssl_kd import Run
from ssl_kd.errors import InputError, MissingPackage
from ssl_kd.training.folder import RunFolderError


@pytest.fixture
def run(photo_run, tmp_path):
    """A run that a test may decide about."""
    return Run.open(shutil.copytree(photo_run, tmp_path / "copy"))


def test_clusters_are_the_table_s(run):
    table = run.samples.column("cluster")
    assert [c.number for c in run.clusters] == [0, 1, 2]
    for cluster in run.clusters:
        assert np.array_equal(cluster.rows, np.flatnonzero(table == cluster.number))
        top = run.samples.column("confidence")[cluster.typical(3)]
        everyone = run.samples.column("confidence")[cluster.rows]
        assert sorted(top)[::-1] == sorted(everyone)[::-1][:3] and len(cluster.images(3)) == 3
    assert len(run) == sum(map(len, run.clusters))
    assert run.typical(2).keys() == {0, 1, 2}


def test_what_is_decided_is_what_is_seen(run):
    largest = max(run.clusters, key=len)
    run.curation.rename(largest.number, "round ones")
    assert np.array_equal(run.cluster("round ones").rows, largest.rows)
    run.curation.exclude(largest.rows[:2])
    assert len(run.cluster("round ones")) == len(largest) - 2
    frame = Run.open(run.path).frame()
    assert (frame["cluster_name"] == "round ones").sum() == len(largest) - 2
    assert len(frame) == len(run) - 2 and not set(largest.rows[:2]) & set(frame["row"])
    found = run.samples.column("cluster")[frame["row"]]
    assert np.array_equal(frame["cluster_of_run"], found)
    run.curation.undo()
    assert len(run.cluster("round ones")) == len(largest)


def test_frames_of_each_kind(run, monkeypatch):
    table = run.frame("arrow")
    assert isinstance(table, pyarrow.Table) and table["row"].to_pylist() == [*range(len(run))]
    assert table.to_pandas().equals(run.frame())
    with pytest.raises(InputError, match="kind is 'excel'; expected one of pandas, polars"):
        run.frame("excel")
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(MissingPackage, match="pip install polars"):
        run.frame("polars")


def test_names_and_what_goes_out(run, tmp_path):
    words = ["apple", "brick", "cloud"]
    names = run.name([f"a {words[k]} seen" for k in run.samples.column("cluster")])
    assert [cluster.name for cluster in run.clusters] == words
    assert names.of("cluster", 1) == "brick"
    run.curation.rename(0, "mine")
    assert Run.open(run.path).cluster("mine").number == 0
    path = run.export("parquet", tmp_path / "one.parquet", clusters=[0], splits=["train"])
    table = pyarrow.parquet.read_table(path)
    assert set(table["cluster_name"].to_pylist()) == {"mine"}
    assert set(table["split"].to_pylist()) == {"train"}
    with pytest.raises(InputError, match="something|is there|exists"):
        run.export("parquet", path)


def test_a_notebook_shows_pictures_and_no_name_is_taken_for_html(run):
    run.curation.rename(0, "<script>alert(1)</script>")
    page = run._repr_html_()
    assert page.count("<img") == 24 and "&lt;script&gt;" in page and "<script>" not in page
    shutil.move(run.samples.settings["DATASET"], run.path / "moved")
    try:
        assert "<img" not in Run.open(run.path)._repr_html_()
    finally:
        shutil.move(run.path / "moved", run.samples.settings["DATASET"])


def test_a_cluster_that_is_not_there(run, tmp_path):
    with pytest.raises(InputError, match="no cluster is called 7; there are 0, 1, 2"):
        run.cluster(7)
    run.curation.rename(1, "twin")
    with pytest.raises(InputError, match="cluster 1 is called 'twin' already: merge the two"):
        run.curation.rename(0, "twin")
    assert run.curation.names == {1: "twin"}
    with pytest.raises(RunFolderError, match="not a run's folder"):
        Run.open(tmp_path)


def test_what_to_throw_out_and_what_to_label(run):
    train = run.samples.splits["train"]
    store = run.samples.store()
    found = run.duplicates()
    assert found.store.n == len(train) and found.groups(1.0) == found.exact
    assert len(run.leaks().above(1.0)) == 0
    far = run.outliers()
    assert len(far) == len(train) and far.scores[0] == run.samples.column("outlier", "train").max()
    doubtful = run.mislabelled("test")
    assert len(doubtful) == len(run.samples.splits["test"])
    assert len(run.odd_images()) == 0
    asked = run.label_next(6)
    assert len(set(asked.rows.tolist())) == 6
    assert {store.labels[row].item() for row in asked.rows} == {0, 1, 2}
    with pytest.raises(InputError, match="no split 'extend1', only train, test"):
        run.outliers("extend1")


def test_its_map_is_a_page(run, tmp_path):
    page = run.explore(tmp_path / "page")
    assert page.name == "explore.html" and "map.pt" in {p.name for p in run.path.iterdir()}
