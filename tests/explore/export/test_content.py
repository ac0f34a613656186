"""Content of exports: a selection, after decisions; and refused input."""

import itertools
import json
import os
import shutil

import pyarrow as arrow
import pytest
from pyarrow import parquet

from ssl_kd.core.errors import InputError
from ssl_kd.vision.samples import Samples
from ssl_kd_explore.decisions import Curation
from ssl_kd_explore.export import export
from ssl_kd_explore.export.content import Content
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


def full(*_, **__):
    raise OSError(28, "No space left on device")


def test_parquet_has_every_column_and_follows_decisions(copied):
    samples = Samples(copied)
    curation = Curation(samples)
    curation.rename(1, "ring")
    path = export(Content.of(samples), "parquet")
    assert path == copied / "export" / "clusters.parquet"
    table = parquet.read_table(path)
    for name in samples.table.column_names:
        assert table.column(name).to_pylist() == samples.table.column(name).to_pylist(), name
    names = ["ring" if c == 1 else str(c) for c in samples.column("cluster").tolist()]
    assert table.column("cluster_name").to_pylist() == names
    assert "cluster_of_run" not in table.column_names
    assert table.schema.field("cluster").type == arrow.int32()

    curation.merge([0, 2], "round or open")
    curation.exclude([3, 4])
    table = parquet.read_table(export(Content.of(samples), "parquet", force=True))
    assert table.num_rows == len(samples) - 2
    assert set(table.column("cluster").to_pylist()) == {0, 1}
    assert set(table.column("cluster_of_run").to_pylist()) == {0, 1, 2}
    assert set(table.column("cluster_name").to_pylist()) == {"round or open", "ring"}


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
    records = Content.records

    def some(self):
        yield from itertools.islice(records(self), 100)
        full()

    monkeypatch.setattr(Content, "records", some)
    monkeypatch.setattr(parquet, "write_table", full)
    out = tmp_path / "a" / ("out.parquet" if to == "parquet" else "out")
    with pytest.raises(OSError, match="No space left"):
        export(Content.of(Samples(photo_run)), to, out)
    assert list(out.parent.iterdir()) == []


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
    content, out = Content.of(Samples(photo_run)), tmp_path / "out.parquet"

    monkeypatch.setattr(parquet, "write_table", lambda *_, **__: out.write_text("mine"))
    with pytest.raises(InputError, match="exists"):
        export(content, "parquet", out)
    assert out.read_text() == "mine" and list(tmp_path.iterdir()) == [out]
    monkeypatch.setattr(parquet, "write_table", full)
    with pytest.raises(OSError, match="No space"):
        export(content, "parquet", out, force=True)
    assert out.read_text() == "mine" and list(tmp_path.iterdir()) == [out]
