"""The number of clusters: plain cases, and the choice in ambiguous ones."""

import numpy as np
import pytest

from ssl_kd.core.errors import InputError
from ssl_kd.vision.graph import number as graph_number
from ssl_kd.vision.graph.layout import Density, low_dimensional
from ssl_kd.vision.graph.levels import levels
from ssl_kd.vision.graph.number import (
    Evidence,
    Families,
    Level,
    apart,
    number_of_clusters,
    smoothed,
    unanimous,
)
from tests.vision.graph.neighbors import graph_of


def layout_of(graph):
    return Density(low_dimensional(graph.matrix, 4, seed=4))


def number_in(x):
    graph = graph_of(x)
    return number_of_clusters(graph, [x], [layout_of(graph)])


def blobs(k, each=60, dim=12, spread=1.0):
    r = np.random.default_rng(0)
    y = np.repeat(np.arange(k), each)
    return 4 * r.normal(size=(k, dim))[y] + spread * r.normal(size=(len(y), dim)), y


@pytest.mark.parametrize("k", [3, 8])
def test_clusters_that_lie_apart_are_counted(k):
    found = number_in(blobs(k)[0])
    low, high = found.interval
    assert found.n_clusters == k == found.ranked[0].n_clusters
    assert low <= k <= high <= 3 * low
    assert found.ranked[0].agreement > 0.95
    assert len({level.n_clusters for level in found.ranked}) == len(found.ranked)
    worths = [level.worth for level in found.ranked]
    assert worths == sorted(worths, reverse=True)


def test_two_long_clusters_are_two_though_families_divide_them():
    r, each = np.random.default_rng(0), 300
    x = np.stack([40 * r.random(2 * each), np.repeat([0, 6], each)], 1) + r.normal(size=(600, 2))
    graph = graph_of(x)
    other = Density(r.normal(size=(600, 4)).astype(np.float32))
    assert number_of_clusters(graph, [x], [other]).n_clusters > 2
    assert unanimous(levels(graph, 37, 0), [layout_of(graph), other]) is None
    found = number_of_clusters(graph, [x], [layout_of(graph)])
    assert found.n_clusters == 2 and found.interval[0] == 2


def test_the_smallest_number_that_is_nearly_best_is_used_and_its_neighbors_are_likely(monkeypatch):
    worths = {2: 0.9, 3: 0.5, 4: 0.7, 6: 0.97, 7: 0.9, 8: 1.0, 9: 0.8, 11: 0.9, 30: 0.55}
    scored = [Level(k, worth, 1.0, 1.0) for k, worth in worths.items()]
    monkeypatch.setattr(graph_number, "_levels", lambda *_: scored)
    monkeypatch.setattr(graph_number, "unanimous", lambda *_: None)
    found = number_in(blobs(3)[0])
    assert found == Evidence(6, (4, 9), [scored[place] for place in (5, 3, 0, 7, 2)])


def test_scores_end_where_they_have_fallen(monkeypatch):
    agreements = {2: 0.5, 3: 1.0, 8: 0.7, 9: 0.81, 10: 0.79, 12: 1.0}
    x = blobs(3)[0]
    graph = graph_of(x)
    families = Families(graph, [x], [layout_of(graph)])
    monkeypatch.setattr(Families, "candidates", lambda self, communities, k: k)
    monkeypatch.setattr(graph_number, "mutual_agreement", agreements.__getitem__)
    monkeypatch.setattr(graph_number, "modularity", lambda *_: 1.0)
    scored = graph_number._levels(graph, families, dict.fromkeys(agreements, np.zeros(180, int)))
    assert [level.n_clusters for level in scored] == [2, 3, 8, 9, 10]
    assert [level.agreement for level in scored] == [0.5, 1.0, 0.7, 0.81, 0.79]


def test_families_divide_a_sample_of_the_rows_into_any_number(monkeypatch):
    monkeypatch.setattr(graph_number, "COMPARED", 200)
    x, y = blobs(40, each=10)
    graph = graph_of(x, 5)
    families = Families(graph, [x, x**3], [layout_of(graph)])
    for k in (3, 40):  # 40 needs more eigenvectors than there are at first
        candidates = families.candidates(y % k, k)
        expected = ["communities", "k-means", "k-means", "spectral", "layout", "density leaves"]
        assert [candidate.family for candidate in candidates] == expected
        assert all(len(candidate.clusters) == 200 for candidate in candidates)
        assert all(candidate.clusters.max() < k for candidate in candidates)
        np.testing.assert_array_equal(candidates[0].clusters, (y % k)[families.rows])


def test_numbers_are_a_factor_apart_and_scores_are_smoothed_over_their_logarithm():
    assert apart([30, 2, 3, 24, 25, 26, 27], 1.1) == [2, 3, 24, 27, 30]
    assert smoothed([2, 4, 8], [3.0, 3.0, 3.0]) == pytest.approx([3, 3, 3])
    assert smoothed([2, 4, 8], [0.0, 1.0, 0.0]) == pytest.approx([0, 1, 0], abs=1e-6)
    near, far = smoothed([20, 21, 40], [0.0, 1.0, 0.0])[[0, 2]]
    assert near == pytest.approx(1 / (1 + np.exp(0.5 * (np.log(21 / 20) / 0.1) ** 2)))
    assert far < 1e-6


def test_alternatives_a_quarter_apart_are_two_and_closer_ones_are_one():
    eight, others = Level(8, 1, 1, 1), (7, 9, 6, 10)
    near = [graph_number._near(Level(k, 1, 1, 1), eight) for k in others]
    assert near == [True, True, False, False]


def test_a_graph_without_communities_is_divided_in_two(monkeypatch):
    monkeypatch.setattr(graph_number, "levels", lambda *_, **__: {})
    found = number_in(blobs(3)[0])
    assert found.n_clusters == 2 and found.interval == (2, 2)


def test_the_same_samples_have_the_same_number():
    x = np.random.default_rng(0).normal(size=(100, 5))
    assert number_in(x) == number_in(x)


def test_too_few_samples_have_no_number():
    with pytest.raises(InputError, match="there are 63 samples; expected at least 64"):
        number_in(np.random.default_rng(0).normal(size=(63, 5)))
