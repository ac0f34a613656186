"""The microscope names the operation, the line and the cause, and ignores intended infinities."""

import pytest
import torch
from torch.nn import functional as F

from benchmarks.diagnosis import KINDS, measure
from firstnan.diagnosis import Cause, diagnose
from firstnan.microscope import Microscope, TensorFacts
from tests.faults.matrix import row as fault


def look(step, **named):
    with Microscope(named) as scope:
        result = step()
    fault = scope.fault(result)
    return fault, None if fault is None else diagnose(fault)


def gradient(loss, x):
    return torch.autograd.grad(loss, x)[0]


def test_names_the_operation_the_line_and_the_ranges():
    p = torch.tensor([[0.5, 0.5], [0.0, 1.0]])
    fault, found = look(lambda: p.log().sum(), input=p)
    assert fault.op == "aten.log" and not fault.backward
    assert fault.place.file == __file__ and "p.log().sum()" in fault.place.text
    (facts,) = fault.inputs
    assert (facts.low, facts.high, facts.zeros, facts.shape) == (0.0, 1.0, 1, (2, 2))
    assert fault.outputs[0].first_bad == (1, 0)
    assert found.cause == Cause.LOG_OF_ZERO


def test_a_backward_fault_is_placed_at_the_line_of_the_forward_pass():
    x = torch.zeros(3, 4, requires_grad=True)

    def step():
        length = x.pow(2).sum(-1).sqrt()  # finite, with an infinite slope
        return gradient(length.sum(), x)

    fault, found = look(step)
    assert (fault.op, fault.backward, fault.node) == ("aten.div", True, "SqrtBackward0")
    assert fault.place.text.startswith("length = x.pow(2)")
    assert found.cause == Cause.ZERO_NORM and "safe_normalize" in found.remedy


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_poisoned_weight_is_named_although_all_share_one_storage(value):
    flat = torch.randn(20)
    weights = {"weight a": flat[:8].view(2, 4), "weight b": flat[8:].view(3, 4)}
    flat[9] = value
    b = weights["weight b"].detach().requires_grad_()
    fault, found = look(lambda: (torch.randn(5, 4) @ b.T).sum(), **weights)
    assert (fault.op, fault.poisoned) == ("aten.mm", "weight b")
    assert found.cause == Cause.POISONED_WEIGHT
    assert found.words.startswith("weight b came in not finite (1 of 12 values")
    assert found.words.endswith("the first at [0, 1])")


def test_a_poisoned_input_row_is_named():
    x = torch.randn(5, 4)
    x[3] = float("nan")
    fault, found = look(lambda: (x @ torch.randn(4, 2)).sum(), input=x)
    assert fault.named["input"].first_bad == (3, 0)
    assert found.cause == Cause.POISONED_INPUT


