"""`Guard` around a plain loop: healthy steps keep every bit, bad steps are skipped."""

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

from firstnan.faults import Thresholds
from firstnan.loop import Guard
from firstnan.parts import TooFewHealthyParts
from tests.bits import same
from tests.faults.matrix import row

NAN = float("nan")
SGD = functools.partial(torch.optim.SGD, lr=0.1)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
OPTIMIZERS = {
    "adamw": ADAMW,
    "adamw_loop": functools.partial(ADAMW, foreach=False),
    "adamw_foreach": functools.partial(ADAMW, foreach=True),
    "adamw_fused": functools.partial(ADAMW, fused=True),
    "amsgrad": functools.partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "sgd": functools.partial(SGD, momentum=0.9, weight_decay=0.1),
    "sgd_fused": functools.partial(SGD, momentum=0.9, fused=True),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.01, momentum=0.9),
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
    state = []
    for p in parameters:
        state.append(p.detach().clone())
        state += [copy.deepcopy(v) for _, v in sorted(optimizer.state.get(p, {}).items())]
    return state


def all_bits(guard):
    return bits(guard.model.parameters(), guard.optimizer)


def linear(optimizer=SGD, dtype=torch.float32, **options) -> Any:
    """A guard around a linear layer that begins the same each time."""
    torch.manual_seed(0)
    model = nn.Linear(6, 2, dtype=dtype)
    return Guard(model, optimizer(model.parameters()), **options)


def heads(optimizer=SGD, trunk=False, parts=Heads.parts, **options) -> Any:
    torch.manual_seed(0)
    model = Heads(trunk)
    return Guard(model, optimizer(model.parameters()), parts(model), **options)


def step(guard, number, change=lambda loss: loss, spoil=1.0, **options):
    """A guarded step of a `linear` model or of `heads`; `spoil` multiplies the inputs."""
    x, y = batch(number)
    guard.optimizer.zero_grad()
    if isinstance(guard.model, Heads):
        features, losses = guard.model.losses(x * spoil, y)
        options |= {"through": features} if options.pop("through", False) else {}
        guard.backward(change(losses), **options)
    else:
        guard.backward(change(mse(guard.model(x * spoil), y)), **options)
    return guard.step()


def events_of(guard, *fields):
    return [tuple(getattr(e, name) for name in fields) for e in guard.events.events]


# -- one part -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_healthy_loop_is_the_plain_loop_to_the_last_bit(name):
    guard, plain = (linear(OPTIMIZERS[name], clip_grad=0.5) for _ in range(2))
    for number in range(10):
        step(guard, number)
        x, y = batch(number)
        plain.optimizer.zero_grad()
        mse(plain.model(x), y).backward()
        nn.utils.clip_grad_norm_(plain.model.parameters(), 0.5)
        plain.optimizer.step()
    assert same(all_bits(guard), all_bits(plain))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bad", ["nan input", "inf input", "nan gradient", "overflow"])
def test_a_bad_step_changes_no_bit_and_training_continues(name, bad):
    guard = linear(OPTIMIZERS[name])
    weight = guard.model.weight

    def change(loss):
        if bad == "nan gradient":  # sqrt has an infinite slope at 0: the loss is finite
            return loss + (weight * 0).square().sum().sqrt()
        return loss * 1e25 if bad == "overflow" else loss

    for number in range(3):
        step(guard, number)
    before = all_bits(guard)
    step(guard, 3, change, {"nan input": NAN, "inf input": math.inf}.get(bad, 1.0))
    assert same(before, all_bits(guard))
    stage = "loss" if bad in ("nan input", "inf input") else "gradient"
    assert events_of(guard, "part", "step", "stage") == [("model", 4, stage)]
    step(guard, 4)
    assert not same(before, all_bits(guard)) and len(guard.events) == 1
    assert all(p.isfinite().all() for p in guard.model.parameters())


def test_spike_is_skipped_and_dead_is_reported():
    guard = linear(functools.partial(SGD, lr=1e-3), thresholds=Thresholds(dead_after=5))
    for number in range(40):
        factor = 1e4 if number == 30 else 0 if number > 33 else 1
        before = guard.model.weight.detach().clone()
        step(guard, number, lambda loss, factor=factor: loss * factor)
        assert torch.equal(before, guard.model.weight) == (number == 30 or number > 33)
    seen = events_of(guard, "step", "stage", "action")
    assert seen == [(31, "spike", "skipped"), (39, "dead", "reported")]


