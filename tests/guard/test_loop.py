import copy
import functools
import json
import math
import pickle
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ssl_kd.guard.faults import Thresholds
from ssl_kd.guard.loop import Guard
from ssl_kd.guard.parts import TooFewHealthyParts
from tests.bits import same
from tests.faults.matrix import row

NAN = float("nan")
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw_loop": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=False),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
}


class Heads(nn.Module):
    """Three heads that own their weights, on inputs or on a trunk that they share."""

    def __init__(self, trunk=False):
        super().__init__()
        self.trunk = nn.Linear(6, 6) if trunk else nn.Identity()
        self.heads = nn.ModuleList(nn.Linear(6, 2) for _ in range(3))

    def losses(self, x, y):
        features = self.trunk(x)
        return features, {f"head {i}": mse(h(features), y) for i, h in enumerate(self.heads)}

    def parts(self):
        return {f"head {i}": head for i, head in enumerate(self.heads)}


def mse(a, b):
    return (a - b).square().mean()


def batch(step, n=8):
    g = torch.Generator().manual_seed(step)
    return torch.randn(n, 6, generator=g), torch.randn(n, 2, generator=g)


def bits(parameters, optimizer):
    """Weights and all of the optimizer's memory of them, as one list of tensors and numbers."""
    seen = []
    for p in parameters:
        seen.append(p.detach().clone())
        seen += [copy.deepcopy(v) for _, v in sorted(optimizer.state.get(p, {}).items())]
    return seen


def seeded(build):
    torch.manual_seed(0)
    return build()


# -- one part -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_healthy_loop_is_the_plain_loop_to_the_last_bit(name):
    ends = []
    for guarded in (False, True):
        model = seeded(lambda: nn.Linear(6, 2))
        optimizer = OPTIMIZERS[name](model.parameters())
        guard = Guard(model, optimizer, clip_grad=0.5)
        for step in range(10):
            x, y = batch(step)
            loss = mse(model(x), y)
            optimizer.zero_grad()
            if guarded:
                guard.backward(loss)
                guard.step()
            else:
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
        ends.append(bits(model.parameters(), optimizer))
    assert same(*ends)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bad", ["nan input", "inf input", "nan gradient", "overflow"])
def test_a_sick_step_changes_no_bit_and_the_next_goes_on(name, bad):
    model = nn.Linear(6, 2)
    optimizer = OPTIMIZERS[name](model.parameters())
    guard = Guard(model, optimizer)

    def step(number, poison=None):
        x, y = batch(number)
        if poison == "nan input":
            x[0, 0] = NAN
        elif poison == "inf input":
            x[0, 0] = math.inf
        loss = mse(model(x), y)
        if poison == "nan gradient":  # sqrt has an infinite slope at 0: the loss is finite
            loss = loss + (model.weight * 0).square().sum().sqrt()
        elif poison == "overflow":
            loss = loss * 1e25
        optimizer.zero_grad()
        guard.backward(loss)
        guard.step()

    for number in range(3):
        step(number)
    before = bits(model.parameters(), optimizer)
    step(3, bad)
    assert same(before, bits(model.parameters(), optimizer))
    assert (event := guard.events.events[-1]).part == "model" and event.step == 3
    assert event.stage == ("loss" if bad in ("nan input", "inf input") else "gradient")
    step(4)
    assert not same(before, bits(model.parameters(), optimizer)) and len(guard.events) == 1
    assert all(p.isfinite().all() for p in model.parameters())


def test_running_statistics_of_a_sick_batch_are_taken_back():
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(6, 4), norm, nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer)
    for step in range(4):
        x, y = batch(step)
        if step == 2:
            x[0, 0] = NAN
        optimizer.zero_grad()
        guard.backward(mse(model(x), y))
        poisoned = not torch.isfinite(norm.running_mean).all()
        assert poisoned == (step == 2)
        guard.step()
        assert torch.isfinite(norm.running_mean).all()
    assert norm.num_batches_tracked == 3


def test_a_buffer_that_a_sick_batch_made_is_taken_back():
    class Lazy(nn.Linear):
        def __init__(self):
            super().__init__(6, 2)
            self.register_buffer("mean", None)

        def forward(self, x):
            batch = x.detach().mean()
            self.mean = batch if self.mean is None else (self.mean + batch) / 2
            return super().forward(x)

    model = Lazy()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = batch(0)
    for bad in (True, False, True):
        guard.optimizer.zero_grad()
        guard.backward(mse(model(x * NAN if bad else x), y))
        assert guard.step() == (set() if bad else {"model"})
        seen = model.mean
        assert seen is None if guard.steps == 1 else torch.equal(seen, x.mean())


def test_spike_is_skipped_and_dead_is_reported():
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = Guard(model, optimizer, thresholds=Thresholds(dead_after=5))
    for step in range(40):
        x, y = batch(step)
        loss = mse(model(x), y) * (1e4 if step == 30 else 0 if step > 33 else 1)
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        guard.backward(loss)
        guard.step()
        assert torch.equal(before, model.weight) == (step == 30 or step > 33)
    seen = [(e.step, e.stage, e.action) for e in guard.events.events]
    assert seen == [(30, "spike", "skipped"), (38, "dead", "reported")]


@pytest.mark.parametrize("at", [1, 3, 5, 12, 19])
def test_a_loss_that_jumps_a_million_times_early_is_a_spike_and_a_growing_one_is_not(at):
    model = nn.Linear(6, 2)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=1e-9))
    for step in range(30):
        growing = 3.0 ** min(step, 15)  # as norms grow when heads that began alike come apart
        x, y = batch(step)
        guard.optimizer.zero_grad()
        guard.backward(mse(model(x), y) * (1e6 * growing if step == at else growing))
        assert guard.step() == (set() if step == at else {"model"})
    assert [(e.step, e.stage) for e in guard.events.events] == [(at, "spike")]


