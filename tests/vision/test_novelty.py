"""Outlier scores: uniform on unseen samples, 1 beyond all of them, defined for any input."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from ssl_kd.vision.model import ClusterModel
from ssl_kd.vision.model_parts import Projection
from ssl_kd.vision.novelty import NEIGHBORS, Novelty, is_dead

DIM = 8


def two_densities(n, seed):
    """Two clusters, one five times as wide as the other."""
    g = torch.Generator().manual_seed(seed)
    wide = (torch.rand(n, 1, generator=g) < 0.5).float()
    return (1 + 4 * wide) * 0.2 * torch.randn(n, DIM, generator=g) + 4 * wide - 2


def plain(novelty, row, x, origin, known=None):
    """`far` and `D` of one row by their definitions in float64, over all pairs."""

    def described(rows):
        rows = rows.double() / novelty.length.double()
        heading = rows - origin.double() / novelty.length.double()
        length = rows.norm(dim=1, keepdim=True) + 1e-3
        heading = heading / (heading.norm(dim=1, keepdim=True) + 1e-3)
        return torch.cat([heading, rows / length, 0.3 * length.log()], 1)

    reference, z = described(x), described(row[None])[0]
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
    return torch.stack([distance / torch.stack(around).mean().sqrt(), distance])


@pytest.mark.parametrize("offset", [0.0, 3.0])
def test_it_is_the_formula_for_new_samples_and_for_those_left_out(offset):
    x, origin = two_densities(40, 0), torch.full((DIM,), offset)
    novelty = Novelty.fit(x, origin)
    own = torch.stack([plain(novelty, x[i], x, origin, i) for i in range(40)])
    torch.testing.assert_close(novelty.own.double(), own[:, 0].sort().values, rtol=1e-5, atol=1e-6)
    new = two_densities(10, 1)
    found = torch.stack([plain(novelty, row, x, origin) for row in new])

    def greater_share(values):
        return (own < values.unsqueeze(1)).double().mean(1).amax(1)

    expected = (greater_share(own) < greater_share(found).unsqueeze(1)).double().mean(1)
    torch.testing.assert_close(novelty.score(new).double(), expected, rtol=0, atol=1e-6)


def test_held_out_samples_have_scores_spread_evenly_as_training_samples_have():
    novelty = Novelty.fit(two_densities(1500, 0))
    for x in (two_densities(3000, 1), two_densities(1500, 0)):
        score = novelty.score(x).sort().values
        even = (torch.arange(len(score)) + 0.5) / len(score)
        assert (score - even).abs().max() < 0.05  # Kolmogorov-Smirnov, 1 % at 0.03 + 0.03
    assert (score - torch.arange(1500.0) / 1500).abs().max() < 0.01  # ties are few


def test_samples_beyond_the_training_range_have_score_1():
    centres = torch.nn.functional.normalize(torch.randn(20, 40), dim=1)
    x = centres[torch.arange(800) % 20] + 0.002 * torch.randn(800, 40)
    x[:80] += 0.05 * torch.randn(80, 40)  # beside dense clusters: very far in their units
    noise = torch.randn(50, 40) / 40**0.5
    assert (Novelty.fit(x).score(noise) == 1).all()


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3e30, 1e-30])
def test_a_dead_input_is_never_typical_whatever_was_trained_on(value):
    x = torch.randn(60, 8).relu()
    x[:20] = value  # a third of the training samples
    projection = Projection.fit(x, None)
    model = ClusterModel(8, 8, 3, 2, hidden_dim=6, bottleneck_dim=4, n_reference=60)
    model.projection.load_state_dict(projection.state_dict())
    model.novelty = Novelty.fit(projection(x), projection(torch.zeros(1, 8))[0])
    scores = model.outlier_scores(torch.cat([torch.full((2, 8), value), x[20:]]))
    assert scores[:2].tolist() == [1, 1] and scores[2:].mean() < 0.9


def test_a_constant_row_of_few_dimensions_is_a_live_input():
    x = torch.tensor([[0.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    assert is_dead(x).tolist() == [True, False, False]
    assert is_dead(x[:, :1]).tolist() == [False, False, False]


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


@settings(deadline=None)
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
        furthest = x.double().norm(dim=1).max().float()  # squares of 1e-30 underflow in float32
        assert (novelty.score(furthest * 1e6 * torch.ones(1, dim)) == 1).all()


def test_duplicates_do_not_divide_by_zero():
    x = torch.ones(30, DIM)
    novelty = Novelty.fit(x)
    assert torch.equal(novelty.score(x), torch.zeros(30))
    assert novelty.score(x + torch.randn(1, DIM)).eq(1).all()
    half = torch.cat([x, torch.randn(30, DIM)])
    assert Novelty.fit(half).score(half).isfinite().all()


def test_two_samples_are_enough_and_one_is_not():
    novelty = Novelty.fit(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    assert novelty.k == 1 < NEIGHBORS
    assert novelty.score(torch.tensor([[-9e9, -9e9]])).tolist() == [1.0]
    with pytest.raises(ValueError, match="x has 1 rows; expected at least 2"):
        Novelty.fit(torch.ones(1, 3))
