"""Typical, diverse and balanced samples, samples near a query, and held-out parts."""

import itertools

import numpy as np
import pytest
import torch

from ssl_kd.core.errors import InputError
from ssl_kd_explore.curate import selection
from tests.explore.curate.stores import distinct, write


def directions(n=200, dim=6, clusters=5, seed=0):
    x, y = distinct(n, dim, clusters, seed)
    x = torch.from_numpy(x).float()
    return x / x.norm(dim=1, keepdim=True), y


def every(x):
    return np.arange(len(x))


def test_directions_are_the_embeddings_with_length_one(tmp_path):
    x, _ = distinct(150, 6)
    store = write(tmp_path, x)
    expected = x / np.linalg.norm(x, axis=1, keepdims=True)
    torch.testing.assert_close(selection.directions(store).double(), torch.from_numpy(expected))


def test_every_diverse_sample_is_the_one_furthest_from_all_before():
    x, _ = directions()
    chosen = selection.diverse(x, 12, allowed=every(x))
    distance = (2 - 2 * x.double() @ x.double().T).clamp(0).sqrt().numpy()
    assert chosen.rows[0] == int((x @ x.mean(0)).argmax())
    for i in range(1, 12):
        nearest = distance[:, chosen.rows[:i]].min(1)
        assert nearest[chosen.rows[i]] == pytest.approx(nearest.max(), abs=1e-4)
        assert chosen.scores[i] == pytest.approx(nearest.max(), abs=1e-4)


def test_diverse_samples_cover_within_twice_the_least_radius():
    x, _ = directions(n=14, seed=3)
    distance = (2 - 2 * x @ x.T).clamp(0).sqrt().numpy()
    least = min(
        distance[:, list(rows)].min(1).max() for rows in itertools.combinations(range(14), 3)
    )
    rows = selection.diverse(x, 3, allowed=every(x)).rows
    radius = selection.covering_radius(x, rows.tolist())
    assert radius == pytest.approx(distance[:, rows].min(1).max(), abs=1e-4)
    assert least <= radius + 1e-4 <= 2 * least


def test_typical_samples_are_in_every_group_with_the_largest_first():
    rng = np.random.default_rng(0)
    y = np.repeat([0, 1, 2], [100, 50, 10])
    x = torch.from_numpy(np.eye(5)[y] + 0.01 * rng.normal(size=(160, 5))).float()
    x /= x.norm(dim=1, keepdim=True)
    chosen = selection.typical(x, 3, allowed=every(x))
    assert y[chosen.rows].tolist() == [0, 1, 2]
    assert chosen.scores.tolist() == [100, 50, 10]
    center = torch.stack([x[torch.from_numpy(y == k)].mean(0) for k in range(3)])
    for k, row in enumerate(chosen.rows):
        members = np.flatnonzero(y == k)
        assert row == members[int((x[members] - center[k]).norm(dim=1).argmin())]


def test_a_typical_selection_continues_with_groups_that_are_not_covered():
    rng = np.random.default_rng(0)
    y = np.repeat([0, 1, 2], [100, 50, 10])
    x = torch.from_numpy(np.eye(5)[y] + 0.01 * rng.normal(size=(160, 5))).float()
    x /= x.norm(dim=1, keepdim=True)
    chosen = selection.typical(x, 2, start=[3], allowed=every(x))
    assert y[chosen.rows].tolist() == [1, 2]


@pytest.mark.parametrize("name", ["diverse", "typical"])
def test_a_selection_has_no_row_twice_and_none_that_is_not_allowed(name):
    x, _ = directions()
    x[50:60] = x[0]  # copies
    allowed = np.arange(0, 200, 2)
    chosen = getattr(selection, name)(x, 90, start=[0, 2], allowed=allowed)
    assert len(set(chosen.rows.tolist())) == 90
    assert set(chosen.rows.tolist()) <= set(allowed.tolist()) - {0, 2}
    everything = getattr(selection, name)(x, 200, allowed=every(x))
    assert sorted(everything.rows.tolist()) == list(range(200))


def test_balanced_samples_are_equally_many_of_each_cluster_with_those_before():
    clusters = np.repeat([0, 1, 2], [20, 10, 3])
    confidence = np.linspace(0, 1, 33)
    chosen = selection.balanced(clusters, confidence, 12, start=[0, 1], allowed=np.arange(33))
    counts = np.bincount(clusters[chosen.rows])
    assert counts.tolist() == [4, 5, 3]
    assert chosen.rows[:2].tolist() == [29, 32]  # the most certain of clusters 1 and 2
    assert chosen.scores[0] == pytest.approx(confidence[29])


def test_samples_near_a_query_are_those_with_the_largest_cosine():
    x, _ = directions()
    chosen = selection.near(x, 3 * x[7], 5, start=[7], allowed=every(x))
    cosine = (x @ x[7]).numpy()
    cosine[7] = -2
    assert chosen.rows.tolist() == np.argsort(-cosine)[:5].tolist()
    assert chosen.scores == pytest.approx(np.sort(cosine)[::-1][:5], abs=1e-5)


def test_held_out_samples_are_a_share_of_each_cluster_without_copies_on_the_other_side():
    rng = np.random.default_rng(0)
    clusters = rng.integers(4, size=1000)
    groups = [np.array([i, i + 500, i + 600]) for i in range(50)]
    allowed = np.arange(10, 1000)
    held_out = selection.held_out(groups, clusters, 0.2, allowed=allowed)
    assert not held_out[:10].any()
    for group in groups[10:]:
        assert len(set(held_out[group].tolist())) == 1
    assert held_out[allowed].mean() == pytest.approx(0.2, abs=0.01)
    singles = np.setdiff1d(allowed, np.concatenate(groups))
    for k in range(4):
        of_cluster = singles[clusters[singles] == k]
        assert held_out[of_cluster].mean() == pytest.approx(0.2, abs=0.05)
    assert np.array_equal(held_out, selection.held_out(groups, clusters, 0.2, allowed=allowed))
    other = selection.held_out(groups, clusters, 0.2, allowed=allowed, seed=1)
    assert not np.array_equal(held_out, other)


@pytest.mark.parametrize("n", [0, 199, 1000])
def test_more_samples_than_remain_are_refused(n):
    x, _ = directions()
    with pytest.raises(InputError, match=f"n is {n}; expected a number from 1 to 198"):
        selection.diverse(x, n, start=[0, 1], allowed=every(x))


@pytest.mark.parametrize("share", [0, 1, -1, float("nan")])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(InputError, match="between 0 and 1"):
        selection.held_out([], np.zeros(5, int), share, allowed=np.arange(5))
