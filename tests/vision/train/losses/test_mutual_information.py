import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssl_kd import losses
from tests.faults.matrix import row
from tests.oracles import objectives as oracle


def _case(heads=3, batch=7, clusters=5, scale=0.3, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    student = torch.randn(heads, batch, clusters, generator=g, dtype=torch.float64) * scale
    teacher = torch.randn(heads, batch, clusters, generator=g, dtype=torch.float64) * scale
    marginal = torch.softmax(torch.randn(heads, clusters, generator=g, dtype=torch.float64), -1)
    return student.to(dtype), teacher.to(dtype), marginal.to(dtype)


@pytest.mark.parametrize("beta", [0.3, 0.6, 1.0])
def test_value_and_gradient_equal_the_oracle(beta):
    student, teacher, marginal = _case()
    a, b = student.clone().requires_grad_(), student.clone().requires_grad_()
    ours = losses.beta_mi(a, teacher, marginal, beta=beta)
    reference = oracle.beta_mi(b, teacher, marginal, beta=beta)
    torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)
    weight = torch.linspace(0.5, 2.0, ours.numel(), dtype=torch.float64).view_as(ours)
    (ours * weight).sum().backward()
    (reference * weight).sum().backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12)


@row(18)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [1.0, 100.0, 1e4, 6e4])
def test_low_precision_logits_stay_near_float64(dtype, scale):
    student, teacher, marginal = _case(clusters=100, scale=1.0)
    student, teacher = (student * scale).clamp(-6e4, 6e4), (teacher * scale).clamp(-6e4, 6e4)
    low, high = student.to(dtype), student.to(dtype).double()
    low.requires_grad_(), high.requires_grad_()
    teacher = teacher.to(dtype)
    clip = {"clip_min": -1e30}
    ours = losses.beta_mi(low, teacher, marginal.float(), **clip)
    reference = losses.beta_mi(high, teacher.double(), marginal, **clip)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), reference, rtol=2e-3, atol=2e-3)
    ours.sum().backward()
    reference.sum().backward()
    assert low.grad.dtype == dtype
    torch.testing.assert_close(low.grad.double(), high.grad, rtol=8e-3, atol=2e-3)


@row(20, 23, 24)
@settings(max_examples=60, deadline=None)
@given(
    scale=st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1e4, 6e4]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    ts=st.sampled_from([1e-4, 0.05, 0.1, 1.0, 1e4]),
    beta=st.sampled_from([1e-3, 0.6, 1.0]),
    dead=st.sampled_from([0, 1, 5]),
    seed=st.integers(0, 10),
)
def test_finite_and_alive_at_every_extreme(scale, dtype, ts, beta, dead, seed):
    student, teacher, marginal = _case(scale=1.0, seed=seed)
    student = (student * scale).clamp(-65504, 65504).to(dtype).requires_grad_()
    marginal[:, :dead] = 0.0
    loss = losses.beta_mi(
        student,
        teacher.mul(scale).clamp(-65504, 65504).to(dtype),
        marginal,
        beta=beta,
        student_temperature=ts,
        teacher_temperature=ts,
    )
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(student.grad).all()
    assert (loss <= 100.0).all()


@row(19)
def test_disjoint_student_and_teacher_still_learn():
    """Underflow of every product: the reference form has NaN gradients, a clamped one none."""
    student = torch.tensor([[[60.0, 0.0, 0.0]]], requires_grad=True)
    teacher = torch.tensor([[[0.0, 60.0, 0.0]]])
    loss = losses.beta_mi(student, teacher, torch.full((1, 3), 1 / 3))
    assert loss.item() == 100.0  # held at clip_min
    loss.sum().backward()
    assert student.grad[0, 0, 1] < 0 < student.grad[0, 0, 0]  # towards the teacher's cluster


def test_holding_changes_the_value_and_not_the_gradient():
    student, teacher, marginal = _case(scale=3.0)
    held, free = student.clone().requires_grad_(), student.clone().requires_grad_()
    a = losses.beta_mi(held, teacher, marginal, clip_min=5.0)
    b = losses.beta_mi(free, teacher, marginal, clip_min=-1e9)
    assert (a == -5.0).all() and (b > -5.0).all()
    a.sum().backward(), b.sum().backward()
    assert torch.equal(held.grad, free.grad) and held.grad.abs().sum() > 0


