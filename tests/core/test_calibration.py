"""Reliability of a confidence: bins, the expected error, and which samples count as right."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ssl_kd.language.evaluate.tokens import TokenScores, TokenValues
from ssl_kd.vision.evaluate import accuracy, calibration, rightly_placed

pairs = st.lists(st.tuples(st.integers(-1, 3), st.integers(-1, 4)), min_size=1)


@given(pairs.filter(lambda rows: any(label >= 0 for label, _ in rows)))
def test_the_right_ones_are_those_that_accuracy_counts(rows):
    labels, clusters = map(np.array, zip(*rows, strict=True))
    right = rightly_placed(labels, clusters)
    assert right.shape == labels.shape and not right[labels < 0].any()
    assert not right[clusters < 0].any()
    assert right.sum() / (labels >= 0).sum() == pytest.approx(accuracy(labels, clusters))


@given(st.lists(st.tuples(st.integers(0, 97), st.booleans()), min_size=1))
def test_the_error_is_that_of_tokens(rows):
    confidence, right = (np.array(column) for column in zip(*rows, strict=True))
    confidence = confidence / 97  # now and then on an edge
    found = calibration(confidence, right)
    scores, zero = TokenScores(), torch.zeros(len(rows))
    values = TokenValues(zero, torch.tensor(confidence), torch.tensor(right).double())
    scores.add([values], [0], n_bytes=1)
    assert found["ece"] == pytest.approx(scores.ece, abs=1e-5)
    assert sum(b["n"] for b in found["bins"]) == len(rows)
    assert all(b["low"] <= b["confidence"] <= b["high"] for b in found["bins"])


def test_a_calibrated_confidence_has_no_error():
    confidence = np.repeat([0.55, 0.95], 100)
    right = np.r_[np.arange(100) < 55, np.arange(100) < 95]
    found = calibration(confidence, right)
    assert found["ece"] == pytest.approx(0, abs=1e-6)
    assert found["sure"]["n"] == 100 and found["sure"]["right"] == 0.95
    assert calibration([0.5], [True])["sure"] is None
    assert calibration([0.0, 1.0], [False, True])["ece"] == 0