def test_a_saved_state_is_changed_by_no_later_step():
    first = nn.Linear(6, 6)
    model = nn.Sequential(first, nn.BatchNorm1d(6), nn.Linear(6, 2))
    guard = Guard(model, ADAMW(model.parameters()), snapshot_every=1)

    def terms(spoil):
        return lambda loss: {"mse": loss * spoil, "one": first.bias.sum()}

    for number in range(3):
        step(guard, number, terms(1.0))
    saved = guard.state_dict()
    before = copy.deepcopy(saved)
    for number in range(3, 6):
        step(guard, number, terms(NAN if number == 4 else 1.0))
    assert same(saved, before) and not same(guard.state_dict(), before)
    other = Guard(model, ADAMW(model.parameters()))
    other.load_state_dict(guard.state_dict())  # with what is remembered of terms
    assert same(guard.state_dict(), other.state_dict()) and int(other.terms["mse"].skipped) == 1


def test_accumulated_batches_are_one_step():
    guard, plain = linear(ADAMW), linear(ADAMW)
    for number in range(5):
        guard.optimizer.zero_grad()
        plain.optimizer.zero_grad()
        for micro in range(3):
            x, y = batch(3 * number + micro)
            mse(plain.model(x), y).div(3).backward()
            sick = number == 3 and micro == 1
            guard.backward(mse(guard.model(x * NAN if sick else x), y) / 3)
        guard.step()
        if number != 3:
            plain.optimizer.step()
    assert same(all_bits(guard), all_bits(plain))
    assert events_of(guard, "step", "stage") == [(4, "loss")]


@pytest.mark.parametrize("scaler", [False, True])
@pytest.mark.parametrize("how", ["zero_grad", "discard"])
def test_an_abandoned_step_leaves_nothing_behind(scaler, how):
    ends = []
    for spoils in ((), (NAN, 1.0)):
        guard = linear(scaler=scaler)
        for spoil in spoils:
            x, y = batch(0)
            guard.backward(mse(guard.model(x), y) * spoil)
            guard.discard() if how == "discard" else guard.optimizer.zero_grad()
        for micro in (1, 2):
            x, y = batch(micro)
            guard.backward(mse(guard.model(x), y))
        assert guard.step() == {"model"}
        ends.append(all_bits(guard))
    assert same(*ends)


def test_a_backward_that_failed_halfway_leaves_nothing_behind():
    ends = []
    for fails in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
        guard = Guard(model, SGD(model.parameters()))
        x, y = batch(0)
        if fails:
            features = model[0](x)
            features.register_hook(lambda g: 1 / 0)  # as if memory ran out: the head is through
            with pytest.raises(ZeroDivisionError):
                guard.backward(mse(model[1](features), y))
        step(guard, 0)
        ends.append(all_bits(guard))
    assert same(*ends)


def test_a_skipped_batch_is_not_an_abandoned_one():
    guard = heads(trunk=True)
    for discards in (False, True):
        for factor in (NAN, 1):  # nothing is left of the first, so there is no gradient
            _, losses = guard.model.losses(*batch(0))
            guard.backward({"head 0": losses["head 0"] * factor})
            if discards and factor != 1:
                guard.discard()
        assert guard.step() == ({"head 0", "shared"} if discards else {"shared"})


def test_the_schedule_advances_through_bad_steps_without_a_warning():
    guard = linear()
    schedule = torch.optim.lr_scheduler.LambdaLR(guard.optimizer, lambda number: 0.5**number)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(3):  # sick from the first step on: optimizer.step() finds no gradient
            step(guard, number, spoil=NAN)
            schedule.step()
    assert schedule.get_last_lr() == [0.0125] and not guard.optimizer.state


def test_a_sparse_gradient_is_judged():
    model = nn.EmbeddingBag(10, 4, sparse=True, mode="sum")
    guard = Guard(model, torch.optim.SparseAdam(list(model.parameters())), clip_grad=1.0)
    for bad in (False, True):
        before = model.weight.detach().clone()
        guard.optimizer.zero_grad()
        guard.backward((model(torch.tensor([[1, 2, 1]])) * (NAN if bad else 3.0)).sum())
        guard.step()
        assert torch.equal(before, model.weight) == bad


# -- parts that own their weights -----------------------------------------------------------------


