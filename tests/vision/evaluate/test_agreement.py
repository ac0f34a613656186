"""The neighbors that several embeddings share."""

import numpy as np
import pytest

from ssl_kd.vision.evaluate import agreement, neighbor_agreement
from ssl_kd.vision.evaluate.agreement import NEIGHBORS, mutual_neighbors

RNG = np.random.default_rng(0)
X = RNG.normal(size=(80, 6))


def neighbors_of(x):
    """Return the pairs of mutual neighbors, found by sorting all similarities."""
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    similarity = unit @ unit.T - 9 * np.eye(len(x))
    near = [set(np.argsort(-row)[:NEIGHBORS].tolist()) for row in similarity]
    return {(i, j) for i in range(len(x)) for j in near[i] if i in near[j]}


def test_agreement_is_the_mean_share_of_common_mutual_neighbors():
    embeddings = [X, X + 0.5 * RNG.normal(size=X.shape), RNG.normal(size=(80, 3))]
    pairs = [neighbors_of(x) for x in embeddings]
    assert set(mutual_neighbors(X).tolist()) == {80 * i + j for i, j in pairs[0]}
    for i, value in enumerate(neighbor_agreement(embeddings)):
        shares = [len(pairs[i] & pairs[j]) / (80 * NEIGHBORS) for j in range(3) if j != i]
        assert value == pytest.approx(np.mean(shares))


def test_an_unrelated_embedding_agrees_least():
    related = [X + 0.2 * RNG.normal(size=X.shape) for _ in range(3)]
    *others, last = map(float, neighbor_agreement([*related, RNG.normal(size=(80, 6))]))
    assert min(others) > 3 * last
    assert float(neighbor_agreement([X, 3 * X])[0]) > 0.5


def test_nothing_is_compared_with_one_embedding_or_sample():
    assert neighbor_agreement([X]) == [None] and neighbor_agreement([]) == []
    assert neighbor_agreement([X[:1], X[:1]]) == [None, None]
    with pytest.raises(ValueError, match=r"have \[79, 80\] rows; expected the same samples"):
        neighbor_agreement([X, X[:-1]])


def test_a_random_subset_of_a_large_set_is_compared(monkeypatch):
    sizes = []
    monkeypatch.setattr(
        agreement, "mutual_neighbors", lambda x: sizes.append(len(x)) or mutual_neighbors(x)
    )
    first, second = (neighbor_agreement([X, X + 1], max_rows=30, seed=seed) for seed in (0, 1))
    assert sizes == [30] * 4 and first != second
