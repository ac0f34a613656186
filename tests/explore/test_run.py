"""The `Run` object: a finished run from Python."""

import shutil

import numpy as np
import pyarrow.parquet
import pytest

from ssl_kd import Run
from ssl_kd.core.errors import InputError
from ssl_kd.core.runs.folder import RunFolderError


@pytest.fixture
def run(photo_run, tmp_path):
    """A run that a test may decide about."""
    return Run.open(shutil.copytree(photo_run, tmp_path / "copy"))


def test_clusters_are_those_of_the_table(run):
    table = run.samples.column("cluster")
    assert [c.number for c in run.clusters] == [0, 1, 2]
    for cluster in run.clusters:
        assert np.array_equal(cluster.rows, np.flatnonzero(table == cluster.number))
        top = run.samples.column("confidence")[cluster.typical(3)]
        every = run.samples.column("confidence")[cluster.rows]
        assert sorted(top)[::-1] == sorted(every)[::-1][:3] and len(cluster.images(3)) == 3
    assert len(run) == sum(map(len, run.clusters))


def test_clusters_and_frame_follow_decisions(run):
    largest = max(run.clusters, key=len)
    run.curation.rename(largest.number, "round ones")
    assert np.array_equal(run.cluster("round ones").rows, largest.rows)
    run.curation.exclude(largest.rows[:2])
    assert len(run.cluster("round ones")) == len(largest) - 2
    frame = Run.open(run.path).frame()
    assert (frame["cluster_name"] == "round ones").sum() == len(largest) - 2
    assert len(frame) == len(run) - 2 and not set(largest.rows[:2]) & set(frame["row"])
    assert np.array_equal(frame["cluster_of_run"], run.samples.column("cluster")[frame["row"]])
    run.curation.undo()
    assert len(run.cluster("round ones")) == len(largest)


def test_export(run, tmp_path):
    run.curation.rename(0, "mine")
    assert Run.open(run.path).cluster("mine").number == 0
    path = run.export("parquet", tmp_path / "one.parquet", clusters=[0], splits=["train"])
    table = pyarrow.parquet.read_table(path)
    assert set(table["cluster_name"].to_pylist()) == {"mine"}
    assert set(table["split"].to_pylist()) == {"train"}


def test_a_notebook_shows_pictures_and_escapes_names(run):
    run.curation.rename(0, "<script>alert(1)</script>")
    page = run._repr_html_()
    assert page.count("<img") == 24 and "&lt;script&gt;" in page and "<script>" not in page
    shutil.move(run.samples.settings["DATASET"], run.path / "moved")
    try:
        assert "<img" not in Run.open(run.path)._repr_html_()
    finally:
        shutil.move(run.path / "moved", run.samples.settings["DATASET"])


def test_an_unknown_cluster_and_a_folder_without_a_run(run, tmp_path):
    with pytest.raises(InputError, match="there is no cluster 7; expected one of 0, 1, 2"):
        run.cluster(7)
    run.curation.rename(1, "twin")
    with pytest.raises(InputError, match="cluster 1 is called 'twin' already: merge the two"):
        run.curation.rename(0, "twin")
    with pytest.raises(RunFolderError, match="not a run folder"):
        Run.open(tmp_path)


def test_curation_of_a_split(run):
    train = run.samples.splits["train"]
    copies = run.duplicates()
    assert copies.store.n == len(train) and copies.groups(1.0) == copies.exact
    assert len(run.leaks(threshold=1.0)) == 0
    far = run.outliers()
    assert len(far) == len(train) and far.scores[0] == run.samples.column("outlier", "train").max()
    assert len(run.mislabeled("test")) == len(run.samples.splits["test"])
    assert run.odd_images().reasons == {}
    with pytest.raises(InputError, match="no split 'extend1'; expected train, test"):
        run.outliers("extend1")


def test_its_map_is_a_page(run, tmp_path):
    page = run.explore(tmp_path / "page")
    assert page.name == "explore.html" and (run.path / "map.pt").is_file()