def run_heads(name, sick_at=None, by_hand=False):
    """Ten steps of three heads; head 1's loss or gradient is bad, or left out by hand."""
    guard = heads(OPTIMIZERS[name], clip_grad=1.0)
    for number in range(10):
        bad = (sick_at or {}).get(number)

        def change(losses, bad=bad):
            if bad and by_hand:
                del losses["head 1"]
            elif bad == "loss":
                losses["head 1"] = losses["head 1"] * NAN
            elif bad == "gradient":
                losses["head 1"].register_hook(lambda g: g * NAN)
            return losses

        assert step(guard, number, change) == {f"head {i}" for i in range(3) if not bad or i != 1}
    return [bits(head.parameters(), guard.optimizer) for head in guard.model.heads], guard


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_faulty_part_is_left_out_as_if_by_hand(name):
    sick = {2: "loss", 3: "gradient", 7: "gradient"}
    ends, guard = run_heads(name, sick)
    by_hand, quiet = run_heads(name, sick, by_hand=True)
    clean, _ = run_heads(name)
    assert all(same(a, b) for a, b in zip(ends, by_hand, strict=True))
    assert same(ends[0], clean[0]) and same(ends[2], clean[2]) and not same(ends[1], clean[1])
    seen = events_of(guard, "step", "part", "stage")
    assert seen == [(number + 1, "head 1", stage) for number, stage in sick.items()]
    assert not quiet.events.events and quiet.health.streak.tolist() == [0, 0, 0]


@pytest.mark.parametrize("how", ["loss", "gradient"])
def test_a_shared_trunk_never_sees_the_faulty_head(how):
    """With `through`, the head is cut out before its gradient reaches the trunk."""
    ends = []
    for by_hand in (False, True):
        guard = heads(ADAMW, trunk=True)
        for number in range(6):
            features, losses = guard.model.losses(*batch(number))
            if number == 3:
                if by_hand:
                    del losses["head 1"]
                elif how == "loss":
                    losses["head 1"] = losses["head 1"] + math.inf
                else:
                    losses["head 1"] = losses["head 1"] + (features * 0).norm(dim=0).sum().sqrt()
            guard.optimizer.zero_grad()
            guard.backward(losses, through=features)
            guard.step()
        ends.append(all_bits(guard))
        assert guard.updates.tolist() == [6, 5, 6, 6]
        seen = events_of(guard, "step", "part", "stage")
        assert seen == ([] if by_hand else [(4, "head 1", how)])
    assert same(*ends)


def test_a_retired_head_teaches_the_trunk_nothing():
    retired, by_hand = heads(trunk=True), heads(trunk=True)
    retired.health.retired[1] = True
    step(retired, 0)
    step(by_hand, 0, lambda losses: {n: x for n, x in losses.items() if n != "head 1"})
    assert same(all_bits(retired), all_bits(by_hand))


def test_a_part_that_is_absent_is_not_dead():
    guard = heads(thresholds=Thresholds(dead_after=3))
    for number in range(5):
        losses = lambda all: {"head 0": all["head 0"], "head 2": all["head 2"] * 0}  # noqa: E731
        assert step(guard, number, losses) == {"head 0", "head 2"}
    assert events_of(guard, "part", "stage") == [("head 2", "dead")]


def test_a_bad_trunk_restores_only_its_own_statistics():
    trunk, head = nn.BatchNorm1d(6), nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2))
    model = nn.Sequential(trunk, head)
    guard = Guard(model, SGD(model.parameters()), {"head": head})
    x, y = batch(0)
    guard.backward({"head": mse(model(x), y)})
    trunk.weight.grad[0] = NAN
    assert guard.step() == {"head"}
    tracked = [b for name, b in model.named_buffers() if "num_batches" in name]
    assert tracked == [0, 1]


def test_one_loss_for_several_parts_has_one_scale():
    parts = lambda model: {"trunk": model.trunk, "heads": model.heads}  # noqa: E731
    guard = heads(trunk=True, parts=parts, scaler=True)
    guard.scale[:] = torch.tensor([64.0, 1024.0])
    total = lambda losses: torch.stack([*losses.values()]).sum()  # noqa: E731
    weights = [*guard.model.parameters()]
    gradients = torch.autograd.grad(total(guard.model.losses(*batch(0))[1]), weights)
    expected = [p - 0.1 * g for p, g in zip(weights, gradients, strict=True)]
    step(guard, 0, total)
    torch.testing.assert_close(weights, expected)
    step(guard, 1, total, spoil=NAN)
    assert events_of(guard, "part") == [("trunk",), ("heads",)]
    guard.model.heads[1].weight.register_hook(lambda g: g * math.inf)
    step(guard, 2, total)
    assert guard.scale.tolist() == [64, 32]  # of the scale in use


