"""Evaluate frozen embeddings by a vote of nearest neighbors."""

import numpy as np
from numpy.typing import NDArray

from ssl_kd.vision.evaluate.sample import labeled_sample

K, TEMPERATURE = 20, 0.07  # as in DINO's code


def knn_accuracy(
    train_x: NDArray,
    train_y: NDArray,
    test_x: NDArray | None = None,
    test_y: NDArray | None = None,
    k: int = K,
    temperature: float = TEMPERATURE,
    *,
    seed: int = 0,
    max_train: int = 100_000,
    max_test: int = 10_000,
) -> float | None:
    """Compute the accuracy of k-NN classification with votes weighted by cosine similarity.

    The predicted class is `argmax_c sum_{i in kNN(x)} exp(cos(x, x_i) / T) [y_i = c]`. Without
    held-out data, each training sample is classified by its neighbors among all other training
    samples (leave-one-out).

    Args:
        train_x: `[n, d]` embeddings.
        train_y: `[n]` integer labels; samples with label -1 (unknown) are left out.
        test_x: `[m, d]` held-out embeddings, or None for leave-one-out.
        test_y: `[m]` labels of the held-out embeddings.
        k: Number of neighbors, at least 1; reduced to the number of training samples.
        temperature: T > 0.
        seed: Seed of the random subsets.
        max_train: Largest number of training rows; a larger set is replaced by a random subset.
        max_test: The same for held-out rows, and for all rows in leave-one-out.

    Returns:
        A number in [0, 1]; None if fewer than two training labels, or no held-out label, are known.

    References:
        Caron et al., "Emerging Properties in Self-Supervised Vision Transformers", 2021, appendix;
        k = 20 and T = 0.07 as in the official code.

    Example:
        >>> knn_accuracy(np.eye(2)[[0, 0, 1, 1]], np.array([5, 5, 7, 7]), k=1)
        1.0
    """
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.preprocessing import normalize

    if k < 1 or not temperature > 0:
        raise ValueError(
            f"k is {k} and temperature {temperature}; expected k of at least 1 and a positive "
            "temperature"
        )
    if (test_x is None) != (test_y is None):
        raise ValueError(
            "one of test_x and test_y is None; expected both, or neither for leave-one-out"
        )
    x, y = labeled_sample(train_x, train_y, max_test if test_x is None else max_train, seed)
    spare = 0 if test_x is not None else 1
    if len(y) < 2:
        return None

    def votes(distance: NDArray) -> NDArray:
        return np.exp((1 - distance**2 / 2) / temperature)  # unit length: cos = 1 - distance² / 2

    classifier = KNeighborsClassifier(min(k, len(y) - spare), algorithm="brute")
    classifier.set_params(weights=votes)
    classifier.fit(normalize(x), y)
    if test_x is None or test_y is None:
        return float((classifier.predict(None) == y).mean())  # None: neighbors exclude self
    query_x, query_y = labeled_sample(test_x, test_y, max_test, seed)
    if not len(query_y):
        return None
    return float((classifier.predict(normalize(query_x)) == query_y).mean())
