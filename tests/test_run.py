"""The `Run` object: a finished run looked at, decided about and taken out of Python."""

import shutil
import sys

import numpy as np
import pyarrow
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
    assert (frame["name"] == "round ones").sum() == len(largest) - 2
    assert list(frame["cluster"][largest.rows[:2]]) == [-1, -1]
    assert list(frame["name"][largest.rows[:2]]) == ["", ""]
    assert np.array_equal(frame["found"], run.samples.column("cluster"))
    run.curation.undo()
    assert len(run.cluster("round ones")) == len(largest)


def test_frames_of_each_kind(run, monkeypatch):
    table = run.frame("arrow")
    assert isinstance(table, pyarrow.Table) and table.num_rows == len(run)
    assert table.to_pandas().equals(run.frame())
    with pytest.raises(InputError, match="kind is 'excel'; expected pandas, polars or arrow"):
        run.frame("excel")
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(MissingPackage, match="pip install polars"):
        run.frame("polars")


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
    run.curation.rename_all({0: "twin", 1: "twin"})
    with pytest.raises(InputError, match="several clusters are called 'twin'"):
        run.cluster("twin")
    with pytest.raises(RunFolderError, match="not a run's folder"):
        Run.open(tmp_path)
