"""The rows of the neighbor graph: all, or enough of many for each cluster."""

import pytest
import torch

from ssl_kd.vision import training_rows as module
from ssl_kd.vision.training_rows import training_rows


@pytest.mark.parametrize(("n_clusters", "n_rows"), [(None, 200), (3, 200), (8, 400), (40, 500)])
def test_the_graph_has_fifty_rows_per_cluster_within_limits(monkeypatch, n_clusters, n_rows):
    monkeypatch.setattr(module, "GRAPH_ROWS", 200)
    monkeypatch.setattr(module, "MOST_GRAPH_ROWS", 500)
    x = torch.randn(600, 3, generator=torch.Generator().manual_seed(0))
    rows = training_rows(600, x.__getitem__, 0, n_clusters)
    assert len(rows) == n_rows == len(rows.unique())
    assert len(training_rows(150, x.__getitem__, 0, n_clusters)) == 150
