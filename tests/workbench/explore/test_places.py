"""Every sample has a place: landmarks by t-SNE, the others among those that are like them."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.manifold import trustworthiness

from ssl_kd.vision.samples import Samples
from ssl_kd.workbench.explore import map_of, places
from tests.faults.matrix import row as fault


def laid_out(x, most, seed=0, block=100):
    rows = places.random_rows(len(x), most, seed)

    def blocks():
        for start in range(0, len(x), block):
            yield start, x[start : start + block]

    return places.lay_out(blocks, x[rows], rows, len(x), seed)


@pytest.fixture(scope="module")
def digits():
    data = load_digits().data  # pyright: ignore[reportAttributeAccessIssue]
    return torch.from_numpy(data[:900].astype(np.float32))


def test_a_third_as_landmarks_keeps_the_neighbours_of_all(digits):
    found = laid_out(digits, 300)
    unit = digits / digits.norm(dim=1, keepdim=True)
    assert found.shape == (900, 2) and np.abs(found).max() <= 1
    assert trustworthiness(unit.numpy(), found, n_neighbors=10) > 0.95
    assert len(np.unique(found, axis=0)) == 900  # none hides another


def test_it_is_the_same_for_a_seed_and_any_blocks(digits):
    x = digits[:300]
    one, two = laid_out(x, 100), laid_out(x, 100)
    assert np.array_equal(one, two)
    assert not np.array_equal(one, laid_out(x, 100, seed=1))


@pytest.mark.parametrize(("n", "most"), [(1, 5), (2, 5), (3, 5), (30, 5), (40, 3)])
def test_few_samples_and_equal_ones_have_a_place(n, most):
    for x in (torch.randn(n, 4), torch.zeros(n, 4), torch.ones(n, 4)):
        found = laid_out(x, most)
        assert found.shape == (n, 2) and np.isfinite(found).all()


@fault(132)
def test_the_map_of_a_run_is_kept_and_made_anew_where_it_is_damaged(photo_run, monkeypatch, caplog):
    samples = Samples(photo_run)
    found = map_of(samples)
    file, monkey = photo_run / places.FILE, []
    monkeypatch.setattr(places, "lay_out", lambda *a, **k: monkey.append(1) or found)
    assert np.array_equal(map_of(samples), found) and not monkey
    map_of(samples, seed=1)
    assert len(monkey) == 1
    file.write_bytes(file.read_bytes()[:100])
    map_of(samples)
    assert len(monkey) == 2 and "computed again" in caplog.text
