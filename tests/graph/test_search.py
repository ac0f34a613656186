"""The search finds what is there, whatever its shape and size, and always the same."""

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.datasets import load_digits, make_moons
from sklearn.metrics import adjusted_rand_score
from sklearn.neighbors import NearestNeighbors

from ssl_kd.graph import Graph, best_partitions, fuzzy_graph, joint, partition_value, refine, search
from ssl_kd.graph.search import LEAST_ALPHA, MOST_ALPHA, alpha_of


def graph_of(x, k=10):
    distances, near = NearestNeighbors(n_neighbors=k).fit(x).kneighbors()
    return Graph(fuzzy_graph(near, distances))


@pytest.fixture(scope="module")
def digits():
    x, y = load_digits(return_X_y=True)
    return graph_of(x[:600]), y[:600]


def test_fuzzy_weights_follow_their_definition():
    x = np.random.default_rng(0).normal(size=(40, 3))
    distances, near = NearestNeighbors(n_neighbors=8).fit(x).kneighbors()
    matrix = fuzzy_graph(near, distances).toarray()
    assert (matrix == matrix.T).all() and (np.diag(matrix) == 0).all()
    one_way = np.zeros((40, 40))
    for i in range(40):
        beyond, low, high = distances[i] - distances[i, 0], 1e-9, 1e3
        for _ in range(200):  # the scale at which the row sums to log2 k
            scale = (low + high) / 2
            low, high = (low, scale) if np.exp(-beyond / scale).sum() > 3 else (scale, high)
        one_way[i, near[i]] = np.exp(-beyond / scale)
    expected = one_way + one_way.T - one_way * one_way.T
    np.testing.assert_allclose(matrix, expected, rtol=1e-4, atol=1e-6)


def test_duplicates_have_finite_weights():
    near = np.array([[1, 2], [0, 2], [0, 1], [4, 5], [3, 5], [3, 4]])
    matrix = fuzzy_graph(near, np.zeros((6, 2)))
    assert np.isfinite(matrix.data).all() and (matrix.data == 1).all()
    found = best_partitions(Graph(matrix), 2)[0]
    assert adjusted_rand_score([0, 0, 0, 1, 1, 1], found.clusters) == 1


def test_finds_clusters_that_no_mean_describes():
    x, y = make_moons(800, noise=0.06, random_state=0)
    found = best_partitions(graph_of(x), 2)[0]
    assert adjusted_rand_score(y, found.clusters) > 0.98


def test_finds_many_clusters():
    r = np.random.default_rng(0)
    y = np.repeat(np.arange(60), 25)
    x = 4 * r.normal(size=(60, 16))[y] + r.normal(size=(len(y), 16))
    found = best_partitions(graph_of(x), 60)[0]
    assert adjusted_rand_score(y, found.clusters) > 0.99


def test_beats_each_of_its_starts(digits):
    graph, labels = digits
    start = np.random.default_rng(0).integers(10, size=graph.n)
    ranked = best_partitions(graph, 10, starts={"random": start, "labels": labels})
    alpha = ranked[0].alpha
    assert ranked[0].value >= partition_value(joint(graph, labels, 10), alpha)
    assert {"random", "labels"} <= {part.origin for part in ranked}
    assert [p.value for p in ranked] == sorted((p.value for p in ranked), reverse=True)
    for part in ranked:
        assert part.value == pytest.approx(partition_value(joint(graph, part.clusters, 10), alpha))
        assert refine(graph, part.clusters, 10, alpha).value == pytest.approx(part.value, abs=1e-6)


def test_a_small_class_is_found_beside_large_ones(monkeypatch):
    r = np.random.default_rng(1)
    y = np.repeat(np.arange(5), [900, 450, 150, 60, 25])
    x = 3 * r.normal(size=(5, 8))[y] + r.normal(size=(len(y), 8))
    graph = graph_of(x)
    best = best_partitions(graph, 5)[0]
    assert best.alpha == MOST_ALPHA
    assert adjusted_rand_score(y, best.clusters) > 0.98
    monkeypatch.setattr(search, "ALPHA", 0.0)
    monkeypatch.setattr(search, "SAME_ALPHA", 1.0)
    alone = best_partitions(graph, 5)[0]  # by information alone
    assert alone.alpha == 0
    assert adjusted_rand_score(y, alone.clusters) < 0.8


def test_alpha_follows_the_sizes_and_what_edges_tell():
    even, tail = np.diag(np.full(4, 0.25)), np.diag([0.85, 0.05, 0.05, 0.05])
    assert alpha_of(even) == LEAST_ALPHA
    assert alpha_of(tail) == MOST_ALPHA
    share = tail.sum(1)
    vague = 0.3 * tail + 0.7 * np.outer(share, share)
    assert LEAST_ALPHA == alpha_of(vague) < MOST_ALPHA


def test_the_same_graph_gives_the_same_answer(digits):
    graph, _ = digits
    first = best_partitions(graph, 10)[0]
    np.random.seed(7)
    again, drawn = best_partitions(graph, 10)[0], np.random.rand()
    assert first.value == again.value
    assert (first.clusters == again.clusters).all()
    np.random.seed(7)
    assert np.random.rand() == drawn  # and draws nothing that others would have drawn


def test_clusters_are_numbered_as_they_come(digits):
    graph, _ = digits
    for part in best_partitions(graph, 10)[:5]:
        seen = list(dict.fromkeys(part.clusters.tolist()))
        assert seen == list(range(len(seen)))


@pytest.mark.parametrize(("n", "k"), [(2, 2), (3, 2), (5, 5), (30, 2), (30, 29), (400, 3)])
def test_any_size(n, k):
    x = np.random.default_rng(n).normal(size=(n, 4))
    found = best_partitions(graph_of(x, min(10, n - 1)), k)[0]
    assert found.clusters.shape == (n,)
    assert 0 <= found.clusters.min() and found.clusters.max() < k
    assert np.isfinite(found.value)


def test_a_graph_in_pieces():
    pieces = Graph(sp.csr_matrix(np.kron(np.eye(7), np.ones((9, 9)) - np.eye(9))))
    found = best_partitions(pieces, 7)[0]
    assert adjusted_rand_score(np.arange(63) // 9, found.clusters) == 1
