"""The answer of many heads: formed without labels, robust to a collapsed head, calibrated."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssl_kd.vision.evaluate import accuracy
from ssl_kd.vision.fit import neighbor_information, temperature_for, vote_tables
from ssl_kd.vision.model import tempered

K = 5
TRUTH = torch.arange(300) % K


def noisy_heads(n_heads, wrong=0.3):
    """Heads that each number the clusters in another way and err on their own share of samples."""
    g = torch.Generator().manual_seed(0)
    heads = []
    for _ in range(n_heads):
        names = torch.randperm(K, generator=g)
        guess = torch.randint(K, TRUTH.shape, generator=g)
        err = torch.rand(TRUTH.shape, generator=g) < wrong
        heads.append(torch.where(err, guess, names[TRUTH]))
    return torch.stack(heads)


def score(partition):
    return accuracy(TRUTH.numpy(), partition.numpy())


def answer(heads):
    votes = vote_tables(heads, heads[0], K)
    return votes[torch.arange(len(heads)).unsqueeze(1), heads].mean(0).argmax(-1)


def information(partition):
    rows = torch.arange(len(TRUTH) - K)
    return neighbor_information(partition[rows], partition[rows + K], K)


def test_vote_tables_count_which_cluster_maps_to_which():
    heads = torch.tensor([[0, 0, 1, 1], [2, 2, 2, 0]])
    votes = vote_tables(heads, torch.tensor([1, 1, 0, 2]), 3)
    third = [1 / 3] * 3
    expected = [[[0, 1, 0], [0.5, 0, 0.5], third], [[0, 0, 1], third, [1 / 3, 2 / 3, 0]]]
    torch.testing.assert_close(votes, torch.tensor(expected))
    assert votes.dtype == torch.float32


def test_neighbor_information_of_known_cases():
    even = torch.arange(K).repeat(20)
    one = torch.zeros_like(even)
    assert neighbor_information(even, even, K) == pytest.approx(math.log(K))
    assert neighbor_information(one, one, K) == 0.0
    apart = torch.cartesian_prod(torch.arange(K), torch.arange(K)).T
    assert neighbor_information(apart[0], apart[1], K) == pytest.approx(0.0, abs=1e-12)
    mixed = torch.where(torch.arange(100) % 4 == 0, 0, even)
    value = neighbor_information(even, mixed, K)
    assert 0 < value < math.log(K) and value == pytest.approx(neighbor_information(mixed, even, K))


def test_neighbor_information_ranks_heads_as_labels_would():
    heads = torch.cat([noisy_heads(1, wrong) for wrong in (0.6, 0.1, 0.0, 0.3)])
    by_information = np.argsort([information(head) for head in heads])
    assert by_information.tolist() == np.argsort([score(head) for head in heads]).tolist()
    wrong = torch.where(TRUTH == 1, 0, TRUTH)  # 0 and 1 merged, 2 split by halves
    wrong = torch.where((TRUTH == 2) & (torch.arange(300) % 10 < 5), 1, wrong)
    assert information(wrong) < information(TRUTH) - 0.1


def test_the_vote_is_better_than_the_best_head_and_collapsed_heads_do_no_harm():
    heads = noisy_heads(12)
    assert max(score(head) for head in heads) < 0.85 and score(answer(heads)) > 0.97
    heads = torch.cat([noisy_heads(8), torch.zeros(3, len(TRUTH), dtype=torch.int64)])
    assert score(answer(heads)) > 0.95


def votes(n=200, k=5, seed=0):
    return (2 * torch.randn(n, k, generator=torch.Generator().manual_seed(seed))).softmax(-1)


@settings(deadline=None)
@given(st.floats(0.05, 20), st.integers(2, 30), st.integers(0, 99))
def test_a_temperature_gives_the_power_of_the_probabilities(temperature, k, seed):
    p = votes(30, k, seed)
    result = tempered(p, temperature)
    expected = p.double() ** (1 / temperature)
    expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(result.double(), expected, atol=1e-6, rtol=1e-5)
    assert result.dtype == p.dtype and tempered(p, 1) is p
    first = p.argmax(-1, keepdim=True)
    assert (result.gather(-1, first) == result.amax(-1, keepdim=True)).all()


@pytest.mark.parametrize("confidence", [0.3, 0.5, 0.7, 0.95])
def test_the_mean_confidence_reaches_its_target(confidence):
    p = votes()
    temperature = temperature_for(p, confidence)
    assert float(tempered(p, temperature).amax(-1).mean()) == pytest.approx(confidence, abs=1e-5)
    assert temperature_for(p, 0.0) == pytest.approx(20)  # the nearest that can be reached
    assert temperature_for(p, 1.5) == pytest.approx(0.05)
    certain = torch.eye(3)
    assert tempered(certain, 0.5).equal(certain) and 1 / 3 < tempered(certain, 20).amax() < 1


def test_the_temperature_is_that_of_a_search_over_whole_answers():
    p = votes(1500, 7)  # more rows than are tempered at once
    low, high = math.log(0.05), math.log(20)
    for _ in range(40):
        middle = (low + high) / 2
        mean = float(tempered(p, math.exp(middle)).amax(-1).double().mean())
        low, high = (middle, high) if mean > 0.6 else (low, middle)
    assert temperature_for(p, 0.6) == math.exp((low + high) / 2)
