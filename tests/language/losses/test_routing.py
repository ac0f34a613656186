import math

import pytest
import torch

from ssl_kd.language.losses.routing import gate_entropy, gate_kl, load_balance


def test_load_balance_is_the_squared_variation_of_both():
    mass, counts = torch.rand(3, 8, dtype=torch.float64), torch.randint(1, 9, (3, 8)).double()
    ours = load_balance(mass, counts)
    expected = [(x.std(-1, correction=1) / x.mean(-1)) ** 2 for x in (mass, counts)]
    torch.testing.assert_close(ours, sum(expected))
    # Only proportions count, so a longer batch does not weigh more.
    torch.testing.assert_close(load_balance(1000 * mass, counts), ours)


def test_load_balance_has_its_gradient_in_the_mass_alone():
    mass = torch.rand(2, 4, dtype=torch.float64, requires_grad=True)
    counts = torch.rand(2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda m: load_balance(m, counts.detach()), mass)
    load_balance(mass, counts).sum().backward()
    assert counts.grad is None
    level = torch.full((4,), 5.0)
    assert load_balance(level, level) == 0


def test_no_token_at_all_is_balanced():
    mass = torch.zeros(4, requires_grad=True)
    loss = load_balance(mass, torch.zeros(4))
    loss.backward()
    assert loss == 0 and torch.equal(mass.grad, torch.zeros(4))


def test_half_precision_is_summed_in_float32():
    mass = torch.tensor([6e4, 3e4, 1e4, 1e4], dtype=torch.float16)  # squares overflow in fp16
    loss = load_balance(mass, mass)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, load_balance(mass.float(), mass.float()))


@pytest.mark.parametrize("shapes", [((4,), (5,)), ((1,), (1,)), ((2, 4), (4,))])
def test_other_shapes_are_refused(shapes):
    with pytest.raises(ValueError, match="expert"):
        load_balance(*(torch.ones(shape) for shape in shapes))


def test_entropy_of_one_expert_and_of_all():
    one = torch.tensor([[0.0, -math.inf, -math.inf]], requires_grad=True)
    entropy = gate_entropy(one)
    entropy.sum().backward()
    assert entropy == 0 and torch.isfinite(one.grad).all()
    torch.testing.assert_close(gate_entropy(torch.zeros(2, 8)), torch.full((2,), math.log(8)))


def test_gates_are_finite_at_the_ends_of_half_precision():
    logits = torch.tensor([[6e4, -6e4, 0.0, 1.0]], dtype=torch.float16, requires_grad=True)
    other = logits.detach().flip(1)
    for value in (gate_entropy(logits), gate_kl(logits, logits), gate_kl(other, logits)):
        assert value.dtype == torch.float32 and torch.isfinite(value).all()


def test_a_nan_gate_stays_a_nan():
    logits = torch.tensor([[math.nan, 0.0], [1.0, 0.0]])
    assert gate_entropy(logits).isnan().tolist() == [True, False]
    assert gate_kl(torch.zeros(2, 2), logits).isnan().tolist() == [True, False]


def test_the_drift_of_a_gate_that_nearly_is_the_original_is_never_below_0():
    original = torch.randn(500, 8, generator=torch.Generator().manual_seed(0)) * 5
    near = (original * (1 + 1e-6)).requires_grad_()
    drift = gate_kl(original, near)
    drift.sum().backward()
    assert (drift >= 0).all() and drift.max() < 1e-5 and near.grad.any()
