"""The partition that heads learn: its graphs, and its use in a fit."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import adjusted_rand_score

from ssl_kd import MultiHeadClusterer
from ssl_kd.vision import fit as fit_module
from ssl_kd.vision.cache import nearest_neighbors
from ssl_kd.vision.evaluate import accuracy
from ssl_kd.vision.graph import fuzzy_graph
from ssl_kd.vision.model_parts import Projection
from ssl_kd.vision.partition import COSINE_GRAPHS, GRAPH_NEIGHBORS, partitions_of, views
from tests.marks import slow

CPU = torch.device("cpu")


def partition_of(*args, **options):
    return partitions_of(*args, **options).answer()


DIGITS: Any = load_digits()
X, Y = torch.from_numpy(DIGITS.data[:500]).float(), DIGITS.target[:500]


def _inputs(x=X, neighbors=20):
    return nearest_neighbors(x, neighbors), x.__getitem__, Projection.fit(x, None)(x)


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
    found = partition_of(10, *_inputs(others), CPU, progress=lambda *numbers: seen.append(numbers))
    assert adjusted_rand_score(Y[:450], found.clusters) > 0.7
    assert seen == [(number, 34) for number in range(1, 35)]
    assert (found.clusters.numpy() == found.ensemble.clusters).all()
    assert found.number is None and len(found.levels) > 2


def test_fewer_neighbors_to_pair_with_change_no_graph():
    few, many = (partition_of(10, *_inputs(neighbors=k), CPU).clusters for k in (5, 20))
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
    assert found.ensemble.sizes == "even"
    assert found.clusters.shape == (40,)


def on_a_ray(n_groups=3, n=40, dim=16):
    """Return groups of samples in one direction from 0, at several distances, and their labels."""
    y = np.repeat(np.arange(n_groups), n)
    return 4.0 * y[:, None] + np.random.default_rng(0).normal(size=(len(y), dim)), y


def on_a_map(seed):
    """Return groups of points in the plane, on all sides of 0, and their labels."""
    centers = np.random.default_rng(seed).uniform(-10, 10, (4, 2))
    y = np.repeat(np.arange(4), 60)
    return centers[y] + np.random.default_rng(seed).normal(size=(len(y), 2)), y


@pytest.mark.parametrize(
    ("x", "y"),
    [on_a_ray(), slow(*on_a_map(1)), slow(*on_a_map(2))],
    ids=["ray", "map", "another map"],
)
def test_groups_that_differ_in_length_are_found_by_distance(x, y, tmp_path):
    inputs = _inputs(torch.from_numpy(x).float())
    answer = partition_of(len(set(y)), *inputs, CPU)
    assert answer.ensemble.metrics == ("euclidean",)
    near = nearest_neighbors(inputs[2], 20, metric="euclidean")
    assert torch.equal(answer.neighbors, near)  # of which heads learn, too
    fit = MultiHeadClusterer(len(set(y)), n_heads=4).fit(x)
    assert adjusted_rand_score(y, fit.labels_) > 0.9
    assert fit.departure_ is not None and fit.departure_ < 0.05
    fit.save_pretrained(tmp_path)
    again = MultiHeadClusterer.from_pretrained(tmp_path)
    assert (again.predict(x) == fit.labels_).all() and again.departure_ is None


def test_the_number_of_clusters_is_chosen_by_distance_where_lengths_matter():
    x, y = on_a_ray(4, 50)
    answer = partition_of(None, *_inputs(torch.from_numpy(x).float()), CPU)
    assert answer.ensemble.metrics == ("euclidean",) and answer.n_clusters == 4
    assert adjusted_rand_score(y, answer.clusters) == 1


@pytest.mark.parametrize("lengths", ["random", slow("one")])
def test_directions_keep_their_vote_where_lengths_are_uninformative(lengths):
    of_rows = X.norm(dim=1, keepdim=True)
    if lengths == "random":
        of_rows = of_rows * torch.randn(len(X), 1).exp()
    x = X / of_rows
    inputs = _inputs(x)
    answer = partition_of(10, *inputs, CPU)
    assert answer.ensemble.metrics == ("cosine", "euclidean") and answer.neighbors is inputs[0]
    assert adjusted_rand_score(Y, answer.clusters) > 0.65


def test_heads_that_leave_their_partition_are_reported(caplog):
    partition = partition_of(10, *_inputs(), CPU).clusters.numpy()
    options: dict[str, Any] = {"n_heads": 2, "random_state": 0, "loss": "fixed"}
    short = MultiHeadClusterer(10, max_steps=3, **options).fit(X.numpy())
    share = 1 - accuracy(partition, short.labels_)
    assert short.departure_ == pytest.approx(share, abs=0.03) and share > 0.05
    assert (
        f"the heads put {100 * (short.departure_ or 0):.1f} % of the training samples"
        in caplog.text
    )
    assert "leave out MAX_STEPS and EPOCHS" in caplog.text
    caplog.clear()
    converged = MultiHeadClusterer(10, **options).fit(X.numpy()).departure_
    assert converged is not None and converged < 0.05
    assert "the heads put" not in caplog.text


def test_heads_learn_the_partition_whatever_the_seed():
    fits = [MultiHeadClusterer(10, n_heads=4, loss="fixed", random_state=seed) for seed in (1, 2)]
    for fit in fits:
        fit.fit(X.numpy())
    partition = partition_of(10, *_inputs(), CPU).clusters.numpy()
    for fit in fits:
        assert accuracy(partition, fit.labels_) > 0.95
    assert np.mean(fits[0].labels_ == fits[1].labels_) > 0.95


def test_many_samples_are_calibrated_on_a_random_part_of_them(monkeypatch):
    options: dict[str, Any] = {"n_heads": 2, "random_state": 0, "loss": "fixed", "max_steps": 50}
    whole = MultiHeadClusterer(10, **options).fit(X.numpy())
    monkeypatch.setattr(fit_module, "CALIBRATION_ROWS", 200)
    part = MultiHeadClusterer(10, **options).fit(X.numpy())
    temperatures = [of.model_.options["answer_temperature"] for of in (part, whole)]
    assert temperatures[0] != temperatures[1]
    assert temperatures[0] == pytest.approx(temperatures[1], rel=0.1)
    assert (part.labels_ == whole.labels_).all() and part.departure_ == whole.departure_
