"""Rank correlations and stated probabilities of teachers, on scores that are known."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import ranking
from benchmarks.ranking import correlation, fitted_slope, pairs_of, probability


def scores(agreement, probe):
    """Return scores of teachers; all criteria but LiDAR rank them as the agreement does."""
    return {
        f"teacher {i}": {
            "probe": p,
            "agreement": a,
            "rankme": a,
            "alpha_req": 1 - a,
            "lidar": None,
            "knn": -p,
        }
        for i, (a, p) in enumerate(zip(agreement, probe, strict=True))
    }


RIGHT = scores([0.1, 0.2, 0.3], [0.5, 0.6, 0.9])
WRONG = scores([0.3, 0.2, 0.1], [0.5, 0.6, 0.9])


def test_correlations_are_those_of_the_ranks():
    assert correlation(RIGHT, "agreement") == pytest.approx(1)
    assert correlation(WRONG, "RankMe") == pytest.approx(-1)
    assert correlation(RIGHT, "alpha-ReQ near 1") == pytest.approx(-1)
    assert correlation(RIGHT, "k-NN, with labels") == pytest.approx(-1)
    assert correlation(RIGHT, "LiDAR") is None


def test_a_pair_is_right_if_the_teacher_with_more_agreement_has_the_better_probe():
    assert [is_right for _, is_right in pairs_of(RIGHT)] == [True] * 3
    assert [is_right for _, is_right in pairs_of(WRONG)] == [False] * 3
    assert [gap for gap, _ in pairs_of(RIGHT)] == pytest.approx([0.1, 0.2, 0.1])
    assert pairs_of(scores([0.1, 0.2], [0.5, 0.5])) == []


def test_the_fitted_probability_is_the_share_that_is_right():
    pairs = [(0.1, i % 4 > 0) for i in range(40)]
    assert probability(fitted_slope([pairs]), 0.1) == pytest.approx(0.75, abs=1e-3)
    assert probability(fitted_slope([pairs_of(WRONG)]), 0.1) == pytest.approx(0.5, abs=1e-3)


def test_descriptors_are_measured_once_and_kept_in_the_file(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    y = np.arange(60) % 3
    x = rng.normal(size=(60, 119)) + 4 * np.eye(119)[y]  # the classes are in the first columns
    np.savez(tmp_path / "landuse21.npz", x=x.astype(np.float32), y=y)
    monkeypatch.setattr(ranking, "images_of", lambda args: [])
    args = SimpleNamespace(features=[tmp_path], json=tmp_path / "out.jsonl", shelf="choose")
    done = {}
    ranking.run(args, done)
    of_set = done["landuse21"]
    assert list(of_set) == ["GIST", "PHOG", "LBP", "all"] and of_set["GIST"]["lidar"] is None
    assert of_set["GIST"]["probe"] > 0.9 > of_set["LBP"]["probe"]
    assert of_set["all"]["agreement"] > of_set["LBP"]["agreement"]
    ranking.run(args, done)
    (line,) = (tmp_path / "out.jsonl").read_text().splitlines()
    assert json.loads(line) == {"set": "landuse21", "scores": of_set}


def test_the_tables_have_a_row_for_each_set(capsys):
    mixed = scores([0.1, 0.2, 0.3], [0.6, 0.5, 0.9])
    ranking.report({"first": mixed, "second": mixed, "third": RIGHT})
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| first | 3 | 50.0 to 90.0 | 0.50 |")
    assert lines[-1].split(" | ")[-1] == "100 |" and lines[-3].split(" | ")[1] == "3"