# -- loss terms that share weights ----------------------------------------------------------------


def run_terms(sick, by_hand=False):
    torch.manual_seed(0)
    first = nn.Linear(6, 8)
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(8, 2))
    optimizer = ADAMW(model.parameters())
    guard = Guard(model, optimizer, clip_grad=1.0)
    for number in range(8):
        x, y = batch(number)
        logits = model(x)
        kd = (logits.softmax(-1) - 0.5).square().mean()
        losses = {"ce": mse(logits, y), "kd": kd}
        # A regularizer reaches the weights past the logits; it must not be lost.
        losses["ce"] = losses["ce"] + 0.01 * first.weight.square().sum()
        if number in sick:
            if sick[number] == "loss":
                losses["kd"] = kd * NAN
            elif sick[number] == "gradient":
                losses["kd"] = kd + (logits * 0).norm(dim=0).sum().sqrt()
            else:
                losses = {n: loss * NAN for n, loss in losses.items()}
        optimizer.zero_grad()
        if not by_hand:
            guard.backward(losses, through=logits)
            guard.step()
        elif sick.get(number) != "both":
            kept = losses["ce"] if number in sick else losses["ce"] + losses["kd"]
            kept.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return guard


def test_a_bad_term_is_left_out_and_the_others_train():
    sick = {2: "loss", 4: "gradient", 5: "both"}
    guard = run_terms(sick)
    assert same(all_bits(guard), all_bits(run_terms(sick, by_hand=True)))
    assert events_of(guard, "step", "part", "stage", "action") == [
        (3, "kd", "loss", "cut out"),
        (4, "kd", "loss", "used again"),
        (5, "kd", "gradient", "cut out"),
        (6, "ce", "loss", "cut out"),
        (6, "kd", "loss", "cut out"),
        (6, "model", "loss", "skipped"),
        (7, "ce", "loss", "used again"),
        (7, "kd", "loss", "used again"),
    ]
    assert guard.updates.tolist() == [7]


@pytest.mark.parametrize("stop_after, fresh", [(3, False), (None, True)])
def test_a_run_that_stays_faulty_stops_at_once_or_goes_back_with_a_fresh_optimizer(
    stop_after, fresh
):
    thresholds = Thresholds(restore_after=4, stop_after=stop_after)
    guard = linear(ADAMW, thresholds=thresholds, snapshot_every=1, fresh_optimizer=fresh)
    for number in range(2):
        before = [p.detach().clone() for p in guard.model.parameters()]
        step(guard, number)
    for number in range(2, 5):
        if stop_after and number == 4:
            with pytest.raises(TooFewHealthyParts, match="in the last 3"):
                step(guard, number, spoil=NAN)
        else:
            step(guard, number, spoil=NAN)
    if fresh:
        step(guard, 5, spoil=NAN)
        assert guard.events.events[-1].action.endswith("with a fresh optimizer")
        assert not guard.optimizer.state
    assert same([p.detach() for p in guard.model.parameters()], before)


def test_terms_may_come_from_different_tensors():
    """As a router's loss does, which was not computed from the logits."""
    trunk, head, router = nn.Linear(6, 6), nn.Linear(6, 2), nn.Linear(6, 3)
    model = nn.ModuleList([trunk, head, router])
    guard = Guard(model, SGD(model.parameters()))
    x, y = batch(0)
    logits, routes = head(trunk(x)), router(trunk(x))
    before = [p.detach().clone() for p in model.parameters()]
    guard.backward({"ce": mse(logits, y), "router": routes.sum() * NAN}, through=[logits, routes])
    guard.step()
    moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert moved == [True, True, True, True, False, False]


def test_a_term_that_stays_bad_names_the_settings_to_change():
    guard = linear()
    for number in range(25):
        step(guard, number, lambda loss: {"ce": loss, "kd": loss * NAN})
    loud = [e.step for e in guard.events.events if "in a row" in e.action]
    assert loud == [10, 20] and guard.health.streak.tolist() == [0]
    assert int(guard.terms["kd"].streak) == 25 and guard.updates.tolist() == [25]


def test_terms_that_are_finite_alone_but_not_together_cost_the_step():
    guard = linear()
    before = all_bits(guard)
    assert step(guard, 0, lambda loss: {"ce": loss + 3e38, "kd": loss + 3e38}) == set()
    assert same(before, all_bits(guard))
    assert events_of(guard, "part", "stage") == [("model", "loss")]
    assert guard.diagnosis().startswith("model, 1 steps: the loss is not finite (1 times).")


