"""The confidence: as sure on average as the partition is stable, in the same order as the vote."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssl_kd.vision.confidence import temperature_for, tempered


def votes(n=200, k=5, seed=0):
    return (2 * torch.randn(n, k, generator=torch.Generator().manual_seed(seed))).softmax(-1)


@settings(deadline=None)
@given(st.floats(0.05, 20), st.integers(2, 30), st.integers(0, 99))
def test_a_temperature_keeps_distributions_and_who_is_first(temperature, k, seed):
    p = votes(30, k, seed)
    found = tempered(p, temperature)
    torch.testing.assert_close(found.sum(-1), torch.ones(30))
    assert found.dtype == p.dtype
    first = p.argmax(-1, keepdim=True)
    assert (found.gather(-1, first) == found.amax(-1, keepdim=True)).all()
    expected = p.double() ** (1 / temperature)
    torch.testing.assert_close(found.double(), expected / expected.sum(-1, keepdim=True),
                               atol=1e-6, rtol=1e-5)  # fmt: skip
    assert tempered(p, 1) is p


def test_a_vote_that_is_certain_can_be_cooled_and_heated():
    p = torch.eye(3)
    assert tempered(p, 0.5).equal(p) and tempered(p, 20).isfinite().all()
    assert 1 / 3 < tempered(p, 20).amax() < 1


@pytest.mark.parametrize("confidence", [0.3, 0.5, 0.7, 0.95])
def test_the_mean_confidence_becomes_the_one_that_is_wanted(confidence):
    p = votes()
    temperature = temperature_for(p, confidence)
    assert float(tempered(p, temperature).amax(-1).mean()) == pytest.approx(confidence, abs=1e-5)


def test_a_confidence_that_cannot_be_reached_gives_the_nearest():
    p = votes()
    assert temperature_for(p, 0.0) == pytest.approx(20)
    assert temperature_for(p, 1.5) == pytest.approx(0.05)
