"""k-NN, linear probe, baselines and the map, on real digits and awkward input."""

import logging

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.manifold import TSNE

from ssl_kd.vision.evaluate import (
    accuracy,
    embedding_map,
    kmeans,
    knn_accuracy,
    linear_probe,
    spectral,
)
from ssl_kd.vision.evaluate.baselines import BASELINES

PIXELS, DIGITS = map(np.asarray, load_digits(return_X_y=True))
X, Y, TEST_X, TEST_Y = PIXELS[:1437] / 16, DIGITS[:1437], PIXELS[1437:] / 16, DIGITS[1437:]


def knn_oracle(x, y, query, k, temperature, skip_self=False):
    """The DINO protocol written out, one query at a time, in float64."""
    x, query = (z / np.linalg.norm(z, axis=1, keepdims=True) for z in (x, query))
    answers = []
    for i, q in enumerate(query):
        similarity = x @ q
        if skip_self:
            similarity[i] = -np.inf
        near = np.argsort(-similarity)[:k]
        votes = np.zeros(y.max() + 1)
        np.add.at(votes, y[near], np.exp(similarity[near] / temperature))
        answers.append(votes.argmax())
    return np.array(answers)


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.07), (20, 0.07), (200, 0.1)])
def test_knn_follows_the_dino_protocol(k, temperature):
    expected = (knn_oracle(X, Y, TEST_X, k, temperature) == TEST_Y).mean()
    assert knn_accuracy(X, Y, TEST_X, TEST_Y, k, temperature) == pytest.approx(expected, abs=0.003)


def test_knn_without_held_out_data_leaves_each_sample_out():
    expected = (knn_oracle(X, Y, X, 20, 0.07, skip_self=True) == Y).mean()
    assert knn_accuracy(X, Y) == pytest.approx(expected, abs=0.001)


def test_knn_excludes_itself_among_duplicates():
    # Each point has one exact duplicate of the other class: with itself excluded, all are wrong.
    x = np.repeat(np.eye(4, dtype=np.float32), 2, axis=0)
    assert knn_accuracy(x, np.array([0, 1] * 4), k=1) == 0.0


def test_knn_ignores_unknown_labels_and_small_sets():
    y = Y.copy()
    y[::2] = -1
    assert knn_accuracy(X, y) == knn_accuracy(X[1::2], Y[1::2])
    assert knn_accuracy(X[:1], Y[:1]) is None
    assert knn_accuracy(X, Y, TEST_X, np.full(len(TEST_X), -1)) is None
    assert knn_accuracy(X[:5], np.zeros(5, int)) == 1.0  # k = 20 of five samples
    with_zero = X.copy()
    with_zero[0] = 0
    value = knn_accuracy(with_zero, Y)
    assert value is not None and value > 0.97
    with pytest.raises(ValueError, match="k is .*; expected k of at least 1"):
        knn_accuracy(X, Y, k=0)


def test_knn_reports_sampling(caplog):
    with caplog.at_level(logging.INFO):
        value = knn_accuracy(X, Y, TEST_X, TEST_Y, max_train=500, max_test=100)
    assert value is not None and value > 0.8
    assert "500 of 1437" in caplog.text and "100 of 360" in caplog.text


def test_probe_reads_the_digits_in_few_steps():
    assert linear_probe(X, Y, TEST_X, TEST_Y, max_iter=20)["converged"]
    result = linear_probe(X, Y, TEST_X, TEST_Y)
    assert result["accuracy"] > 0.88 and result["converged"] and result["rows"] == 1437
    assert 1e-4 <= result["C"] <= 10 and result["note"] is None
    # The same again, and the held-out labels are not used for training.
    shuffled = linear_probe(X, Y, TEST_X, np.random.default_rng(0).permutation(TEST_Y))
    assert shuffled["accuracy"] < 0.25
    assert shuffled | {"accuracy": result["accuracy"]} == result


def test_probe_records_differences(monkeypatch):
    result = linear_probe(X, Y)
    assert "a held-out quarter of the training data" in result["note"] and result["accuracy"] > 0.93
    result = linear_probe(X, Y, TEST_X, TEST_Y, max_iter=2)
    assert not result["converged"] and "2 steps" in result["note"]
    monkeypatch.setattr("ssl_kd.vision.evaluate.probe.BUDGET", 0)
    x, y = np.concatenate([X, TEST_X, X]), np.concatenate([Y, TEST_Y, Y])
    result = linear_probe(x, y, TEST_X, TEST_Y, max_iter=2)
    assert result["rows"] == 2000 and "random 2000 of 3234" in result["note"]


