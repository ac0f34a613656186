"""Test rows 28 to 38: backward pass, optimizer, escalation."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from firstnan.faults import Thresholds
from firstnan.parts import TooFewHealthyParts
from ssl_kd.core.files import load_tensors
from ssl_kd.vision import pipeline
from ssl_kd.vision.report import write_report
from ssl_kd.vision.run import run
from ssl_kd.vision.train import step as guarded
from ssl_kd.vision.train.heads import TEMIHead
from tests.bits import same
from tests.faults.inject import (
    CLUSTERS,
    CPU,
    DIM,
    OTHERS,
    SICK,
    all_finite,
    assignments,
    events,
    healthy_alike,
    in_forward,
    metrics,
    newest_checkpoint,
    one_line,
    scale_gradient,
    set_gradient,
    set_logit,
    stopped,
    trained,
)
from tests.faults.matrix import row

HEAD = f"head {SICK}"
NEVER = Thresholds(restore_after=10**6)


@row(29)
@hypothesis_settings(max_examples=10, deadline=None)
@given(exponent=st.floats(0, 38.4), negative=st.booleans(), clip=st.sampled_from([1.0, None]))
def test_a_gradient_of_any_size_is_clipped_or_skipped_for_its_head_alone(exponent, negative, clip):
    value = math.copysign(10**exponent, -1 if negative else 1)
    options = {"steps": 3, "clip_grad": clip, "thresholds": NEVER}
    clean = trained(**options)
    sick = trained(in_forward(set_gradient(value), {1}), **options)
    assert healthy_alike(sick, clean)
    assert all(torch.isfinite(tensor).all() for tensor in sick.owned(SICK).values())
    if sick.of(HEAD):
        assert sick.of(HEAD) in ([(1, "gradient", "skipped")], [(1, "spike", "skipped")])
        assert same(sick.owned(SICK, 2), sick.owned(SICK, 1))
    else:  # clipped or unchanged: AdamW ignores the scale
        moved = sick.owned(SICK, 2)["student"] - sick.owned(SICK, 1)["student"]
        assert 0 < moved.abs().max() < 0.1


@row(29)
@pytest.mark.parametrize("value", [1e20, 1e30, -3e38])
def test_a_gradient_whose_square_overflows_is_detected(value):
    sick = trained(in_forward(set_gradient(value), {1}), steps=3)
    assert sick.of(HEAD) == [(1, "gradient", "skipped")]
    (event,) = sick.events
    assert "too large to square" in event.reason


@row(30)
@pytest.mark.parametrize("before", [None, math.inf])
def test_a_spike_is_skipped_and_does_not_move_the_running_norm(before, monkeypatch):
    """Also test it after an infinite gradient, which would ruin a plain running mean."""

    def strike(trainer, step):
        if before is not None:
            in_forward(set_gradient(before), {30})(trainer, step)
        if step != 30:
            in_forward(scale_gradient(1000.0), {40, 50})(trainer, step)

    # With a nearly constant teacher, norms depend little on the skipped steps.
    monkeypatch.setattr(guarded, "EMA_MOMENTUM", 0.99)
    clean, sick = trained(steps=60), trained(strike, steps=60)
    spikes = [(40, "spike", "skipped"), (50, "spike", "skipped")]
    first = [] if before is None else [(30, "gradient", "skipped")]
    assert sick.of(HEAD) == first + spikes and healthy_alike(sick, clean)
    assert same(sick.owned(SICK, 41), sick.owned(SICK, 40))
    assert sick.health.skipped[SICK] == len(first) + 2 and not sick.health.streak[SICK]
    assert abs(sick.health.level[SICK] - clean.health.level[SICK]) < 0.5  # nats; the spike was 6.9
    assert all(event.value > 0 for event in sick.events if event.stage == "spike")


@row(31)
def test_a_head_without_gradient_is_reported_as_dead_once():
    options = {"steps": 36, "thresholds": Thresholds(dead_after=20)}
    clean = trained(**options)
    dead = trained(in_forward(scale_gradient(0.0), range(10, 35)), **options)
    assert dead.of(HEAD) == [(29, "dead", "reported")] and len(dead.events) == 1
    assert "exactly zero" in dead.events[0].reason and healthy_alike(dead, clean)
    short = trained(in_forward(scale_gradient(0.0), range(10, 29)), **options)
    assert not short.events


@row(16, 28, 32)
@pytest.mark.parametrize("how", ["none", "own"])
@pytest.mark.parametrize(
    "fault",
    [set_logit(math.nan), set_logit(math.inf), set_gradient(math.nan), set_gradient(1e30)],
    ids=["NaN logit", "infinite logit", "NaN gradient", "huge gradient"],
)
def test_a_skipped_head_keeps_every_bit_under_momentum_and_decay(fault, how, monkeypatch):
    monkeypatch.setattr(guarded, "WEIGHT_DECAY", 5.0)
    monkeypatch.setattr(guarded, "EMA_MOMENTUM", 0.5)
    options = {"learning_rate": 0.1, "instance_weight": how}
    sick = trained(in_forward(fault, {3}), **options)
    assert [(event.step, event.action) for event in sick.events] == [(4, "skipped")]
    assert sick.health.skipped.tolist() == [0, 0, 1, 0, 0] and not sick.health.streak.any()
    before, after = sick.owned(SICK, 3), sick.owned(SICK, 4)
    assert same(before, after) and before["exp_avg"].any() and before["exp_avg_sq"].any()
    assert (before["updates"], sick.owned(SICK)["updates"]) == (3, 5)
    assert healthy_alike(sick, trained(**options))
    for step in (2, 4):  # it changes before and after the bad step
        moved = sick.owned(SICK, step + 1) if step < 5 else sick.owned(SICK)
        assert not torch.equal(moved["student"], sick.owned(SICK, step)["student"])


@row(16, 33)
@pytest.mark.parametrize(
    ("fault", "stage"),
    [(set_logit(math.inf), "loss"), (set_gradient(math.nan), "gradient")],
    ids=["loss", "gradient"],
)
@pytest.mark.usefixtures("kept_every_50_steps")
def test_ten_bad_steps_restore_the_head_from_its_last_good_state(fault, stage):
    clean = trained(steps=80)
    sick = trained(in_forward(fault, range(60, 70)), steps=80)
    assert sick.of(HEAD) == [
        *((step, stage, "skipped") for step in range(60, 70)),
        (69, "escalation", "restored to its state before step 51"),
    ]
    assert "10 bad steps in a row" in sick.events[-1].reason
    assert same(sick.owned(SICK, 70), clean.owned(SICK, 50)) and healthy_alike(sick, clean)
    assert not sick.health.streak[SICK] and sick.health.skipped[SICK] == 10
    assert not torch.equal(sick.owned(SICK)["student"], sick.owned(SICK, 70)["student"])


@row(34)
def test_a_head_that_is_always_bad_is_reinitialized_once_then_retired():
    clean = trained(steps=60)
    sick = trained(in_forward(set_gradient(math.nan), range(60)), steps=60)
    assert [(step, done) for step, stage, done in sick.of(HEAD) if stage == "escalation"] == [
        (9, "restored to its state before step 1"),
        (19, "re-initialized"),
        (29, "retired"),
    ]
    assert sick.of(HEAD)[-1][0] == 29  # no event after that
    assert not torch.equal(sick.owned(SICK, 20)["student"], sick.owned(SICK, 19)["student"])
    assert sick.health.retired.tolist() == [False, False, True, False, False]
    assert healthy_alike(sick, clean)
    assert all(torch.isfinite(tensor).all() for tensor in sick.owned(SICK).values())


@pytest.fixture
def strike_runs(monkeypatch):
    """Return a function that injects a fault into the students' forward pass of every run."""
    make = pipeline.make_trainer

    def use(change, start=0, learning=None):
        def struck(*arguments):
            trainer, passes = make(*arguments), iter(range(10**9))
            step = trainer.step

            def with_fault(*views, **more):
                in_forward(change, range(start, 10**9))(trainer, next(passes))
                return step(*views, **more)

            monkeypatch.setattr(trainer, "step", with_fault)
            return trainer

        monkeypatch.setattr(pipeline, "make_trainer", struck if change is not None else make)

    return use


