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


# --- Which heads --------------------------------------------------------------------------------


def test_healthy_heads_come_in_the_order_of_their_loss():
    loss = torch.tensor([0.5, float("nan"), -2.0, 0.1, -9.0, float("-inf")])
    healthy = torch.tensor([True, True, True, True, False, True])
    assert consensus.healthy_heads_by_loss(loss, healthy).tolist() == [2, 3, 0]
    assert loss[2] == -2.0


@pytest.mark.parametrize(
    ("loss", "healthy"),
    [([1.0, 2.0], [False, False]), ([float("nan"), float("inf")], [True, True])],
)
def test_no_healthy_head_is_an_error(loss, healthy):
    with pytest.raises(ValueError, match="no head is healthy"):
        consensus.healthy_heads_by_loss(torch.tensor(loss), torch.tensor(healthy))


# --- What they agree on -------------------------------------------------------------------------


def test_many_poor_heads_make_a_good_answer():
    heads = noisy_heads(12)
    assert max(score(head) for head in heads) < 0.85
    assert score(consensus.consensus_partition(heads, K, 0)) > 0.97


def test_one_collapsed_head_does_no_harm():
    heads = torch.cat([torch.zeros(1, len(TRUTH), dtype=torch.int64), noisy_heads(11)])
    assert score(consensus.consensus_partition(heads, K, 0)) > 0.97


@pytest.mark.parametrize("n_heads", [1, 2, 7])
def test_unanimous_heads_are_repeated(n_heads):
    heads = noisy_heads(n_heads, wrong=0.0)
    assert score(consensus.consensus_partition(heads, K, 0)) == 1.0


def test_clusters_that_no_head_uses_are_no_fault():
    """Fewer distinct opinions than clusters: what all heads hold apart stays apart."""
    heads = (TRUTH % 2).repeat(3, 1)
    found = consensus.consensus_partition(heads, K, 0)
    assert found.shape == TRUTH.shape and 0 <= found.min() and found.max() < K
    votes = consensus.vote_tables(heads, found, K)[0].argmax(-1)
    assert votes[0] != votes[1]


@pytest.mark.parametrize("n", [K, K + 1, 8])
def test_few_samples(n):
    found = consensus.consensus_partition(noisy_heads(4)[:, :n], K, 0)
    assert found.shape == (n,) and found.dtype == torch.int64


def test_the_seed_decides_and_the_global_generators_are_left_alone():
    heads = noisy_heads(3, wrong=0.7)
    torch.manual_seed(1)
    np.random.seed(1)
    states = torch.get_rng_state(), np.random.get_state()[1].copy()  # pyright: ignore
    first = consensus.consensus_partition(heads, K, 4)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()  # pyright: ignore
    np.random.seed(2)
    assert torch.equal(first, consensus.consensus_partition(heads, K, 4))


def test_the_order_and_the_names_of_the_heads_clusters_do_not_matter():
    heads = noisy_heads(9)
    renamed = torch.stack([torch.randperm(K)[head] for head in heads]).flip(0)
    first = consensus.consensus_partition(heads, K, 0)
    again = consensus.consensus_partition(renamed, K, 0)
    assert accuracy(first.numpy(), again.numpy()) > 0.99


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


def test_the_candidate_that_tells_most_is_the_better_one():
    """The best heads first, then ones that know nothing: neighbours tell where to stop."""
    heads = torch.cat([noisy_heads(6, 0.25), torch.randint(K, (18, len(TRUTH)))])
    first = torch.arange(len(TRUTH) - K)
    found = consensus.candidates(heads, first, first + K, K, 0, [1, 3, 6, 24])
    assert [candidate.n_heads for candidate in found] == [1, 3, 6, 24]
    assert [len(candidate.votes) for candidate in found] == [1, 3, 6, 24]
    best = max(found, key=lambda candidate: candidate.information)

    def answer(candidate):
        heads_of_it = torch.arange(candidate.n_heads).unsqueeze(1)
        return candidate.votes[heads_of_it, heads[: candidate.n_heads]].mean(0).argmax(-1)

    assert score(answer(best)) >= max(score(answer(candidate)) for candidate in found) - 0.02
    assert score(answer(found[0])) == score(heads[0])  # of one head: its own clusters


@pytest.mark.parametrize(
    ("n_heads", "most", "sizes"),
    [
        (48, None, [1, 3, 6, 12, 24, 48]),
        (48, 12, [1, 3, 6, 12]),
        (50, None, [1, 3, 6, 12, 24, 48, 50]),
        (2, None, [1, 2]),
        (1, None, [1]),
        (9, 1, [1]),
    ],
)
def test_sizes_to_try(n_heads, most, sizes):
    assert consensus.sizes_to_try(n_heads, most) == sizes


def test_sample_rows_are_all_or_a_repeatable_sample_in_order():
    assert consensus.sample_rows(5, 0, 5).tolist() == [0, 1, 2, 3, 4]
    rows = consensus.sample_rows(1000, 3, 40)
    assert len(rows.unique()) == 40 and torch.equal(rows, rows.sort().values) and rows.max() < 1000
    assert torch.equal(rows, consensus.sample_rows(1000, 3, 40))
    assert not torch.equal(rows, consensus.sample_rows(1000, 4, 40))
