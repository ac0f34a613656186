"""Compare the clusters with those of k-means where groups differ in length, not only in direction.

python -m benchmarks.lengths
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from sklearn.datasets import make_blobs, make_circles
from sklearn.metrics import adjusted_rand_score

from benchmarks.turns import table_head, table_line
from ssl_kd import MultiHeadClusterer


def sets() -> Iterator[tuple[str, NDArray, NDArray]]:
    """Yield name, samples `[n, d]` and labels `[n]`; sets of one name differ in their seed."""
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(3), 40)
    yield "three groups on a ray, 16-D", 4.0 * y[:, None] + rng.normal(size=(120, 16)), y
    blobs = {"five blobs, 2-D": (2, 1.0, 10), "five blobs, 3-D": (3, 1.0, 5)}
    blobs["five wide blobs, 2-D"] = (2, 1.8, 3)
    for name, (dim, spread, seeds) in blobs.items():
        for seed in range(seeds):
            options = {"n_features": dim, "cluster_std": spread, "random_state": seed}
            x, y, *_ = make_blobs(n_samples=300, centers=5, **options)
            yield name, np.asarray(x), np.asarray(y)
    for seed in range(3):
        rng, y = np.random.default_rng(seed), np.repeat(np.arange(4), 60)
        yield "four groups, 1-D", rng.normal(size=(240, 1)) + 6 * y[:, None], y
    for seed in range(3):
        rng, y = np.random.default_rng(seed), np.repeat(np.arange(12), 40)
        directions = rng.normal(size=(4, 16))
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        centers = (directions[:, None] * np.array([5, 15, 30])[:, None]).reshape(12, 16)
        yield "four directions, three radii, 16-D", centers[y] + rng.normal(0, 0.8, (480, 16)), y
    x, y = make_circles(400, noise=0.05, factor=0.4, random_state=0)
    yield "two circles, 2-D", np.asarray(x), np.asarray(y)


def main() -> None:
    scores: dict[str, list[tuple[float, float]]] = {}
    for name, x, y in sets():
        k = len(np.unique(y))
        starts: Any = 10  # scikit-learn's stubs allow only a string
        answers = KMeans(k, n_init=starts, random_state=0), MultiHeadClusterer(k)
        both = [100 * adjusted_rand_score(y, answer.fit(x).labels_) for answer in answers]
        scores.setdefault(name, []).append((both[0], both[1]))
    print(table_head(["set", "draws", "k-means, ARI", "ours, ARI", "ours, worst behind k-means"]))
    for name, pairs in scores.items():
        kmeans, ours = np.array(pairs).T
        cells = [f"{kmeans.mean():.0f}", f"{ours.mean():.0f}", f"{max(kmeans - ours):.0f}"]
        print(table_line([name, str(len(pairs)), *cells]))


if __name__ == "__main__":
    main()