def test_a_saved_state_is_changed_by_no_later_step():
    first = nn.Linear(6, 6)
    model = nn.Sequential(first, nn.BatchNorm1d(6), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = Guard(model, optimizer, snapshot_every=1)

    def step(number, spoil=1.0):
        x, y = batch(number)
        optimizer.zero_grad()
        guard.backward({"mse": mse(model(x), y) * spoil, "one": first.bias.sum()})
        guard.step()

    for number in range(3):
        step(number)
    saved = guard.state_dict()
    before = copy.deepcopy(saved)
    for number in range(3, 6):
        step(number, NAN if number == 4 else 1.0)
    assert same(saved, before) and not same(guard.state_dict(), before)


def test_an_optimizer_that_needs_a_closure_is_refused():
    model = nn.Linear(6, 2)
    with pytest.raises(ValueError, match=r"LBFGS.step needs a closure.*can be called without one"):
        Guard(model, torch.optim.LBFGS(model.parameters()))


def test_accumulated_batches_are_one_step():
    ends = []
    for guarded in (False, True):
        model = seeded(lambda: nn.Linear(6, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        guard = Guard(model, optimizer)
        for step in range(5):
            optimizer.zero_grad()
            for micro in range(3):
                x, y = batch(3 * step + micro)
                if guarded and step == 3 and micro == 1:
                    x[:] = NAN
                loss = mse(model(x), y) / 3
                guard.backward(loss) if guarded else loss.backward()
            if guarded:
                guard.step()
            elif step != 3:
                optimizer.step()
        ends.append(bits(model.parameters(), optimizer))
    assert same(*ends)
    assert [(e.step, e.stage) for e in guard.events.events] == [(3, "loss")]


@pytest.mark.parametrize("scaler", [False, True])
@pytest.mark.parametrize("how", ["zero_grad", "discard"])
def test_a_step_that_was_given_up_leaves_nothing_behind(scaler, how):
    ends = []
    for given_up in (False, True):
        model = seeded(lambda: nn.Linear(6, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        guard = Guard(model, optimizer, scaler=scaler)
        for bad in (NAN, 1.0) if given_up else ():
            x, y = batch(0)
            guard.backward(mse(model(x), y) * bad)
            guard.discard() if how == "discard" else optimizer.zero_grad()
        for micro in (1, 2):
            x, y = batch(micro)
            guard.backward(mse(model(x), y))
        assert guard.step() == {"model"}
        ends.append([p.detach() for p in model.parameters()])
    assert same(*ends)


def test_a_backward_that_failed_halfway_leaves_nothing_behind():
    ends = []
    for fails in (False, True):
        model = seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        guard = Guard(model, optimizer)
        x, y = batch(0)
        if fails:
            features = model[0](x)
            features.register_hook(lambda g: 1 / 0)  # as if memory ran out: the head is through
            with pytest.raises(ZeroDivisionError):
                guard.backward(mse(model[1](features), y))
            optimizer.zero_grad()
        guard.backward(mse(model(x), y))
        guard.step()
        ends.append([p.detach() for p in model.parameters()])
    assert same(*ends)


def test_a_batch_that_was_cut_out_is_not_one_that_was_given_up():
    model = Heads(trunk=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, model.parts())
    for factor in (NAN, 1):  # nothing is left of the first, so there is no gradient
        _, losses = model.losses(*batch(0))
        guard.backward({"head 0": losses["head 0"] * factor})
    assert guard.step() == {"shared"}
    for factor in (NAN, 1):
        _, losses = model.losses(*batch(0))
        guard.backward({"head 0": losses["head 0"] * factor})
        if factor != 1:
            guard.discard()
    assert guard.step() == {"head 0", "shared"}


def test_the_schedule_goes_on_through_sick_steps_without_a_warning():
    model = nn.Linear(6, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    guard = Guard(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):  # sick from the first step on: optimizer.step() finds no gradient
            guard.backward(mse(model(torch.full((4, 6), NAN)), torch.zeros(4, 2)))
            guard.step()
            schedule.step()
    assert schedule.get_last_lr() == [0.125] and not optimizer.state


def test_autocast_around_the_forward_pass():
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer)
    x, y = batch(0)
    for bad in (False, True):
        before = model.weight.detach().clone()
        with torch.autocast("cpu", torch.bfloat16):
            loss = mse(model(x * NAN if bad else x), y)
        guard.backward(loss)
        guard.step()
        assert torch.equal(before, model.weight) == bad


def test_a_sparse_gradient_is_judged():
    model = nn.EmbeddingBag(10, 4, sparse=True, mode="sum")
    optimizer = torch.optim.SparseAdam(list(model.parameters()))
    guard = Guard(model, optimizer, clip_grad=1.0)
    for bad in (False, True):
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        guard.backward((model(torch.tensor([[1, 2, 1]])) * (NAN if bad else 3.0)).sum())
        guard.step()
        assert torch.equal(before, model.weight) == bad


# -- parts that own their weights -----------------------------------------------------------------


def run_heads(name, sick_at=None, by_hand=False, vector=False):
    """Ten steps of three heads; head 1's loss or gradient is bad, or left out by hand."""
    model = seeded(Heads)
    optimizer = OPTIMIZERS[name](model.parameters())
    guard = Guard(model, optimizer, model.parts(), clip_grad=1.0)
    for step in range(10):
        _, losses = model.losses(*batch(step))
        bad = (sick_at or {}).get(step)
        optimizer.zero_grad()
        if bad and by_hand:
            del losses["head 1"]
        elif bad == "loss":
            losses["head 1"] = losses["head 1"] * NAN
        elif bad == "gradient":
            losses["head 1"].register_hook(lambda g: g * NAN)
        guard.backward(torch.stack([*losses.values()]) if vector else losses)
        assert guard.step() == {f"head {i}" for i in range(3) if not bad or i != 1}
    return [bits(head.parameters(), optimizer) for head in model.heads], guard


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("vector", [False, True])
def test_a_sick_part_is_left_out_as_if_by_hand(name, vector):
    sick = {2: "loss", 3: "gradient", 7: "gradient"}
    heads, guard = run_heads(name, sick, vector=vector)
    by_hand, quiet = run_heads(name, sick, by_hand=True)
    clean, _ = run_heads(name)
    assert all(same(a, b) for a, b in zip(heads, by_hand, strict=True))
    assert same(heads[0], clean[0]) and same(heads[2], clean[2]) and not same(heads[1], clean[1])
    seen = [(e.step, e.part, e.stage) for e in guard.events.events]
    assert seen == [(step, "head 1", stage) for step, stage in sick.items()]
    assert not quiet.events.events and quiet.health.streak.tolist() == [0, 0, 0]


@pytest.mark.parametrize("how", ["loss", "gradient"])
def test_a_shared_trunk_never_sees_the_sick_head(how):
    """With `through`, the head is cut out before its gradient reaches the trunk."""
    ends = []
    for by_hand in (False, True):
        model = seeded(lambda: Heads(trunk=True))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        guard = Guard(model, optimizer, model.parts())
        for step in range(6):
            features, losses = model.losses(*batch(step))
            if step == 3:
                if by_hand:
                    del losses["head 1"]
                elif how == "loss":
                    losses["head 1"] = losses["head 1"] + math.inf
                else:
                    losses["head 1"] = losses["head 1"] + (features * 0).norm(dim=0).sum().sqrt()
            optimizer.zero_grad()
            guard.backward(losses, through=features)
            guard.step()
        ends.append(bits(model.parameters(), optimizer))
        assert guard.updates.tolist() == [6, 5, 6, 6]
        seen = [(e.step, e.part, e.stage) for e in guard.events.events]
        assert seen == ([] if by_hand else [(3, "head 1", how)])
    assert same(*ends)


def test_a_retired_head_teaches_the_trunk_nothing():
    ends = []
    for retired in (False, True):
        model = seeded(lambda: Heads(trunk=True))
        guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), model.parts())
        guard.health.retired[1] = retired
        _, losses = model.losses(*batch(0))
        if not retired:
            del losses["head 1"]
        guard.backward(losses)
        guard.step()
        ends.append([p.detach() for p in model.parameters()])
    assert same(*ends)


def test_a_part_that_is_not_there_is_not_dead():
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, model.parts(), thresholds=Thresholds(dead_after=3))
    for step in range(5):
        _, losses = model.losses(*batch(step))
        optimizer.zero_grad()
        guard.backward({"head 0": losses["head 0"], "head 2": losses["head 2"] * 0})
        assert guard.step() == {"head 0", "head 2"}
    assert [(e.part, e.stage) for e in guard.events.events] == [("head 2", "dead")]


def test_a_sick_trunk_takes_back_its_own_statistics_only():
    trunk, head = nn.BatchNorm1d(6), nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2))
    model = nn.Sequential(trunk, head)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), {"head": head})
    x, y = batch(0)
    guard.backward({"head": mse(model(x), y)})
    trunk.weight.grad[0] = NAN
    assert guard.step() == {"head"}
    tracked = [b for name, b in model.named_buffers() if "num_batches" in name]
    assert tracked == [0, 1]


