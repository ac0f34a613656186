import pytest
import torch

from ssl_kd.guard.parts import (
    AdamWState,
    adamw_,
    clip_factors,
    ema_,
    keep_unless_,
    part_norms,
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
        adamw_(weights, gradient, state, healthy, learning_rate=0.01, weight_decay=decay)
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
    assert clip_factors(norms, None).tolist() == [1.0] * 4


def test_ema_and_keep_unless_leave_sick_rows():
    average, latest = torch.zeros(2, 3), torch.tensor([[1.0] * 3, [float("nan")] * 3])
    healthy = torch.tensor([True, False])
    ema_(average, latest, healthy, 0.75)
    assert average.tolist() == [[0.25] * 3, [0.0] * 3]
    counts = torch.tensor([1.0, 1.0])
    keep_unless_(healthy, counts, counts + 1)
    assert counts.tolist() == [2.0, 1.0]
