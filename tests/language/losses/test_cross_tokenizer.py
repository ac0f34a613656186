import math

import pytest
import torch

from ssl_kd.language.losses.cross_tokenizer import (
    Positions,
    VocabularyMap,
    chunk_log_likelihood,
    chunk_matching,
    class_log_probabilities,
    likelihood_matching,
    uld,
)
from ssl_kd.language.losses.divergences import DIVERGENCES
from ssl_kd.language.losses.token_distillation import token_kd


def logits(*shape, seed=0, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale


def case():
    """Five groups: of 1, 2, 1, 1 and 2 student tokens and 1, 1, 3, 1 and 2 teacher tokens."""
    student_groups = torch.tensor([0, 1, 1, 2, 3, 4, 4])
    teacher_groups = torch.tensor([0, 1, 2, 2, 2, 3, 4, 4])
    student = Positions(
        torch.arange(7),
        torch.tensor([3, 0, 1, 2, 5, 4, 1]),
        student_groups,
        torch.tensor([0, 1, 3, 4, 5]),
    )
    teacher = Positions(
        torch.arange(8),
        torch.tensor([2, 7, 1, 1, 0, 4, 6, 3]),
        teacher_groups,
        torch.tensor([0, 1, 2, 5, 6]),
    )
    matched = torch.tensor([True, False, False, True, False])
    student_map = VocabularyMap(torch.tensor([0, 1, 1, 2, 3, 3]), 3)
    teacher_map = VocabularyMap(torch.tensor([3, 0, 2, 1, 1, 0, 2, 2]), 3)
    return (logits(7, 6), logits(8, 8, seed=1), student, teacher, matched, student_map, teacher_map)


def classes_oracle(row, vocabulary):
    mass = [0.0] * (vocabulary.size + 1)
    for z, k in zip(row, vocabulary.classes.tolist(), strict=True):
        mass[k] += math.exp(z)
    return [m / sum(mass[:-1]) for m in mass[:-1]]


def likelihood_oracle(z, side, group):
    total = 0.0
    for row, (target, g) in enumerate(
        zip(side.targets.tolist(), side.groups.tolist(), strict=True)
    ):
        if g == group:
            row_logits = z[row].tolist()
            total += row_logits[target] - math.log(sum(math.exp(x) for x in row_logits))
    return total


def binary_kl(u, v, temperature):
    a, b = math.exp(u / temperature), math.exp(v / temperature)
    return temperature * (a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b)))


def test_uld_knows_no_names_and_stays_in_its_range():
    student = logits(6, 11, scale=20.0)
    permuted = student[:, torch.randperm(11)]
    assert (uld(student, permuted) < 1e-12).all()
    far = uld(torch.tensor([[1e3, 0.0]]).double(), torch.zeros(1, 1000).double())
    assert 1.99 < far <= 2.0


def test_classes_sum_the_mass_of_their_tokens():
    z, vocabulary = logits(3, 8), case()[-1]
    expected = torch.tensor([classes_oracle(row, vocabulary) for row in z.tolist()]).double()
    torch.testing.assert_close(
        class_log_probabilities(z, vocabulary).exp(), expected, rtol=1e-6, atol=0
    )
    padded = torch.cat([z, torch.full((3, 4), 50.0, dtype=torch.float64)], 1)
    assert torch.equal(
        class_log_probabilities(padded, vocabulary), class_log_probabilities(z, vocabulary)
    )


def test_a_class_far_below_the_best_keeps_value_and_gradient():
    z = torch.tensor([[0.0, -200.0, -201.0]], requires_grad=True)
    vocabulary = VocabularyMap(torch.tensor([0, 1, 1]), 2)
    low = class_log_probabilities(z, vocabulary)[0, 1]
    assert math.isclose(low.item(), -200 + math.log1p(math.exp(-1)), rel_tol=1e-6)
    low.backward()
    torch.testing.assert_close(z.grad, torch.tensor([[-1.0, 0.7310586, 0.2689414]]))


