"""How far out a sample lies: even over what was never seen, 1 beyond everything, whatever comes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from ssl_kd.vision.novelty import NEIGHBOURS, Novelty

DIM = 8


def two_densities(n, seed):
    """Two clusters, one five times as wide as the other."""
    g = torch.Generator().manual_seed(seed)
    wide = (torch.rand(n, 1, generator=g) < 0.5).float()
    return (1 + 4 * wide) * 0.2 * torch.randn(n, DIM, generator=g) + 4 * wide - 2


def plain(novelty, z, known):
    """`far` of one polar row by its definition in float64, over all pairs."""
    reference = novelty.reference.double()
    k = novelty.k

    def nearest(point, rows):
        distances = (rows - point).norm(dim=1)
        order = distances.argsort()[:k]
        return distances[order].mean(), order

    others = torch.arange(len(reference))
    if known is not None:
        others = others[others != known]
    distance, order = nearest(z, reference[others])
    around = []
    for j in others[order].tolist():
        rest = reference[[i for i in range(len(reference)) if i not in (j, known)]]
        around.append(nearest(reference[j], torch.cat([rest, z[None]]))[0])
    return distance / torch.stack(around).mean().sqrt()


def test_it_is_the_formula_for_new_samples_and_for_those_left_out():
    x = two_densities(40, 0)
    novelty = Novelty.fit(x)
    own = torch.stack([plain(novelty, novelty.reference[i].double(), i) for i in range(40)])
    torch.testing.assert_close(novelty.own.double(), own.sort().values, rtol=1e-5, atol=1e-6)
    new = two_densities(10, 1)
    far = torch.stack([plain(novelty, z.double(), None) for z in novelty.polar(new)])
    expected = (own < far.unsqueeze(1)).double().mean(1)
    torch.testing.assert_close(novelty.score(new).double(), expected, rtol=0, atol=1e-6)


def test_held_out_samples_have_scores_spread_evenly_as_training_samples_have():
    novelty = Novelty.fit(two_densities(1500, 0))
    for x in (two_densities(3000, 1), two_densities(1500, 0)):
        score = novelty.score(x).sort().values
        even = (torch.arange(len(score)) + 0.5) / len(score)
        assert (score - even).abs().max() < 0.05  # Kolmogorov-Smirnov, 1 % at 0.03 + 0.03
    assert torch.equal(score, torch.arange(1500.0) / 1500)  # each training sample has its own place


def test_new_kinds_of_samples_are_farther_out_in_dense_and_sparse_surroundings():
    x, inside = two_densities(1000, 0), two_densities(500, 1)
    novelty = Novelty.fit(x)
    g = torch.Generator().manual_seed(2)
    kinds = {
        "a third cluster": 0.2 * torch.randn(500, DIM, generator=g) + torch.tensor([4.0, -4.0] * 4),
        "noise in the same box": x.amin(0) + x.std(0) * 4 * torch.rand(500, DIM, generator=g),
        "beside the dense cluster": 0.6 * torch.randn(500, DIM, generator=g) - 2,
    }
    truth = torch.arange(1000) >= 500
    for name, kind in kinds.items():
        assert roc_auc_score(truth, novelty.score(torch.cat([inside, kind]))) > 0.85, name


@given(st.sampled_from([1e-30, 1e-3, 1.0, 1e6, 1e30]), st.integers(1, 5), st.integers(2, 30))
def test_any_scale_width_and_number_of_samples(scale, dim, n):
    g = torch.Generator().manual_seed(n)
    x = torch.randn(n, dim, generator=g) * scale
    novelty = Novelty.fit(x)
    found = novelty.score(torch.cat([x, 2 * x, torch.zeros(1, dim)]))
    assert found.shape == (2 * n + 1,) and found.dtype == torch.float32
    assert found.isfinite().all() and (found >= 0).all() and (found <= 1).all()
    assert torch.equal(found, novelty.score(torch.cat([x, 2 * x, torch.zeros(1, dim)])))
    assert novelty.score(x[:0]).shape == (0,)
    if dim > 1:  # on a line the direction is a sign: beyond is judged by the length alone
        assert (novelty.score(x.norm(dim=1).max() * 1e6 * torch.ones(1, dim)) == 1).all()


def test_duplicates_are_no_division_by_zero():
    x = torch.ones(30, DIM)
    novelty = Novelty.fit(x)
    assert torch.equal(novelty.score(x), torch.zeros(30))
    assert novelty.score(x + torch.randn(1, DIM)).eq(1).all()
    half = torch.cat([x, torch.randn(30, DIM)])
    assert Novelty.fit(half).score(half).isfinite().all()


def test_two_samples_are_enough_and_one_is_not():
    novelty = Novelty.fit(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    assert novelty.k == 1 < NEIGHBOURS
    assert novelty.score(torch.tensor([[-9e9, -9e9]])).tolist() == [1.0]
    with pytest.raises(ValueError, match="x has 1 rows, expected at least 2"):
        Novelty.fit(torch.ones(1, 3))
