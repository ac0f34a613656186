"""Test rows 15 to 21: forward pass and loss."""

import math

import numpy as np
import pytest
import torch

from ssl_kd.vision import pipeline
from ssl_kd.vision.report import write_report
from ssl_kd.vision.run import run
from ssl_kd.vision.train import step as guarded
from tests.bits import same
from tests.faults.inject import (
    BATCH,
    OTHERS,
    SICK,
    all_finite,
    assignments,
    healthy_alike,
    make_trainer,
    metrics,
    problem,
    trained,
)
from tests.faults.matrix import row
from tests.marks import slow
from tests.train_heads import train
from tests.vision.own_loss import SINKHORN


@row(15)
@pytest.mark.parametrize("how", [slow("none"), "own"])
@pytest.mark.parametrize("place", ["student", "teacher", "exp_avg", "marginal"])
@pytest.mark.usefixtures("kept_every_50_steps")
def test_a_nan_weight_costs_its_head_ten_steps_and_the_others_nothing(place, how):
    def strike(trainer, step):
        if step == 60:
            getattr(trainer.state, place)[SICK, 1] = math.nan

    clean = trained(steps=75, instance_weight=how)
    sick = trained(strike, steps=75, instance_weight=how)
    skipped = [event for event in sick.of(f"head {SICK}") if event[2] == "skipped"]
    first = 61 if place == "exp_avg" else 60  # step 60 itself makes the weight NaN
    stage = "loss" if place == "student" else "teacher"
    assert skipped == [(step, stage, "skipped") for step in range(first, first + 10)]
    after = (first + 9, "escalation", "restored to its state before step 51")
    assert sick.of(f"head {SICK}")[-1] == after
    assert {event.part for event in sick.events} == {f"head {SICK}"}
    assert healthy_alike(sick, clean)
    assert same(sick.owned(SICK, first + 10), clean.owned(SICK, 50))
    assert not same(sick.owned(SICK), clean.owned(SICK, 50))  # it trains again
    assert all(torch.isfinite(tensor).all() for tensor in sick.trainer.state.owned().values())


@row(15)
def test_where_weights_couple_the_heads_the_others_are_as_if_it_had_been_left_out():
    """Compare with a run that retires the head by hand from that step on."""

    def hit(trainer, step):
        if step == 3:
            trainer.state.teacher[SICK, 1] = math.nan

    def leave_out(trainer, step):
        trainer.state.health.retired[SICK] = step >= 3

    sick, twin = (trained(strike, steps=8, instance_weight="mean") for strike in (hit, leave_out))
    skipped = [step for step, _, action in sick.of(f"head {SICK}") if action == "skipped"]
    assert skipped == [3, 4, 5, 6, 7]
    assert healthy_alike(sick, twin)
    assert not healthy_alike(sick, trained(steps=8, instance_weight="mean"))


@row(15)
def test_a_nan_weight_never_reaches_a_checkpoint():
    """Save in the step right after the fault, before the guard restores the head."""
    x, sampler = problem()
    trainer, events, saved = make_trainer(), [], []

    def strike():
        if len(saved) == 1:
            trainer.state.student[SICK, 1] = math.nan
        return False

    train(
        trainer,
        sampler,
        x.__getitem__,
        20,
        checkpoint_every=10,
        on_events=events.extend,
        on_checkpoint=lambda step: saved.append(
            {name: tensor.clone() for name, tensor in trainer.tensors().items()}
        ),
        should_stop=strike,
    )
    assert len(saved) == 2
    assert all(torch.isfinite(tensor).all() for tensor in saved[1].values())
    assert "restored to its state before step 1" in {event.action for event in events}


@row(17)
@pytest.mark.parametrize("loss", ["temi", "sharpened", SINKHORN])
@pytest.mark.parametrize("how", ["none", "own", "mean"])
def test_a_nan_sample_is_dropped_from_its_batch(how, loss):
    objective = {"instance_weight": how}
    if loss != "temi":
        objective |= {"loss": loss, "teacher_temp": 0.05}
    views = torch.randn(2, BATCH, 6)
    alone, without = make_trainer(**objective), make_trainer(**objective)
    harmed = views.clone()
    harmed[1, 5, 2] = math.nan
    result = alone.step(harmed, 1e-2)
    assert result.bad.nonzero().tolist() == [[1, 5]] and not result.stage.any()
    kept = torch.arange(BATCH) != 5
    expected = without.step(views[:, kept], 1e-2)
    torch.testing.assert_close(result.loss, expected.loss, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(alone.state.marginal, without.state.marginal, rtol=1e-4, atol=1e-6)
    assert all(torch.isfinite(tensor).all() for tensor in alone.state.owned().values())


@row(17)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_sample_is_named_and_no_head_is_blamed(value):
    x, sampler = problem()
    x[7] = value
    found = trained(steps=20, data=x)
    drawn = [step for step in range(20) if 7 in torch.cat(sampler(step))]
    assert len(drawn) > 5 and {event.step - 1 for event in found.events} == set(drawn)
    assert {(event.part, event.stage) for event in found.events} == {("batch", "input")}
    assert all("row 7 " in event.reason for event in found.events)
    assert not found.health.skipped.any() and not found.health.streak[OTHERS].any()
    assert all(torch.isfinite(tensor).all() for tensor in found.trainer.state.owned().values())


@row(20)
def test_an_empty_cluster_is_finite_and_logged_once(caplog, monkeypatch):
    def strike(trainer, step):
        if step in (3, 5):
            trainer.state.marginal[SICK] = torch.tensor([0.5, 0.5, 0.0, 0.0])

    monkeypatch.setattr(guarded, "MARGINAL_MOMENTUM", 0.99)
    clean, empty = trained(), trained(strike)
    assert all(torch.isfinite(tensor).all() for tensor in empty.owned(SICK).values())
    assert healthy_alike(empty, clean) and not empty.health.skipped.any()
    messages = [e.reason for e in empty.events]
    messages += [record.getMessage() for record in caplog.records]
    assert len([line for line in messages if "marginal" in line]) == 1


@row(21)
def test_collapse_of_one_head_is_flagged_for_that_head(settings, monkeypatch):
    make = pipeline.make_trainer

    def collapsed_trainer(*arguments):
        """Make head 2 predict cluster 0 for every input, with zero gradient."""
        trainer = make(*arguments)
        for weights in (trainer.state.student, trainer.state.teacher):
            named = trainer.bank.unflatten(weights)
            for name in ("hidden.weight", "bottleneck.weight"):
                named[name][2] = 0.0
            named["bottleneck.bias"][2] = 1.0
            named["prototypes"][2] = -1.0
            named["prototypes"][2, 0] = 1.0
        return trainer

    monkeypatch.setattr(pipeline, "make_trainer", collapsed_trainer)
    path = run(settings(learning_rate=1e-9, max_steps=5))
    heads = metrics(path)["heads"]
    assert heads[2]["collapsed"] and heads[2]["clusters_used"] == 1
    assert not any(head["collapsed"] for head in heads if head["head"] != 2)
    assert all_finite(path) and write_report(path).read_text().count(">collapsed</span>") == 1


@row(21)
def test_collapse_of_every_head_is_flagged_and_finite(settings, tmp_path):
    np.savez(tmp_path / "one.npz", features=np.tile(np.linspace(0, 1, 8), (40, 1)))
    path = run(settings(dataset=str(tmp_path / "one.npz"), n_clusters=4))
    assert all_finite(path) and len({line["cluster"] for line in assignments(path)}) == 1
    assert all(head["collapsed"] for head in metrics(path)["heads"])
    assert write_report(path).read_text().count(">collapsed</span>") == 4