def test_one_loss_for_several_parts():
    model = Heads(trunk=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, {"trunk": model.trunk, "heads": model.heads}, scaler=True)
    guard.scale[:] = torch.tensor([2.0, 512.0])  # one loss cannot be scaled by both
    x, y = batch(0)
    loss = torch.stack([*model.losses(x, y)[1].values()]).sum()
    weights = [*model.parameters()]
    gradients = torch.autograd.grad(loss, weights, retain_graph=True)
    expected = [p - 0.1 * g for p, g in zip(weights, gradients, strict=True)]
    guard.backward(loss)
    guard.step()
    torch.testing.assert_close(weights, expected)
    guard.backward(torch.stack([*model.losses(x * NAN, y)[1].values()]).sum())
    guard.step()
    assert [e.part for e in guard.events.events] == ["trunk", "heads"]


# -- loss terms that share weights ----------------------------------------------------------------


def run_terms(sick, by_hand=False, through=True):
    first = seeded(lambda: nn.Linear(6, 8))
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    guard = Guard(model, optimizer, clip_grad=1.0)
    for step in range(8):
        x, y = batch(step)
        logits = model(x)
        kd = (logits.softmax(-1) - 0.5).square().mean()
        losses = {"ce": mse(logits, y), "kd": kd}
        # A regulariser reaches the weights past the logits; it must not be lost.
        losses["ce"] = losses["ce"] + 0.01 * first.weight.square().sum()
        if step in sick:
            if sick[step] == "loss":
                losses["kd"] = kd * NAN
            elif sick[step] == "gradient":
                losses["kd"] = kd + (logits * 0).norm(dim=0).sum().sqrt()
            else:
                losses = {n: loss * NAN for n, loss in losses.items()}
        optimizer.zero_grad()
        if by_hand:
            if sick.get(step) == "both":
                continue
            kept = losses["ce"] if step in sick else losses["ce"] + losses["kd"]
            kept.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        else:
            guard.backward(losses, through=logits if through else None)
            guard.step()
    return bits(model.parameters(), optimizer), guard


