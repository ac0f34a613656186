"""The rows of the neighbor graph: all, or a sample large enough for each cluster."""

import pytest
import torch

from ssl_kd.vision import training_rows as module
from ssl_kd.vision.training_rows import (
    carried,
    nearest_in_graph,
    other_rows,
    training_rows,
    unequal_columns,
)


@pytest.mark.parametrize(("n_clusters", "n_rows"), [(None, 200), (3, 200), (8, 400), (40, 500)])
def test_the_graph_has_fifty_rows_per_cluster_within_limits(monkeypatch, n_clusters, n_rows):
    monkeypatch.setattr(module, "GRAPH_ROWS", 200)
    monkeypatch.setattr(module, "MOST_GRAPH_ROWS", 500)
    x = torch.randn(600, 3, generator=torch.Generator().manual_seed(0))
    rows = training_rows(600, x.__getitem__, 0, n_clusters)
    assert len(rows) == n_rows == len(rows.unique())
    assert len(training_rows(150, x.__getitem__, 0, n_clusters)) == 150


def test_few_columns_of_different_units_are_named():
    x = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    assert unequal_columns(x, standardized=False) == ""
    x[:, 2] *= 100
    message = unequal_columns(x, standardized=False)
    assert message.startswith("the 4 columns were not standardized")
    assert "STANDARDIZE" in message
    assert unequal_columns(x, standardized=True) == ""
    assert unequal_columns(torch.zeros(5, 4), standardized=False) == ""
    assert unequal_columns(x.repeat(1, 10), standardized=False) == ""  # 40 columns


def test_samples_beyond_the_graph_are_all_others_or_a_random_part_of_them(monkeypatch):
    monkeypatch.setattr(module, "GRAPH_ROWS", 200)
    x = torch.randn(600, 3, generator=torch.Generator().manual_seed(0))
    graph = training_rows(600, x.__getitem__, 0, None)
    others = other_rows(600, graph, 0, None)
    assert torch.cat([graph, others]).sort().values.equal(torch.arange(600))
    monkeypatch.setattr(module, "MOST_OTHER_ROWS", 150)
    few = other_rows(600, graph, 0, None)
    assert len(few.unique()) == 150
    assert torch.isin(few, others).all()
    x = x[:100].repeat(2, 1)  # copies are left out of the graph
    assert len(graph := training_rows(200, x.__getitem__, 0, None)) == 100
    assert len(other_rows(200, graph, 0, None)) == 0


def test_samples_beyond_the_graph_find_their_nearest_in_it():
    x = torch.randn(5000, 4, generator=torch.Generator().manual_seed(0))
    nearest = nearest_in_graph(x.__getitem__, 300, 5000, 7, torch.device("cpu"))
    expected = torch.cdist(x[300:].double(), x[:300].double()).topk(7, largest=False).indices
    assert nearest is not None
    assert nearest.dtype == torch.int32
    assert (nearest == expected).double().mean() > 0.999
    assert nearest_in_graph(x.__getitem__, 300, 300, 7, torch.device("cpu")) is None


def test_a_sample_beyond_the_graph_joins_the_most_frequent_cluster_around_it():
    clusters = torch.tensor([3, 3, 0, 1, 1, 0])
    nearest = torch.tensor([[2, 0, 1], [3, 0, 2], [5, 3, 4]])
    assert carried(clusters, nearest).tolist() == [3, 1, 1]  # most, the nearest, most
    far = torch.tensor([[0] * 4 + [2] * 6 + [0] * 9])  # the nine after the tenth do not count
    assert carried(clusters, far).tolist() == [0]
