"""What is exported of a run: a selection, after decisions; and what is refused."""

import json
import os
import shutil

import numpy as np
import pyarrow as arrow
import pytest
from pyarrow import parquet

from ssl_kd.errors import InputError
from ssl_kd.vision.samples import Samples
from ssl_kd.workbench.decisions import Curation
from ssl_kd.workbench.export import export
from ssl_kd.workbench.export.content import Content
from tests.faults.matrix import row as fault


@pytest.fixture
def copied(photo_run, tmp_path):
    """A copy of the run, with pictures of its own, that a test may damage."""
    config = json.loads((photo_run / "config.json").read_text())
    shutil.copytree(config["settings"]["DATASET"], tmp_path / "photos")
    shutil.copytree(photo_run, tmp_path / "run")
    config["settings"]["DATASET"] = str(tmp_path / "photos")
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    return tmp_path / "run"


def full(*_):
    raise OSError(28, "No space left on device")
    yield


def test_parquet_has_every_column(copied):
    samples = Samples(copied)
    Curation(samples).rename(1, "ring")
    path = export(Content.of(samples), "parquet")
    assert path == copied / "export" / "clusters.parquet"
    table = parquet.read_table(path)
    for name in samples.table.column_names:
        assert table.column(name).to_pylist() == samples.table.column(name).to_pylist(), name
    clusters = samples.column("cluster").tolist()
    names = ["ring" if c == 1 else str(c) for c in clusters]
    assert table.column("cluster_name").to_pylist() == names
    assert "cluster_of_run" not in table.column_names


def test_a_selection(photo_run, tmp_path):
    samples = Samples(photo_run)
    content = Content.of(samples, splits=["test"], clusters=[0, 2])
    table = parquet.read_table(export(content, "parquet", tmp_path / "some.parquet"))
    assert set(table.column("split").to_pylist()) == {"test"}
    assert set(table.column("cluster").to_pylist()) == {0, 2}
    selected = np.isin(samples.column("cluster"), [0, 2]) & (samples.column("split") == "test")
    assert table.num_rows == selected.sum()


def test_an_export_follows_decisions(copied, tmp_path):
    samples = Samples(copied)
    curation = Curation(samples)
    curation.merge([0, 2], "round or open")
    curation.exclude([3, 4])
    table = parquet.read_table(export(Content.of(samples), "parquet", tmp_path / "all.parquet"))
    assert table.num_rows == len(samples) - 2
    assert set(table.column("cluster").to_pylist()) == {0, 1}
    assert set(table.column("cluster_of_run").to_pylist()) == {0, 1, 2}
    assert set(table.column("cluster_name").to_pylist()) == {"round or open", "1"}


def test_invalid_selections_and_options(photo_run, tmp_path):
    samples = Samples(photo_run)
    content = Content.of(samples)

    def refused(match, make):
        with pytest.raises(InputError, match=match):
            make()

    refused("no split 'tset'; expected train, test", lambda: Content.of(samples, splits=["tset"]))
    refused("no cluster 9; expected one of 0, 1, 2", lambda: Content.of(samples, clusters=[9]))
    refused("expected parquet, .*parquet", lambda: export(content, "parqet"))
    refused(
        "the format parquet has no option --link",
        lambda: export(content, "parquet", tmp_path / "a.parquet", link="copy"),
    )


@pytest.mark.parametrize("to", ["folders", "fiftyone", "label-studio"])
@fault(134)
def test_missing_pictures_are_named_and_skipped_on_request(copied, tmp_path, caplog, to):
    out = tmp_path / "out"
    missing = sorted((tmp_path / "photos" / "train" / "digit 0").iterdir())[:2]
    for file in missing:
        file.unlink()
    with pytest.raises(InputError, match=f"2 of .* pictures are missing.*{missing[0].name}"):
        export(Content.of(Samples(copied)), to, out)
    assert not out.exists() and not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    export(Content.of(Samples(copied)), to, out, skip_missing=True)
    assert out.exists() and "2 of" in caplog.text


@pytest.mark.parametrize("to", ["parquet", "fiftyone", "label-studio", "hf-dataset"])
@fault(133)
def test_a_full_disk_leaves_nothing(photo_run, tmp_path, monkeypatch, to):
    content = Content.of(Samples(photo_run))
    out = tmp_path / "a" / ("out.parquet" if to == "parquet" else "out")
    out.parent.mkdir()
    first, batches = Content.batches(content, 1), Content.batches

    def some(self, size):
        if size == 1:
            return first
        return (b if i < 1 else next(full()) for i, b in enumerate(batches(self, 100)))

    monkeypatch.setattr(Content, "batches", some)
    with pytest.raises(OSError, match="No space left"):
        export(content, to, out)
    assert list(out.parent.iterdir()) == []


def test_row_groups_are_one_file(photo_run, tmp_path, monkeypatch):
    monkeypatch.setattr("ssl_kd.workbench.export.parquet_table.ROWS_PER_GROUP", 50)
    content = Content.of(Samples(photo_run))
    path = export(content, "parquet", tmp_path / "a.parquet")
    with parquet.ParquetFile(path) as file:
        assert file.num_row_groups == -(-len(content) // 50)
        assert file.schema_arrow.field("cluster").type == arrow.int32()


@fault(173)
@pytest.mark.parametrize("out", ["", ".", "..", "x", "x.PARQUET", "a\0.parquet", "~"])
def test_an_invalid_path_is_refused_before_anything_is_written(photo_run, tmp_path, out):
    out = f"{tmp_path}/{out}" if out not in ("~", "") else out
    with pytest.raises(InputError, match="--out is|exists"):
        export(Content.of(Samples(photo_run)), "parquet", out)
    assert list(tmp_path.iterdir()) == []


@fault(173)
@pytest.mark.parametrize("what", ["link", "broken link", "folder", "pipe"])
def test_force_replaces_a_file_and_follows_no_link(photo_run, tmp_path, what):
    content, out, other = Content.of(Samples(photo_run)), tmp_path / "out.parquet", tmp_path / "x"
    if what == "pipe":
        os.mkfifo(out)
    elif what == "folder":
        out.mkdir()
    else:
        out.symlink_to(other)
    if what == "link":
        other.write_text("mine")
        export(content, "parquet", out, force=True)
        assert other.read_text() == "mine" and out.is_file() and not out.is_symlink()
        return
    with pytest.raises(InputError, match=r"exists: .* move it away"):
        export(content, "parquet", out, force=True)
    assert os.path.lexists(out) and not [p for p in tmp_path.iterdir() if p.suffix == ".tmp"]


@fault(173)
def test_a_file_that_appears_during_an_export_is_not_replaced(photo_run, tmp_path, monkeypatch):
    out, batches = tmp_path / "out.parquet", Content.batches

    def slow(self, size):
        yield from batches(self, size)
        out.write_text("mine")

    monkeypatch.setattr(Content, "batches", slow)
    with pytest.raises(InputError, match="exists"):
        export(Content.of(Samples(photo_run)), "parquet", out)
    assert out.read_text() == "mine" and list(tmp_path.iterdir()) == [out]
    monkeypatch.setattr(Content, "batches", full)
    with pytest.raises(OSError, match="No space"):
        export(Content.of(Samples(photo_run)), "parquet", out, force=True)
    assert out.read_text() == "mine" and list(tmp_path.iterdir()) == [out]
