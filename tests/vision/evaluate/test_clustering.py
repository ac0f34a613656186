"""Clustering scores against brute force, scikit-learn and known cases."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import (
    adjusted_mutual_info_score,
    adjusted_rand_score,
    normalized_mutual_info_score,
)

from ssl_kd.vision.evaluate import (
    METRICS,
    accuracy,
    cluster_sizes,
    clustering_scores,
    collapsed,
    contingency,
    effective_clusters,
    match,
)

pairs = st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 4)), min_size=1, max_size=40).filter(
    lambda rows: any(label >= 0 for label, _ in rows)
)


def brute_force(labels, clusters):
    """Best accuracy over every injective map of five clusters to five (padded) classes."""
    known = [(y, k) for y, k in zip(labels, clusters, strict=True) if y >= 0]
    return max(
        sum(to[k] == y for y, k in known) / len(known) for to in itertools.permutations(range(5))
    )


@given(pairs)
def test_accuracy_is_the_best_over_all_pairings(rows):
    labels, clusters = map(np.array, zip(*rows, strict=True))
    assert accuracy(labels, clusters) == pytest.approx(brute_force(labels, clusters))


@settings(max_examples=30)
@given(pairs, st.permutations(range(5)))
def test_scores_do_not_depend_on_cluster_names(rows, renamed):
    labels, clusters = map(np.array, zip(*rows, strict=True))
    assert clustering_scores(labels, clusters) == pytest.approx(
        clustering_scores(labels, np.array(renamed)[clusters])
    )


@settings(max_examples=30)
@given(pairs)
def test_unknown_labels_are_left_out(rows):
    labels, clusters = map(np.array, zip(*rows, strict=True))
    known = labels >= 0
    y, k = labels[known], clusters[known]
    scores = clustering_scores(labels, clusters)
    assert scores["acc"] == accuracy(y, k)
    assert scores["nmi"] == pytest.approx(normalized_mutual_info_score(y, k))
    assert scores["ari"] == pytest.approx(adjusted_rand_score(y, k))
    assert scores["ami"] == pytest.approx(adjusted_mutual_info_score(y, k))


def test_no_known_label_gives_none_and_accuracy_refuses():
    nothing = dict.fromkeys(METRICS)
    assert clustering_scores([-1, -1], [0, 1]) == nothing
    assert clustering_scores(None, [0, 1]) == nothing
    with pytest.raises(ValueError, match="no label is known"):
        accuracy([-1, -1], [0, 1])


def test_every_metric_is_1_for_a_perfect_match_and_less_for_others():
    labels = np.arange(40) % 4
    perfect, worse = (clustering_scores(labels, c) for c in (labels[::-1], np.arange(40) // 10))
    for key in METRICS:
        assert perfect[key] == pytest.approx(1) and (worse[key] or 0) < 0.5


def test_noise_is_wrong_in_accuracies_and_one_more_cluster_in_the_others():
    labels, clusters = np.array([0, 0, 0, 1, 1, 1, 2]), np.array([0, 0, -1, 1, 1, -1, -1])
    assert accuracy(labels, clusters) == pytest.approx(4 / 7)
    assert contingency(labels, clusters).tolist() == [[2, 0], [0, 2], [0, 0]]
    scores = clustering_scores(labels, clusters)
    assert scores["nmi"] == normalized_mutual_info_score(labels, clusters)
    assert scores["ari"] == adjusted_rand_score(labels, clusters)
    no_cluster = np.full(7, -1)
    assert accuracy(labels, no_cluster) == 0
    assert match(labels, no_cluster) == {}


def test_more_clusters_than_classes_leave_some_without_a_class():
    labels, clusters = [0, 0, 0, 1, 1], [2, 2, 0, 1, 1]
    assert match(labels, clusters) == {2: 0, 1: 1}
    assert accuracy(labels, clusters) == 0.8


@pytest.mark.parametrize(
    ("labels", "clusters", "error", "message"),
    [
        ([0, 1], [0], ValueError, "equal length"),
        ([0, 1], [0, -2], ValueError, "smallest cluster -2"),
        ([0, -2], [0, 0], ValueError, "smallest label is -2"),
        (["cat", "dog"], [0, 1], TypeError, "labels have dtype"),
        ([0, 1], [0.0, 1.0], TypeError, "clusters have dtype"),
    ],
)
def test_bad_input_is_named(labels, clusters, error, message):
    with pytest.raises(error, match=message):
        accuracy(labels, clusters)
    with pytest.raises(ValueError, match="raise n_classes or n_clusters"):
        contingency([0, 4], [0, 0], n_classes=4)


def test_sizes_keep_leading_axes():
    clusters = np.random.default_rng(0).integers(0, 7, (3, 2, 50))
    sizes = cluster_sizes(clusters, 7)
    assert sizes.shape == (3, 2, 7)
    assert np.array_equal(sizes[2, 1], np.bincount(clusters[2, 1], minlength=7))
    with pytest.raises(ValueError, match="expected 0 to 5"):
        cluster_sizes(clusters, 6)
    assert cluster_sizes([], 2).tolist() == [0, 0]
    assert cluster_sizes(np.empty((3, 0)), 2).tolist() == [[0, 0]] * 3


def test_effective_clusters_between_one_and_all():
    assert effective_clusters([8, 8, 8, 8]) == pytest.approx(4)
    assert effective_clusters([32, 0, 0, 0]) == pytest.approx(1)
    assert effective_clusters([0, 0]) == 0


def test_collapse_is_distinguished_from_imbalance():
    assert not collapsed(np.geomspace(20, 400, 10).astype(int))
    assert collapsed([900, 50, 50, 0, 0, 0, 0, 0, 0, 0])
    assert collapsed([0, 0, 0])
    assert not collapsed(np.r_[np.full(55, 10), np.zeros(45)])
    assert collapsed(np.r_[np.full(45, 10), np.zeros(55)])
