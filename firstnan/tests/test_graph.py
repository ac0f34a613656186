"""The operation that made a loss bad is read from its graph, before the backward pass."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.diagnosis import KINDS, faulty_case, is_finite
from firstnan import Guard
from firstnan._graph import origin_of
from firstnan.diagnosis import diagnose
from firstnan.microscope import Microscope
from firstnan.watch import LossOrigin

LABELS = torch.tensor([0, 1])


class Same(torch.autograd.Function):
    """Returns its input; autograd sees an operation that it does not know."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0]


def found(loss_of, values=((0.0, 1.0, 2.0), (1.0, 2.0, 3.0)), dtype=torch.float32):
    z = torch.tensor(values, dtype=dtype, requires_grad=True)
    loss = loss_of(z)
    assert loss.ndim == 0 and not is_finite(loss)
    return origin_of([loss], lambda number: False)


def masked(mask):
    mask = torch.tensor(mask)
    return lambda z: ((z * mask).sum(-1) / mask.sum(-1)).mean()


NAMED = {
    "a log": (lambda z: z.log().mean(), "log", "an exact 0"),
    "a log1p": (lambda z: (-torch.log1p(z - 1)).sum(), "log1p", "an exact 0"),
    "a log of a softmax": (lambda z: -(z * 200).softmax(-1).log().mean(), "log", "an exact 0"),
    "labels of a log": (
        lambda z: F.nll_loss((200 * z).softmax(-1).log(), LABELS),
        "log",
        "an exact 0",
    ),
    "rows of a log": (lambda z: z.log().gather(1, LABELS[:, None]).mean(), "log", "an exact 0"),
    "a log times 0": (lambda z: (z.log() * torch.zeros(2, 3)).sum(), "log", "an exact 0"),
    "parts of a log": (
        lambda z: torch.cat([*torch.stack([*z.log().unbind()]).split(1)]).T.reshape(-1)[:1].sum(),
        "log",
        "an exact 0",
    ),
    "a negative log": (lambda z: (z - 1).log().mean(), "log", "not defined for -1"),
    "acos": (lambda z: (z[1] * 0.3334).acos().sum(), "acos", "not defined for 1.0002"),
    "a root": (lambda z: (z[0, 0] - 1).sqrt(), "sqrt", "the root of a negative number"),
    "an exponential": (lambda z: (z * 100).exp().mean(), "exp", "a number above 88.7"),
    "a power": (lambda z: (z**-1).mean(), "pow", "a division by 0: "),
    "a square": (lambda z: (z * 1e30).square().mean(), "pow", "values up to 3e+30"),
    "a reciprocal": (lambda z: (1 / z.norm(dim=0)[:1] * 0).sum() / z[0, 0], "div", "0 / 0"),
    "an inverse root": (lambda z: torch.rsqrt(z.var(dim=0) - 0.5).mean(), "rsqrt", "by 0"),
    "a norm": (
        lambda z: ((z - z[:1]) / (z - z[:1]).norm(dim=-1, keepdim=True)).mean(),
        "div",
        "a vector's length is exactly 0",
    ),
    "a norm before a product": (
        lambda z: F.cross_entropy((n := F.normalize(z - z[:1], eps=0)) @ n.T, LABELS),
        "div",
        "a vector's length is exactly 0",
    ),
    "an empty mask": (masked([0.0, 0.0, 0.0]), "div", "the mask or count is empty"),
    "one empty mask": (
        masked([[1.0, 0, 1], [0.0, 0, 0]]),
        "div",
        "the mask or count is empty, at row 1",
    ),
    "an empty choice": (lambda z: z[z > 9].mean(), "mean", "a mean over nothing"),
    "an empty count": (lambda z: z.sum() / (z > 9).sum(), "div", "the mask or count is empty"),
    "a divisor that is given": (
        lambda z: (z / torch.tensor([0.0, 1.0, 2.0])).sum(),
        "div",
        "a division by 0: the denominator is exactly 0",
    ),
    "a sum of exponentials": (
        lambda z: ((e := (-1e3 * (z.square() + z.exp())).exp()) / e.sum(-1, keepdim=True)).sum(),
        "div",
        "exponentials underflowed to 0",
    ),
    "the exponential of -inf": (
        lambda z: ((e := (z - torch.inf).exp()) / e.sum(-1, keepdim=True)).sum(),
        "div",
        "0 / 0: the sum is exactly 0",
    ),
    "a norm times 0": (
        lambda z: (z / (z.norm(dim=-1, keepdim=True) * 0)).sum(),
        "div",
        "the denominator is exactly 0",
    ),
    "the std of one": (lambda z: z[:1].std(0).mean(), "std", "the std or var of one value"),
    "ignored labels": (
        lambda z: F.cross_entropy(z, torch.full((2,), -100)),
        "nll_loss_forward",
        "every label is ignored",
    ),
    "CTC": (
        lambda z: (
            F.ctc_loss(z[:, None].log_softmax(-1), LABELS[None] + 1, (2,), (2,))
            + F.ctc_loss(z[:, None].log_softmax(-1), torch.tensor([[1, 1]]), (2,), (2,))
        ),
        "_ctc_loss",
        "a CTC input is too short",
    ),
    "the earlier of two": (lambda z: z.acos().mean() + z.log().mean(), "acos", "not defined for 3"),
    "a log of a root that keeps it": (lambda z: z.log().abs().sqrt().sum(), "log", "an exact 0"),
}