def test_the_likelihood_of_a_chunk_is_the_product_of_its_tokens():
    student_logits, _, student, *_ = case()
    expected = torch.tensor([likelihood_oracle(student_logits, student, g) for g in range(5)])
    ours = chunk_log_likelihood(student_logits, student.targets, student.groups, 5)
    torch.testing.assert_close(ours, expected.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("temperature", [1.0, 10.0, 100.0])
def test_likelihood_matching_is_the_binary_divergence(temperature):
    student, teacher = -logits(6).abs() - 0.01, -logits(6, seed=1).abs() - 0.01
    pairs = zip(teacher.tolist(), student.tolist(), strict=True)
    expected = torch.tensor([binary_kl(u, v, temperature) for u, v in pairs]).double()
    ours = likelihood_matching(student, teacher, temperature=temperature)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-9)


def test_likelihood_matching_pulls_towards_the_teacher_from_both_sides():
    teacher = torch.tensor([-5.0, -5.0, -5.0, -0.0, -300.0, 0.0, -2.0])
    student = torch.tensor([-9.0, -5.0, -1.0, -3.0, -1.0, 0.0, 0.0], requires_grad=True)
    values = likelihood_matching(student, teacher)
    values.sum().backward()
    assert values.isfinite().all() and (values >= 0).all()
    assert values[1] == values[5] == 0 and student.grad.isfinite().all()
    assert student.grad[0] < 0 and student.grad[3] < 0  # a step downhill raises the likelihood
    assert student.grad[1] == student.grad[5] == 0
    assert (student.grad[[2, 4, 6]] > 0).all()


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_with_one_tokenizer_it_is_token_kd(divergence):
    student, teacher = logits(9, 7).requires_grad_(), logits(9, 7, seed=1)
    other = student.detach().clone().requires_grad_()
    side = Positions(torch.arange(9), torch.arange(9) % 7, torch.arange(9), torch.arange(9))
    same = VocabularyMap(torch.arange(7), 7)
    ours = chunk_matching(
        student, teacher, side, side, torch.ones(9, dtype=torch.bool), same, same,
        temperature=1.5, divergence=divergence,
    )  # fmt: skip
    plain = token_kd(other[None], teacher[None], temperature=1.5, divergence=divergence)
    torch.testing.assert_close(ours.mean(), plain)
    ours.mean().backward(), plain.backward()
    torch.testing.assert_close(student.grad, other.grad)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, 6e4, -6e4])
def test_logits_that_overflowed_can_be_unlearned(value):
    student_logits, teacher_logits, *rest = case()
    student_logits = student_logits.float()
    student_logits[0, 3] = student_logits[1, 0] = value  # the tokens that came
    student_logits.requires_grad_()
    loss = chunk_matching(student_logits, teacher_logits, *rest)
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(student_logits.grad).all()
    if value < 0:
        assert student_logits.grad[0, 3] < 0 and student_logits.grad[1, 0] < 0


def test_nearly_equal_likelihoods_are_never_below_0():
    likelihood = -torch.rand(500, generator=torch.Generator().manual_seed(0)) * 50
    near = (likelihood * (1 + 1e-6)).requires_grad_()
    values = likelihood_matching(near, likelihood)
    values.sum().backward()
    assert (values >= 0).all() and near.grad.isfinite().all() and near.grad.any()


def test_uld_equals_the_sorted_difference():
    student, teacher = logits(4, 5), logits(4, 9, seed=1)
    expected = []
    for row in range(4):
        q, p = (
            sorted(torch.softmax(z[row] / 1.7, -1).tolist(), reverse=True) + [0.0] * (9 - width)
            for z, width in ((student, 5), (teacher, 9))
        )
        expected.append(sum(abs(x - y) for x, y in zip(q, p, strict=True)))
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(uld(student, teacher, temperature=1.7), expected)
    torch.testing.assert_close(uld(teacher, student, temperature=1.7), expected)