def test_a_term_may_be_a_constant():
    """A term that does not apply to this batch is 0 without a gradient; alone it is a mistake."""
    guard = linear()
    with_zero = lambda loss: {"ce": loss, "kd": torch.zeros(())}  # noqa: E731
    assert step(guard, 0, with_zero) == {"model"}
    before = all_bits(guard)
    assert step(guard, 1, with_zero, spoil=NAN) == set() and same(before, all_bits(guard))
    with pytest.raises(RuntimeError, match="does not require grad"):
        guard.backward({"kd": torch.zeros(())})


# -- float16 --------------------------------------------------------------------------------------


def test_a_left_out_term_is_not_an_overflow():
    guard = linear(scaler=True)
    logits = guard.model(batch(0)[0])
    guard.backward({"kd": (logits * 0).norm(dim=0).sum().sqrt()}, through=logits)
    assert guard.step() == set() and guard.scale.tolist() == [1024]


@pytest.mark.parametrize("shared", [False, True])
def test_scaled_gradients_are_the_unscaled_ones(shared):
    """Powers of two: equal to the last bit, also where parts of unequal scale share weights."""
    plain, scaled = (heads(ADAMW, trunk=shared, scaler=scaler) for scaler in (False, True))
    scaled.scale[:3] = torch.tensor([2.0, 512.0, 65536.0])
    for number in range(5):
        for guard in (plain, scaled):
            step(guard, number, through=shared)
    assert same(all_bits(plain), all_bits(scaled))


# -- escalation -----------------------------------------------------------------------------------


def test_a_shared_trunk_is_not_a_part_that_is_left():
    guard = heads(ADAMW, trunk=True)
    with pytest.raises(TooFewHealthyParts):
        for number in range(60):
            spoil = NAN if number > 5 else 1.0
            sick = lambda losses, spoil=spoil: {n: x * spoil for n, x in losses.items()}  # noqa: E731
            step(guard, number, sick, through=True)
    assert all(p.isfinite().all() for p in guard.model.parameters())
    with pytest.raises(ValueError, match="min_parts is 4; expected at most 3"):
        heads(trunk=True, thresholds=Thresholds(min_parts=4))


def test_frozen_weights_are_of_no_part_and_cannot_be_trained_later():
    model = Heads(trunk=True)
    model.trunk.requires_grad_(False)
    guard = Guard(model, SGD(model.parameters()), model.parts())
    assert [*guard.state_dict()["parts"]] == ["head 0", "head 1", "head 2"]
    model.trunk.requires_grad_()
    with pytest.raises(ValueError, match="make a new Guard"):
        step(guard, 0)


def test_events_that_cannot_be_written_are_kept_with_one_warning(tmp_path, caplog):
    guard = linear(events=tmp_path)
    for number in range(3):
        step(guard, number, spoil=NAN if number < 2 else 1.0)
    assert events_of(guard, "step") == [(1,), (2,)]
    (message,) = caplog.messages
    assert "kept in memory only" in message and str(tmp_path) in message


def test_one_part_is_restored_to_its_last_good_state_then_the_run_stops(tmp_path):
    guard = linear(ADAMW, snapshot_every=5, events=tmp_path / "events.jsonl")
    good = None
    with pytest.raises(TooFewHealthyParts) as stop:
        for number in range(50):
            if number == 5:
                good = all_bits(guard)
            if number == 8:
                with torch.no_grad():
                    guard.model.weight[0, 0] = NAN  # from outside: no step of the guard did this
            if number == 17:
                assert guard.model.weight.isnan().any()
            if number == 18:
                assert same(good, all_bits(guard))
            step(guard, number, spoil=NAN if number >= 18 else 1.0)
    assert number == 27 and same(good, all_bits(guard))
    rows = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert len(rows) == 23 and (rows[-1]["part"], rows[-1]["action"]) == ("run", "stopped")
    assert rows[10]["action"] == "restored to its state before step 6" == rows[-2]["action"]
    assert rows[10]["reason"] == "10 bad steps in a row"
    message = str(stop.value)
    assert "the loss is not finite (20 times)" in message and "learning rate" in message
    assert "restored to its state before step 6" in message


def ladder(steps=60, **options):
    """Head 1 is NaN on every step from 5 on; the rungs, and what is left."""
    guard = heads(ADAMW, **options)
    for number in range(steps):
        spoil = NAN if number >= 5 else 1.0
        sick = lambda losses, spoil=spoil: losses | {"head 1": losses["head 1"] * spoil}  # noqa: E731
        step(guard, number, sick)
    assert all(e.part == "head 1" for e in guard.events.events)
    return [(e.step, e.action) for e in guard.events.events if e.stage == "escalation"], guard


