"""Test the table of `benchmarks.calibration` on a tiny data set."""

import sys

import numpy as np

from benchmarks import calibration
from benchmarks.sets import Absent


def three(sources):
    y = np.arange(300) % 3
    x = np.random.default_rng(0).normal(size=(300, 5)) + 9 * np.eye(3, 5)[y]
    return x.astype(np.float32), y


def absent(sources):
    raise Absent("it is not here")


def test_the_table_has_both_confidences_and_detects_the_unseen_class(monkeypatch, capsys):
    monkeypatch.setattr(calibration, "SETS", {"three": three, "gone": absent})
    monkeypatch.setattr(sys, "argv", ["calibration"])
    calibration.main()
    printed = capsys.readouterr()
    (line,) = [line for line in printed.out.splitlines() if line.startswith("| three")]
    name, acc, before, after, _, sure, area, above = [
        c.strip() for c in line.strip("| ").split("|")
    ]
    assert (name, acc) == ("three", "100.0")
    assert float(before) < 20 and float(after) < 20
    assert sure.startswith("100.0 of ") and float(area) > 99 and float(above) < 15
    assert "- three, raw: " in printed.out and "gone is skipped: it is not here" in printed.err