def test_chunk_matching_is_divergence_where_matched_and_likelihood_elsewhere():
    arguments = case()
    student_logits, teacher_logits, student, teacher, matched, student_map, teacher_map = arguments
    expected = []
    for g in range(5):
        if matched[g]:
            p = classes_oracle((teacher_logits[teacher.first[g]]).tolist(), teacher_map)
            q = classes_oracle((student_logits[student.first[g]]).tolist(), student_map)
            p, q = ((torch.tensor(x).double().log() / 2).softmax(-1) for x in (p, q))
            expected.append(4 * (p * (p / q).log()).sum().item())
        else:
            u = likelihood_oracle(teacher_logits, teacher, g)
            expected.append(binary_kl(u, likelihood_oracle(student_logits, student, g), 100.0))
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(chunk_matching(*arguments), expected, rtol=1e-6, atol=0)


LIKELY = -logits(4, seed=2).abs() - 0.1


@pytest.mark.parametrize(
    ("loss", "student"),
    [
        *[
            (lambda z, d=divergence: chunk_matching(z, *case()[1:], divergence=d), logits(7, 6))
            for divergence in DIVERGENCES
        ],
        (lambda z: uld(z, logits(4, 6, seed=1)), logits(4, 5)),
        (lambda z: likelihood_matching(z, LIKELY, temperature=3.0), -logits(4).abs() - 0.1),
    ],
)
def test_gradcheck(loss, student):
    assert torch.autograd.gradcheck(loss, student.requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("loss", [chunk_matching, lambda z, t, *_: uld(z[:7], t[:7])])
def test_half_precision_logits_are_computed_in_float32(dtype, loss):
    student_logits, teacher_logits, *rest = case()
    student = student_logits.to(dtype).requires_grad_()
    teacher = teacher_logits.to(dtype).requires_grad_()
    exact = student.detach().double().requires_grad_()
    value, expected = loss(student, teacher, *rest), loss(exact, teacher.double(), *rest)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), expected, rtol=1e-4, atol=1e-6)
    value.mean().backward(), expected.mean().backward()
    assert teacher.grad is None
    torch.testing.assert_close(student.grad, exact.grad, rtol=2e-2, atol=2e-3, check_dtype=False)


def test_a_nan_stays_in_its_group():
    student_logits, teacher_logits, *rest = case()
    healthy = chunk_matching(student_logits, teacher_logits, *rest)
    for side, sick_row, group in ((0, 2, 1), (0, 4, 3), (1, 6, 4)):
        broken = [student_logits.clone(), teacher_logits.clone()]
        broken[side][sick_row, 2] = torch.nan
        values = chunk_matching(*broken, *rest)
        assert values.isnan().nonzero().squeeze(1).tolist() == [group]
        others = torch.arange(5) != group
        assert torch.equal(values[others], healthy[others])
    student_logits[2, 0] = torch.nan
    assert uld(student_logits, student_logits).isnan().nonzero().tolist() == [[2]]


def test_an_empty_comparison_stays_in_the_graph():
    none, empty = torch.zeros(0, dtype=torch.int64), torch.zeros(0, 5, requires_grad=True)
    side = Positions(none, none, none, none)
    same = VocabularyMap(torch.arange(5), 5)
    nothing = chunk_matching(empty, empty, side, side, none.bool(), same, same)
    for loss in (nothing, uld(empty, empty)):
        assert loss.shape == (0,) and loss.requires_grad
        loss.sum().backward()


Z, T, S_POSITIONS, T_POSITIONS, MATCHED, S_MAP, T_MAP = case()
FEWER = T_POSITIONS._replace(first=T_POSITIONS.first[:4])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: uld(Z, Z, temperature=0), "temperature is 0"),
        (lambda: uld(Z, T), "7 aligned positions of the student and 8"),
        (lambda: likelihood_matching(Z[:, 0], Z[:, 0], temperature=-1), "temperature is -1"),
        (lambda: chunk_matching(*case(), divergence="kl"), "divergence is 'kl'"),
        (
            lambda: chunk_matching(Z, T, S_POSITIONS, FEWER, MATCHED, S_MAP, T_MAP),
            "5 groups of the student and 4",
        ),
        (
            lambda: chunk_matching(*case()[:-1], VocabularyMap(T_MAP.classes, 9)),
            "student_vocabulary has 3 classes and teacher_vocabulary 9",
        ),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
