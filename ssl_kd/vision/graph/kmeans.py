"""Run k-means and number the clusters without gaps."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray


def kmeans(
    x: NDArray,
    n_clusters: int,
    seed: int,
    *,
    n_init: int = 1,
    max_iter: int = 50,
    init: Literal["k-means++", "random"] | NDArray = "k-means++",
) -> NDArray[np.int64]:
    """Return at most `n_clusters` clusters `[n]` of the rows of `x`, numbered without gaps.

    `init` names how starts are drawn, or is the start itself, `[n_clusters, d]`.
    """
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    starts: Any = n_init  # scikit-learn's stubs allow only a string
    first: Any = init  # and no array
    model = KMeans(n_clusters, init=first, n_init=starts, max_iter=max_iter, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        clusters = model.fit_predict(x)
    return np.unique(clusters, return_inverse=True)[1].astype(np.int64)
