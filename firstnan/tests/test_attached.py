"""`Guard(...).attach()`: one line guards a loop that is otherwise unchanged."""

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from firstnan import EventLog, Guard, Thresholds, TooFewHealthyParts
from tests.bits import same
from tests.processes import python

STEPS = 6


class StackingMuon(torch.optim.Optimizer):
    """Needs every gradient, and moves by momentum alone, as Muons in the wild do."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.02})

    @torch.no_grad()
    def step(self, epoch=None):
        for group in self.param_groups:
            stacked = torch.stack([p.grad for p in group["params"]])
            for p, g in zip(group["params"], stacked, strict=True):
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.sub_(momentum.mul_(0.9).add_(g), alpha=group["lr"])


class Container(torch.optim.Optimizer):
    """torchtitan's: an optimizer that steps others."""

    def __init__(self, optimizers):
        self.optimizers = optimizers
        super().__init__([p for o in optimizers for g in o.param_groups for p in g["params"]], {})

    def __iter__(self):
        return iter(self.optimizers)

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()


class Net(nn.Module):
    def __init__(self, checkpointed=False):
        super().__init__()
        self.a, self.b, self.checkpointed = nn.Linear(6, 6), nn.Linear(6, 6), checkpointed

    def forward(self, x):
        inner = lambda x: self.b(self.a(x).log1p().tanh())  # noqa: E731
        return checkpoint(inner, x, use_reentrant=False) if self.checkpointed else inner(x)


def train(way, guarded=True, bad=(), each=None, **options):
    """The weights after each step, and the guard; the rows of a bad batch are below log1p's -1."""
    torch.manual_seed(0)
    model = Net(way == "checkpoint")
    matrices, vectors = ([p for p in model.parameters() if p.ndim == n] for n in (2, 1))
    muon, adamw = StackingMuon(matrices), torch.optim.AdamW(vectors, lr=0.01)
    optimizers: Any = Container([muon, adamw]) if way == "container" else [muon, adamw]
    called = torch.compile(model, backend="aot_eager") if way == "compile" else model
    options = {"locate": True, "snapshot_every": 1, **options}
    guard = Guard(called, optimizers, **options).attach() if guarded else None
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=way == "scaler")
    bits = []
    for step in range(STEPS):
        x = torch.rand(4, 6) * 0.1

        def closure(x=x, step=step):
            for _ in range(2):  # accumulates
                scaler.scale(called(x if step not in bad else x - 99).square().mean()).backward()

        if way != "closure":
            closure()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e3)
        if way == "container":
            optimizers.step()
        elif way == "scaler":
            scaler.step(muon), scaler.step(adamw), scaler.update()
        else:
            adamw.step(closure if way == "closure" else None), muon.step()
        model.zero_grad()
        bits.append([p.detach().clone() for p in model.parameters()])
    return bits, guard


WAYS = ["plain", "container", "closure", "checkpoint", "compile", "scaler"]


@pytest.mark.parametrize("way", WAYS)
def test_a_line_guards_all_optimizers_of_a_loop(way, caplog):
    plain, _ = train(way, guarded=False)
    healthy, guard = train(way)
    assert all(map(same, plain, healthy)) and guard.updates.tolist() == [STEPS]
    assert not guard.events.events
    sick, guard = train(way, bad={3})
    assert [i for i in range(1, STEPS) if same(sick[i - 1], sick[i])] == [3]
    if way == "scaler":  # which skips the step before an optimizer is called
        assert guard.updates.tolist() == [STEPS - 1] and not guard.events.events
        return
    assert guard.updates.tolist() == [STEPS - 1] and guard.steps == STEPS
    origin, event = guard.events.events
    assert (event.step, event.stage, event.action) == (4, "gradient", "skipped")
    assert "aten.log1p" in origin.reason and "in Net (" in origin.reason
    messages = [x.getMessage() for x in caplog.records if x.name == "firstnan.events"]
    assert messages == [f"step 4:\n{guard.locator.findings[4]}", str(event)]


def test_without_a_guard_the_muon_would_fail_or_move():
    model = nn.Linear(2, 2)
    muon = StackingMuon([model.weight])
    guard = Guard(model, [muon, torch.optim.SGD([model.bias], lr=0.1)])
    model(torch.full((1, 2), torch.nan)).sum().backward()
    assert guard.step() == set() and len(muon.param_groups) == 1
    with pytest.raises(TypeError):  # it has no gradient: what `step` kept the optimizer from
        muon.step()


def test_a_model_that_stays_faulty_returns_to_its_last_state_and_stops():
    torch.manual_seed(0)
    with pytest.raises(TooFewHealthyParts, match="restored"):
        train("plain", bad=range(2, 99), thresholds=Thresholds(restore_after=2))


def test_the_latest_guard_replaces_the_others_and_no_guard_scales_unseen_losses():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guards = [Guard(model, optimizer).attach() for _ in range(2)]
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    guards[1].detach()
    optimizer.step()
    assert [guard.steps for guard in guards] == [0, 1]
    with pytest.raises(ValueError, match="GradScaler"):
        Guard(model, optimizer, scaler=True).attach()


def test_optimizers_that_step_at_different_rates_are_judged_at_each_step_of_the_faster():
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    often, seldom = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (a, b))
    guard = Guard(nn.ModuleList([a, b]), [often, seldom]).attach()
    for step in range(4):
        b(a(torch.ones(1, 2))).sum().backward()
        often.step()
        if step % 2:
            seldom.step()
    assert guard.steps == 3 + 1 and guard.updates.tolist() == [4]