def test_a_sick_term_is_cut_out_and_the_rest_goes_on_alone():
    sick = {2: "loss", 4: "gradient", 5: "both"}
    guarded, guard = run_terms(sick)
    by_hand, _ = run_terms(sick, by_hand=True)
    assert same(guarded, by_hand)
    seen = [(e.step, e.part, e.stage, e.action) for e in guard.events.events]
    assert seen == [
        (2, "kd", "loss", "cut out"),
        (3, "kd", "loss", "used again"),
        (4, "kd", "gradient", "cut out"),
        (5, "ce", "loss", "cut out"),
        (5, "kd", "loss", "cut out"),
        (5, "model", "loss", "skipped"),
        (6, "ce", "loss", "used again"),
        (6, "kd", "loss", "used again"),
    ]
    assert guard.updates.tolist() == [7]


def test_a_term_counts_steps_not_batches():
    model = nn.Linear(6, 2)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = batch(0)
    for step in range(3):
        for half in range(4):
            sick = NAN if step < 2 and half == 1 else 1.0
            logits = model(x)
            guard.backward({"ce": mse(logits, y), "kd": sick * logits.square().mean()})
        assert guard.step() == {"model"}
    assert [(e.step, e.part, e.action) for e in guard.events.events] == [
        (0, "kd", "cut out"),
        (1, "kd", "cut out"),
        (2, "kd", "used again"),
    ]
    assert "healthy again after 2 steps" in guard.events.events[-1].reason


@pytest.mark.parametrize("stop_after, fresh", [(3, False), (None, True)])
def test_a_run_that_stays_sick_stops_at_once_or_goes_back_with_a_fresh_optimizer(stop_after, fresh):
    model = nn.Linear(6, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    thresholds = Thresholds(restore_after=4, stop_after=stop_after)
    guard = Guard(model, optimizer, thresholds=thresholds, snapshot_every=1, fresh_optimizer=fresh)
    x, y = batch(0)
    for step in range(6):
        sick = NAN if step >= 2 else 1.0
        guard.backward(mse(model(x), y) * sick)
        if stop_after and step == 4:
            with pytest.raises(TooFewHealthyParts, match="in the last 3"):
                guard.step()
            break
        guard.step()
    else:
        assert guard.events.events[-1].action.endswith("with a fresh optimizer")
        assert not optimizer.state
    kept = guard._parts[0].good["weights"]
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), kept, strict=True))


def test_terms_may_come_from_different_tensors():
    """As a router's loss does, which the logits know nothing of."""
    trunk, head, router = nn.Linear(6, 6), nn.Linear(6, 2), nn.Linear(6, 3)
    model = nn.ModuleList([trunk, head, router])
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = batch(0)
    logits, routes = head(trunk(x)), router(trunk(x))
    before = [p.detach().clone() for p in model.parameters()]
    guard.backward({"ce": mse(logits, y), "router": routes.sum() * NAN}, through=[logits, routes])
    guard.step()
    moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert moved == [True, True, True, True, False, False]


def test_without_through_a_sick_gradient_costs_the_step():
    sick = {2: "loss", 4: "gradient"}
    guarded, guard = run_terms(sick, through=False)
    by_hand, _ = run_terms({2: "loss", 4: "both"}, by_hand=True)
    assert same(guarded, by_hand)
    seen = [(e.step, e.part) for e in guard.events.events if e.action != "used again"]
    assert seen == [(2, "kd"), (4, "model")]


def test_a_term_that_stays_sick_says_what_to_change():
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = Guard(model, optimizer)
    for step in range(25):
        x, y = batch(step)
        logits = model(x)
        guard.backward({"ce": mse(logits, y), "kd": logits.sum() * NAN}, through=logits)
        guard.step()
    loud = [e.step for e in guard.events.events if "in a row" in e.action]
    assert loud == [9, 19] and guard.health.streak.tolist() == [0]
    assert guard.summary() == "step 25: 100.0 % of updates done; bad steps in a row: kd 25"


def test_a_term_whose_gradient_is_clamped_away_is_reported_as_dead():
    model = nn.Linear(6, 2)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for step in range(100):
        x, y = batch(step)
        logits = model(x)
        guard.backward({"ce": mse(logits, y), "kd": (mse(logits, y) + 9).clamp(max=5)}, logits)
        guard.step()
    assert [(e.step, e.part, e.stage) for e in guard.events.events] == [(99, "kd", "dead")]


def test_terms_that_are_finite_alone_but_not_together_cost_the_step():
    model = nn.Linear(6, 2)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    logits = model(batch(0)[0])
    before = model.weight.detach().clone()
    guard.backward({"ce": logits.mean() + 3e38, "kd": logits.mean() + 3e38})
    assert guard.step() == set() and torch.equal(before, model.weight)
    assert [(e.part, e.stage) for e in guard.events.events] == [("model", "loss")]
    assert guard.diagnosis().startswith("model, 1 steps: the loss is not finite (1 times).")


def test_a_term_may_be_a_constant():
    """A term that found nothing in this batch is 0 without a gradient; alone it is a mistake."""
    model = nn.Linear(6, 2)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = batch(0)
    logits = model(x)
    before = model.weight.detach().clone()
    guard.backward({"ce": mse(logits, y), "kd": torch.zeros(())}, through=logits)
    assert guard.step() == {"model"} and not torch.equal(before, model.weight)
    before = model.weight.detach().clone()
    guard.optimizer.zero_grad()
    guard.backward({"ce": mse(model(x * NAN), y), "kd": torch.zeros(())})
    assert guard.step() == set() and torch.equal(before, model.weight)
    with pytest.raises(RuntimeError, match="does not require grad"):
        guard.backward({"kd": torch.zeros(())})


# -- float16 --------------------------------------------------------------------------------------


def test_one_parts_overflow_does_not_move_the_scale_of_another():
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = Guard(
        model, optimizer, model.parts(), scaler=True, thresholds=Thresholds(restore_after=99)
    )
    for step in range(30):
        _, losses = model.losses(*batch(step))
        losses["head 1"].register_hook(lambda g: g * math.inf)
        optimizer.zero_grad()
        guard.backward(losses)
        guard.step()
    assert guard.scale.tolist() == [1024, 1, 1024]


