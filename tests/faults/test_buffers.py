"""Test row 80: restore shared buffers that a left-out batch has already changed."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from firstnan.loop import Guard
from tests.bits import same
from tests.faults.matrix import row

NAN = math.nan


def two_heads(affine=True, trained=True):
    """Return two heads on a BatchNorm trunk, each with its own batches, and their guard."""
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, affine=affine)).requires_grad_(trained)
    model: Any = nn.ModuleDict({"trunk": trunk, "a": nn.Linear(6, 2), "b": nn.Linear(6, 2)})
    weights = [p for p in model.parameters() if p.requires_grad]
    parts = {"a": model["a"], "b": model["b"]}
    return model, Guard(model, torch.optim.AdamW(weights, lr=0.01), parts)


def step(model, guard, seed, spoil=1.0, names=("a", "b")):
    drawn = torch.Generator().manual_seed(seed)
    batches = {name: torch.randn(8, 6, generator=drawn) for name in ("a", "b")}
    batches["b"] = batches["b"] * spoil
    guard.optimizer.zero_grad()
    losses = {name: model[name](model["trunk"](batches[name])).square().mean() for name in names}
    guard.backward(losses)
    return guard.step()


def seen(guard):
    return [(e.step, e.part, e.stage, e.action) for e in guard.events.events]


@row(80)
@pytest.mark.parametrize("affine, trained", [(True, True), (False, True), (True, False)])
def test_a_trunk_that_parts_share_keeps_its_statistics(affine, trained):
    model, guard = two_heads(affine, trained)
    other, by_hand = two_heads(affine, trained)
    for i in range(4):
        step(model, guard, i, spoil=NAN if i == 2 else 1.0)
        step(other, by_hand, i, names="a" if i == 2 else "ab")
        assert all(b.isfinite().all() for b in model.buffers())
    assert same([*model.parameters()], [*other.parameters()])  # training uses batch statistics
    assert seen(guard) == [(3, "shared", "buffer", "put back"), (3, "b", "loss", "skipped")]
    assert "trunk.1.running_mean, trunk.1.running_var" in guard.events.events[0].reason
    tracked = model["trunk"][1].num_batches_tracked
    assert tracked == 6  # of 4 steps x 2 batches: all buffers of a module are restored together
    assert model.eval()["a"](model["trunk"](torch.ones(2, 6))).isfinite().all()


@row(80)
def test_discriminator_buffers_are_restored_after_a_bad_generator_batch():
    torch.manual_seed(0)
    make = nn.Linear(4, 6)
    judge = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    makers = Guard(make, torch.optim.Adam(make.parameters()))
    judges = Guard(judge, torch.optim.Adam(judge.parameters()))
    for i in range(3):
        noise = torch.randn(8, 4)
        judges.optimizer.zero_grad()
        fake = judge(make(noise).detach()).mean()
        judges.backward(fake - judge(torch.randn(8, 6)).mean())
        assert judges.step() == {"model"}
        if i == 1:
            noise[0] = NAN
        makers.optimizer.zero_grad()
        makers.backward(-judge(make(noise)).mean())
        assert makers.step() == (set() if i == 1 else {"model"})
        assert all(b.isfinite().all() for b in judge.buffers())
    assert seen(makers) == [(2, "model", "loss", "skipped")]
    assert seen(judges) == [(3, "model", "buffer", "put back")]  # between steps 2 and 3
    assert "1.running_mean" in judges.events.events[0].reason
    assert (
        "buffers not finite (1 times)" in judges.diagnosis()
        and "the way to another" in judges.diagnosis()
    )


@row(80)
@pytest.mark.parametrize("how", ["given up", "overflow", "eval of another loop"])
def test_unlisted_buffers_are_restored_with_an_event(how):
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2))
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = [b.clone() for b in model.buffers()]
    x = torch.randn(8, 6)
    if how == "overflow":  # an infinite variance makes the batch 0 and the loss finite
        x = x * 1e25
    else:
        model(x * NAN)
        if how == "given up":
            guard.discard()
    guard.backward(model(x).square().mean())
    assert guard.step() == {"model"}
    assert seen(guard) == [(1, "model", "buffer", "put back")]
    assert same(before, [*model.buffers()]) == (how != "given up")
    assert all(b.isfinite().all() for b in model.buffers())
    guard.backward(model(torch.randn(8, 6)).square().mean())
    assert guard.step() == {"model"} and len(guard.events) == 1
