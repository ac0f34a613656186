"""The rows of the neighbor graph: all, or enough of many for each cluster."""

import pytest
import torch

from ssl_kd.vision import training_rows as module
from ssl_kd.vision.training_rows import training_rows, unequal_columns


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
