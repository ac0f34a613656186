import copy
import math
import pickle
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.func import functional_call

from firstnan._buffers import Buffers
from firstnan.loop import Guard
from tests.bits import same


def holder(**tensors):
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return cast(Any, module)


def buffers(module):
    return Buffers(module.named_modules(), nn.Parameter(torch.ones(1)))


def healed(watched):
    """Put back what is spoiled; the names of it."""
    spoiled = watched.spoiled()
    watched.put_back(spoiled)
    return watched.names(spoiled)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_buffer_of_any_dtype_is_seen_by_its_name_and_put_back(dtype, value):
    model: Any = nn.Sequential(
        holder(a=torch.ones(3, dtype=dtype), n=torch.tensor(4)), holder(b=None)
    )
    watched = buffers(model)
    assert healed(watched) == "" and not watched.spoiled()
    model[0].a[1], model[0].n = value, torch.tensor(5)
    assert watched.spoiled() and healed(watched) == "0.a"
    assert model[0].a.isfinite().all() and model[0].n == 4  # a module's buffers go back together
    model[1].b = torch.full((2,), value)
    assert healed(watched) == "1.b" and model[1].b is None


def test_initially_nonfinite_buffers_are_accepted():
    mask, low = torch.full((2, 2), -math.inf).triu(1), torch.tensor(math.inf)
    module = holder(mask=mask, low=low, sentinel=torch.tensor(math.nan))
    watched = buffers(module)
    assert healed(watched) == "" and watched.nan == "sentinel"
    module.low.fill_(3.0)
    healed(watched)
    watched.keep(ask=False)
    module.low.fill_(math.inf)  # by now it should be finite
    assert healed(watched) == "low" and module.low == 3
    module.mask[0, 0] = math.nan
    assert healed(watched) == "mask" and module.mask[0, 0] == 0


def test_buffers_without_a_norm_are_left_alone():
    sparse = torch.eye(2).to_sparse()
    tensors = {"f8": torch.ones(2).to(torch.float8_e4m3fn), "flags": torch.ones(2) > 0}
    module = holder(sparse=sparse, empty=torch.empty(0), **tensors)
    watched = buffers(module)
    assert healed(watched) == "" and not watched.spoiled()


def test_a_guard_names_buffers_that_start_as_nan():
    model = nn.BatchNorm1d(3)
    model.running_var[1] = math.nan
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    (event,) = guard.events.events
    assert event.stage == "buffer" and event.action == "left as it is"
    assert "running_var" in event.reason and "running_mean" not in event.reason


class Queue(nn.Sequential):
    """What passes through is counted, in a buffer that the user writes to between steps, too."""

    queue: torch.Tensor

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.BatchNorm1d(3), nn.Linear(3, 1))
        self.register_buffer("queue", torch.zeros(4))

    def forward(self, input):
        self.queue[0] += len(input)
        return super().forward(input)


def by_loop(run=lambda model: model, between=lambda model, i: None, bad=2, model=None):
    """Four guarded steps, `bad` with a NaN; something happens between them."""
    model = model or Queue()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    states = []
    for i in range(4):
        states.append([b.clone() for b in model.buffers()])
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(i))
        guard.backward(run(model)(x * (math.nan if i == bad else 1)).sum())
        if guard.step() != (set() if i == bad else {"model"}):
            raise AssertionError(i)
        if i == bad:
            assert same(states[-1], [*model.buffers()])
        between(model, i)
    return model


def enqueue(model, i):
    model.queue[i % 3 + 1] = i + 1


@pytest.mark.parametrize(
    "between",
    [
        enqueue,
        lambda model, i: setattr(model, "queue", torch.full((4,), float(i))),
        lambda model, i: model[0].reset_running_stats(),
        lambda model, i: model.load_state_dict(Queue().state_dict()),
    ],
)
def test_a_bad_batch_keeps_buffers_written_between_steps(between):
    by_loop(between=between)

    def evaluated(model, i):  # another forward pass between the steps, which begins none
        with torch.no_grad():
            nn.Sequential.forward(model.eval(), torch.ones(4, 3))
        between(model.train(), i)

    by_loop(between=evaluated)


def test_a_nan_written_between_steps_is_not_restored():
    def spoil(model, i):
        if i == 0:
            model[0].running_var.fill_(math.nan)

    assert all(b.isfinite().all() for b in by_loop(between=spoil, bad=-1).buffers())


def test_compiled_and_borrowed_modules_go_back_as_before():
    compiled = by_loop(lambda m: torch.compile(m, backend="eager", fullgraph=True))
    assert same([*compiled.buffers()], [*by_loop().buffers()])

    def lent(model):
        buffers = {name: b + 5 for name, b in model.named_buffers()}
        return lambda x: functional_call(model, buffers, (x,))

    model = by_loop(lent)
    assert same([*model.buffers()], [*Queue().buffers()])


def test_a_copy_of_the_model_carries_nothing_of_the_guard():
    model = Queue()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), locate=True)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for other in copies:
        other.queue[1] = 5
        other(torch.ones(4, 3))
        assert other.queue.tolist() == [4, 5, 0, 0]
    guard.backward(model(torch.full((4, 3), math.nan)).sum())
    assert guard.step() == set() and model.queue.sum() == 0
