"""The synthetic classes of the benchmark of many rows, and the peers beside them."""

import numpy as np
import pytest

from benchmarks.large import PEERS, peer, write


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_is_scored_on_the_rows_that_were_written(tmp_path, name):
    features = tmp_path / "features.npy"
    write(features, 2000, 16, classes=5, modes=1)
    labels = np.load(tmp_path / "features_labels.npy")
    assert np.load(features).shape == (2000, 16)
    assert np.bincount(labels).min() > 300
    assert len(labels) == 2000
    result = peer(name, features, 5)
    assert result["method"] == name
    assert 0.7 < result["acc"] <= 1