@pytest.mark.parametrize("sparse", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_sparse_tensor_may_be_named_and_is_followed(sparse):
    a, x = torch.eye(4), torch.randn(4, 2)
    assert look(lambda: (sparse(a) @ x).sum(), weight=sparse(a), input=x) == (None, None)
    a[2, 2] = float("nan")
    weight = sparse(a)
    fault, found = look(lambda: (weight @ x).sum(), weight=weight, input=x)
    assert fault.poisoned == "weight" and found.words.endswith("the first at [2, 2])")
    fault, found = look(lambda: weight, weight=weight)
    assert fault.poisoned == "weight" and found.cause == Cause.POISONED_WEIGHT


def test_intended_infinities_are_not_faults():
    scores, mask = torch.randn(4, 4, requires_grad=True), torch.ones(4, 4).tril().bool()

    def step():
        shut = scores.masked_fill(~mask, float("-inf"))
        log = torch.where(mask, torch.where(mask, 1.0, 0.0).log(), 0.0)
        norm = (scores * 0).norm(dim=-1)  # its backward pass masks an infinity by itself
        return gradient((torch.softmax(shut, -1) + log).square().sum() + norm.sum(), scores)

    assert look(step) == (None, None)


def test_the_origin_that_reached_the_result_is_the_fault_not_an_earlier_one():
    x = torch.tensor([0.0, 1.0])

    def step():
        torch.where(x > 0, x.log(), 0.0)  # dropped by the where
        return (x / x).sum()

    fault, _ = look(step)
    assert fault.op == "aten.div"


@pytest.mark.parametrize(
    ("step", "cause"),
    [
        (lambda: torch.full((3,), float("inf")).sum(), Cause.UNKNOWN),
        (lambda: torch.ones(3) * float("inf"), Cause.UNKNOWN),
        (lambda: torch.full((3,), float("-inf")).mean(), Cause.MASKED),
        (lambda: torch.ones(3).masked_fill(torch.ones(3).bool(), float("inf")), Cause.MASKED),
    ],
)
def test_a_written_infinity_is_a_mask_only_in_the_shape_of_one(step, cause):
    fault, found = look(step)
    assert fault.masked and found.cause == cause
    if cause == Cause.UNKNOWN:
        assert found.words == f"{fault.op} was given an infinity, which reached the result"


@pytest.mark.parametrize(
    "step",
    [
        lambda: F.cross_entropy(torch.randn(2, 3), torch.full((2,), -100)),
        lambda: F.cross_entropy(torch.randn(2, 3, 4, 4), torch.full((2, 4, 4), -100)),
        lambda: torch.ones(3).mul(torch.zeros(3)).sum() / torch.zeros(3).sum(),
    ],
)
@fault(142)
def test_a_mean_over_nothing_is_named_as_such(step):
    fault, found = look(step)
    assert found.cause == Cause.MASKED and "a mean over nothing" in found.words
    assert not any(facts.nans for facts in fault.inputs)


def test_in_place_and_foreach_operations_are_followed():
    x = torch.tensor([0.0, 2.0])

    def step():
        y = x.clone()
        torch._foreach_reciprocal_([y])  # pyright: ignore[reportPrivateImportUsage]
        y.mul_(2)
        return y

    fault, _ = look(step)
    assert fault.op == "aten._foreach_reciprocal_" and fault.inputs[0].zeros == 1


def test_memory_that_is_only_written_is_not_checked():
    x, out = torch.ones(3), torch.full((3,), float("nan"))
    assert look(lambda: torch.add(x, 1, out=out)) == (None, None)
    assert look(lambda: torch.full((3,), float("nan")).zero_()) == (None, None)


@pytest.mark.parametrize(
    ("step", "cause"),
    [
        (lambda: (torch.tensor([20.0]).half() * 100).exp(), Cause.FP16_OVERFLOW),
        (lambda: (torch.tensor([0.9]).half() / 0.04).exp(), Cause.TEMPERATURE),
        (lambda: torch.tensor([1e5]).half(), Cause.FP16_OVERFLOW),
        (lambda: torch.tensor([12.0]).half().exp(), Cause.FP16_OVERFLOW),
        (lambda: torch.tensor([1e5]).to(torch.float8_e5m2).float(), Cause.FP8_OVERFLOW),
        (lambda: torch.tensor([1e25]).square(), Cause.LEARNING_RATE),
        (lambda: F.normalize(torch.zeros(1, 3).half()), Cause.ZERO_NORM),
        (lambda: torch.tensor([2.0]).acos(), Cause.DOMAIN),
    ],
)
def test_causes(step, cause):
    _, found = look(step)
    assert found.cause == cause and not found.advice


def test_a_temperature_is_not_blamed_for_a_zero_it_divided():
    _, found = look(lambda: (torch.zeros(1).half() / 0.04 + 12).exp())
    assert found.cause == Cause.FP16_OVERFLOW and found.words.endswith("holds it up to 11.1")


def test_diverged_weights_and_a_single_corrupt_weight_are_distinguished():
    x = torch.randn(8, 4)
    away = torch.randn(4, 4) * 1e15
    _, found = look(lambda: (x @ away).pow(2).pow(2).sum(), **{"weight": away})
    assert found.cause == Cause.LEARNING_RATE
    hit = torch.randn(4, 4)
    hit[1, 1] = 1e30
    _, found = look(lambda: (x @ hit).pow(2).sum(), **{"weight": hit})
    assert found.cause == Cause.POISONED_WEIGHT and "1 of 16" in found.words


def test_a_corrupt_weight_among_zeros_is_an_outlier():
    bias = torch.zeros(16)
    bias[3] = 1e30
    _, found = look(lambda: bias.square().sum(), **{"weight": bias})
    assert found.cause == Cause.POISONED_WEIGHT and "1 of 16" in found.words
    assert TensorFacts.of(torch.tensor([65536.0])).outliers == 0
    assert TensorFacts.of(torch.zeros(4)).outliers == 0


def test_healthy_steps_are_silent_and_anomaly_mode_is_restored():
    assert look(lambda: torch.randn(3).sum()) == (None, None)
    assert not torch.is_anomaly_enabled()


def test_facts_of_empty_integer_and_wholly_bad_tensors():
    assert TensorFacts.of(torch.empty(0)).low is None
    assert TensorFacts.of(torch.tensor([0, 2])).zeros == 1
    facts = TensorFacts.of(torch.full((2,), float("nan")))
    assert (facts.nans, facts.high, str(facts)) == (2, None, "float32 [2], 2 of 2 NaN")


def test_injected_faults_of_every_kind_are_found():
    score = measure(KINDS, injections=28)
    assert score.right >= 27, score.misses
    assert len({truth for truth, _ in score.table}) == 7


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda x: (x - 0.2).sqrt(), "aten.sqrt is not defined for -0.2"),
        (lambda x: (x - 0.2).log(), "aten.log is not defined for -0.2"),
        (lambda x: (x - 0.2) ** 0.5, "aten.pow is not defined for -0.2"),
        (lambda x: (x + 1.5).acos(), "aten.acos is not defined for 2.5"),
        (lambda x: (1.0001 * x).acos(), "aten.acos is not defined for 1.0001"),
        (lambda x: (2 * x - 0.5).asin(), "aten.asin is not defined for 1.5"),
    ],
)
def test_a_function_outside_its_domain_is_named_with_the_value(step, words):
    _, found = look(lambda: step(torch.tensor([0.0, 1.0])).sum())
    assert (found.cause, found.words) == (Cause.DOMAIN, words)