def test_the_scale_in_use_is_the_one_that_an_overflow_halves():
    model = Heads()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.01), model.parts(), scaler=True)
    guard.scale[:] = torch.tensor([64.0, 1024.0, 1024.0])
    losses = model.losses(*batch(0))[1]
    losses["head 1"].register_hook(lambda g: g * math.inf)
    guard.backward(torch.stack([*losses.values()]).sum())  # one loss, one scale
    guard.step()
    assert guard.scale.tolist() == [64, 32, 1024]


def test_what_was_cut_out_is_no_overflow():
    model = nn.Linear(6, 2)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.01), scaler=True)
    logits = model(batch(0)[0])
    guard.backward({"kd": (logits * 0).norm(dim=0).sum().sqrt()}, through=logits)
    assert guard.step() == set() and guard.scale.tolist() == [1024]


@pytest.mark.parametrize("shared", [False, True])
def test_scaled_gradients_are_the_unscaled_ones(shared):
    """Powers of two: equal to the last bit, also where parts of unequal scale share weights."""
    ends = []
    for scaler in (False, True):
        model = seeded(lambda: Heads(trunk=shared))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        guard = Guard(model, optimizer, model.parts(), scaler=scaler)
        if scaler:
            guard.scale[:3] = torch.tensor([2.0, 512.0, 65536.0])
        for step in range(5):
            features, losses = model.losses(*batch(step))
            optimizer.zero_grad()
            guard.backward(losses, through=features if shared else None)
            guard.step()
        ends.append(bits(model.parameters(), optimizer))
    assert same(*ends)


# -- escalation -----------------------------------------------------------------------------------


def test_a_shared_trunk_is_not_a_part_that_is_left():
    model = seeded(lambda: Heads(trunk=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = Guard(model, optimizer, model.parts())
    with pytest.raises(TooFewHealthyParts):
        for step in range(60):
            features, losses = model.losses(*batch(step))
            if step > 5:
                losses = {name: loss * NAN for name, loss in losses.items()}
            optimizer.zero_grad()
            guard.backward(losses, through=features)
            guard.step()
    assert all(p.isfinite().all() for p in model.parameters())
    with pytest.raises(ValueError, match="min_parts is 4; expected at most 3"):
        Guard(model, optimizer, model.parts(), thresholds=Thresholds(min_parts=4))


def test_what_is_frozen_is_shared_by_nobody_until_it_is_trained():
    model = Heads(trunk=True)
    model.trunk.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, model.parts())
    assert [*guard.state_dict()["parts"]] == ["head 0", "head 1", "head 2"]
    model.trunk.requires_grad_()
    guard.backward(model.losses(*batch(0))[1])
    with pytest.raises(ValueError, match="make a new Guard"):
        guard.step()


def test_a_part_that_is_often_sick_but_never_for_long_is_reported_once(caplog):
    model = seeded(Heads)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = Guard(model, optimizer, model.parts())
    for step in range(300):
        _, losses = model.losses(*batch(step))
        if step % 2:
            losses["head 1"] = losses["head 1"] * NAN
        optimizer.zero_grad()
        guard.backward(losses)
        guard.step()
    assert caplog.messages == ["head 1 missed 50 of the last 100 steps"]
    other = Guard(model, optimizer, model.parts())
    other.load_state_dict(guard.state_dict())
    assert other.summary().endswith("below 90 % in the last 100 steps: head 1")


def test_a_tenth_of_a_window_may_be_missed_and_one_step_more_is_reported(caplog):
    model = seeded(Heads)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = Guard(model, optimizer, model.parts())
    for step in range(200):
        _, losses = model.losses(*batch(step))
        for head, missed in (("head 1", step % 10 == 0), ("head 2", step % 10 == 0 or step == 105)):
            if missed:
                losses[head] = losses[head] * NAN
        optimizer.zero_grad()
        guard.backward(losses)
        guard.step()
        if step == 99:
            assert not caplog.messages and "below" not in guard.summary()
    assert caplog.messages == ["head 2 missed 11 of the last 100 steps"]
    assert guard.summary().endswith("below 90 % in the last 100 steps: head 2")


def test_events_that_cannot_be_written_are_kept_with_one_warning(tmp_path, caplog):
    model = nn.Linear(6, 2)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), events=tmp_path)
    for step in range(3):
        x, y = batch(step)
        guard.optimizer.zero_grad()
        guard.backward(mse(model(x * NAN if step < 2 else x), y))
        assert guard.step() == ({"model"} if step == 2 else set())
    assert [e.step for e in guard.events.events] == [0, 1]
    (message,) = caplog.messages
    assert "kept in memory only" in message and str(tmp_path) in message