@pytest.mark.parametrize("y", [np.zeros(50, int), np.full(50, -1), np.r_[0, 1, np.full(48, -1)]])
def test_probe_with_too_few_labels_gives_a_reason(y):
    result = linear_probe(X[:50], y)
    assert result["accuracy"] is None and "expected at least 2" in result["note"]


def test_probe_takes_classes_with_a_single_sample_and_constant_features():
    x, y = X[:60].copy(), Y[:60].copy()
    x[:, :5], y[0] = 3.0, 77
    assert linear_probe(x, y, TEST_X, TEST_Y)["accuracy"] > 0.5


def test_lines_to_beat_on_digits():
    means, graph = kmeans(X, 10, test_x=TEST_X), spectral(X, 10, test_x=TEST_X)
    for baseline, floor in ((means, 0.75), (graph, 0.80)):
        assert baseline.clusters is not None and baseline.test_clusters is not None
        assert baseline.clusters.dtype == baseline.test_clusters.dtype == np.int64
        assert accuracy(Y, baseline.clusters) > floor
        assert accuracy(TEST_Y, baseline.test_clusters) > floor - 0.1
        assert baseline.note is None and baseline.seconds > 0
    again = spectral(X, 10)
    assert again.test_clusters is None and again.clusters is not None and graph.clusters is not None
    assert np.array_equal(again.clusters, graph.clusters)


@pytest.mark.parametrize(
    ("method", "note", "floor"),
    [(spectral, "1000 random samples", 0.75), (kmeans, "mini-batch k-means", 0.6)],
)
def test_large_sets_are_clustered_faster_with_a_note(method, note, floor):
    result = method(X, 10, max_rows=1000)
    assert note in result.note and accuracy(Y, result.clusters) > floor


def test_spectral_clustering_handles_disconnected_graphs():
    far = np.concatenate([X[:100], np.zeros((100, 64))], 1)
    other = np.concatenate([np.zeros((100, 64)), X[100:200]], 1)
    result = spectral(np.concatenate([far, other]), 2)
    assert result.note == "the neighbor graph is not connected"
    assert result.clusters is not None
    assert accuracy(np.repeat([0, 1], 100), result.clusters) == 1.0
    few = spectral(X[:5], 5)
    assert few.clusters is None and few.note is not None and "5 clusters" in few.note


def test_map_keeps_digits_together_and_is_quick(monkeypatch):
    """By counts and not by the clock: 500 rounds, each of n log n and not n * n."""
    made = []
    monkeypatch.setattr(
        "sklearn.manifold.TSNE", lambda **asked: made.append(TSNE(**asked)) or made[0]
    )
    x, y = X[:500], Y[:500]
    rows, places = embedding_map(x, 0)
    assert made[0].n_iter_ < 500 and made[0].method == "barnes_hut"
    assert np.array_equal(rows, np.arange(500))
    assert places.shape == (500, 2) and places.dtype == np.float32
    assert np.abs(places).max() == pytest.approx(1)
    distance = np.square(places[:, None] - places[None]).sum(-1) + 9 * np.eye(len(places))
    assert (y[distance.argmin(1)] == y).mean() > 0.9


@pytest.mark.parametrize(("n", "d"), [(1, 64), (2, 1), (3, 2), (5, 64), (20, 2)])
def test_map_of_tiny_and_equal_sets_is_finite(n, d):
    for x in (X[:n, 20 : 20 + d], np.ones((n, d))):
        rows, places = embedding_map(x)
        assert len(rows) == n and places.shape == (n, 2) and np.isfinite(places).all()
    rows, places = embedding_map(X, 3, max_points=n)
    assert len(rows) == len(np.unique(rows)) == n and np.all(np.diff(rows) > 0)
    assert np.array_equal(places, embedding_map(X, 3, max_points=n)[1])


@pytest.mark.parametrize("unit", [1e-44, 1e-30, 1e30])
def test_a_map_of_values_whose_squares_overflow_float32(unit):
    """In such units scikit-learn's t-SNE ended the process, or put all into one point."""
    x = (np.random.default_rng(0).normal(size=(60, 8)) * unit).astype(np.float32)
    _, places = embedding_map(x)
    assert np.isfinite(places).all() and np.ptp(places, axis=0).min() > 0.5


def test_baselines_have_the_names_of_the_table():
    for name, method in BASELINES.items():
        assert method(X[:200], 10, 0, test_x=TEST_X).name == name


@pytest.mark.parametrize("unit", [1e-30, 1e30])
@pytest.mark.parametrize("method", BASELINES.values())
def test_baselines_do_not_depend_on_the_unit(method, unit):
    found = [method(X[:300] * u, 10, test_x=TEST_X[:60] * u) for u in (1.0, unit)]
    assert accuracy(found[0].clusters, found[1].clusters) > 0.98
    assert accuracy(found[0].test_clusters, found[1].test_clusters) > 0.96
