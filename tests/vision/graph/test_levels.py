"""Communities of any number, and the tree around any partition."""

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.metrics import adjusted_rand_score

from ssl_kd.vision.graph import Graph
from ssl_kd.vision.graph.criterion import modularity_losses
from ssl_kd.vision.graph.levels import (
    communities,
    level_sizes,
    levels,
    nested_levels,
    pair_losses,
)
from tests.vision.graph.neighbors import graph_of


def blobs(k, each=60, dim=12, seed=0):
    r = np.random.default_rng(seed)
    y = np.repeat(np.arange(k), each)
    return 4 * r.normal(size=(k, dim))[y] + r.normal(size=(len(y), dim)), y


def test_levels_have_as_many_clusters_as_they_say():
    x = np.random.default_rng(0).normal(size=(300, 1)) + np.repeat([0, 9, 20], 100)[:, None]
    for k, clusters in levels(graph_of(x), 18, 0).items():
        assert set(clusters) == set(range(k))


def test_the_cost_of_a_merge_is_modularity_where_clusters_are_many():
    r = np.random.default_rng(0)
    for size, exact in ((181, 200), (41, 40), (180, 200), (40, 40)):
        table = r.random((size, size))
        table = (table + table.T) / (2 * table.sum())
        costs, cheap = pair_losses(exact)(table, np.arange(size)), modularity_losses(table)
        assert np.array_equal(costs, cheap) == (size in (181, 41))
    assert np.isfinite(costs).sum() == 780  # of 40 clusters all pairs, of 180 the 3,600 cheapest
    assert np.isfinite(pair_losses(200)(np.ones((180, 180)) / 180**2, np.arange(180))).sum() == 3600


@pytest.mark.parametrize(
    ("n", "k"), [(400, 2), (400, 5), (400, 7), (1000, 20), (5, 2), (9, 9), (40, 30)]
)
def test_levels_are_nested_around_any_partition(n, k):
    x = np.random.default_rng(n).normal(size=(n, 4))
    clusters = np.unique(np.arange(n) % k, return_inverse=True)[1]
    found = nested_levels(graph_of(x, min(10, n - 1)), clusters)
    sizes = [len(np.unique(level)) for level in found]
    assert sizes == sorted(sizes, reverse=True)
    assert set(sizes) <= set(level_sizes(k)) | {k}
    assert sizes[0] >= k  # so that each cluster is a part or has some
    for level, size in zip(found, sizes, strict=True):
        assert set(level) == set(range(size))
        finer, coarser = (level, clusters) if size > k else (clusters, level)
        assert len(np.unique(np.stack([finer, coarser]), axis=1).T) == max(size, k)
    for finer, coarser in zip(found, found[1:], strict=False):
        assert len(np.unique(np.stack([finer, coarser]), axis=1).T) == len(np.unique(finer))


def test_the_tree_goes_through_groups_of_groups():
    """Six clusters in three pairs, each of two halves."""
    place = np.repeat(np.arange(12), 30)
    pair = np.arange(12) // 4
    cluster = np.arange(12) // 2
    ties = np.where(pair[:, None] == pair, 0.05, 0.001) + 0.2 * (cluster[:, None] == cluster)
    ties += 2 * np.eye(12)
    graph = Graph(sp.csr_matrix(ties[place][:, place]))
    tree = {len(np.unique(level)): level for level in nested_levels(graph, cluster[place])}
    assert level_sizes(6) == [18, 14, 9, 5]
    assert set(tree) == {18, 14, 9, 5}
    merged = [c for c in range(6) if (tree[5] == tree[5][place // 2 == c][0]).sum() > 60]
    assert len(merged) == 2 and merged[0] // 2 == merged[1] // 2
    halves = adjusted_rand_score(place, tree[14])
    assert halves > 0.9


def test_the_finest_of_many_clusters_are_three_times_as_many():
    cliques = sp.block_diag([sp.csr_array(np.ones((5, 5)))] * 140).tocsr()
    chain = sp.diags_array([np.full(699, 0.01)] * 2, offsets=[-1, 1])
    tree = nested_levels(Graph((cliques + chain).tocsr()), np.arange(700) // 5)
    assert len(np.unique(tree[0])) == 420


def test_sizes_of_levels():
    assert level_sizes(10) == [30, 22, 15, 7, 5]
    assert level_sizes(2) == [6, 4, 3]
    assert level_sizes(5) == [15, 11, 8]


def test_communities_keep_a_long_tail_apart_where_the_entropy_counts():
    r = np.random.default_rng(0)
    y = np.repeat(np.arange(5), [900, 300, 100, 40, 30])
    graph = graph_of(6 * r.normal(size=(5, 8))[y] + r.normal(size=(len(y), 8)))
    even, uneven = communities(graph, 5, powers=(0.0, 0.5))
    assert adjusted_rand_score(y, uneven) > 0.95 > adjusted_rand_score(y, even)