def test_one_part_goes_back_to_its_last_good_state_and_then_stops(tmp_path):
    model = nn.Linear(6, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = Guard(model, optimizer, snapshot_every=5, events=tmp_path / "events.jsonl")
    good = None
    with pytest.raises(TooFewHealthyParts) as stop:
        for step in range(50):
            x, y = batch(step)
            if step == 5:
                good = bits(model.parameters(), optimizer)
            if step == 8:
                with torch.no_grad():
                    model.weight[0, 0] = NAN  # from outside: no step of the guard did this
            if step == 17:
                assert model.weight.isnan().any()
            if step == 18:
                assert same(good, bits(model.parameters(), optimizer))
            if 18 <= step:
                x[0, 0] = NAN  # and now the data are bad for good
            optimizer.zero_grad()
            guard.backward(mse(model(x), y))
            guard.step()
    assert step == 27 and same(good, bits(model.parameters(), optimizer))
    rows = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert len(rows) == 23 and (rows[-1]["part"], rows[-1]["action"]) == ("run", "stopped")
    assert rows[10]["action"] == "restored to its state before step 5" == rows[-2]["action"]
    assert rows[10]["reason"] == "10 bad steps in a row"
    message = str(stop.value)
    assert "the loss is not finite (20 times)" in message and "learning rate" in message
    assert "restored to its state before step 5" in message


@pytest.mark.parametrize("missed", [7, 12])
def test_the_streak_that_is_said_is_the_real_one(missed):
    """Neither the default of the patience nor, where that was just shortened, the patience."""
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = Guard(model, optimizer, thresholds=Thresholds(restore_after=99))
    for step in range(missed + 1):
        if step == missed:
            guard.thresholds = Thresholds(restore_after=7)
        x, y = batch(step)
        optimizer.zero_grad()
        guard.backward(mse(model(x), y) * (NAN if step else 1))
        guard.step()
    (said,) = [e for e in guard.events.events if e.stage == "escalation"]
    assert said.reason == f"{missed} bad steps in a row"


def ladder(parts, steps=60, **options):
    """Head 1 is NaN on every step from 5 on; the rungs, and what is left."""
    model = seeded(Heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = Guard(model, optimizer, parts(model), **options)
    for step in range(steps):
        _, losses = model.losses(*batch(step))
        if step >= 5:
            losses["head 1"] = losses["head 1"] * NAN
        optimizer.zero_grad()
        guard.backward(losses)
        guard.step()
    rungs = [(e.step, e.action) for e in guard.events.events if e.stage == "escalation"]
    assert all(e.part == "head 1" for e in guard.events.events)
    return rungs, model, optimizer, guard


def test_a_part_that_stays_sick_climbs_the_ladder_alone():
    rungs, model, optimizer, guard = ladder(Heads.parts)
    assert rungs[0] == (14, "restored to its state before step 0")
    assert rungs[1] == (24, "re-initialised")
    assert rungs[2][0] == 34 and rungs[2][1].startswith("retired") and len(rungs) == 3
    heads, _ = run_twin(60)
    for i in (0, 2):
        assert same(bits(model.heads[i].parameters(), optimizer), heads[i])
    assert not [e for e in guard.events.events if e.step > 34]
    assert guard.summary().endswith("retired: head 1")
    drawn = []
    for run in (lambda: ladder(Heads.parts), lambda: seeded(Heads)):
        run()
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)  # re-initialising takes nothing from the loop's random numbers


def run_twin(steps):
    model = seeded(Heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        torch.stack([*model.losses(*batch(step))[1].values()]).sum().backward()
        optimizer.step()
    return [bits(head.parameters(), optimizer) for head in model.heads], model


def test_a_part_starts_again_with_new_weights_and_no_memory():
    _, model, optimizer, guard = ladder(Heads.parts, steps=25)
    first = seeded(Heads)
    for p, old in zip(model.heads[1].parameters(), first.heads[1].parameters(), strict=True):
        assert p not in optimizer.state and not torch.equal(p, old) and p.isfinite().all()
    assert guard.state_dict()["parts"]["head 1"]["good"] is None


def test_going_back_to_the_start_forgets_the_moments():
    model = nn.Linear(6, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = Guard(model, optimizer)
    start = model.weight.detach().clone()
    for step in range(14):
        x, y = batch(step)
        optimizer.zero_grad()
        guard.backward(mse(model(x if step < 4 else x * NAN), y))
        guard.step()
    assert torch.equal(start, model.weight) and not any(optimizer.state.values())


def test_what_cannot_be_re_initialised_is_retired_at_once():
    rungs, *_ = ladder(lambda m: {k: v.parameters() for k, v in m.parts().items()})
    assert [step for step, _ in rungs] == [14, 24] and rungs[1][1].startswith("retired")


def test_the_users_own_re_initialisation_is_used():
    asked = []
    rungs, *_ = ladder(
        lambda m: {k: v.parameters() for k, v in m.parts().items()}, reinitialise=asked.append
    )
    assert asked == ["head 1"] and len(rungs) == 3


def test_a_part_whose_weights_were_hit_recovers_alone():
    model = seeded(Heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = Guard(model, optimizer, model.parts(), snapshot_every=10)
    for step in range(40):
        if step == 15:
            with torch.no_grad():
                next(model.heads[1].parameters())[:] = math.inf
        optimizer.zero_grad()
        guard.backward(model.losses(*batch(step))[1])
        guard.step()
    assert guard.updates.tolist() == [40, 30, 40]
    assert guard.summary() == "step 40: 91.7 % of updates done"
    twin, _ = run_twin(40)
    assert same(bits(model.heads[0].parameters(), optimizer), twin[0])
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("rate", [10.0, 1e38])
def test_a_hopeless_learning_rate_ends_with_finite_weights(rate):
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    guard = Guard(model, optimizer, snapshot_every=1)
    with pytest.raises(TooFewHealthyParts, match="lower the learning rate"):
        for step in range(200):
            x, y = batch(step)
            optimizer.zero_grad()
            guard.backward(mse(model(x), y))
            guard.step()
    state = [value for row in optimizer.state.values() for value in row.values()]
    assert all(torch.isfinite(t).all() for t in [*model.parameters(), *state])


def test_a_cache_in_a_buffer_may_grow():
    class Cached(nn.Linear):
        def forward(self, x):
            size = len(getattr(self, "cache", ())) + 1
            self.register_buffer("cache", torch.zeros(size), persistent=False)
            return super().forward(x)

    model = Cached(6, 2)
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = batch(0)
    guard.backward(mse(model(x * NAN), y))
    assert guard.step() == set() and model.cache.shape == (3,)


def test_what_is_remembered_of_terms_is_part_of_the_state():
    model = nn.Linear(6, 2)
    guard, other = (Guard(model, torch.optim.SGD(model.parameters(), lr=0.1)) for _ in range(2))
    x, y = batch(0)
    logits = model(x)
    guard.backward({"ce": mse(logits, y), "kd": logits.sum() * NAN})
    guard.step()
    other.load_state_dict(guard.state_dict())
    assert guard.summary() == other.summary() and "kd 1" in other.summary()


def test_a_snapshot_is_never_taken_of_what_is_not_finite():
    model = nn.Embedding(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    guard = Guard(model, optimizer, snapshot_every=1)
    for step in range(3):
        if step == 2:
            with torch.no_grad():
                model.weight[3] = NAN  # a row that no batch asks for: loss and gradient are finite
        guard.backward(model(torch.tensor([0, 1])).square().sum())
        guard.step()
    assert guard.state_dict()["parts"]["model"]["good"]["step"] == 1


@pytest.mark.parametrize("stop", [7, 12])
@pytest.mark.parametrize("scaler", [False, True])
def test_a_resumed_guard_goes_on_as_if_never_stopped(tmp_path, scaler, stop):
    def build():
        model = seeded(lambda: nn.Linear(6, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        guard = Guard(model, optimizer, snapshot_every=5, clip_grad=1.0, scaler=scaler)
        return model, optimizer, guard

    def run(model, optimizer, guard, steps):
        for step in steps:
            x, y = batch(step)
            if 8 <= step < 20:
                x[0, 0] = NAN
            optimizer.zero_grad()
            guard.backward(mse(model(x), y))
            guard.step()

    whole = build()
    run(*whole, range(25))
    first = build()
    run(*first, range(stop))
    torch.save([part.state_dict() for part in first], tmp_path / "state.pt")
    second = build()
    states = torch.load(tmp_path / "state.pt", weights_only=True)
    for part, state in zip(second, states, strict=True):
        part.load_state_dict(state)
    run(*second, range(stop, 25))
    assert whole[2].health.restored.all()
    held = [bits(o.param_groups[0]["params"], o) for _, o, _ in (whole, second)]
    assert same(*held) and torch.equal(whole[0].weight, second[0].weight)
    assert whole[2].summary() == second[2].summary()
    assert torch.equal(whole[2].scale, second[2].scale)


# -- numbers at the edge --------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    value=st.floats(width=32) | st.sampled_from([NAN, math.inf, -math.inf, 1e20, 3e38, 1e-40]),
    where=st.integers(0, 11),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_whatever_a_gradient_holds_the_weights_stay_finite_and_the_neighbour_exact(
    value, where, dtype
):
    model = seeded(lambda: nn.ModuleList(nn.Linear(5, 2).to(dtype) for _ in range(2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = Guard(model, optimizer, {"a": model[0], "b": model[1]}, clip_grad=1.0)
    ones = torch.ones(3, 5, dtype=dtype)
    for poisoned in (False, True, False):
        optimizer.zero_grad()
        guard.backward({"a": model[0](ones).sum(), "b": model[1](ones).sum()})
        if poisoned:
            flat = torch.cat([p.grad.flatten() for p in model[0].parameters()])
            flat[where] = value
            rows = flat.split([10, 2])
            for p, row in zip(model[0].parameters(), rows, strict=True):
                p.grad = row.view_as(p).clone()
        guard.step()
    assert all(p.isfinite().all() for p in model.parameters())
    assert guard.updates[1] == 3 and guard.updates[0] == 3 - len(guard.events)
    seen = abs(torch.tensor(value, dtype=dtype).item())
    if not math.isfinite(seen) or (seen > 1e20 and dtype != torch.float64):
        assert len(guard.events) == 1  # the square overflows in float32
    elif seen < 1e5:
        assert not guard.events.events
    elif 1e7 < seen < 1e18 or (
        seen > 1e7 and dtype == torch.float64
    ):  # the second gradient, and a million times the first
        assert [e.stage for e in guard.events.events] == ["spike"]


# -- what is refused ------------------------------------------------------------------------------


def test_arguments_that_do_not_fit_are_named():
    model = Heads()
    optimizer = torch.optim.SGD(model.heads.parameters(), lr=0.1)
    for options, message in [
        ({"clip_grad": 0}, "clip_grad is 0"),
        ({"clip_grad": NAN}, "clip_grad is nan"),
        ({"snapshot_every": -1}, "snapshot_every is -1"),
        ({"thresholds": Thresholds(min_parts=2)}, "min_parts is 2; expected at most 1"),
        ({"parts": {}}, "expected names"),
        ({"parts": {"shared": model.heads}}, "other than 'shared'"),
        ({"parts": {"a": nn.ReLU()}}, "'a' has no trainable parameter"),
        ({"parts": {"a": nn.Linear(2, 2)}}, "not in the optimizer"),
        ({"parts": {"a": model.heads[0], "b": model.heads}}, "'b' and 'a' share a parameter"),
    ]:
        with pytest.raises(ValueError, match=message):
            Guard(model, optimizer, **options)

    guard = Guard(model, optimizer, model.parts())
    features, losses = model.losses(*batch(0))
    features.requires_grad_()
    for given_losses, through, message in [
        ({"head 9": losses["head 0"]}, None, "no part is named 'head 9'"),
        ({"head 0": torch.ones(2)}, None, "shape"),
        ({}, None, "dictionary of losses is empty"),
        (torch.ones(2), None, "a vector of 3"),
        (losses["head 0"], features, "one was given"),
        (losses, torch.ones(2, requires_grad=True), "not computed from `through`"),
    ]:
        with pytest.raises(ValueError, match=message):
            guard.backward(given_losses, through)
    with pytest.raises(ValueError, match=r"shape \(1,\); expected one number .*, or a dictionary"):
        Guard(model, optimizer).backward(torch.ones(1))
    for not_a_loss, message in [
        (0.5, "the loss is 0.5"),
        ({"head 0": 0.5}, "loss 'head 0' is 0.5"),
    ]:
        with pytest.raises(TypeError, match=message):
            guard.backward(not_a_loss)
    with pytest.raises(ValueError, match="this guard has model"):
        Guard(model, optimizer).load_state_dict(guard.state_dict())
    late = nn.Parameter(torch.ones(1))
    optimizer.add_param_group({"params": [late]})
    guard.step()
    late.grad = torch.ones(1)
    with pytest.raises(ValueError, match="make a new Guard"):
        guard.step()


def test_a_part_may_be_one_parameter_and_name_it_twice():
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, {"w": model.weight, "b": [model.bias, model.bias]})
    x, y = batch(0)
    guard.backward(mse(model(x), y))
    assert guard.step() == {"w", "b"}


def test_complex_parameters_are_refused_by_name():
    model = nn.ParameterDict({"wave": nn.Parameter(torch.ones(2, dtype=torch.complex64))})
    with pytest.raises(ValueError, match="parameter 'wave' is complex"):
        Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))


def linear(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Linear(3, 1, dtype=dtype)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("times", [1, 2])
def test_a_loss_that_is_finite_in_float64_is_no_fault(times):
    model, optimizer = linear(torch.float64)
    guard = Guard(model, optimizer)
    for _ in range(times):
        guard.backward(model(torch.ones(2, 3).double()).sum() + 1e60)
    assert guard.step() == {"model"} and not len(guard.events)
    model, optimizer = linear(torch.float64)
    guard = Guard(model, optimizer)
    for _ in range(times):
        guard.backward({"a": model(torch.ones(2, 3).double()).sum() + 1e60})
    assert guard.step() == {"model"} and not len(guard.events)


def test_an_optimizer_of_another_model_is_refused():
    model, optimizer = linear()
    with pytest.raises(ValueError, match="holds none of the 2 trainable parameters"):
        Guard(copy.deepcopy(model), optimizer)


@pytest.mark.parametrize("what", ["weight", 3, ["weight"], None])
def test_a_part_that_is_no_module_and_no_parameters_is_refused(what):
    model, optimizer = linear()
    with pytest.raises(ValueError, match="part 'a' is .*expected a module, or parameters"):
        Guard(model, optimizer, {"a": what})


def test_a_guard_is_neither_copied_nor_pickled():
    guard = Guard(*linear())
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"neither copied nor pickled: take its state_dict\(\)"):
            attempt(guard)


@pytest.mark.parametrize("missing", [["health"], ["parts", "steps"], None])
def test_a_state_that_lacks_something_is_refused_before_anything_is_taken_over(missing):
    guard = Guard(*linear())
    state = guard.state_dict() if missing else {}
    for name in missing or ():
        del state[name]
    with pytest.raises(ValueError, match="the state lacks .*" + ", ".join(missing or ["health"])):
        guard.load_state_dict({**state, "steps": 3} if missing == ["health"] else state)
    assert guard.steps == 0


def _huge(optimizer, factor=1e200, losses=lambda loss: loss, dtype=torch.float64, **options):
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(6, 2).to(dtype)
    guard = Guard(model, optimizer(model.parameters()), **options)
    x, y = batch(0)
    guard.backward(losses(mse(model(x.to(dtype)), y.to(dtype)) * factor))
    return guard, guard.step()


_sgd = functools.partial(torch.optim.SGD, lr=1e-210)


@row(163)
@pytest.mark.parametrize("options", [{}, {"clip_grad": 1.0}, {"scaler": True}], ids=str)
@pytest.mark.parametrize("losses", [lambda x: x, lambda x: {"a": x, "b": x / 2}, lambda x: -x])
@pytest.mark.parametrize("factor", [1e39, 1e160, 1e200, 1e300])
def test_a_loss_that_is_finite_in_float64_is_finite(factor, losses, options):
    guard, updated = _huge(_sgd, factor, losses, **options)
    assert updated == {"model"} and not guard.events.events
    assert guard.grad_norm.isfinite().all()
    assert all(p.isfinite().all() for p in guard.model.parameters())


@row(163)
def test_a_gradient_that_an_optimizer_could_not_square_is_large_and_clipped_it_is_well():
    guard, updated = _huge(torch.optim.AdamW)
    assert not updated and [e.stage for e in guard.events.events] == ["large"]
    assert not guard.optimizer.state[guard.model.weight]  # no second moment of inf for ever
    guard, updated = _huge(torch.optim.AdamW, clip_grad=1.0)
    assert updated and guard.optimizer.state[guard.model.weight]["exp_avg_sq"].isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_in_float64_is_still_not(bad):
    assert [e.stage for e in _huge(_sgd, bad)[0].events.events] == ["loss"]


@row(164)
def test_a_scripted_model_is_guarded_or_refused_in_one_line():
    plain = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    with_buffers = nn.Sequential(nn.Linear(6, 2), nn.BatchNorm1d(2))
    x, y = batch(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates it
        scripted: Any = torch.jit.script(plain)
        refused: Any = torch.jit.script(with_buffers)
        traced: Any = torch.jit.trace(with_buffers, x)
    for model in (scripted, traced):
        guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for spoil in (1.0, math.nan, 1.0):
            before = copy.deepcopy([*model.state_dict().values()])
            guard.optimizer.zero_grad()
            guard.backward(mse(model(x * spoil), y))
            assert guard.step() == ({"model"} if spoil == 1 else set())
            after = model.state_dict().values()
            kept = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            assert kept == (spoil != 1)
    with pytest.raises(ValueError, match=r"1\.running_mean|1\.num_batches") as caught:
        Guard(refused, torch.optim.SGD(refused.parameters(), lr=0.1))
    assert len(str(caught.value).splitlines()) == 1