def test_a_part_that_stays_faulty_climbs_the_ladder_alone():
    rungs, guard = ladder()
    assert rungs[0] == (15, "restored to its state before step 1")
    assert rungs[1] == (25, "re-initialized")
    assert rungs[2][0] == 35 and rungs[2][1].startswith("retired") and len(rungs) == 3
    healthy = heads(ADAMW)
    for number in range(60):
        step(healthy, number)
    for i in (0, 2):
        ends = [bits(g.model.heads[i].parameters(), g.optimizer) for g in (guard, healthy)]
        assert same(*ends)
    assert not [e for e in guard.events.events if e.step > 35]
    assert guard.health.retired.tolist() == [False, True, False]
    drawn = []
    for run in (ladder, heads):
        run()
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)  # re-initializing draws nothing from the loop's random numbers


def test_a_part_starts_again_with_new_weights_and_no_memory():
    _, guard = ladder(25)
    pairs = zip(guard.model.heads[1].parameters(), heads().model.heads[1].parameters(), strict=True)
    for p, old in pairs:
        assert p not in guard.optimizer.state and not torch.equal(p, old) and p.isfinite().all()
    assert guard.state_dict()["parts"]["head 1"]["good"] is None


def test_a_part_without_reset_is_retired_at_once():
    rungs, _ = ladder(parts=lambda m: {k: v.parameters() for k, v in m.parts().items()})
    assert [number for number, _ in rungs] == [15, 25] and rungs[1][1].startswith("retired")


@pytest.mark.parametrize("rate", [10.0, 1e38])
def test_an_absurd_learning_rate_ends_with_finite_weights(rate):
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    guard = Guard(model, SGD(model.parameters(), lr=rate, momentum=0.9), snapshot_every=1)
    with pytest.raises(TooFewHealthyParts, match="lower the learning rate"):
        for number in range(200):
            step(guard, number)
    assert all(torch.isfinite(t).all() for t in all_bits(guard) if t is not None)


def test_a_cache_in_a_buffer_may_grow():
    class Cached(nn.Linear):
        def forward(self, x):
            size = len(getattr(self, "cache", ())) + 1
            self.register_buffer("cache", torch.zeros(size), persistent=False)
            return super().forward(x)

    model = Cached(6, 2)
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    guard = Guard(model, SGD(model.parameters()))
    assert step(guard, 0, spoil=NAN) == set() and model.cache.shape == (3,)


def test_a_snapshot_holds_finite_values_only():
    model = nn.Embedding(4, 2)
    guard = Guard(model, ADAMW(model.parameters()), snapshot_every=1)
    for number in range(3):
        if number == 2:
            with torch.no_grad():
                model.weight[3] = NAN  # a row that is in no batch: loss and gradient are finite
        guard.backward(model(torch.tensor([0, 1])).square().sum())
        guard.step()
    assert guard.state_dict()["parts"]["model"]["good"]["step"] == 1


@pytest.mark.parametrize("stop", [7, 12])
@pytest.mark.parametrize("scaler", [False, True])
def test_a_resumed_guard_equals_an_uninterrupted_one(tmp_path, scaler, stop):
    build = functools.partial(linear, ADAMW, snapshot_every=5, clip_grad=1.0, scaler=scaler)

    def run(guard, steps):
        for number in steps:
            step(guard, number, spoil=NAN if 8 <= number < 20 else 1.0)

    whole, first, second = build(), build(), build()
    run(whole, range(25))
    run(first, range(stop))
    states = [x.state_dict() for x in (first.model, first.optimizer, first)]
    torch.save(states, tmp_path / "state.pt")
    states = torch.load(tmp_path / "state.pt", weights_only=True)
    for part, state in zip((second.model, second.optimizer, second), states, strict=True):
        part.load_state_dict(state)
    run(second, range(stop, 25))
    assert whole.health.restored.all() and same(all_bits(whole), all_bits(second))
    assert same(whole.state_dict(), second.state_dict())


