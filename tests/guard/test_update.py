import pytest
import torch

from ssl_kd.guard.update import (
    AdamWState,
    adamw_,
    clip_factors,
    only_healthy,
    part_norms,
    rescale_,
)


def _run(steps, healthy_at, seed=0):
    g = torch.Generator().manual_seed(seed)
    weights = torch.randn(3, 8, generator=g)
    state = AdamWState.zeros_like(weights)
    decay = torch.tensor([0.1] * 4 + [0.0] * 4)
    for step in range(steps):
        gradient = torch.randn(3, 8, generator=g)
        healthy = torch.tensor(healthy_at(step))
        gradient[~healthy] = float("nan")
        with only_healthy(healthy, weights, state.exp_avg, state.exp_avg_sq, state.steps):
            adamw_(weights, gradient, state, learning_rate=0.01, weight_decay=decay)
    return weights, state


def test_equals_torch_adamw():
    g = torch.Generator().manual_seed(0)
    weights, state = _run(5, lambda step: [True] * 3)
    p = torch.nn.Parameter(torch.randn(3, 8, generator=g))
    decayed, free = torch.nn.Parameter(p[:, :4].detach()), torch.nn.Parameter(p[:, 4:].detach())
    optimizer = torch.optim.AdamW(
        [{"params": [decayed], "weight_decay": 0.1}, {"params": [free], "weight_decay": 0.0}],
        lr=0.01,
    )
    for _ in range(5):
        gradient = torch.randn(3, 8, generator=g)
        decayed.grad, free.grad = gradient[:, :4].clone(), gradient[:, 4:].clone()
        optimizer.step()
    expected = torch.cat([decayed, free], 1).detach()
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-7)
    assert state.steps.tolist() == [5, 5, 5]


def test_one_update_is_the_formula_with_any_betas_and_epsilon():
    """In float64, by hand; the parts are of two ages, and epsilon is large enough to count."""
    g = torch.Generator().manual_seed(0)
    weights, gradients, m, v = torch.randn(4, 2, 5, generator=g)
    v, ages, decay = v.square(), torch.tensor([[0.0], [6.0]]), torch.linspace(0, 0.4, 5)
    old = [tensor.double() for tensor in (weights, gradients, m, v)]
    state = AdamWState(m, v, ages.flatten().clone())
    options = {"learning_rate": 0.3, "betas": (0.7, 0.95), "eps": 0.5}
    adamw_(weights, gradients, state, weight_decay=decay, **options)

    p, grad, m, v = old
    m, v, age = 0.7 * m + 0.3 * grad, 0.95 * v + 0.05 * grad**2, ages.double() + 1
    update = m / (1 - 0.7**age) / ((v / (1 - 0.95**age)).sqrt() + 0.5)
    expected = p * (1 - 0.3 * decay.double()) - 0.3 * update
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state.exp_avg.double(), m, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state.exp_avg_sq.double(), v, rtol=1e-5, atol=1e-6)
    assert state.steps.tolist() == [1, 7]


def test_a_skipped_part_keeps_every_bit_and_the_others_do_not_notice():
    clean, clean_state = _run(6, lambda step: [True] * 3)
    weights, state = _run(6, lambda step: [True, step not in (2, 4), True])
    for row in (0, 2):
        assert torch.equal(weights[row], clean[row])
        assert torch.equal(state.exp_avg_sq[row], clean_state.exp_avg_sq[row])
    assert state.steps.tolist() == [6, 4, 6]
    before, _ = _run(2, lambda step: [True] * 3)
    after, _ = _run(3, lambda step: [True, step < 2, True])
    assert torch.equal(before[1], after[1]) and not torch.equal(before[0], after[0])


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


def test_a_loss_scale_halves_on_overflow_and_doubles_after_many_updates():
    scale = torch.tensor([8.0, 8.0, 8.0, 8.0, 1.0, 65536.0, 8.0])
    healthy = torch.tensor([True, True, False, False, False, True, True])
    overflow = torch.tensor([False, False, True, False, True, False, False])
    steps = torch.tensor([9, 8, 9, 9, 9, 9, 10])
    rescale_(scale, healthy, overflow, steps, grow_every=10)
    # grown, too early, halved, sick for another reason, floor, ceiling, too late
    assert scale.tolist() == [16.0, 8.0, 4.0, 8.0, 1.0, 65536.0, 8.0]


@pytest.mark.parametrize("device", ["cpu", "elsewhere"])
def test_only_healthy_keeps_every_bit_of_the_others(device, monkeypatch):
    """Both ways: by rows where asking is free, by copies where it is not."""
    if device == "elsewhere":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for healthy in ([True, False, True], [True] * 3, [False] * 3):
        matrix, vector = torch.tensor([[-0.0, 1.0]] * 3), torch.tensor([-0.0] * 3)
        with only_healthy(torch.tensor(healthy), matrix, vector):
            matrix.fill_(float("nan"))
            vector.add_(5)
        for row, well in enumerate(healthy):
            assert torch.isnan(matrix[row]).all() if well else matrix[row].tolist() == [0.0, 1.0]
            assert vector[row] == 5 if well else bool(torch.signbit(vector[row]))


def test_the_update_compiles_without_a_break():
    weights, state = torch.randn(3, 8), AdamWState.zeros_like(torch.zeros(3, 8))
    before = weights.clone()

    def update(gradients, healthy):
        with only_healthy(healthy, weights, state.exp_avg, state.exp_avg_sq, state.steps):
            adamw_(weights, gradients, state, learning_rate=0.1, weight_decay=torch.zeros(8))

    compiled = torch.compile(update, backend="eager", fullgraph=True)
    compiled(torch.full((3, 8), float("nan")), torch.tensor([False] * 3))
    assert torch.equal(weights, before) and state.steps.tolist() == [0, 0, 0]
    compiled(torch.ones(3, 8), torch.tensor([True, False, True]))
    assert torch.equal(weights[1], before[1])
    torch.testing.assert_close(weights[0], before[0] - 0.1)
