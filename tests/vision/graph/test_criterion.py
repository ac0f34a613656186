"""The value of a partition against its definition, and the local search against the value."""

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.metrics import adjusted_rand_score

from ssl_kd.vision.graph import Graph, joint, partition_value, refine
from ssl_kd.vision.graph.criterion import adjusted_rand_index, merge_losses


@pytest.fixture
def graph():
    r = np.random.default_rng(0)
    dense = r.random((60, 60)) * (r.random((60, 60)) < 0.2)
    return Graph(sp.csr_matrix(dense + dense.T))


@pytest.mark.parametrize("alpha", [0, 0.3, 1])
def test_value_is_information_of_the_edges_over_a_power_of_the_entropy(graph, alpha):
    k, clusters = 4, np.random.default_rng(1).integers(4, size=graph.n)
    table = np.zeros((k, k))
    np.add.at(table, (clusters[graph.rows], clusters[graph.columns]), graph.weights)
    information = sum(
        table[a, b] * np.log(table[a, b] / (table.sum(1)[a] * table.sum(0)[b]))
        for a in range(k)
        for b in range(k)
    )
    share = [graph.degree[clusters == c].sum() for c in range(k)]
    expected = information / (-sum(p * np.log(p) for p in share)) ** alpha
    assert partition_value(joint(graph, clusters, k), alpha) == pytest.approx(expected, rel=1e-12)


def test_the_criterion_of_separate_clusters_and_of_one():
    blocks = Graph(sp.csr_matrix(np.kron(np.eye(3), np.ones((5, 5)))))
    apart = joint(blocks, np.arange(15) // 5, 3)
    for alpha in (0, 0.5, 1):
        assert partition_value(apart, alpha) == pytest.approx(np.log(3) ** (1 - alpha))
        assert partition_value(joint(blocks, np.zeros(15, int), 3), alpha) == 0
    assert partition_value(apart) == pytest.approx(np.log(3) ** 0.5)


def test_the_higher_the_power_the_more_a_large_class_is_kept_whole():
    place = np.repeat(np.arange(4), [30, 30, 20, 20])
    ties = np.array([[9, 3, 0, 0], [3, 9, 0, 0], [0, 0, 9, 4.5], [0, 0, 4.5, 9]])
    graph = Graph(sp.csr_matrix(ties[place][:, place]))
    halved, kept = np.array([0, 1, 2, 2])[place], np.array([0, 0, 1, 2])[place]

    def gain(alpha):
        return np.log(
            partition_value(joint(graph, kept, 3), alpha)
            / partition_value(joint(graph, halved, 3), alpha)
        )

    assert gain(0) < gain(0.5) < gain(1)


@pytest.mark.parametrize("alpha", [0, 0.5, 1])
def test_merge_losses_equal_the_change_of_the_criterion(graph, alpha):
    table = joint(graph, np.random.default_rng(2).integers(6, size=graph.n), 6)
    losses = merge_losses(table, alpha)
    for a, b in ((0, 1), (2, 5), (3, 4)):
        merged = table.copy()
        merged[a] += merged[b]
        merged[:, a] += merged[:, b]
        merged[b], merged[:, b] = 0, 0
        lost = partition_value(table, alpha) - partition_value(merged, alpha)
        assert losses[a, b] == pytest.approx(lost, abs=1e-12)
    assert np.isinf(losses[np.tril_indices(6)]).all()


def test_refine_never_loses_and_ends_where_it_stays(graph):
    r = np.random.default_rng(3)
    for _ in range(20):
        start = r.integers(5, size=graph.n)
        found = refine(graph, start, 5)
        value = partition_value(joint(graph, found, 5))
        assert value >= partition_value(joint(graph, start, 5))
        assert partition_value(joint(graph, refine(graph, found, 5), 5)) == value


def test_refine_recovers_separate_clusters_from_wrong_labels():
    blocks = Graph(sp.csr_matrix(np.kron(np.eye(3), np.ones((20, 20))) + 0.01))
    y = np.arange(60) // 20
    start = np.where(np.arange(60) % 3 == 0, (y + 1) % 3, y)
    assert (refine(blocks, start, 3) == y).all()


def test_groups_keep_the_value(graph):
    groups = np.random.default_rng(4).integers(12, size=graph.n)
    groups = np.unique(groups, return_inverse=True)[1]
    clusters = np.arange(groups.max() + 1) % 3
    small = graph.of_groups(groups, groups.max() + 1)
    of_all = partition_value(joint(graph, clusters[groups], 3))
    assert partition_value(joint(small, clusters, 3)) == pytest.approx(of_all, rel=1e-9)


@pytest.mark.parametrize(("of_a", "of_b"), [(3, 3), (1, 4), (40, 2), (60, 60)])
def test_the_adjusted_rand_index_is_that_of_scikit_learn(of_a, of_b):
    r = np.random.default_rng(0)
    a, b = r.integers(of_a, size=60), r.integers(of_b, size=60)
    b = np.where(r.random(60) < 0.5, a % of_b, b)
    for pair in ((a, b), (b, a), (a, a), (np.arange(60), a), (a, 3 * b)):
        assert adjusted_rand_index(*pair) == pytest.approx(adjusted_rand_score(*pair), abs=1e-12)
