"""The consensus of partitions, and its answer on shapes that single families miss."""

import numpy as np
import pytest
from sklearn.datasets import load_digits, make_moons
from sklearn.metrics import adjusted_rand_score
from sklearn.neighbors import NearestNeighbors

from ssl_kd.vision.graph import View, agreement, consensus, criterion, form_ensemble, fuzzy_graph
from ssl_kd.vision.graph.ensemble import (
    MASS,
    PEAKS,
    Candidate,
    aligned,
    any_size_consensus,
    cluster_agreement,
    vote,
    weights_of,
)

R = np.random.default_rng(0)


def ensemble_of(x, n_clusters, **options):
    distances, near = NearestNeighbors(n_neighbors=min(20, len(x) - 1)).fit(x).kneighbors()
    graphs = {k: fuzzy_graph(near[:, :k], distances[:, :k]) for k in (10, 15, 20)}
    centred = (x - x.mean(0)).astype(np.float32)
    view = View(centred, graphs)
    return form_ensemble(view, view, view, n_clusters, **options)


def agreed(partitions, n_clusters):
    return consensus([Candidate("any", clusters) for clusters in partitions], n_clusters)


def test_a_partition_takes_the_names_of_the_answer():
    answer = np.array([0, 0, 0, 1, 1, 2, 2, 2])
    assert aligned(np.array([2, 2, 2, 0, 0, 1, 1, 1]), answer).tolist() == answer.tolist()
    more = np.array([0, 0, 3, 1, 1, 2, 2, 2])  # a cluster that is left over goes where it was
    assert aligned(more, answer).tolist() == answer.tolist()
    assert set(aligned(np.zeros(8, int), answer)) == {0}


def test_each_family_counts_once_in_the_agreement_with_a_cluster():
    answer = np.array([0, 0, 0, 0, 1, 1, 2, 2])
    parts = [
        Candidate("a", np.array([0, 0, 0, 0, 1, 1, 1, 1])),
        Candidate("a", np.array([0, 1, 1, 1, 2, 2, 2, 2])),  # worse than its sibling
        Candidate("b", np.array([0, 0, 0, 1, 1, 1, 2, 2])),
    ]
    found = cluster_agreement(parts, answer, 4)
    assert found.tolist() == [(1 + 3 / 4) / 2, (1 / 2 + 2 / 3) / 2, (1 / 2 + 1) / 2, 0]


def test_errors_that_partitions_do_not_share_are_outvoted():
    y = np.repeat(np.arange(6), 50)
    parts = []
    for _ in range(9):
        part = y.copy()
        wrong = R.random(len(y)) < 0.25
        part[wrong] = R.integers(6, size=wrong.sum())
        parts.append(R.permutation(6)[part])
    assert max(adjusted_rand_score(y, part) for part in parts) < 0.75
    assert adjusted_rand_score(y, agreed(parts, 6)) > 0.97


def test_partitions_may_have_other_numbers_of_clusters():
    y = np.repeat(np.arange(4), 40)
    parts = [y, y, np.minimum(y, 2), 2 * y + R.integers(2, size=len(y)), np.zeros(160, int)]
    assert adjusted_rand_score(y, agreed(parts, 4)) == 1


def test_many_joint_clusters_are_solved_as_few_are():
    y = np.repeat(np.arange(50), 20)
    parts = [np.where(R.random(1000) < 0.1, R.integers(50, size=1000), y) for _ in range(12)]
    assert adjusted_rand_score(y, agreed(parts, 50)) > 0.99


def test_a_large_cluster_stays_whole_that_each_partition_cuts_elsewhere():
    y = np.repeat(np.arange(4), [2400, 300, 60, 40])
    parts = []
    for _ in range(9):
        part = y.copy()
        part[R.random(len(y)) < R.uniform(0.1, 0.4) * (y == 0)] = 4
        parts.append(Candidate("any", part))
    answer = any_size_consensus(parts, 4)
    assert adjusted_rand_score(y, answer) > 0.99  # also of those that were not compared in pairs


def test_rare_clusters_are_kept_of_many_samples():
    y = np.repeat(np.arange(22), [9000, 900, *[5] * 20])
    parts = []
    for _ in range(6):
        part = y.copy()
        wrong = R.random(len(y)) < 0.02 * (y < 2)
        part[wrong] = 1 - part[wrong]
        parts.append(Candidate("any", part))
    assert adjusted_rand_score(y, answer := any_size_consensus(parts, 22)) > 0.99
    assert np.bincount(answer).tolist().count(5) == 20


@pytest.mark.parametrize(("n", "k"), [(550, 5), (5500, 2100)])
def test_groups_that_no_partition_separates_are_not_split(n, k):
    y = np.arange(n) % 11 % 3
    assert (any_size_consensus([Candidate("any", y)] * 3, k) == y).all()


def test_each_family_has_one_vote():
    y = np.repeat([0, 1, 2], 20)
    moved = y.copy()
    moved[:6] = 1
    many = [Candidate("a family of many partitions", moved)] * 5
    answer = consensus([*many, Candidate("b", y), Candidate("c", y)], 3)
    assert adjusted_rand_score(y, answer) == 1
    assert weights_of(many) == pytest.approx([0.2] * 5)


@pytest.mark.parametrize(("n_moved", "moves"), [(2, False), (3, True)])
def test_a_sample_moves_with_a_majority_of_votes_and_stays_at_a_tie(n_moved, moves):
    y = np.repeat([0, 1, 2], 20)
    moved = y.copy()
    moved[0] = 1
    answer = agreed([moved] * n_moved + [y] * (4 - n_moved), 3)
    assert (answer[0] == answer[25]) == moves


