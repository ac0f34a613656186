"""The linear probe of DINOv2, against a plain loop in PyTorch."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

from ssl_kd.vision.evaluate import sgd_probe
from ssl_kd.vision.evaluate.sgd_probe import RATES, SCALE, train_linear

PIXELS, DIGITS = map(np.asarray, load_digits(return_X_y=True))
X, Y = (PIXELS[:1000] / 16).astype(np.float32), DIGITS[:1000]
TEST_X, TEST_Y = (PIXELS[1000:] / 16).astype(np.float32), DIGITS[1000:]


@pytest.mark.parametrize("rate", [0.01, 0.5])
def test_all_rates_at_once_are_trained_as_one_layer_by_pytorch(rate):
    steps, batch_size, seed = 60, 32, 3
    x, y = torch.from_numpy(X), torch.from_numpy(Y)
    rates = [0.01, 0.1, 0.5]
    weights, bias = train_linear(x, y, 10, rates, steps=steps, batch_size=batch_size, seed=seed)
    random = torch.Generator().manual_seed(seed)
    layer = torch.nn.Linear(64, 10)
    with torch.no_grad():
        layer.weight.copy_((SCALE * torch.randn(64, 1, 10, generator=random))[:, 0].T)
        layer.bias.zero_()
    optimizer = torch.optim.SGD(layer.parameters(), rate, momentum=0.9, weight_decay=0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=0)
    order = torch.cat([torch.randperm(len(x), generator=random) for _ in range(2)])
    for rows in order.split(batch_size)[:steps]:
        optimizer.zero_grad()
        cross_entropy(layer(x[rows]), y[rows]).backward()
        optimizer.step()
        schedule.step()
    at = rates.index(rate)
    torch.testing.assert_close(weights[:, at].T, layer.weight.detach(), rtol=0, atol=1e-5)
    torch.testing.assert_close(bias[at], layer.bias.detach(), rtol=0, atol=1e-5)


def test_a_rate_is_chosen_without_the_test_labels():
    result = sgd_probe(X, Y, TEST_X, TEST_Y, steps=300)
    assert result["accuracy"] > 0.85 and result["note"] is None
    assert result["epochs"] == pytest.approx(300 * 128 / 1000) and result["rows"] == 1000
    assert [row["rate"] for row in result["rates"]] == list(RATES)
    best = max(result["rates"], key=lambda row: row["validation"])
    assert best.items() <= result.items()
    assert result["as_dinov2"] == max(row["accuracy"] for row in result["rates"])
    shuffled = np.random.default_rng(0).permutation(TEST_Y)
    other = sgd_probe(X, Y, TEST_X, shuffled, steps=300)
    assert other["rate"] == result["rate"] and other["accuracy"] < 0.25
    assert other["as_dinov2"] >= other["accuracy"]


def test_the_probe_repeats_with_its_seed_and_holds_out_a_quarter():
    first, again, other = (sgd_probe(X, Y, steps=50, seed=seed) for seed in (0, 0, 1))
    assert first == again != other
    assert first["rows"] == 750 and "a held-out quarter" in first["note"]


def test_rates_that_diverge_are_left_out():
    huge = X * np.float32(1e18)
    result = sgd_probe(huge, Y, TEST_X, TEST_Y, rates=[1e-5, 1e30], steps=100)
    assert result["rates"][1]["accuracy"] is None and "of 2 rates diverged" in result["note"]
    nothing = sgd_probe(huge, Y, TEST_X, TEST_Y, rates=[1e30], steps=100)
    assert nothing["accuracy"] is nothing["rate"] is nothing["as_dinov2"] is None


def test_labels_need_not_be_from_0_and_unknown_classes_are_wrong():
    named = np.array([3, 8, 11, 20, 21, 30, 41, 55, 60, 99])
    plain = sgd_probe(X, Y, TEST_X, TEST_Y, steps=50)
    assert sgd_probe(X, named[Y], TEST_X, named[TEST_Y], steps=50) == plain
    for unknown in (1, 15, 1000):
        assert (
            sgd_probe(X, named[Y], TEST_X, np.full(len(TEST_X), unknown), steps=5)["accuracy"] == 0
        )


@pytest.mark.parametrize("y", [np.zeros(1000, int), np.full(1000, -1)])
def test_too_few_labels_give_a_reason(y):
    result = sgd_probe(X, y)
    assert result["accuracy"] is None and "expected at least 2" in result["note"]


@pytest.mark.parametrize("bad", [{"steps": 0}, {"batch_size": 0}, {"rates": []}, {"rates": [0.0]}])
def test_bad_arguments_are_refused(bad):
    with pytest.raises(ValueError, match="expected steps and batch_size of at least 1"):
        sgd_probe(X, Y, **bad)
