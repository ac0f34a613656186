"""Columns of a run's samples: filters, order, cells and charts."""

import shutil

import numpy as np
import pytest

from ssl_kd.errors import InputError
from ssl_kd.vision.samples import Samples
from ssl_kd.workbench.columns import Columns
from ssl_kd.workbench.decisions import Curation


@pytest.fixture
def samples(photo_run, tmp_path):
    return Samples(shutil.copytree(photo_run, tmp_path / "copy"))


@pytest.fixture
def columns(samples):
    return Columns(samples, Curation(samples))


def test_filters_find_what_pandas_finds(samples, columns):
    frame = samples.table.to_pandas()
    wanted = {
        ("confidence", "<0.9"): frame.confidence < 0.9,
        ("confidence", " 0.5 .. 0.9"): frame.confidence.between(0.5, 0.9),
        ("label", "DIGIT 1"): frame.label == "digit 1",
        ("label", "!=digit 1"): frame.label != "digit 1",
        ("cluster", "2"): frame.cluster == 2,
        ("cluster", "!=2"): frame.cluster != 2,
        ("file", "/000"): frame.file.str.contains("/000"),
        ("", "=test"): frame.split == "test",
    }
    for (name, text), mask in wanted.items():
        assert np.array_equal(columns.find({name: text}), np.flatnonzero(mask)), (name, text)
    order = frame.sort_values("confidence", ascending=False, kind="stable").index
    assert np.array_equal(columns.find({}, "confidence", descending=True), order)


def test_an_unknown_column_is_an_error_with_a_near_name(columns):
    with pytest.raises(InputError, match=r"no column 'confidenc'.* mean confidence\?"):
        columns.find({"confidenc": "<0.5"})
