"""The rules for the number of clusters, on curves that are known."""

import numpy as np
import pytest

from benchmarks import number
from benchmarks.number import SHIPPED, best_rule, interval_by, lost, number_by, report, summary

NUMBERS = [2, 3, 4, 6, 8, 10, 13, 20, 30]


def task(name, agreement, classes, modularity=0.5):
    """Return a task whose accuracy falls by 20 points per factor e from its classes."""
    accuracy = {str(k): 90 - 20 * abs(np.log(k / classes)) for k in (2, 4, 8, 20)}
    row = {"set": name, "draw": 0, "n": 400, "classes": classes, "K": NUMBERS}
    curves = {"Q": [modularity] * len(NUMBERS), "F": agreement, "A": agreement[::-1]}
    return {**row, **curves, "accuracy": accuracy}


FLAT = task("flat", [0.1, 0.2, 0.7, 0.98, 1.0, 0.99, 0.9, 0.5, 0.2], 8)
SHARP = task("sharp, half", [0.1, 0.1, 1.0, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1], 4)


def test_the_smallest_number_with_a_share_of_the_highest_score_is_found():
    assert number_by(("Q F", 1.0), FLAT) == 8 and number_by(SHIPPED, FLAT) == 6
    assert number_by(("Q F", 0.6), FLAT) == 4
    assert number_by(SHIPPED, SHARP) == 4
    assert number_by(("Q A^(1/3)", 1.0), SHARP) == 13  # its curve is reversed
    assert interval_by(SHIPPED, FLAT) == (4, 8)  # from half to one and a half times 6
    assert interval_by(SHIPPED, SHARP) == (4, 4)


def test_lost_points_are_interpolated_over_the_logarithm_of_the_number():
    assert lost(FLAT, 8) == pytest.approx(0)
    assert lost(FLAT, 4) == pytest.approx(20 * np.log(2))
    assert lost(FLAT, 6) == pytest.approx(20 * np.log(8 / 6))
    assert lost(SHARP, 4) == pytest.approx(0)


def test_sources_weigh_the_same_and_the_rule_with_least_loss_is_best():
    rows = [FLAT, FLAT, SHARP]
    close, held, ratio, points = summary(rows, [SHIPPED] * 3)
    assert (close, held, ratio) == (50, 100, 1.5)
    assert points == pytest.approx(20 * np.log(8 / 6) / 2)
    name, share = best_rule(rows)
    assert "F" in name and summary(rows, [(name, share)] * 3)[-1] == pytest.approx(0)
    lines = report(rows).splitlines()
    assert lines[0] == "3 tasks of 2 sources"
    assert "| **shipped: Q F, 0.96** | 50 | 100 | 1.5 | 2.9 |" in lines
    assert any(line.startswith("| source left out | ") for line in lines)
    assert "| flat | 8 | 6 | 4 to 8 | 5.8 | 8 |" in lines


def test_ingredients_of_three_groups_speak_for_three(monkeypatch):
    monkeypatch.setattr(number, "HALVINGS", 1)
    r = np.random.default_rng(0)
    y = np.repeat(np.arange(3), 40)
    x = 5 * r.normal(size=(3, 8))[y] + r.normal(size=(120, 8))
    x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
    row = {"classes": 3, **number.ingredients(x, y)}
    assert row["K"][:2] == [2, 3] and len(row["Q"]) == len(row["F"]) == len(row["A"])
    for name in ("Q F", "Q A^(1/3)"):
        assert number_by((name, 1.0), row) == 3
    assert row["accuracy"][3] == 100 and lost(row, 2) > 20


def test_half_of_the_classes_are_kept_with_all_their_samples():
    y = np.arange(50) % 5
    x, kept = number.half_of_classes(np.arange(50)[:, None], y, 1)
    assert len(set(kept)) == 3 and len(kept) == 30 and (x[:, 0] % 5 == kept).all()