@pytest.mark.parametrize("kind", NAMED)
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_the_operation_is_named_with_its_cause(kind):
    loss_of, op, words = NAMED[kind]
    origin = found(loss_of)
    assert origin is not None and origin.fault.op == f"aten.{op}"
    assert words in diagnose(origin.fault).words


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_half_and_double_precision_are_read(dtype):
    origin = found(lambda z: z.log().float().mean(), dtype=dtype)
    assert origin.is_certain and str(dtype).endswith(origin.fault.inputs[0].dtype)


UNNAMED = {
    "a NaN in the data": lambda z: F.mse_loss(z, torch.full((2, 3), torch.nan)),
    "a log that where drops": lambda z: (
        torch.where(z > 0, z.log(), z).sum() + torch.tensor(torch.nan)
    ),
    "a log that no label chooses": lambda z: (
        F.nll_loss(z.log(), LABELS + 1) + torch.tensor(torch.nan)
    ),
    "an infinity that exp drops": lambda z: z.log().exp().sum() + torch.tensor(torch.nan),
    "an infinity that a minimum may drop": lambda z: torch.min(
        (z * 100).exp(), z * torch.inf
    ).sum(),
    "a function of the script": lambda z: Same.apply(z.log()).sum(),
    "a float16 reciprocal of a small number": lambda z: (1 / (z[0, 1:] * 3e-6).half()).sum(),
    "a tensor that was overwritten": lambda z: [(y := z * 1), y.log().sum(), y.add_(1)][1],
}


@pytest.mark.parametrize("kind", UNNAMED)
def test_operations_missing_from_the_graph_are_not_named(kind):
    assert found(UNNAMED[kind]) is None


@pytest.mark.parametrize(
    ("loss_of", "is_certain"),
    [
        (lambda z: z.log().mean(), True),
        (lambda z: (z - torch.full((2, 3), -torch.inf)).exp().mean(), False),
        (lambda z: (z / torch.zeros(3)).sum(), False),
        (lambda z: (z * 1e38 * z).square().mean(), False),  # an input is infinite
    ],
)
def test_a_note_mentions_values_that_may_have_been_bad_before(loss_of, is_certain):
    origin = found(loss_of)
    assert origin.is_certain == is_certain == ("was bad before" not in origin.note)


def test_random_faults_are_named_as_by_a_microscope():
    r, n_named = random.Random(2), 0
    for i in range(4 * len(KINDS)):
        case, _, _ = faulty_case(KINDS[i % len(KINDS)], r)
        x = case.x.detach().requires_grad_(not case.weights)

        def loss_of(case=case, x=x):
            for _, function in case.stages:
                x = function(x)
            return x.float().sum() * case.scale

        torch.manual_seed(0)
        origin = None if is_finite(loss := loss_of()) else origin_of([loss], lambda number: False)
        if origin is not None:
            torch.manual_seed(0)
            with Microscope({"input": case.x, **case.weights}) as scope:
                again = loss_of()
            fault = scope.fault(again)
            assert (origin.fault.op, fault.poisoned) == (fault.op, None)
            n_named += 1
    assert n_named > len(KINDS)


def test_a_checkpoint_is_not_run_again():
    runs = []

    def loss_of(z):
        runs.append(len(runs))
        return z.log().mean()

    origin = found(lambda z: checkpoint(loss_of, z, use_reentrant=False))
    assert origin is None and len(runs) == 1


def test_a_loss_on_a_device_is_not_waited_for():
    """The device `meta` has no value to wait for: looking at one raises an error."""
    loss, reader = torch.ones((), device="meta", requires_grad=True).log(), LossOrigin()
    reader.read([loss], [])
    with pytest.raises(RuntimeError, match="meta"):
        reader.read([loss], [], waits=True)


def test_the_gradients_are_those_without_reading():
    gradients = []
    for reads in (False, True):
        z = torch.tensor([0.0, 2.0], requires_grad=True)
        loss = torch.where(z > 0, z.log(), z.exp() - 1).cumsum(0).sum() + 1 / z[0]
        if reads:
            assert origin_of([loss], lambda number: False).fault.op == "aten.reciprocal"
        loss.backward()
        gradients.append(z.grad)
    assert torch.equal(*(x.nan_to_num(7) for x in gradients))


@pytest.mark.parametrize("parts", [False, True])
def test_a_guard_names_the_operation_behind_a_bad_loss(parts):
    model = nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1))
    named = {"parts": {"a": model[0]}} if parts else {}
    guard = Guard(model, torch.optim.SGD(model.parameters()), locate=True, **named)
    for scale in (1.0, 0.0, 1.0):
        loss = (model(torch.ones(3, 2)) * scale).log().mean()
        guard.backward({"a": loss} if parts else loss)
        guard.step()
    origin = guard.events.events[0]
    assert origin.stage == "origin" and origin.step == 2
    assert "aten.log, forward, outside of the model" in origin.reason
    assert "an exact 0" in origin.reason and len(guard.events.events) == 2
