"""Low-dimensional layouts of a graph, and the clusters that density shows there."""

import itertools

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.cluster import HDBSCAN
from sklearn.datasets import make_blobs, make_moons
from sklearn.metrics import adjusted_rand_score
from sklearn.neighbors import NearestNeighbors

from ssl_kd.vision.graph import fuzzy_graph, layout
from ssl_kd.vision.graph.layout import Density, low_dimensional
from ssl_kd.vision.graph.spectral import spectral_coordinates


def graph_of(x, k=15):
    distances, near = NearestNeighbors(n_neighbors=min(k, len(x) - 1)).fit(x).kneighbors()
    return fuzzy_graph(near, distances)


def blobs(sizes, seed=0, dim=4, apart=8.0):
    r = np.random.default_rng(seed)
    y = np.repeat(np.arange(len(sizes)), sizes)
    return (apart * r.normal(size=(len(sizes), dim))[y] + r.normal(size=(len(y), dim))), y


def test_neighbors_stay_neighbors_in_few_dimensions():
    x, y = make_blobs(600, 40, centers=8, random_state=0)[:2]
    graph = graph_of(x)
    places = low_dimensional(graph, 5, seed=0)
    assert places.shape == (600, 5) and places.dtype == np.float32
    _, near = NearestNeighbors(n_neighbors=10).fit(places).kneighbors()
    assert np.mean(np.take(y, near) == np.reshape(y, (-1, 1))) > 0.99
    assert (places == low_dimensional(graph, 5, seed=0)).all()
    assert (places != low_dimensional(graph, 5, seed=1)).any()


def reference_layout(graph, dim, seed, steps):
    """Edge by edge in float64: the forces of UMAP's curve and EVoC's repulsion."""
    random, n = np.random.default_rng(seed), graph.shape[0]
    start = spectral_coordinates(graph, dim + 1)[:, 1:] / np.sqrt(graph.toarray().sum(1))[:, None]
    places = 5 * start / np.abs(start).max(0) + random.normal(scale=0.05, size=(n, dim))
    edges = sp.triu(graph, 1).tocoo()
    weights = edges.data / edges.data.max()
    for step in range(steps):
        moves, others = np.zeros((n, dim)), random.integers(n, size=edges.nnz)
        for i, j, other, w in zip(edges.row, edges.col, others, weights, strict=True):
            d = np.linalg.norm(places[i] - places[j])
            pull = -w * (d + 2) / (2 * d**2 - d / 2 + 1) * (places[i] - places[j])
            away, q = places[i] - places[other], np.square(places[i] - places[other]).sum()
            push = 4 * w / ((1 + q / 4) * q) * away if q > 0.01 else 0 * away
            moves[i] += pull + push.clip(-4, 4)
            moves[j] -= pull
        places = places + 0.1 * (1 - step / steps) * moves
    return places