@row(34)
def test_a_retired_head_is_reported_and_does_not_vote(settings, strike_runs):
    strike_runs(set_gradient(math.nan))
    path = run(settings(max_steps=45))
    heads = metrics(path)["heads"]
    assert [head["retired"] for head in heads] == [False, False, True, False]
    assert not heads[SICK]["chosen"] and heads[SICK]["skipped"] == 30
    assert len(assignments(path)) == 64 and all_finite(path)
    actions = [e["action"] for e in events(path) if e["stage"] == "escalation"]
    assert actions[1:] == ["re-initialized", "retired"] and metrics(path)["events"] == 33
    assert "retired" in write_report(path).read_text()


@row(35)
@pytest.mark.usefixtures("kept_every_50_steps")
def test_every_head_bad_stops_with_a_diagnosis_and_a_good_checkpoint(
    settings, strike_runs, train_py
):
    long = {"max_steps": 100, "checkpoint_every": 25}
    good = newest_checkpoint(stopped(settings, "clean", step=50, **long))[1]["tensors"]
    strike_runs(set_logit(math.nan, heads=slice(None)), start=60)
    sick = settings(run_name="a", **long)
    code, error = train_py(sick)
    line = one_line(error)
    path = Path(sick.runs_dir) / "a"
    assert code == 3 and "LEARNING_RATE (now 0.004)" in line and "step 80" in line
    assert "test_nan_issues.py" in line and "the loss is not finite" in line
    assert f"ssl_kd replay {path / 'faults' / 'head-0-step61.safetensors'}" in line
    assert not (path / "metrics.json").exists()
    last = events(path)[-1]
    assert (last["step"], last["part"], last["action"]) == (80, "run", "stopped")
    skipped = [e for e in events(path) if e["action"] == "skipped"]
    assert {(e["step"], e["part"]) for e in skipped} == {
        (step, f"head {head}") for step in range(61, 81) for head in range(4)
    }
    newest = newest_checkpoint(path)[1]
    assert newest["step"] == 80
    for name in ("student", "teacher", "exp_avg", "exp_avg_sq", "updates", "marginal"):
        assert torch.equal(newest["tensors"][name], good[name]), name

    strike_runs(None)  # fix the cause and resume
    code, error = train_py(sick, "--resume")
    assert code == 0 and all_finite(path), error


