"""Cells merge as Ward's method merges the samples in them."""

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage
from sklearn.metrics import adjusted_rand_score

from ssl_kd.vision.graph.cells import kmeans_by_cells, merge_cells
from ssl_kd.vision.graph.kmeans import kmeans


def test_cells_of_one_sample_merge_as_by_scipy():
    x = np.random.default_rng(0).normal(size=(60, 5)).astype(np.float32)
    clusters = merge_cells(x, np.ones(60, int), 7)
    assert adjusted_rand_score(fcluster(linkage(x, "ward"), 7, "maxclust"), clusters) == 1


def test_a_cell_counts_as_the_samples_in_it():
    random = np.random.default_rng(1)
    means, sizes = random.normal(size=(30, 4)).astype(np.float32), random.integers(1, 20, 30)
    clusters = merge_cells(means, sizes, 5)
    tree = linkage(np.repeat(means, sizes, axis=0), "ward")
    samples = fcluster(tree, 5, "maxclust")
    assert adjusted_rand_score(samples, np.repeat(clusters, sizes)) == 1


def test_as_many_clusters_as_cells_are_the_cells():
    means = np.random.default_rng(2).normal(size=(6, 3)).astype(np.float32)
    assert len(set(merge_cells(means, np.ones(6, int), 6))) == 6


def test_each_of_many_clusters_is_found_where_kmeans_misses_some():
    random = np.random.default_rng(3)
    y = np.repeat(np.arange(100), 20)
    x = (random.normal(size=(100, 16))[y] + 0.2 * random.normal(size=(2000, 16))).astype(np.float32)
    assert adjusted_rand_score(y, kmeans_by_cells(x, 100, 0)) > 0.99
    assert adjusted_rand_score(y, kmeans(x, 100, 0, init="random")) < 0.9


def test_fewer_distinct_rows_than_clusters_form_one_cluster_each():
    x = np.repeat(np.eye(5, dtype=np.float32), 20, axis=0)
    assert len(set(kmeans_by_cells(x, 10, 0))) == 5
