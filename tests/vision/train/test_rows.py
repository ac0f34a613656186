import pytest
import torch

from ssl_kd.vision.train.rows import RowParts, adamw_, clip_factors, only_healthy, part_norms


def test_one_update_of_parts_of_two_ages_is_the_formula():
    """In float64, by hand."""
    g = torch.Generator().manual_seed(0)
    weights, gradients, m, v = torch.randn(4, 2, 5, generator=g)
    v, ages, decay = v.square(), torch.tensor([0.0, 6.0]), torch.linspace(0, 0.4, 5)
    p, grad, m64, v64 = [tensor.double() for tensor in (weights, gradients, m, v)]
    adamw_(weights, gradients, m, v, ages, learning_rate=0.3, weight_decay=decay)

    m64, v64, age = 0.9 * m64 + 0.1 * grad, 0.999 * v64 + 0.001 * grad**2, ages.double()[:, None]
    update = m64 / (1 - 0.9**age) / ((v64 / (1 - 0.999**age)).sqrt() + 1e-8)
    expected = p * (1 - 0.3 * decay.double()) - 0.3 * update
    for found, wanted in ((weights, expected), (m, m64), (v, v64)):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
    assert ages.tolist() == [1, 7]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e20])
def test_one_number_per_part_shows_every_bad_gradient(bad):
    gradients = torch.ones(3, 5)
    gradients[1, 3] = bad
    norms = part_norms(gradients)
    assert torch.isfinite(norms).tolist() == [True, False, True]


def test_clipping_is_per_part():
    norms = torch.tensor([0.0, 0.5, 2.0, 8.0])
    assert clip_factors(norms, 1.0).tolist() == [1.0, 1.0, 0.5, 0.125]
    assert clip_factors(norms, 4.0).tolist() == [1.0, 1.0, 1.0, 0.5]
    assert clip_factors(norms, 1e-3).tolist() == pytest.approx([1.0, 2e-3, 5e-4, 1.25e-4])
    assert clip_factors(norms, None).tolist() == [1.0] * 4


class Elsewhere(torch.Tensor):
    """Real numbers that say they are on a GPU."""

    device = torch.device("cuda")


@pytest.mark.parametrize("kind", [torch.Tensor, Elsewhere])
def test_only_healthy_keeps_every_bit_of_the_others(kind):
    """Both ways: by rows where asking is free, by copies where it is not."""
    for healthy in ([True, False, True], [True] * 3, [False] * 3):
        matrix, vector = torch.tensor([[-0.0, 1.0]] * 3), torch.tensor([-0.0] * 3)
        with only_healthy(torch.tensor(healthy).as_subclass(kind), matrix, vector):
            matrix.fill_(float("nan"))
            vector.add_(5)
        for row, well in enumerate(healthy):
            assert torch.isnan(matrix[row]).all() if well else matrix[row].tolist() == [0.0, 1.0]
            assert vector[row] == 5 if well else bool(torch.signbit(vector[row]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_is_finite_only_if_every_tensor_of_it_is(bad):
    tensors = {"a": torch.ones(2, 3, 2), "b": torch.ones(2)}
    parts = RowParts(["x", "y"], tensors, lambda part, step: {})
    assert parts.finite() == [True, True]
    tensors["b"][1] = bad
    assert parts.finite() == [True, False]
    tensors["a"][0, 2, 1] = bad
    assert parts.finite() == [False, False]
