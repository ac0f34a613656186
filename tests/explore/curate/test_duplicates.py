"""Copies of samples: all inserted ones are found, and no others."""

import numpy as np
import pytest
import torch

from ssl_kd.core.errors import InputError
from ssl_kd.vision.cache import EmbeddingStore
from ssl_kd_explore.curate import near_duplicates, outliers
from tests.explore.curate.stores import distinct, write


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """400 distinct rows, then copies of 0 ... 29 with a little noise, then three equals of 40."""
    x, _ = distinct()
    rng = np.random.default_rng(1)
    near = x[:30] + 0.01 * rng.normal(size=(30, x.shape[1]))
    return write(tmp_path_factory.mktemp("copied"), np.concatenate([x, near, x[[40, 40, 40]]]))


def as_lists(groups):
    return [rows.tolist() for rows in groups]


def test_all_copies_are_found_and_nothing_else(copied):
    found = near_duplicates(copied)
    expected = [[row, 400 + row] for row in range(30)] + [[40, 430, 431, 432]]
    assert as_lists(found.groups()) == expected
    assert as_lists(found.exact) == [[40, 430, 431, 432]]
    assert found.kept().sum() == 400 and found.kept()[:400].all()
    assert found.similarity[found.pairs()].min() > 0.99
    table = found.frame()
    assert table.num_rows == 64 and table.column("kept").to_pylist().count(True) == 31
    last = table.slice(60).to_pydict()
    assert last["group"] == [40] * 4 and last["row"] == [40, 430, 431, 432]
    assert last["file"][1] == "train/430.png" and last["exact"] == [True] * 4
    assert last["size"] == [4] * 4 and last["similarity"] == [1.0] * 4


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dim", [2, 16, 64])
def test_no_copy_is_invented(tmp_path, dim, seed):
    x, _ = distinct(300, dim, seed=seed)
    # One in a hundred sets of distinct samples may hold a pair that is closer than chance.
    assert len(near_duplicates(write(tmp_path, x)).groups()) <= (1 if dim == 2 else 0)


def test_the_size_of_the_blocks_changes_nothing(copied, monkeypatch):
    whole = near_duplicates(copied)
    monkeypatch.setattr("ssl_kd_explore.curate.neighbor_spacing.BLOCK_BYTES", 1 << 12)
    small = near_duplicates(copied)
    for name in ("first", "second", "similarity", "chance", "first_equal"):
        assert np.array_equal(getattr(whole, name), getattr(small, name)), name
    assert whole.floor == small.floor


def test_thresholds_nest(copied):
    found = near_duplicates(copied, floor=0.5)
    before = None
    for threshold in (1.0, 0.9999, 0.99, 0.9, 0.7, 0.5):
        labels = found.labels(threshold)
        if before is not None:  # groups only grow
            assert (labels[before] == labels).all()
        before = labels
    assert len(found.groups(0.5)) < len(found.groups(0.99))
    with pytest.raises(InputError, match=r"threshold is 0\.4; expected a cosine from 0\.5000 to 1"):
        found.groups(0.4)


def test_pairs_above_a_floor_are_all_pairs(tmp_path):
    x, _ = distinct(60, 8)
    store = write(tmp_path, x)
    found = near_duplicates(store, floor=0.8)
    units = torch.nn.functional.normalize(torch.from_numpy(x), dim=1)
    cosines = (units @ units.T).numpy()
    truth = {(i, j) for i in range(60) for j in range(i + 1, 60) if cosines[i, j] >= 0.8}
    chosen = found.pairs(0.8)
    pairs = set(zip(found.first[chosen].tolist(), found.second[chosen].tolist(), strict=True))
    assert pairs == truth  # none has more than 20 that near
    assert np.allclose(found.similarity, cosines[found.first, found.second], atol=1e-6)


def test_more_equals_than_neighbors_are_one_group(tmp_path):
    x, _ = distinct(200)
    found = near_duplicates(write(tmp_path, np.concatenate([x, np.repeat(x[:1], 50, 0)])))
    assert as_lists(found.exact) == as_lists(found.groups()) == [[0, *range(200, 250)]]
    assert found.kept(0.999).sum() == 200


def test_which_copy_stays(tmp_path):
    x, _ = distinct(300)
    store = write(tmp_path, np.concatenate([x, x[:1] + 0.01, x[:1] + 0.02]))
    copies = near_duplicates(store)
    assert as_lists(copies.groups(0.999)) == [[0, 300, 301]]
    assert copies.kept(0.999)[[0, 300, 301]].tolist() == [True, False, False]
    sizes = np.r_[np.zeros(300), 5, 7]
    assert copies.kept(0.999, sizes=sizes)[[0, 300, 301]].tolist() == [False, False, True]


def test_one_row_two_rows_and_equal_rows(tmp_path):
    one = near_duplicates(write(tmp_path / "one", [[1.0, 2.0]]))
    assert len(one) == 0 and one.groups() == [] and one.kept().tolist() == [True]
    for n in (2, 120):
        copies = near_duplicates(write(tmp_path / f"{n}", np.ones((n, 4))))
        assert as_lists(copies.exact) == as_lists(copies.groups()) == [list(range(n))]
        assert len(copies) == n - 1 and copies.kept().sum() == 1


@pytest.mark.parametrize("look", [near_duplicates, outliers])
def test_a_row_that_is_not_finite_is_named(tmp_path, monkeypatch, look):
    gather = EmbeddingStore.gather

    def damaged(self, rows):
        return gather(self, rows).masked_fill((rows == 7).unsqueeze(1), torch.nan)

    store = write(tmp_path, distinct(150)[0])
    monkeypatch.setattr(EmbeddingStore, "gather", damaged)
    with pytest.raises(InputError, match="row 7 .*is not finite"):
        look(store)