# -- numbers at the edge --------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    value=st.floats(width=32) | st.sampled_from([NAN, math.inf, -math.inf, 1e20, 3e38, 1e-40]),
    where=st.integers(0, 11),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_weights_stay_finite_for_any_gradient_and_other_parts_exact(value, where, dtype):
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(5, 2).to(dtype) for _ in range(2))
    guard = Guard(model, ADAMW(model.parameters()), {"a": model[0], "b": model[1]}, clip_grad=1.0)
    ones = torch.ones(3, 5, dtype=dtype)
    for poisoned in (False, True, False):
        guard.optimizer.zero_grad()
        guard.backward({"a": model[0](ones).sum(), "b": model[1](ones).sum()})
        if poisoned:
            flat = torch.cat([p.grad.flatten() for p in model[0].parameters()])
            flat[where] = value
            rows = flat.split([10, 2])
            for p, part in zip(model[0].parameters(), rows, strict=True):
                p.grad = part.view_as(p).clone()
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
        assert events_of(guard, "stage") == [("spike",)]


def _huge(optimizer, factor=1e200, losses=lambda loss: loss, **options):
    guard = linear(optimizer, torch.float64, **options)
    x, y = (t.double() for t in batch(0))
    guard.backward(losses(mse(guard.model(x), y) * factor))
    return guard, guard.step()


_tiny_sgd = functools.partial(SGD, lr=1e-210)


@row(163)
@pytest.mark.parametrize("options", [{}, {"clip_grad": 1.0}, {"scaler": True}], ids=str)
@pytest.mark.parametrize("losses", [lambda x: x, lambda x: {"a": x, "b": x / 2}, lambda x: -x])
@pytest.mark.parametrize("factor", [1e39, 1e160, 1e200, 1e300])
def test_a_loss_that_is_finite_in_float64_is_finite(factor, losses, options):
    guard, updated = _huge(_tiny_sgd, factor, losses, **options)
    assert updated == {"model"} and not guard.events.events
    assert guard.grad_norm.isfinite().all()
    assert all(p.isfinite().all() for p in guard.model.parameters())


@row(163)
def test_a_gradient_that_an_optimizer_could_not_square_is_large_and_clipped_it_is_well():
    guard, updated = _huge(torch.optim.AdamW)
    assert not updated and events_of(guard, "stage") == [("large",)]
    assert not guard.optimizer.state[guard.model.weight]  # no second moment of inf for ever
    guard, updated = _huge(torch.optim.AdamW, clip_grad=1.0)
    assert updated and guard.optimizer.state[guard.model.weight]["exp_avg_sq"].isfinite().all()
    for bad in (math.nan, math.inf):
        assert events_of(_huge(_tiny_sgd, bad)[0], "stage") == [("loss",)]


# -- what is refused ------------------------------------------------------------------------------


def test_arguments_that_do_not_fit_are_named():
    model = Heads()
    optimizer = SGD(model.heads.parameters())
    other = copy.deepcopy(model)
    lbfgs = torch.optim.LBFGS(model.heads.parameters())
    for arguments, options, message in [
        ((model, optimizer), {"clip_grad": 0}, "clip_grad is 0"),
        ((model, optimizer), {"clip_grad": NAN}, "clip_grad is nan"),
        ((model, optimizer), {"snapshot_every": -1}, "snapshot_every is -1"),
        ((model, optimizer), {"thresholds": Thresholds(min_parts=2)}, "expected at most 1"),
        ((model, optimizer, {}), {}, "expected one or more"),
        ((model, optimizer, {"shared": model.heads}), {}, "none of them 'shared'"),
        ((model, optimizer, {"a": nn.ReLU()}), {}, "'a' has no trainable parameter"),
        ((model, optimizer, {"a": nn.Linear(2, 2)}), {}, "not in the optimizer"),
        ((model, optimizer, {"a": model.heads[0], "b": model.heads}), {}, "'b' and 'a' share"),
        (
            (model, optimizer, {"a": "weight"}),
            {},
            "part 'a' is 'weight'; expected a module or a list",
        ),
        ((model, optimizer, {"a": None}), {}, "part 'a' is None; expected a module or a list"),
        ((model, lbfgs), {}, r"LBFGS.step needs a closure.*can be called without a closure"),
        ((other, optimizer), {}, "holds none of the 6 trainable parameters"),
    ]:
        with pytest.raises(ValueError, match=message):
            Guard(*arguments, **options)

    guard = Guard(model, optimizer, model.parts())
    features, losses = model.losses(*batch(0))
    features.requires_grad_()
    for given_losses, through, message in [
        ({"head 9": losses["head 0"]}, None, "the loss 'head 9' belongs to no part"),
        ({"head 0": torch.ones(2)}, None, "shape"),
        ({}, None, "dictionary of losses is empty"),
        (losses["head 0"], features, "`losses` is a single tensor"),
        (losses, torch.ones(2, requires_grad=True), "not computed from `through`"),
    ]:
        with pytest.raises(ValueError, match=message):
            guard.backward(given_losses, through)
    with pytest.raises(ValueError, match=r"shape \(1,\); expected a single number"):
        Guard(model, optimizer).backward(torch.ones(1))
    for not_a_loss, message in [
        (0.5, "the loss is 0.5"),
        ({"head 0": 0.5}, "loss 'head 0' is 0.5"),
    ]:
        with pytest.raises(TypeError, match=message):
            guard.backward(not_a_loss)
    with pytest.raises(ValueError, match="this guard has model"):
        Guard(model, optimizer).load_state_dict(guard.state_dict())


