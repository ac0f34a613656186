"""The answer of many heads: found without labels, unharmed by a collapsed head, repeatable."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ssl_kd.evaluate import accuracy
from ssl_kd.vision import consensus

K = 5
TRUTH = torch.arange(300) % K


def noisy_heads(n_heads, wrong=0.3, seed=0):
    """Heads that each call the clusters by other numbers and err on their own share of samples."""
    g = torch.Generator().manual_seed(seed)
    heads = []
    for _ in range(n_heads):
        names = torch.randperm(K, generator=g)
        guess = torch.randint(K, TRUTH.shape, generator=g)
        err = torch.rand(TRUTH.shape, generator=g) < wrong
        heads.append(torch.where(err, guess, names[TRUTH]))
    return torch.stack(heads)


def score(partition):
    return accuracy(TRUTH.numpy(), partition.numpy())


# --- Votes --------------------------------------------------------------------------------------


def test_vote_tables_count_which_cluster_stands_for_which():
    heads = torch.tensor([[0, 0, 1, 1], [2, 2, 2, 0]])
    votes = consensus.vote_tables(heads, torch.tensor([1, 1, 0, 2]), 3)
    third = [1 / 3] * 3
    expected = [[[0, 1, 0], [0.5, 0, 0.5], third], [[0, 0, 1], third, [1 / 3, 2 / 3, 0]]]
    torch.testing.assert_close(votes, torch.tensor(expected))


@given(st.integers(1, 6), st.integers(1, 40), st.integers(2, 7), st.integers(0, 99))
def test_vote_tables_are_distributions(n_heads, n, k, seed):
    g = torch.Generator().manual_seed(seed)
    heads = torch.randint(k, (n_heads, n), generator=g)
    votes = consensus.vote_tables(heads, torch.randint(k, (n,), generator=g), k)
    assert votes.shape == (n_heads, k, k) and votes.dtype == torch.float32 and (votes >= 0).all()
    torch.testing.assert_close(votes.sum(-1), torch.ones(n_heads, k))


# --- How good an answer is, by neighbours --------------------------------------------------------


def test_neighbour_information_of_known_cases():
    even = torch.arange(K).repeat(20)
    one = torch.zeros_like(even)
    assert consensus.neighbour_information(even, even, K) == pytest.approx(math.log(K))
    assert consensus.neighbour_information(one, one, K) == 0.0
    apart = torch.cartesian_prod(torch.arange(K), torch.arange(K)).T
    assert consensus.neighbour_information(apart[0], apart[1], K) == pytest.approx(0.0, abs=1e-12)
    some = torch.where(torch.arange(100) % 4 == 0, 0, even)
    assert 0 < consensus.neighbour_information(even, some, K) < math.log(K)
    assert consensus.neighbour_information(even, some, K) == pytest.approx(
        consensus.neighbour_information(some, even, K)
    )


def test_neighbour_information_ranks_heads_as_labels_would():
    heads = torch.cat([noisy_heads(1, wrong) for wrong in (0.6, 0.1, 0.0, 0.3)])
    pairs = torch.arange(len(TRUTH) - K)
    found = [consensus.neighbour_information(h[pairs], h[pairs + K], K) for h in heads]
    assert np.argsort(found).tolist() == np.argsort([score(h) for h in heads]).tolist()


def test_a_cluster_that_is_split_and_two_that_are_merged_tell_less():
    pairs = torch.arange(len(TRUTH) - K)
    wrong = torch.where(TRUTH == 1, 0, TRUTH)  # 0 and 1 merged, 2 split by halves
    wrong = torch.where((TRUTH == 2) & (torch.arange(300) % 10 < 5), 1, wrong)
    right, less = (
        consensus.neighbour_information(h[pairs], h[pairs + K], K) for h in (TRUTH, wrong)
    )
    assert less < right - 0.1


# --- The answer ---------------------------------------------------------------------------------


def answer(heads, anchor=0):
    votes = consensus.vote_tables(heads, heads[anchor], K)
    return votes[torch.arange(len(heads)).unsqueeze(1), heads].mean(0).argmax(-1)


def test_the_vote_is_better_than_the_best_head():
    heads = noisy_heads(12)
    assert max(score(head) for head in heads) < 0.85
    assert score(answer(heads)) > 0.97


def test_collapsed_heads_do_no_harm():
    heads = torch.cat([noisy_heads(8), torch.zeros(3, len(TRUTH), dtype=torch.int64)])
    assert score(answer(heads)) > 0.95


@pytest.mark.parametrize("n_heads", [1, 2, 7])
def test_unanimous_heads_are_repeated(n_heads):
    heads = noisy_heads(n_heads, wrong=0.0)
    assert torch.equal(answer(heads), heads[0])


def test_the_names_of_the_heads_clusters_do_not_matter():
    heads = noisy_heads(9)
    renamed = torch.stack([heads[0], *(torch.randperm(K)[head] for head in heads[1:])])
    assert torch.equal(answer(heads), answer(renamed))


# --- Pairs to judge by --------------------------------------------------------------------------


def test_judging_pairs_are_the_nearest_quarter_or_a_repeatable_sample_of_it():
    neighbours = torch.arange(1, 9).repeat(10, 1) + 10 * torch.arange(10).unsqueeze(1)
    pairs = consensus.judging_pairs(neighbours, 0, most=100)
    assert pairs.shape == (2, 20) and set(pairs[1].tolist()) == {
        10 * row + near for row in range(10) for near in (1, 2)
    }
    assert (pairs[1] // 10 == pairs[0]).all()
    some = consensus.judging_pairs(neighbours, 3, most=15)
    assert some.shape == (2, 15) and {tuple(p) for p in some.T.tolist()} <= {
        tuple(p) for p in pairs.T.tolist()
    }
    assert torch.equal(some, consensus.judging_pairs(neighbours, 3, most=15))
    assert consensus.judging_pairs(torch.tensor([[1], [0]]), 0, 9).tolist() == [[0, 1], [1, 0]]


def test_sample_rows_are_all_or_a_repeatable_sample_in_order():
    assert consensus.sample_rows(5, 0, 5).tolist() == [0, 1, 2, 3, 4]
    rows = consensus.sample_rows(1000, 3, 40)
    assert len(rows.unique()) == 40 and torch.equal(rows, rows.sort().values) and rows.max() < 1000
    assert torch.equal(rows, consensus.sample_rows(1000, 3, 40))
    assert not torch.equal(rows, consensus.sample_rows(1000, 4, 40))