def test_the_layout_follows_its_forces_whatever_the_unit_of_the_weights(monkeypatch):
    monkeypatch.setattr(layout, "STEPS", 3)
    graph = graph_of(np.random.default_rng(1).normal(size=(60, 3)))
    for scale in (0.25, 4):
        places = low_dimensional(graph * np.float32(scale), 2, seed=3)
        np.testing.assert_allclose(places, reference_layout(graph, 2, 3, 3), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("sizes", [[100] * 5, [300, 60, 60, 30]])
@pytest.mark.parametrize("clusters", [Density.leaves, Density.peaks, Density.heaviest])
def test_clusters_that_lie_apart_are_found_by_their_density(clusters, sizes):
    x, y = blobs(sizes)
    found = clusters(Density(x), len(sizes))
    assert found.dtype == np.int64 and set(found) == set(range(len(sizes)))
    assert adjusted_rand_score(y, found) > 0.98


def test_leaves_are_those_of_hdbscan_at_the_size_that_leaves_so_many():
    x, _ = make_moons(500, noise=0.08, random_state=0)
    found = Density(x).leaves(2)
    trees = [
        HDBSCAN(size, min_samples=5, cluster_selection_method="leaf", copy=True).fit_predict(x)
        for size in (50, 100, 150)
    ]
    theirs = next(tree for tree in trees if tree.max() == 1)
    inside = theirs >= 0
    assert adjusted_rand_score(theirs[inside], found[inside]) > 0.99


@pytest.mark.parametrize("clusters", [Density.leaves, Density.peaks, Density.heaviest])
def test_clusters_do_not_depend_on_the_scale_of_the_places(clusters):
    x, _ = blobs([80, 60, 30], apart=3.0)
    assert (clusters(Density(x * 1e-8), 3) == clusters(Density(x), 3)).all()


def test_peaks_keep_a_rare_cluster_where_leaves_divide_the_large_one():
    x, y = blobs([900, 900, 25], apart=6.0)
    assert adjusted_rand_score(y, Density(x).peaks(3)) > 0.99
    assert np.bincount(Density(x).leaves(3)).min() > 25


@pytest.mark.parametrize("seed", range(4))
def test_the_heaviest_are_those_of_hdbscan_where_it_finds_as_many(seed):
    x, _ = blobs(np.random.default_rng(seed).integers(20, 300, 9), seed, apart=4.0)
    theirs = HDBSCAN(5, min_samples=5, copy=True).fit_predict(x)
    found, inside = Density(x).heaviest(int(theirs.max()) + 1), theirs >= 0
    assert theirs.max() > 1 and adjusted_rand_score(theirs[inside], found[inside]) > 0.98


def test_density_is_that_of_fifteen_neighbors_if_there_are_as_many():
    x = np.random.default_rng(0).normal(size=(40, 2))
    assert Density(x)._near.shape == (40, 15) and Density(x[:9])._near.shape == (9, 8)


def test_leaves_of_tied_sizes_are_the_nearest_number():
    random = np.random.default_rng(0)
    groups = [start + random.random(10) for start in (0, 100, 210, 330, 460)]  # merged in turn
    density = Density(np.concatenate(groups)[:, None])
    assert [density.leaves(k).max() + 1 for k in (2, 3, 5)] == [1, 5, 5]
    assert 5 <= density.heaviest(50).max() + 1 <= 10  # no more than there are of five samples


@pytest.mark.parametrize("seed", range(12, 24))
def test_the_heaviest_have_the_largest_excess_of_mass_of_all_choices(seed):
    """By definition: each sample counts from the density at which its cluster splits off."""
    density = Density(np.random.default_rng(seed).random((60, 1)))
    (children, size, lengths), n = density._tree, len(density.places)

    def samples(node):
        return {node} if node < n else set().union(*map(samples, children[node - n]))

    def choices(node, born):
        """Every set of disjoint clusters below a node, with its mass."""
        members, mass, large = samples(node), 0.0, [node]
        while len(large) == 1:
            (node,) = large
            risen = 1 / lengths[node - n]
            large = [child for child in children[node - n] if size[child] >= 5]
            stay = samples(large[0]) if len(large) == 1 else set()
            mass += len(samples(node) - stay) * (risen - born)
        parts = itertools.product(*(choices(child, risen) for child in large)) if large else ()
        return [([members], mass), *((a + b, of_a + of_b) for (a, of_a), (b, of_b) in parts)]

    found = choices(2 * n - 2, 0.0)
    for k in {len(clusters) for clusters, _ in found}:
        best = max((c for c in found if len(c[0]) == k), key=lambda c: c[1])[0]
        ours = [set(density.heaviest(k)[list(members)]) for members in best]
        assert all(len(numbers) == 1 for numbers in ours) and len(set().union(*ours)) == k


@pytest.mark.parametrize(
    "x",
    [np.zeros((30, 3)), np.ones((2, 2)), np.arange(5.0)[:, None], np.repeat(np.eye(3), 20, 0)],
    ids=["one point", "two", "a line", "duplicates"],
)
def test_degenerate_places_give_clusters_for_all(x):
    for clusters in (Density.leaves, Density.peaks, Density.heaviest):
        found = clusters(Density(x), 2)
        assert found.shape == (len(x),) and found.min() == 0
    assert np.isfinite(low_dimensional(graph_of(x), 4, seed=0)).all()