@row(35)
def test_too_few_heads_left_stop_the_run():
    def all_but_one(logits):
        return set_gradient(math.nan)(logits).index_fill(0, torch.tensor([0, 1, 3]), math.nan)

    with pytest.raises(
        TooFewHealthyParts, match="only 1 of 5 parts are left.*at least 2 are required"
    ):
        trained(in_forward(all_but_one, range(90)), steps=90, thresholds=Thresholds(min_parts=2))


@row(36)
def test_one_heads_overflow_moves_no_other_scale_and_stops_at_the_floor():
    scaled = dataclasses.replace(CPU, scale=True)
    clean = trained(steps=60, precision=scaled, thresholds=NEVER)
    strike = in_forward(set_gradient(math.inf), range(5, 55))
    sick = trained(strike, steps=60, precision=scaled, thresholds=NEVER)
    assert healthy_alike(sick, clean)
    assert sick.trainer.state.scale[OTHERS].tolist() == [16.0] * 4
    scales = [owned["scale"][SICK].item() for owned in sick.before]
    assert scales[5:10] == [16.0, 8.0, 4.0, 2.0, 1.0] and min(scales) == 1.0
    assert sick.owned(SICK)["updates"] == 10  # it trains again as soon as its gradient is finite


@row(37)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_heads_become_fp32_masters_with_one_line(dtype, caplog):
    def half():
        return TEMIHead(DIM, CLUSTERS, 10, 5).to(dtype)

    caplog.set_level("INFO")
    found = trained(make_head=half)
    first = found.before[0]["student"]
    assert first.dtype == torch.float32 and torch.equal(first, first.to(dtype).float())
    assert not torch.equal(found.trainer.state.student, first) and not found.events
    messages = [r.getMessage() for r in caplog.records if "fp32" in r.getMessage()]
    assert (
        len(messages) == 1
        and str(dtype).removeprefix("torch.").replace("float", "fp") in messages[0]
    )


@row(38)
@pytest.mark.parametrize(
    "changes",
    [{}, {"clip_grad": None}],
    ids=["clipped", "not clipped"],
)
def test_a_learning_rate_of_ten_never_leaves_a_number_that_is_not_finite(
    settings, train_py, changes
):
    wild = settings(run_name="a", max_steps=60, learning_rate=10.0, **changes)
    path = Path(wild.runs_dir) / "a"
    code, error = train_py(wild)
    assert code in (0, 3), error
    if code == 3:
        assert "Lower LEARNING_RATE (now 10)" in one_line(error) and events(path)
    else:
        assert all_finite(path)
    checkpoints = list((path / "checkpoint").glob("*.pt"))
    assert checkpoints
    for checkpoint in checkpoints:
        for name, tensor in load_tensors(checkpoint)["tensors"].items():
            assert torch.isfinite(tensor).all(), (checkpoint.name, name)
