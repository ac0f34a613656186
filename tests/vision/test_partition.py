"""The partition that heads learn: its graphs, and what becomes of it in a fit."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import adjusted_rand_score

from ssl_kd import MultiHeadClusterer
from ssl_kd.evaluate import accuracy
from ssl_kd.graph import fuzzy_graph
from ssl_kd.store import nearest_neighbors
from ssl_kd.vision.model_parts import Projection
from ssl_kd.vision.partition import COSINE_GRAPHS, GRAPH_NEIGHBORS, partition_of, views

CPU = torch.device("cpu")
DIGITS: Any = load_digits()
X, Y = torch.from_numpy(DIGITS.data[:500]).float(), DIGITS.target[:500]


def _inputs(x=X, neighbours=20):
    return nearest_neighbors(x, neighbours), x.__getitem__, Projection.fit(x, None)(x)


def test_graphs_are_cosine_euclidean_and_half_whitened():
    x = torch.randn(400, 12) * torch.logspace(0, -2, 12) + 0.5
    near, read, projected = _inputs(x)
    directions = torch.linalg.svd(projected.double(), full_matrices=False)
    lengths = directions.S / directions.S[0]
    white = (projected.double() @ directions.Vh.T)[:, lengths > 1e-3]
    white /= lengths[lengths > 1e-3].sqrt()
    unit = x.double() / x.double().norm(dim=1, keepdim=True)
    distances = [1 - unit @ unit.T, torch.cdist(x.double(), x.double()), torch.cdist(white, white)]
    for view, distance in zip(views(near, read, projected, CPU), distances, strict=True):
        distance.fill_diagonal_(torch.inf)
        sizes = COSINE_GRAPHS if view.rows is not None and len(view.graphs) > 1 else (15,)
        assert tuple(view.graphs) == sizes and GRAPH_NEIGHBORS in sizes
        for size in sizes:
            nearest = distance.topk(size, largest=False)
            expected = fuzzy_graph(nearest.indices.numpy(), nearest.values.numpy())
            assert abs(view.graphs[size] - expected).max() < 2e-3


def test_it_finds_the_digits_and_reports_each_partition():
    seen = []
    others = X[:450]  # of which no other test has asked
    found = partition_of(10, *_inputs(others), CPU, lambda *numbers: seen.append(numbers))
    assert adjusted_rand_score(Y[:450], found.clusters) > 0.7
    assert seen == [(number, 34) for number in range(1, 35)]
    assert (found.clusters.numpy() == found.ensemble.clusters).all()
    assert found.number is None and len(found.levels) > 2


def test_fewer_neighbours_to_pair_with_change_no_graph():
    few, many = (partition_of(10, *_inputs(neighbours=k), CPU).clusters for k in (5, 20))
    assert torch.equal(few, many)


@pytest.mark.parametrize(("n", "k"), [(2, 2), (3, 3), (4, 2), (17, 5)])
def test_few_samples(n, k):
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(n))
    found = partition_of(k, *_inputs(x, min(20, n - 1)), CPU)
    assert found.clusters.shape == (n,) and int(found.clusters.max()) < k


@pytest.mark.parametrize(
    "x",
    [torch.ones(40, 3), torch.zeros(40, 3), torch.eye(40), torch.ones(40, 2).cumsum(0) * 1e20],
    ids=["one point", "zeros", "all alike", "a line, far out"],
)
def test_odd_embeddings(x):
    found = partition_of(3, *_inputs(x), CPU)
    assert np.isfinite(found.ensemble.evenness)
    assert found.clusters.shape == (40,)


def test_heads_learn_the_partition_whatever_the_seed():
    fits = [MultiHeadClusterer(10, n_heads=4, random_state=seed).fit(X.numpy()) for seed in (1, 2)]
    partition = partition_of(10, *_inputs(), CPU).clusters.numpy()
    for fit in fits:
        assert accuracy(partition, fit.labels_) > 0.95
    assert np.mean(fits[0].labels_ == fits[1].labels_) > 0.95