def test_the_gradient_of_a_squared_zero_is_not_a_division():
    _, found = look(lambda: (1e30 * torch.tensor([0.0, 1.0])).square().sum())
    assert (found.cause, found.words.partition(" went")[0]) == (
        Cause.LEARNING_RATE,
        "values up to 1e+30",
    )


ROWS = torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, 1.0]])
HALF = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])


@pytest.mark.parametrize(
    ("step", "cause", "words"),
    [
        (lambda: ROWS / ROWS.norm(dim=1, keepdim=True), Cause.ZERO_NORM, "length is exactly 0"),
        (lambda: ROWS / ROWS.abs().sum(1, keepdim=True), Cause.ZERO_NORM, "length is exactly 0"),
        (lambda: ROWS * ROWS.square().mean(1, True).rsqrt(), Cause.ZERO_NORM, "length is exactly"),
        (lambda: (ROWS * HALF).sum(1) / HALF.sum(1), Cause.MASKED, "count is empty, at row 1"),
        (lambda: (ROWS * HALF).sum(1) / (HALF > 0).sum(1), Cause.MASKED, "empty, at row 1"),
        (lambda: ROWS.mean() * 0 / (ROWS > 9).sum(), Cause.MASKED, "a mean over nothing"),
        (lambda: ROWS / (ROWS - 200).exp().sum(1, True), Cause.UNDERFLOW, "exponentials underfl"),
        (lambda: ROWS / (ROWS - 200).sigmoid().sum(1, True), Cause.UNDERFLOW, "sigmoids underfl"),
        (lambda: ROWS / (ROWS - 5).relu().sum(1, True), Cause.ZERO_SUM, "0: the sum is exactly 0"),
        (lambda: (ROWS - 1) / ROWS.std(1, keepdim=True), Cause.CONSTANT, "equal values"),
        (
            lambda: ROWS / (ROWS.amax(1, True) - ROWS.amin(1, True)),
            Cause.CONSTANT,
            "range of equal values is exactly 0, at row 1",
        ),
        (
            lambda: ROWS / (ROWS.abs().amax(1, True) / 448).log2().ceil().exp2(),
            Cause.ZERO_SCALE,
            "all values of a block are, at row 1",
        ),
        (lambda: 1 / (ROWS[:, 0] - ROWS[:, 1]), Cause.ZERO_DIVISOR, "difference of two equal"),
        (lambda: ROWS / ROWS, Cause.ZERO_DIVISOR, "the divisor is given, and exactly 0"),
        (lambda: ROWS / 0, Cause.ZERO_DIVISOR, "0 / 0: the divisor is the number 0"),
        (lambda: ROWS / ROWS.sin(), Cause.ZERO_DIVISOR, "0, at row 1; it comes from aten.sin"),
    ],
)
def test_the_cause_of_a_division_by_zero_is_its_divisor(step, cause, words):
    _, found = look(step, input=ROWS)
    assert (found.cause, words in found.words) == (cause, True), found


def test_a_sum_of_weights_is_not_a_norm():
    w = torch.zeros(3, requires_grad=True)
    _, found = look(lambda: (w / w.sum()).sum(), weight=w)
    assert found.cause == Cause.ZERO_SUM and "softmax(w)" in found.remedy


@pytest.mark.parametrize("root", [torch.sqrt, lambda x: x**0.5])
def test_a_root_of_zero_is_a_norm_only_of_squares(root):
    x = torch.zeros(2, 3, requires_grad=True)
    _, found = look(lambda: gradient(root(x.abs()).sum(), x))
    assert found.cause == Cause.ROOT_OF_ZERO
    _, found = look(lambda: gradient(root(x.square().sum(1)).sum(), x))
    assert found.cause == Cause.ZERO_NORM


def test_infinities_that_meet_are_named():
    masked = torch.tensor([0.0, 1.0]).log()
    _, found = look(lambda: masked - masked.masked_fill(masked < 0, -torch.inf), input=ROWS)
    assert found.cause == Cause.INFINITIES
    _, found = look(lambda: torch.zeros(1, 2) @ masked[:, None], input=ROWS)
    assert found.cause == Cause.ZERO_TIMES_INFINITY


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (range(12), "all 12 rows"),
        ([4], "row 4"),
        ([4, 5], "rows 4, 5"),
        ([0, 1, 2, 3, 4, 9], "rows 0 to 4, 9 (6 of 12)"),
        ([], ""),
    ],
)
def test_rows_are_named_exactly(bad, words):
    x = torch.zeros(12, 2)
    x[list(bad)] = torch.nan
    assert TensorFacts.of(x).rows == words
