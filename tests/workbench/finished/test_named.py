"""A finished run's clusters are named, and what people called them stays."""

import shutil

import pytest

from ssl_kd.vision.samples import Samples
from ssl_kd.workbench.finished import name_samples
from ssl_kd.workbench.naming import Names

SAYS = {"digit 0": "a ring", "digit 1": "one stroke", "digit 4": "an open fork"}


@pytest.fixture
def copied(photo_run, tmp_path):
    return shutil.copytree(photo_run, tmp_path / "copy")


def captions(samples: Samples) -> list[str]:
    return [f"a drawing of {SAYS[label]}" for label in samples.column("label")]


def test_from_captions_at_every_level(photo_run, tmp_path):
    samples = Samples(photo_run)
    names = name_samples(samples, captions(samples))
    assert set(names.levels) == set(samples.levels)
    own = {names.of("cluster", c) for c in range(3)}
    assert {"ring", "stroke", "fork"} & set(" ".join(own).replace(",", "").split())
    for of in names.levels.values():
        texts = [name.text for name in of.values()]
        assert len(set(texts)) == len(texts)
    table = tmp_path / "captions.csv"
    files, splits = samples.column("file"), samples.column("split")
    lines = [f"{f},{s},{t}" for f, s, t in zip(files, splits, captions(samples), strict=True)]
    table.write_text("\n".join(["file,split,caption", *lines]) + "\n")
    assert name_samples(samples, table) == names


def test_labels_give_no_names(photo_run):
    samples = Samples(photo_run)
    assert str(samples.column("file")[0]).startswith("digit ")  # the folders are the labels
    names = name_samples(samples)
    assert all(not of for of in names.levels.values()), "a number is all these files are called"


def test_a_name_that_somebody_gave_stays(copied):
    samples = Samples(copied)
    names = name_samples(samples, captions(samples))
    twin = names.of("cluster", 1)
    names.edited({"cluster": {0: twin, 1: "mine"}}).save(copied)
    again = name_samples(samples, captions(samples))
    assert [again.of("cluster", c) for c in (0, 1)] == [twin, "mine"]
    assert again.edits == Names.load(copied).edits