def test_a_part_may_be_one_parameter_and_name_it_twice():
    model = nn.Linear(6, 2)
    guard = Guard(model, SGD(model.parameters()), {"w": model.weight, "b": [model.bias] * 2})
    x, y = batch(0)
    guard.backward(mse(model(x), y))
    assert guard.step() == {"w", "b"}


def test_a_guard_is_neither_copied_nor_pickled():
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"neither copied nor pickled: take its state_dict\(\)"):
            attempt(linear())


@pytest.mark.parametrize("missing", ["health", "parts, steps"])
def test_a_state_that_lacks_something_is_refused_before_anything_is_loaded(missing):
    guard = linear()
    state = {k: v for k, v in guard.state_dict().items() if k not in missing.split(", ")}
    with pytest.raises(ValueError, match=f"the state lacks {missing};"):
        guard.load_state_dict({**state, "steps": 3} if missing == "health" else state)
    assert guard.steps == 0


@row(164)
def test_a_scripted_model_is_guarded_or_refused_in_one_line():
    plain = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    with_buffers = nn.Sequential(nn.Linear(6, 2), nn.BatchNorm1d(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates it
        scripted: Any = torch.jit.script(plain)
        refused: Any = torch.jit.script(with_buffers)
        traced: Any = torch.jit.trace(with_buffers, batch(0)[0])
    for model in (scripted, traced):
        guard = Guard(model, SGD(model.parameters()))
        for spoil in (1.0, math.nan, 1.0):
            before = copy.deepcopy([*model.state_dict().values()])
            assert step(guard, 0, spoil=spoil) == ({"model"} if spoil == 1 else set())
            after = model.state_dict().values()
            kept = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            assert kept == (spoil != 1)
    with pytest.raises(ValueError, match=r"1\.running_mean|1\.num_batches") as caught:
        Guard(refused, SGD(refused.parameters()))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_complex_weights_are_guarded_clipped_and_restored(dtype, kind):
    torch.manual_seed(0)
    xs = torch.randn(4, 3, 5, dtype=dtype)
    plain = nn.Linear(5, 2, dtype=dtype)
    model = copy.deepcopy(plain)
    optimizers = [kind(m.parameters(), lr=0.01) for m in (plain, model)]
    guard = Guard(model, optimizers[1], clip_grad=0.1, locate=True, snapshot_every=1)
    for x in xs:
        optimizers[0].zero_grad()
        plain(x).abs().square().mean().backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizers[0].step()
        optimizers[1].zero_grad()
        guard.backward(model(x).abs().square().mean())
        guard.step()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    optimizers[1].zero_grad()
    guard.backward(model(xs[0] * complex(0, NAN)).abs().square().mean())
    assert guard.step() == set()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert "aten.addmm" in guard.events.events[0].reason


def test_a_step_of_the_optimizer_that_no_guard_has_judged_is_refused():
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters())
    guard = Guard(model, optimizer)
    guard.backward(model(torch.full((1, 2), NAN)).sum())
    with pytest.raises(ValueError, match=r"call guard.step\(\) in place of optimizer.step\(\)"):
        optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())
    assert guard.step() == set()
    guard.attach()
    guard.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    guard.detach()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()  # of a loop that does without the guard


def test_parameters_in_place_of_a_model_are_refused_with_the_way_out():
    model = nn.Linear(2, 1)
    with pytest.raises(TypeError, match=r"model is a generator; .* nn.ParameterList"):
        Guard(model.parameters(), SGD(model.parameters()))
    weights = nn.ParameterList(model.parameters())
    guard = Guard(weights, SGD(weights.parameters()))
    guard.backward(model(torch.ones(1, 2)).sum())
    assert guard.step() == {"model"}
