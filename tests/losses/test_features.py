import math

import pytest
import torch

from ssl_kd.losses.features import state_distance
from tests.oracles.features import HUGE, state_oracle

INF, NAN = math.inf, math.nan


def states(*shape, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale


def value_and_gradient(function, student, teacher):
    student = student.detach().clone().requires_grad_()
    value = function(student, teacher)
    (gradient,) = torch.autograd.grad(value.sum(), student)
    return value.detach(), gradient


def test_states_of_float64_equal_the_formula_and_its_gradient():
    student, teacher = states(5, 6), states(5, 6, seed=1)
    found = value_and_gradient(state_distance, student, teacher)
    torch.testing.assert_close(found, value_and_gradient(state_oracle, student, teacher))


def test_it_is_zero_for_the_same_and_know_no_length():
    x = states(8, 6)
    assert state_distance(7 * x, x).abs().max() < 1e-14
    assert torch.allclose(state_distance(-x, x), torch.full((8,), 2.0, dtype=torch.float64))


# Each: the student's and the teacher's states, [8, 12].
MATRIX = {
    "ordinary": (1.0, 1.0),
    "thousands": (3000.0, 3000.0),
    "thousands beside ones": (3000.0, 1.0),
    "the largest": (6e4, 6e4),
    "the smallest": (1e-7, 1e-7),
    "tiny beside large": (1e-4, 2e4),
}


@pytest.mark.parametrize("infinite", [False, True])
@pytest.mark.parametrize("name", MATRIX)
def test_the_fp16_matrix(name, infinite):
    """Finite, and what float64 makes of the same rounded numbers."""
    scales = MATRIX[name]
    student, teacher = (
        (states(8, 12, seed=seed) * scale).clamp(-6e4, 6e4).half()
        for seed, scale in enumerate(scales)
    )
    if infinite:
        student[1, 3], student[4, 2], teacher[1, 3], teacher[5, 0] = INF, -INF, INF, -INF
    with torch.autocast("cpu", torch.float16):
        value, gradient = value_and_gradient(state_distance, student, teacher)
    assert value.dtype == torch.float32 and gradient.dtype == torch.float16
    assert value.isfinite().all()
    student, teacher = (x.double().nan_to_num(0, INF, -INF) for x in (student, teacher))
    expected, slope = value_and_gradient(state_oracle, student, teacher)
    torch.testing.assert_close(value.double(), expected, rtol=2e-4, atol=2e-6)
    within = slope.abs() < HUGE  # a cast of the gradient itself may overflow
    if not infinite:  # through a saturated entry a slope passes, which the formula has not
        error = (gradient.double() - slope)[within].abs().max()
        assert error <= 2e-3 * slope[within].abs().max() + 1e-6
    elif name == "ordinary":  # an overflow can be unlearned
        assert gradient[4].any()


def test_a_zero_state_has_a_distance_and_a_finite_slope():
    zero = torch.zeros(1, 4, dtype=torch.float16)
    value, gradient = value_and_gradient(state_distance, zero, states(1, 4).half())
    assert value.item() == pytest.approx(0.5) and gradient.isfinite().all()


def test_a_nan_stays_in_its_row_and_the_teacher_gets_no_gradient():
    student, teacher = states(8, 6), states(8, 6, seed=1).requires_grad_()
    student[4, 0] = NAN
    distance = state_distance(student.requires_grad_(), teacher)
    assert distance.isnan().nonzero().flatten().tolist() == [4]
    distance[:4].sum().backward()
    assert teacher.grad is None and student.grad[:4].all()


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="project the student's to the teacher's width"):
        state_distance(states(3, 4), states(3, 6))
