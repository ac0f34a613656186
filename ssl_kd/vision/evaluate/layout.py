"""Project embeddings into the plane for plots."""

import numpy as np
from numpy.typing import NDArray

from ssl_kd.vision.evaluate.sample import in_range, random_rows


def embedding_map(
    x: NDArray, seed: int = 0, *, max_points: int = 1500
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Project embeddings `[n, d]` into the plane by t-SNE, which keeps neighbors close.

    Distances between separate groups are not meaningful. A larger set is replaced by a random
    subset of `max_points` rows; a map of 1,500 points takes about two seconds on one core. Return
    the row numbers on the map, ascending, `[m]`, and their coordinates `[m, 2]`, centered, in
    [-1, 1].

    References:
        van der Maaten and Hinton, "Visualizing Data using t-SNE", 2008.
    """
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    rows = random_rows(len(x), max_points, seed)
    (z,) = in_range(x[rows])
    if len(z) < 4 or np.ptp(z, axis=0).max() == 0:  # too few, or all equal
        places = np.zeros((len(z), 2), np.float32)
        places[:, 0] = np.linspace(-1, 1, len(z)) if len(z) > 1 else 0
        return rows, places
    if min(z.shape) > 50:
        z = PCA(50, random_state=seed).fit_transform(z)
    layout = TSNE(
        perplexity=min(30.0, (len(z) - 1) / 3),
        init="pca" if min(z.shape) >= 2 else "random",
        max_iter=500,
        random_state=seed,
    )
    places = layout.fit_transform(z)
    places = places - (places.max(0) + places.min(0)) / 2
    return rows, (places / max(np.abs(places).max(), 1e-12)).astype(np.float32)
