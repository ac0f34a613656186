"""Coordinates of a graph's nodes by the leading eigenvectors of its random walk."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from scipy.sparse.linalg import ArpackNoConvergence, eigsh

# Below this many rows, or for nearly all eigenvectors, a dense solver is the faster one.
DENSE_ROWS = 200


def spectral_coordinates(graph: Any, n_vectors: int) -> NDArray[np.float32]:
    """Leading eigenvectors of `D^-1/2 A D^-1/2`, largest eigenvalue first.

    Always the same for the same graph: the iteration starts from a fixed vector, and the largest
    entry of each eigenvector is positive.

    Args:
        graph: sparse, symmetric `[n, n]`, at least 0.
        n_vectors: how many; at most n are there.

    Returns:
        `[n, m]` float32.

    References:
        Ng, Jordan & Weiss, On spectral clustering, 2001.
    """
    n = graph.shape[0]
    n_vectors = min(n_vectors, n)
    degree = np.asarray(graph.sum(1), np.float64).ravel()
    root = sp.diags_array(1 / np.sqrt(np.maximum(degree, degree.mean() * 1e-6)))
    walk = (root @ graph @ root).tocsr()
    if n <= DENSE_ROWS or n_vectors > n // 4:
        values, vectors = np.linalg.eigh(walk.toarray().astype(np.float64))
    else:
        basis = min(n, max(2 * n_vectors + 1, 20))
        try:
            values, vectors = eigsh(
                walk, n_vectors, which="LA", v0=np.random.default_rng(0).random(n), ncv=basis
            )
        except ArpackNoConvergence as error:  # what has converged is as good
            values, vectors = error.eigenvalues, error.eigenvectors
    order = np.argsort(-values, kind="stable")[:n_vectors]
    vectors = vectors[:, order]
    signs = np.sign(vectors[np.abs(vectors).argmax(0), np.arange(vectors.shape[1])])
    return (vectors * signs).astype(np.float32)


def on_sphere(coordinates: NDArray[np.float32]) -> NDArray[np.float32]:
    """Each row at length 1: nodes of one cluster then lie together, however central they are."""
    lengths = np.linalg.norm(coordinates, axis=1, keepdims=True)
    return coordinates / np.maximum(lengths, 1e-12)
