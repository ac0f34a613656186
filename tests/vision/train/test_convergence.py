"""Training ends by the agreement of neighbors, and at the same step after a resume."""

import math

import numpy as np
import pytest
import torch

from ssl_kd import MultiHeadClusterer
from ssl_kd.vision.train.convergence import ALONE, DECAY, Convergence, fewest


def _ended(values, most=10**6, n_clusters=10):
    """Steps, and the learning rate of each, where the looks see these values in turn."""
    seen = iter(values)
    until = Convergence(lambda: torch.tensor([next(seen)]), n_clusters, most)
    rates, step = [], 0
    while step < until.steps:
        rates.append(until.learning_rate_at(step, 1.0, 0.1))
        step += 1
        until.look(step)
    return until, rates


def test_it_ends_once_half_of_the_steps_brought_less_than_a_hundredth():
    hundredth = 0.01 * math.log(10)
    # The third is 0.3 above the first, the fourth as much as it has to be above the second.
    seen = [0.0, 0.3, 0.3, 0.3 + 1.01 * hundredth, 0.3 + 0.99 * hundredth]
    until, rates = _ended([*seen, *[9.0] * 9])
    assert list(until.history()) == [25, 35, 50, 71, 100]
    assert until.steps == len(rates) == math.ceil(100 / (1 - DECAY))


def test_the_rate_warms_up_stays_and_falls_once_it_is_known_when():
    _, rates = _ended([1.0] * 9)
    assert len(rates) == fewest()
    warmup = round(0.1 * fewest())
    assert rates[0] == 1 / warmup and rates[warmup - 1 : 50] == [1.0] * (51 - warmup)
    assert all(a >= b for a, b in zip(rates[50:], rates[51:], strict=False))
    assert 0 < rates[-1] < 0.01


@pytest.mark.parametrize("most", [1, 2, 30, 99, 143, 150, 1000])
def test_it_never_takes_more_steps_than_there_are(most):
    until, rates = _ended([float(n) for n in range(99)], most)  # always grows
    assert until.steps == len(rates) == most
    assert most < 10 or rates[-1] < 0.2  # and the rate falls in time
    assert all(step <= most for step in until.history())


def test_heads_that_find_their_own_clusters_are_judged_from_50_steps_on():
    until = Convergence(lambda: torch.tensor([1.0]), 10, 10**6, ALONE)
    for step in range(1, 200):
        until.look(step)
    assert list(until.history()) == [50, 71, 100] and until.steps == math.ceil(100 / (1 - DECAY))


def test_heads_that_all_are_faulty_do_not_move_the_end():
    values = [torch.nan, torch.nan, torch.nan]
    until, _ = _ended(values)
    assert list(until.history().values()) == [0.0] * 3 and until.steps == fewest()


def test_steps_that_are_given_win_over_the_rule():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 8)).astype(np.float32) + 6 * np.eye(8)[rng.integers(0, 3, 300)]
    common = {"n_clusters": 3, "n_heads": 2, "batch_size": 100, "hidden_dim": 16}
    steps = {}
    for name, given in {"max_steps": 7, "epochs": 2, "neither": None}.items():
        options = {} if given is None else {name: given}
        model = MultiHeadClusterer(**common, **options).fit(x.astype(np.float32))
        steps[name] = model.n_iter_
    assert steps == {"max_steps": 14, "epochs": 12, "neither": 2 * fewest()}  # two stages
