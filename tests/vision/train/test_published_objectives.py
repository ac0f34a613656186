"""Objectives of other papers equal their formulas, and a bad head stays alone."""

import pytest
import torch

from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.train.objectives import OBJECTIVES, make_objective
from tests.faults.inject import BATCH, DIM, HEADS, make_trainer
from tests.oracles import objectives as oracle

TEMPERATURES = {"student_temp": 0.1, "teacher_temp": 0.05}
ORACLES = {
    "swav": lambda student, teacher: oracle.swav(student, teacher),
    "scan": lambda student, teacher: oracle.scan(student),
    "iic": lambda student, teacher: oracle.iic(student),
}


def logits(seed, heads=3, clusters=5, batch=40, dtype=torch.float64):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(heads, 2, batch, clusters, generator=draw, dtype=dtype) / 4


def loss_of(name, student, teacher, weights=None):
    objective = make_objective(name, VisionSettings().__dict__ | TEMPERATURES)
    start = objective.initial_marginal(student.shape[-1])
    marginal = torch.full((len(student), student.shape[-1]), start, dtype=student.dtype)
    targets, _ = objective.targets(teacher, marginal)
    return objective.loss(student, targets, marginal, weights)


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-6)])
def test_loss_and_gradient_equal_the_official_formula(name, dtype, tolerance):
    student, teacher = logits(1).requires_grad_(), logits(2)
    expected = ORACLES[name](student, teacher)
    (gradient,) = torch.autograd.grad(expected.sum(), student)

    own = student.detach().to(dtype).requires_grad_()
    actual = loss_of(name, own, teacher.to(dtype))
    (of_own,) = torch.autograd.grad(actual.sum(), own)
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(of_own.double(), gradient, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ORACLES)
def test_equal_weights_change_nothing_and_a_weight_of_zero_leaves_a_sample_out(name):
    student, teacher = logits(1), logits(2)
    weights = torch.full((3, 40), 1 / 40, dtype=torch.float64)
    torch.testing.assert_close(
        loss_of(name, student, teacher, weights), loss_of(name, student, teacher)
    )
    if name == "iic":
        weights[:, 0] = 0
        weights /= weights.sum(1, keepdim=True)
        others = oracle.iic(student[:, :, 1:])
        torch.testing.assert_close(loss_of(name, student, teacher, weights), others)


@pytest.mark.parametrize("name", ORACLES)
def test_certain_assignments_have_a_finite_loss_and_gradient(name):
    student = 60_000 * torch.eye(5).repeat(3, 2, 8, 1)
    student.requires_grad_()
    loss = loss_of(name, student, student)
    (gradient,) = torch.autograd.grad(loss.sum(), student)
    assert loss.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("name", ORACLES)
def test_views_that_disagree_for_certain_have_a_finite_loss_and_gradient(name):
    student = 1_000 * torch.eye(5).repeat(3, 2, 8, 1)
    student[:, 1] = student[:, 1].roll(1, -1)
    student.requires_grad_()
    loss = loss_of(name, student, student)
    (gradient,) = torch.autograd.grad(loss.sum(), student)
    assert loss.isfinite().all()
    assert gradient.isfinite().all()


def test_swav_allows_any_teacher_temperature():
    settings = VisionSettings(loss="swav", teacher_temp=0.2, student_temp=0.1)
    assert settings.teacher_temp == 0.2


def test_the_targets_of_swav_are_balanced_and_sum_to_one():
    objective = make_objective("swav", VisionSettings().__dict__ | TEMPERATURES)
    teacher = logits(3, batch=400)
    teacher[..., 0] += 0.5  # most samples are in the first cluster
    targets, marginal = objective.targets(teacher, torch.full((3, 5), 0.2))
    torch.testing.assert_close(targets.sum(-1), torch.ones(3, 2, 400, dtype=torch.float64))
    softmax = (teacher / 0.05).softmax(-1)
    apart, before = ((q.mean(2) - 0.2).abs().amax((1, 2)) for q in (targets, softmax))
    assert (apart < before / 3).all()
    torch.testing.assert_close(marginal, targets.mean((1, 2)))


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "fixed"])
def test_a_head_with_a_nan_leaves_the_others_bit_identical(name):
    x = torch.randn(BATCH, DIM, generator=torch.Generator().manual_seed(0))
    views = torch.stack([x, x + 0.1])
    healthy, sick = (make_trainer(loss=name) for _ in range(2))
    sick.state.student[1].fill_(float("nan"))
    expected, result = healthy.step(views, 1e-2), sick.step(views, 1e-2)
    others = torch.arange(HEADS) != 1
    assert expected.loss.isfinite().all()
    assert torch.equal(result.loss[others], expected.loss[others])
    for state in ("student", "teacher", "marginal"):
        actual, wanted = (getattr(t.state, state)[others] for t in (sick, healthy))
        assert torch.equal(actual, wanted), state
