"""Every sample has a place on the map: landmarks by t-SNE, the others among their nearest."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.manifold import trustworthiness

from ssl_kd.vision.evaluate.sample import random_rows
from ssl_kd.vision.samples import Samples
from ssl_kd_explore.explore import map_layout, map_of
from tests.faults.matrix import row as fault


def laid_out(x, most, block=100):
    rows = random_rows(len(x), most, 0)
    blocks = ((start, x[start : start + block]) for start in range(0, len(x), block))
    return map_layout.lay_out(blocks, x[rows], rows, len(x))


@pytest.fixture(scope="module")
def digits():
    data = load_digits().data  # pyright: ignore[reportAttributeAccessIssue]
    return torch.from_numpy(data[:900].astype(np.float32))


def test_a_third_as_landmarks_keeps_the_neighbors_of_all(digits):
    places = laid_out(digits, 300)
    unit = digits / digits.norm(dim=1, keepdim=True)
    assert places.shape == (900, 2) and np.abs(places).max() <= 1
    assert trustworthiness(unit.numpy(), places, n_neighbors=10) > 0.95
    assert len(np.unique(places, axis=0)) == 900  # none hides another


def test_a_map_can_be_repeated(digits):
    x = digits[:300]
    assert np.array_equal(laid_out(x, 100), laid_out(x, 100))


@pytest.mark.parametrize(("n", "most"), [(1, 5), (2, 5), (3, 5), (30, 5), (40, 3)])
def test_few_samples_and_equal_ones_have_a_place(n, most):
    for x in (torch.randn(n, 4), torch.zeros(n, 4), torch.ones(n, 4)):
        places = laid_out(x, most)
        assert places.shape == (n, 2) and np.isfinite(places).all()


@fault(132)
def test_a_map_is_stored_and_computed_again_if_damaged(photo_run, monkeypatch, caplog):
    samples = Samples(photo_run)
    places = map_of(samples)
    file, calls = photo_run / map_layout.FILE, []
    monkeypatch.setattr(map_layout, "lay_out", lambda *a, **k: calls.append(1) or places)
    assert np.array_equal(map_of(samples), places) and not calls
    file.write_bytes(file.read_bytes()[:100])
    map_of(samples)
    assert len(calls) == 1 and "computed again" in caplog.text