def test_a_scaler_leaves_a_fused_optimizer_neither_scaled_gradients_nor_a_fault():
    weights = []
    for fused in (False, True):
        model, scaler = nn.PReLU(), torch.amp.GradScaler("cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        guard = Guard(model, optimizer, clip_grad=1.0).attach()
        for x in (1.0, 1e38, 1.0):
            optimizer.zero_grad()
            scaler.scale(model(torch.full((2, 1), -x)).mean()).backward()
            scaler.step(optimizer), scaler.update()
        assert guard.steps == 2 and not guard.events.events
        weights.append(model.weight.item())
    assert weights[0] == weights[1] == pytest.approx(0.25 + 2 * 0.1)


class Nested(torch.optim.SGD):
    def step(self, closure=None):
        assert self.param_groups[0]["lr"] == 0.1
        super().step(closure)
        self.calls = getattr(self, "calls", 0) + 1


@pytest.mark.parametrize("way", ["attached", "closure", "by hand"])
def test_a_step_that_calls_another_and_reads_its_groups_is_left_out(way):
    model = nn.Linear(4, 1)
    torch.optim.SGD(model.parameters())  # torch adds hooks to `step` at the first use of a class
    optimizer = Nested(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer)
    step: Any = guard.step if way == "by hand" else guard.attach().optimizer.step
    for x in (1.0, torch.nan, 1.0):
        optimizer.zero_grad()
        backward = model(torch.full((2, 4), x)).sum().backward
        step(backward) if way == "closure" else (backward(), step())
    assert optimizer.calls == guard.steps == 3 and guard.updates.tolist() == [2]


def train_in_turn(values, to_none=True, events=None):
    """A GAN: each optimizer has a loss of its own; the values are inputs of the second one."""
    pair = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    a, b = (torch.optim.SGD(model.parameters(), lr=0.1) for model in pair)
    guard = Guard(pair, [a, b, a], events=events).attach()
    for x in values:
        for model, optimizer, value in (pair[0], a, 1.0), (pair[1], b, x):
            optimizer.zero_grad(set_to_none=to_none)
            model(torch.full((1, 2), value)).sum().backward()
            optimizer.step()
    return guard


@pytest.mark.parametrize("to_none", [True, False])
def test_a_loss_of_the_second_optimizer_after_the_first_stepped_is_judged_too(to_none, caplog):
    guard = train_in_turn([1.0, torch.nan, 1.0], to_none, EventLog(announce=True))
    assert [event.stage for event in guard.events.events] == ["gradient"]
    assert len(caplog.records) == 1 and (guard.steps == 5 or not to_none)


ENDS = [Guard.detach, lambda guard: Guard(guard.model, guard.optimizer).attach(), lambda guard: 0]


@pytest.mark.parametrize("end", ENDS, ids=["detach", "another guard", "garbage collection"])
def test_the_last_step_of_optimizers_in_turn_is_finished(end):
    guard = train_in_turn([1.0, torch.nan])
    log = guard.events.events
    assert not log and guard.steps == 3
    end(guard)
    del guard
    gc.collect()
    assert [(event.step, event.stage) for event in log] == [(4, "gradient")]


def test_the_last_step_is_finished_when_the_process_ends(tmp_path):
    code = "from firstnan.tests.test_attached import *; kept = train_in_turn([torch.nan])"
    assert b"step 2, model" in python(tmp_path, "-c", code).stderr


def test_other_objects_than_optimizers_are_named():
    for wrong in (None, {"a": 1}, [torch.zeros(1)]):
        with pytest.raises(TypeError, match="list of them; got a (NoneType|dict|Tensor)"):
            Guard(nn.Linear(1, 1), wrong)


def test_a_gradient_that_was_left_out_keeps_its_memory_for_a_cuda_graph():
    model = Net()
    weights = [*model.parameters()]
    for p in weights:
        p.grad = torch.zeros_like(p)
    memory = [p.grad for p in weights]  # what replays write into
    optimizer = torch.optim.AdamW(weights, lr=0.01)
    guard = Guard(model, optimizer).attach()
    for x in (0.1, -99.0, 0.1):
        loss = model(torch.full((2, 6), x)).square().mean()
        for kept, gradient in zip(memory, torch.autograd.grad(loss, weights), strict=True):
            kept.copy_(gradient)
        optimizer.step()
    assert guard.updates.tolist() == [2] and guard.steps == 3


def test_a_step_inside_the_backward_pass_is_refused():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    Guard(model, optimizer).attach()
    model.bias.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(ValueError, match="call `step` outside"):
        model(torch.ones(3, 2)).sum().backward()


@pytest.mark.parametrize("inside", [True, False])
def test_the_log_shows_the_same_finding_as_the_command(caplog, inside):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    Guard(model, optimizer, locate=True).attach()
    loss = model(torch.full((1, 2), torch.nan) if inside else torch.ones(1, 2)).sum()
    (loss if inside else loss * torch.nan).backward()
    optimizer.step()
    report, event = (x.getMessage() for x in caplog.records if x.name == "firstnan.events")
    assert report.startswith("step 1:\n") and event.startswith("step 1, model: the gradient's norm")
    if inside:
        assert "first bad  aten.addmm" in report and "\nremedy     rebuild" in report
    else:
        assert "first bad  outside of the model" in report
