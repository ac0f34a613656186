"""Sampled pairs: allowed ones, uniform, and a function of seed and step."""

import torch

from ssl_kd.vision.train.pairs import PairSampler, judging_pairs, mutual_neighbors, sample_rows


def test_mutual_neighbors(monkeypatch):
    neighbors = torch.tensor([[1, 2], [0, 2], [3, 1], [2, 0], [0, 1]])
    expected = [[True, False], [True, True], [True, True], [True, False], [True, False]]
    for rows_per_block in (4096, 2):
        monkeypatch.setattr("ssl_kd.vision.train.pairs.ROWS_PER_BLOCK", rows_per_block)
        assert mutual_neighbors(neighbors).tolist() == expected  # row 4 keeps its nearest
        assert mutual_neighbors(neighbors.int()).tolist() == expected


def test_sampler_draws_allowed_pairs_evenly_and_is_a_function_of_seed_and_step():
    neighbors = torch.tensor([[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]])
    allowed = torch.tensor([[1, 1, 0], [0, 1, 0], [1, 1, 1], [0, 0, 1]]).bool()
    sampler = PairSampler(neighbors, allowed, 2, seed=5)
    assert sampler.steps_per_epoch == 2
    pairs = []
    for step in range(3000):
        rows, partners = sampler(step)
        pairs += zip(rows.tolist(), partners.tolist(), strict=True)
    counts = {pair: pairs.count(pair) for pair in set(pairs)}
    assert set(counts) == {(0, 1), (0, 2), (1, 2), (2, 0), (2, 1), (2, 3), (3, 2)}
    shares = {(0, 1): 0.5, (0, 2): 0.5, (1, 2): 1.0, (2, 3): 1 / 3, (3, 2): 1.0}
    assert all(abs(counts[pair] / 1500 - share) < 0.05 for pair, share in shares.items())
    again = PairSampler(neighbors, allowed, 2, seed=5)
    for step in (17, 4, 2999):
        assert all(torch.equal(a, b) for a, b in zip(sampler(step), again(step), strict=True))
    other = PairSampler(neighbors, allowed, 2, seed=6)
    assert any(not torch.equal(other(s)[1], again(s)[1]) for s in range(20))


def test_every_sample_is_drawn_once_in_an_epoch():
    neighbors = torch.arange(1, 13).remainder(12).unsqueeze(1)
    sampler = PairSampler(neighbors, torch.ones(12, 1, dtype=torch.bool), 4, seed=0)
    for epoch in range(3):
        rows = torch.cat([sampler(epoch * 3 + i)[0] for i in range(3)])
        assert sorted(rows.tolist()) == list(range(12))


def test_judging_pairs_are_the_nearest_quarter_or_a_repeatable_sample_of_it():
    neighbors = torch.arange(1, 9).repeat(10, 1) + 10 * torch.arange(10).unsqueeze(1)
    pairs = judging_pairs(neighbors, 0, 100)
    expected = {10 * row + near for row in range(10) for near in (1, 2)}
    assert pairs.shape == (2, 20) and set(pairs[1].tolist()) == expected
    assert (pairs[1] // 10 == pairs[0]).all()
    sample = judging_pairs(neighbors, 3, 15)
    assert sample.shape == (2, 15)
    assert set(map(tuple, sample.T.tolist())) <= set(map(tuple, pairs.T.tolist()))
    assert torch.equal(sample, judging_pairs(neighbors, 3, 15))
    assert judging_pairs(torch.tensor([[1], [0]]), 0, 9).tolist() == [[0, 1], [1, 0]]


def test_sample_rows_are_all_or_a_repeatable_sample_in_order():
    assert sample_rows(5, 0, 5).tolist() == [0, 1, 2, 3, 4]
    rows = sample_rows(1000, 3, 40)
    assert len(rows.unique()) == 40 and torch.equal(rows, rows.sort().values) and rows.max() < 1000
    assert torch.equal(rows, sample_rows(1000, 3, 40))
    assert not torch.equal(rows, sample_rows(1000, 4, 40))
