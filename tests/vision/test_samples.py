"""A finished run opened again: each sample with its place and its source."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from ssl_kd.core.errors import InputError
from ssl_kd.core.files import CorruptFileError
from ssl_kd.core.runs.folder import RunFolderError
from ssl_kd.vision.cache import EmbeddingStore
from ssl_kd.vision.samples import Samples
from tests.faults.matrix import row as fault


@pytest.fixture
def copied(photo_run, tmp_path):
    """A copy of the run's folder that a test may damage."""
    return shutil.copytree(photo_run, tmp_path / "copy")


def test_every_sample_of_every_split(photo_run):
    samples = Samples(photo_run)
    train, test = samples.splits["train"], samples.splits["test"]
    assert list(samples.splits) == ["train", "test"]
    assert train.start == 0 and test == range(len(train), len(samples)) and len(test) > 20
    assert set(samples.column("label")) == {"digit 0", "digit 1", "digit 4"}
    assert samples.n_clusters == 3 and samples.column("cluster").max() == 2
    assert "cluster" in samples.levels and len(samples.levels) > 1
    sizes = [len(set(samples.column(name))) for name in samples.levels]
    assert sizes == sorted(sizes)


def test_embeddings_and_pictures_are_those_of_the_run(photo_run):
    samples = Samples(photo_run)
    folder = samples.settings["EMBEDDINGS_DIR"]
    stores = [EmbeddingStore.open(folder, split).tensor() for split in ("train", "test")]
    everything = torch.cat(stores)
    rows = [len(samples) - 1, 0, len(stores[0]), 5, 5]
    assert torch.equal(samples.embeddings(rows), everything[rows])
    for row in (0, len(samples) - 1):
        image, file = samples.image(row), samples.image_file(row)
        assert image is not None and file is not None
        assert str(file).endswith(str(samples.column("file")[row]))
        assert np.array_equal(np.asarray(image), np.asarray(Image.open(file)))


def test_a_column_or_split_that_is_not_there(photo_run):
    samples = Samples(photo_run)
    with pytest.raises(InputError, match="no column 'colour'; expected one of file, cluster"):
        samples.column("colour")
    with pytest.raises(InputError, match="no split 'extend1'; expected train, test"):
        samples.store("extend1")


def test_unfinished_runs_are_refused(copied, tmp_path):
    with pytest.raises(RunFolderError, match="not a run folder"):
        Samples(tmp_path)
    file = copied / "metrics.json"
    metrics = json.loads(file.read_text())
    del metrics["dataset"]["pictured"]
    file.write_text(json.dumps(metrics))
    with pytest.raises(
        RunFolderError, match="have no pictured: another version wrote them .commit"
    ):
        Samples(copied)
    file.unlink()
    with pytest.raises(RunFolderError, match=r"no metrics\.json, so it is not a finished run"):
        Samples(copied)


@fault(130)
def test_an_edited_table_is_refused(copied):
    file = copied / "assignments.csv"
    header, *lines = file.read_text().splitlines()
    file.write_text("\n".join([header, lines[-1], *lines[:-1]]) + "\n")
    with pytest.raises(CorruptFileError, match="sorted or edited: the rows of split test"):
        _ = Samples(copied).splits
    file.write_text("\n".join([header, *lines[1:]]) + "\n")
    with pytest.raises(RunFolderError, match="embeddings, but not those of the"):
        Samples(copied).store()
    file.write_text("file,cluster\na,1\n")
    with pytest.raises(CorruptFileError, match="no column confidence: the file was edited"):
        Samples(copied)
    file.write_text(header + "\nx,1\n")
    with pytest.raises(CorruptFileError, match="is damaged"):
        Samples(copied)


def test_data_of_the_run_that_is_gone(copied):
    config = json.loads((copied / "config.json").read_text())
    there = config["settings"]["DATASET"], config["settings"]["EMBEDDINGS_DIR"]
    for name, place in zip(("DATASET", "EMBEDDINGS_DIR"), there, strict=True):
        config["settings"][name] = place + " gone"
    (copied / "config.json").write_text(json.dumps(config))
    samples = Samples(copied)
    with pytest.raises(FileNotFoundError, match="missing; expected them in .*embeddings gone: put"):
        samples.store()
    with pytest.raises(InputError, match="photos gone"):
        samples.image(0)