@pytest.mark.parametrize("clusters", [10, 10_000])
def test_marginal_floor_moves_healthy_values_by_less_than_1e_4(clusters):
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 4, clusters, generator=g, dtype=torch.float64)
    marginal = torch.full((1, clusters), 1 / clusters, dtype=torch.float64)
    exact = oracle.beta_mi(logits, logits, marginal)
    ours = losses.beta_mi(logits.float(), logits.float(), marginal.float())
    torch.testing.assert_close(ours.double(), exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize("how", ["none", "own", "mean"])
def test_temi_equals_the_oracle(how):
    g = torch.Generator().manual_seed(1)
    student = torch.randn(3, 2, 6, 4, generator=g, dtype=torch.float64)
    teacher = torch.randn(3, 2, 6, 4, generator=g, dtype=torch.float64) * 0.2
    marginal = torch.softmax(torch.randn(3, 4, generator=g, dtype=torch.float64), -1)
    a = (student * 0.2).requires_grad_()
    b = (student * 0.2).requires_grad_()
    log_q = losses.log_probabilities(teacher, 0.1)
    weights = losses.instance_weights(losses.agreement(log_q), how)
    ours = losses.temi(a, log_q, marginal, weights)
    reference = oracle.temi(b, teacher, marginal, how)
    torch.testing.assert_close(ours, reference)
    ours.sum().backward(), reference.sum().backward()
    torch.testing.assert_close(a.grad, b.grad)


def test_more_views_are_the_mean_over_ordered_pairs():
    g = torch.Generator().manual_seed(2)
    student = torch.randn(2, 3, 5, 4, generator=g, dtype=torch.float64) * 0.2
    log_q = losses.log_probabilities(student + 0.1, 0.1)
    marginal = torch.full((2, 4), 0.25, dtype=torch.float64)
    pairs = [(v, w) for v in range(3) for w in range(3) if v != w]
    by_hand = torch.stack(
        [losses.temi(student[:, [v, w]], log_q[:, [v, w]], marginal) for v, w in pairs]
    ).mean(0)
    torch.testing.assert_close(losses.temi(student, log_q, marginal), by_hand)


@pytest.mark.parametrize("clusters", [4, 120])
def test_how_logits_lie_in_memory_makes_no_difference(clusters):
    """Samples last, as `TEMIHead.stacked` gives few clusters, or clusters last."""
    g = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 2, 3, 5, clusters, generator=g).unbind()
    turned = [x.movedim(-1, 1).contiguous().movedim(1, -1) for x in (student, teacher)]
    marginal, found = torch.rand(2, clusters, generator=g), []
    for mine, others in ((student, teacher), turned):
        leaf = mine.detach().requires_grad_()
        loss = losses.temi(leaf, losses.log_probabilities(others, 0.1), marginal)
        loss.sum().backward()
        found.append((loss.detach(), leaf.grad))
    torch.testing.assert_close(*found)


def test_a_nan_stays_in_its_sample_and_no_gradient_reaches_teacher_or_marginal():
    student, teacher, marginal = _case()
    student[1, 2, 0] = torch.nan
    student.requires_grad_(), teacher.requires_grad_(), marginal.requires_grad_()
    loss = losses.beta_mi(student, teacher, marginal)
    assert loss.isnan().sum() == 1 and loss[1, 2].isnan()
    loss.sum().backward()
    assert student.grad is not None and teacher.grad is None and marginal.grad is None


BAD_TEMPERATURES = (0.0, -1.0, 1e-9, 1e9, math.nan, math.inf, None, "2", 1j)


@row(23, 24)
@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *[("beta", v) for v in (0.0, -0.1, 1.1, math.nan)],
        *[("student_temperature", v) for v in BAD_TEMPERATURES],
        *[("teacher_temperature", v) for v in BAD_TEMPERATURES],
        *[("clip_min", v) for v in (math.inf, -math.inf, math.nan, -1e39)],
    ],
)
def test_bad_arguments_are_named(argument, value):
    student, teacher, marginal = _case()
    with pytest.raises(ValueError, match=f"{argument} is .*; expected a"):
        losses.beta_mi(student, teacher, marginal, **{argument: value})
    if argument != "teacher_temperature":
        log_q = losses.log_probabilities(teacher, 0.1)
        with pytest.raises(ValueError, match=argument):
            losses.temi(student[:, None], log_q[:, None], marginal, **{argument: value})


@pytest.mark.parametrize(
    "shapes", [((3, 7), (3, 6), (3,)), ((3, 7), (3, 7), (2,)), ((7,), (7,), (3,))]
)
def test_shapes_that_do_not_fit_are_named(shapes):
    with pytest.raises(ValueError, match="do not fit"):
        losses.beta_mi(*(torch.zeros(*shape, 5) for shape in shapes))


@pytest.mark.parametrize(
    ("how", "sick", "expected"),
    [
        ("mean", [math.nan, 0.9], [[0.4, 0.6]]),
        ("own", [math.nan, math.nan], [[0.25, 0.75], [0.5, 0.5], [0.4, 0.6]]),
    ],
)
def test_weights_leave_a_faulty_head_out(how, sick, expected):
    first = [0.2, 0.4] if how == "mean" else [0.25, 0.75]
    last = [0.6, 0.8] if how == "mean" else [0.4, 0.6]
    weights = losses.instance_weights(torch.tensor([first, sick, last]), how)
    torch.testing.assert_close(weights, torch.tensor(expected))


@row(22)
@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.sampled_from([0.0, 1e-7, 1.0, 3.0, 6e4, -1.0, float("nan"), float("inf")]),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)
def test_weights_are_proportions_of_the_remaining_mass(values, dtype):
    w = torch.tensor(values, dtype=torch.float64).to(dtype)
    out = losses.safe_normalize_weights(w).double()
    torch.testing.assert_close(out.sum(), torch.tensor(1.0, dtype=torch.float64), atol=1e-5, rtol=0)
    good = torch.isfinite(w) & (w > 0)
    if good.any():
        expected = torch.where(good, w.double(), 0)
        torch.testing.assert_close(out, expected / expected.sum(), atol=1e-6, rtol=1e-5)
    else:
        torch.testing.assert_close(out, torch.full_like(out, 1 / len(values)))


def test_weights_at_both_ends_of_float32_keep_their_proportions_row_by_row():
    w = torch.tensor([[3e38, 3e38], [1e-30, 3e-30]])  # the first sum overflows
    torch.testing.assert_close(
        losses.safe_normalize_weights(w), torch.tensor([[0.5, 0.5], [0.25, 0.75]])
    )
