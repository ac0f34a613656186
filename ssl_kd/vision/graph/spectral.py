"""Compute spectral coordinates of the nodes of a graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from scipy.sparse.linalg import ArpackNoConvergence, aslinearoperator, eigsh

# Up to this many rows, or for nearly all eigenvectors, a dense solver is faster.
DENSE_ROWS = 200


def spectral_coordinates(graph: Any, n_vectors: int) -> NDArray[np.float32]:
    """Return the `n_vectors` leading eigenvectors of `D^-1/2 A D^-1/2`, largest eigenvalue first.

    The result `[n, m]` is deterministic: the iteration starts from a fixed vector, and the entry of
    largest magnitude in each eigenvector is positive.

    References:
        Ng, Jordan & Weiss, On spectral clustering, 2001.
    """
    n = graph.shape[0]
    n_vectors = min(n_vectors, n)
    degree = np.asarray(graph.sum(1), np.float64).ravel()
    lengths = np.sqrt(np.maximum(degree, degree.mean() * 1e-6))
    root = sp.diags_array(1 / lengths)
    walk = (root @ graph @ root).tocsr()
    if n <= DENSE_ROWS or n_vectors > n // 4:
        values, vectors = np.linalg.eigh(walk.toarray().astype(np.float64))
    else:
        values, vectors = _leading(walk, n_vectors, _of_components(walk, lengths))
    order = np.argsort(-values, kind="stable")[:n_vectors]
    vectors = vectors[:, order]
    signs = np.sign(vectors[np.abs(vectors).argmax(0), np.arange(vectors.shape[1])])
    return (vectors * signs).astype(np.float32)


def _of_components(walk: Any, lengths: NDArray[np.float64]) -> Any:
    """Return the eigenvectors of eigenvalue 1, `[n, c]`: one for each of c connected components."""
    n_parts, part = sp.csgraph.connected_components(walk, directed=False)
    unit = lengths / np.sqrt(np.bincount(part, lengths**2, n_parts))[part]
    known = sp.csr_array((unit, part, np.arange(len(part) + 1)), shape=(len(part), n_parts))
    tied = np.bincount(part, np.diff(walk.indptr), n_parts) > 0
    return known[:, tied if tied.sum() > 1 else []]


def _leading(
    walk: Any, n_vectors: int, known: Any
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the largest eigenvalues and their eigenvectors `[n, n_vectors]`.

    The iteration would need thousands of steps to find several eigenvectors of one eigenvalue.
    Therefore the `known` eigenvectors (eigenvalue 1) are removed first. They are returned in a
    random rotation, in which a few of them suffice to separate the components.
    """
    n, n_known = known.shape
    shape = n_known, min(n_known, n_vectors)
    first = known @ np.linalg.qr(np.random.default_rng(0).standard_normal(shape))[0]
    if n_known >= n_vectors:
        return np.ones(n_vectors), first
    rest, operator = n_vectors - n_known, walk
    if n_known:
        into, back = aslinearoperator(known.T), aslinearoperator(known)
        operator = aslinearoperator(walk) - back @ into
    try:
        values, vectors = eigsh(
            operator,
            rest,
            which="LA",
            v0=np.random.default_rng(0).random(n),
            ncv=min(n, max(2 * rest + 1, 20)),
        )
    except ArpackNoConvergence as error:  # use those that have converged
        values, vectors = error.eigenvalues, error.eigenvectors
    return np.concatenate([np.ones(n_known), values]), np.concatenate([first, vectors], 1)


def on_sphere(coordinates: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scale each row to length 1, which brings central and peripheral nodes of a cluster close."""
    lengths = np.linalg.norm(coordinates, axis=1, keepdims=True)
    return coordinates / np.maximum(lengths, 1e-12)
