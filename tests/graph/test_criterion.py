"""The value of a partition against its definition, and the local search against the value."""

import numpy as np
import pytest
import scipy.sparse as sp

from ssl_kd.graph import Graph, joint, partition_value, refine
from ssl_kd.graph.criterion import merge_losses


@pytest.fixture
def graph():
    r = np.random.default_rng(0)
    dense = r.random((60, 60)) * (r.random((60, 60)) < 0.2)
    return Graph(sp.csr_matrix(dense + dense.T))


def test_value_is_information_and_modularity_of_the_edges(graph):
    k, clusters = 4, np.random.default_rng(1).integers(4, size=graph.n)
    ends = clusters[graph.rows], clusters[graph.columns]
    table = np.zeros((k, k))
    np.add.at(table, ends, graph.weights)
    information = sum(
        table[a, b] * np.log(table[a, b] / (table.sum(1)[a] * table.sum(0)[b]))
        for a in range(k)
        for b in range(k)
    )
    share = np.array([graph.degree[clusters == c].sum() for c in range(k)])
    inside = graph.weights[ends[0] == ends[1]].sum()
    expected = information / np.log(k) + (inside - (share**2).sum()) / (1 - 1 / k)
    assert partition_value(joint(graph, clusters, k)) == pytest.approx(expected, rel=1e-12)


def test_value_is_two_for_even_separate_clusters_and_zero_for_one():
    blocks = Graph(sp.csr_matrix(np.kron(np.eye(3), np.ones((5, 5)))))
    assert partition_value(joint(blocks, np.arange(15) // 5, 3)) == pytest.approx(2)
    assert partition_value(joint(blocks, np.zeros(15, int), 3)) == pytest.approx(0, abs=1e-12)


def test_merging_costs_what_it_says(graph):
    table = joint(graph, np.random.default_rng(2).integers(6, size=graph.n), 6)
    losses = merge_losses(table, 6)
    for a, b in ((0, 1), (2, 5), (3, 4)):
        merged = table.copy()
        merged[a] += merged[b]
        merged[:, a] += merged[:, b]
        merged[b], merged[:, b] = 0, 0  # K stays what the value is for
        lost = partition_value(table) - partition_value(merged)
        assert losses[a, b] == pytest.approx(lost, abs=1e-12)
    assert np.isinf(losses[np.tril_indices(6)]).all()


def test_refine_never_loses_and_ends_where_it_stays(graph):
    r = np.random.default_rng(3)
    for _ in range(20):
        start = r.integers(5, size=graph.n)
        found = refine(graph, start, 5, "a start")
        assert found.value >= partition_value(joint(graph, start, 5))
        assert found.value == partition_value(joint(graph, found.clusters, 5))
        assert found.origin == "a start"
        assert refine(graph, found.clusters, 5).value == found.value


def test_groups_keep_the_value(graph):
    groups = np.random.default_rng(4).integers(12, size=graph.n)
    groups = np.unique(groups, return_inverse=True)[1]
    clusters = np.arange(groups.max() + 1) % 3
    small = graph.of_groups(groups, groups.max() + 1)
    of_all = partition_value(joint(graph, clusters[groups], 3))
    assert partition_value(joint(small, clusters, 3)) == pytest.approx(of_all, rel=1e-9)
