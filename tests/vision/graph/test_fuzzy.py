"""The weights of a graph of neighbors, against their definition."""

import numpy as np
from sklearn.neighbors import NearestNeighbors

from ssl_kd.vision.graph import fuzzy_graph


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
