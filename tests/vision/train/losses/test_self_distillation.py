import pytest
import torch

from ssl_kd import losses
from tests.faults.matrix import row
from tests.oracles import objectives as oracle


def _case(seed=0):
    g = torch.Generator().manual_seed(seed)
    student = torch.randn(3, 2, 6, 4, generator=g, dtype=torch.float64) * 0.2
    teacher = torch.randn(3, 2, 6, 4, generator=g, dtype=torch.float64) * 0.2
    center = torch.randn(3, 4, generator=g, dtype=torch.float64) * 0.1
    return student, teacher, center


def test_value_and_gradient_equal_the_oracle():
    student, teacher, center = _case()
    a, b = student.clone().requires_grad_(), student.clone().requires_grad_()
    targets = losses.centered_targets(teacher, center, 0.04)
    ours = losses.sharpened_cross_entropy(a, targets)
    reference = oracle.sharpened(b, teacher, center)
    torch.testing.assert_close(ours, reference)
    ours.sum().backward(), reference.sum().backward()
    torch.testing.assert_close(a.grad, b.grad)


def test_centring_stops_a_cluster_that_every_sample_prefers():
    logits = torch.randn(1, 2, 20, 4, generator=torch.Generator().manual_seed(4)) * 0.05
    logits[..., 2] += 5.0
    center = logits.mean((1, 2))
    shares = losses.centered_targets(logits, center, 0.05).mean((1, 2))
    assert shares.max() < 0.5


@row(23)
@pytest.mark.parametrize("bad", [0.0, -1.0, 1e-9, 1e9, float("nan")])
def test_bad_temperatures_are_named(bad):
    student, teacher, center = _case()
    with pytest.raises(ValueError, match="teacher_temperature"):
        losses.centered_targets(teacher, center, bad)
    with pytest.raises(ValueError, match="student_temperature"):
        losses.sharpened_cross_entropy(student, teacher.softmax(-1), student_temperature=bad)


@pytest.mark.parametrize("heads", [1, 3], ids=["one head's targets", "each its own"])
@pytest.mark.parametrize("clusters", [4, 120])
def test_the_cross_entropy_is_that_of_autograd(clusters, heads):
    """Three views, weights, and rows that sum to something else than one."""
    g = torch.Generator().manual_seed(0)
    student = torch.randn(3, 3, 5, clusters, generator=g, dtype=torch.float64)
    targets = torch.rand(heads, 3, 5, clusters, generator=g, dtype=torch.float64)
    weights = torch.rand(3, 5, generator=g, dtype=torch.float64)

    def plain(student):
        log_probs = (student / 0.3).log_softmax(-1)
        pairs = [(v, w) for v in range(3) for w in range(3) if v != w]
        sums = [-(targets[:, w] * log_probs[:, v]).sum(-1) for v, w in pairs]
        return (weights * torch.stack(sums).mean(0)).sum(-1)

    a, b = student.clone().requires_grad_(), student.clone().requires_grad_()
    ours = losses.sharpened_cross_entropy(a, targets, weights, student_temperature=0.3)
    reference = plain(b)
    torch.testing.assert_close(ours, reference)
    scale = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    (ours * scale).sum().backward(), (reference * scale).sum().backward()
    torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_logit_that_is_not_finite_shows_in_the_loss_of_its_head_alone(bad):
    student, teacher, _ = _case()
    targets = torch.nn.functional.one_hot(teacher.argmax(-1), 4).double()
    clean = losses.sharpened_cross_entropy(student, targets)
    student[1, 0, 2, 3] = bad
    sick = losses.sharpened_cross_entropy(student, targets)
    assert sick.isfinite().tolist() == [True, False, True]
    assert torch.equal(sick[[0, 2]], clean[[0, 2]])
