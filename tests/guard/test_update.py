import pytest
import torch

from ssl_kd.guard.update import (
    adamw_,
    clip_factors,
    only_healthy,
    part_norms,
    rescale_,
)


def _fresh(g):
    """Weights `[3, 8]`, both moments and the step counts."""
    return torch.randn(3, 8, generator=g), torch.zeros(3, 8), torch.zeros(3, 8), torch.zeros(3)


def _run(steps, healthy_at, seed=0):
    g = torch.Generator().manual_seed(seed)
    state = _fresh(g)
    decay = torch.tensor([0.1] * 4 + [0.0] * 4)
    for step in range(steps):
        gradient = torch.randn(3, 8, generator=g)
        healthy = torch.tensor(healthy_at(step))
        gradient[~healthy] = float("nan")
        with only_healthy(healthy, *state):
            weights, *moments = state
            adamw_(weights, gradient, *moments, learning_rate=0.01, weight_decay=decay)
    return state


def test_equals_torch_adamw():
    g = torch.Generator().manual_seed(0)
    weights, *_, steps = _run(5, lambda step: [True] * 3)
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
    assert steps.tolist() == [5, 5, 5]


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


def test_a_skipped_part_keeps_every_bit_and_the_others_do_not_notice():
    clean = _run(6, lambda step: [True] * 3)
    mine = _run(6, lambda step: [True, step not in (2, 4), True])
    for row in (0, 2):
        assert all(torch.equal(a[row], b[row]) for a, b in zip(mine, clean, strict=True))
    assert mine[-1].tolist() == [6, 4, 6]
    before, after = _run(2, lambda step: [True] * 3)[0], _run(3, lambda s: [True, s < 2, True])[0]
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
    steps = torch.tensor([499, 498, 499, 499, 499, 499, 500])
    rescale_(scale, healthy, overflow, steps)
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
    weights, *moments = _fresh(None)
    before = weights.clone()

    def update(gradients, healthy):
        with only_healthy(healthy, weights, *moments):
            adamw_(weights, gradients, *moments, learning_rate=0.1, weight_decay=torch.zeros(8))

    compiled = torch.compile(update, backend="eager", fullgraph=True)
    compiled(torch.full((3, 8), float("nan")), torch.tensor([False] * 3))
    assert torch.equal(weights, before) and moments[-1].tolist() == [0, 0, 0]
    compiled(torch.ones(3, 8), torch.tensor([True, False, True]))
    assert torch.equal(weights[1], before[1])
    torch.testing.assert_close(weights[0], before[0] - 0.1)
