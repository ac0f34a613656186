"""Spectral coordinates equal those of a dense solver, for any number of components."""

import numpy as np
import pytest
import scipy.sparse as sp

from ssl_kd.vision.graph import spectral
from ssl_kd.vision.graph.spectral import on_sphere, spectral_coordinates


def rings(sizes):
    """A graph whose components are rings with chords, one for each size; of size 1: no edge."""
    random, parts = np.random.default_rng(0), []
    for size in sizes:
        edges = np.roll(np.eye(size), 1, 1) + np.triu(random.random((size, size)) < 0.1)
        np.fill_diagonal(edges, 0)
        parts.append(sp.csr_array(edges + edges.T))
    return sp.csr_array(sp.block_diag(parts))


def walk(graph):
    degree = np.asarray(graph.sum(1)).ravel()
    root = 1 / np.sqrt(np.maximum(degree, degree.mean() * 1e-6))
    return graph.toarray() * root[:, None] * root


SIZES = [300, 120, 90, 60, 50, 40, 30, 1, 1]


@pytest.mark.parametrize("n_vectors", [2, 6, 7, 8, 20])
@pytest.mark.parametrize("sizes", [[400], [400, 1], SIZES])
def test_they_are_leading_eigenvectors(sizes, n_vectors):
    graph = rings(sizes)
    found = spectral_coordinates(graph, n_vectors).astype(np.float64)
    values = np.linalg.eigvalsh(walk(graph))[::-1][:n_vectors]
    np.testing.assert_allclose(found.T @ found, np.eye(n_vectors), atol=1e-5)
    np.testing.assert_allclose(walk(graph) @ found, found * values, atol=1e-5)


def test_a_few_of_many_components_tell_them_apart_without_an_iteration(monkeypatch):
    sizes = [20] * 40
    monkeypatch.setattr(spectral, "eigsh", lambda *given, **options: pytest.fail("searched"))
    places = on_sphere(spectral_coordinates(rings(sizes), 5)[:, :3])
    of_part = places.reshape(40, 20, 3)
    np.testing.assert_allclose(of_part, np.repeat(of_part[:, :1], 20, 1), atol=1e-5)
    apart = np.linalg.norm(of_part[:, None, 0] - of_part[None, :, 0], axis=-1)
    assert apart[~np.eye(40, dtype=bool)].min() > 0.01