def test_two_moons_are_two():
    x, y = make_moons(400, noise=0.06, random_state=0)
    assert adjusted_rand_score(y, ensemble_of(x, 2).clusters) > 0.98


def test_of_two_clusters_one_may_be_rare():
    y = np.repeat([0, 1], [640, 60])
    x = R.normal(size=(len(y), 8)) + 7 * y[:, None]
    assert (ensemble_of(x, 2, sizes="any").clusters == y).all()


def test_digits_many_clusters_and_progress():
    x, y = load_digits(return_X_y=True)
    done = []
    ensemble = ensemble_of(x[:400], 10, progress=lambda *numbers: done.append(numbers))
    assert adjusted_rand_score(y[:400], ensemble.clusters) > 0.7
    assert done == [(number, 34) for number in range(1, 35)]
    assert len(ensemble.candidates) == 34
    found = agreement(ensemble.candidates, ensemble.clusters).values()
    assert min(found) > 0.2 and max(found) < 1
    y = np.repeat(np.arange(60), 12)
    x = 4 * R.normal(size=(60, 16))[y] + R.normal(size=(len(y), 16))
    done.clear()
    ensemble = ensemble_of(x, 60, progress=lambda *numbers: done.append(numbers))
    assert adjusted_rand_score(y, ensemble.clusters) > 0.99
    assert done == [(number, 26) for number in range(1, 27)]


def test_of_clusters_of_any_size_those_vote_that_have_no_preference():
    y = np.repeat(np.arange(5), [900, 120, 60, 40, 30])
    x = 5 * R.normal(size=(5, 8))[y] + R.normal(size=(len(y), 8))
    ensemble = ensemble_of(x, 5, sizes="any")
    assert len(ensemble.voters) == 12
    families = [candidate.family for candidate in ensemble.voters]
    assert families.count(PEAKS) == families.count(MASS) == families.count("communities") == 4
    assert adjusted_rand_score(y, ensemble.clusters) > 0.98


def test_the_same_samples_give_the_same_answer_whatever_was_drawn_before():
    x = load_digits(return_X_y=True)[0][:120]
    first = ensemble_of(x, 10)
    np.random.seed(3)
    np.random.rand(5)
    again = ensemble_of(x, 10)
    assert (first.clusters == again.clusters).all()
    for one, other in zip(first.candidates, again.candidates, strict=True):
        assert one.family == other.family and (one.clusters == other.clusters).all()


@pytest.mark.parametrize(("n", "k"), [(3, 2), (6, 5), (12, 3)])
def test_few_samples(n, k):
    ensemble = ensemble_of(R.normal(size=(n, 3)), k)
    assert ensemble.clusters.shape == (n,) and ensemble.clusters.max() < k


def unequal_groups():
    """Return 100 rows of 8 columns in 7 groups of 40 to 4, and their groups."""
    y = np.repeat(np.arange(7), [40, 20, 13, 10, 8, 5, 4])
    random = np.random.default_rng(0)
    return (4 * random.normal(size=(7, 8)))[y] + random.normal(size=(100, 8)), y


def test_groups_of_a_small_table_keep_their_sizes():
    x, y = unequal_groups()
    ensemble = ensemble_of(x, 7)
    assert not ensemble.by_graphs
    assert ensemble.metrics == ("euclidean",)
    assert {candidate.family for candidate in ensemble.candidates} == {"k-means", "Ward", "mixture"}
    assert adjusted_rand_score(y, ensemble.clusters) > 0.9
    assert (vote(ensemble.candidates, "any", 7) >= 0).all()


def test_graphs_are_trusted_in_a_small_table_where_they_agree():
    x, y = make_moons(200, noise=0.05, random_state=0)
    ensemble = ensemble_of(x, 2)
    assert ensemble.by_graphs
    assert adjusted_rand_score(y, ensemble.clusters) > 0.98


@pytest.mark.slow
def test_hundreds_of_clusters_are_found_without_spectral_methods():
    random = np.random.default_rng(0)
    y = np.repeat(np.arange(210), 10)
    x = random.normal(size=(210, 24))[y] + 0.25 * random.normal(size=(2100, 24))
    ensemble = ensemble_of(x, 210)
    families = {candidate.family for candidate in ensemble.voters}
    assert families == {"k-means", "communities", "layout", "density leaves"}
    assert adjusted_rand_score(y, ensemble.clusters) > 0.97


def test_the_vote_of_very_many_clusters_starts_from_the_partition_that_most_agree_with():
    y = np.arange(600) // 2
    wrong = np.random.default_rng(0).permutation(y)
    candidates = [Candidate("a", wrong), Candidate("b", y), Candidate("c", np.roll(y, 0))]
    assert adjusted_rand_score(y, consensus(candidates, 300)) == 1


def test_votes_are_counted_in_blocks_of_rows(monkeypatch):
    random = np.random.default_rng(0)
    y = random.integers(4, size=3000)  # more than the samples of which all pairs are compared
    noisy = [np.where(random.random(3000) < 0.3, random.integers(4, size=3000), y) for _ in "abc"]
    candidates = [
        Candidate(family, clusters) for family, clusters in zip("abc", noisy, strict=True)
    ]
    whole = consensus(candidates, 4), any_size_consensus(candidates, 4)
    monkeypatch.setattr(criterion, "CELLS", 400)
    parts = consensus(candidates, 4), any_size_consensus(candidates, 4)
    assert len(criterion.row_blocks(3000, 4)) == 30
    assert all((a == b).all() for a, b in zip(whole, parts, strict=True))
