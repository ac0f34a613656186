"""Rows 15 to 24: forward pass and loss."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from ssl_kd import losses
from ssl_kd.report import write_report
from ssl_kd.settings import SettingsError
from ssl_kd.vision import pipeline
from ssl_kd.vision import step as guarded
from ssl_kd.vision.run import run
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.train import train
from tests.bits import same
from tests.faults.inject import (
    BATCH,
    OTHERS,
    SICK,
    all_finite,
    assignments,
    healthy_alike,
    in_forward,
    make_trainer,
    metrics,
    one_line,
    problem,
    set_logit,
    trained,
)
from tests.faults.matrix import row
from tests.vision.own_loss import SINKHORN

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
EDGES = (1e-4, 1e4)  # of a temperature


@row(15)
@pytest.mark.parametrize("how", ["none", "own"])
@pytest.mark.parametrize("place", ["student", "teacher", "exp_avg", "marginal"])
@pytest.mark.usefixtures("kept_every_50_steps")
def test_a_nan_weight_costs_its_head_ten_steps_and_the_others_nothing(place, how):
    def strike(trainer, step):
        if step == 60:
            getattr(trainer.state, place)[SICK, 1] = math.nan

    clean = trained(steps=75, instance_weight=how)
    sick = trained(strike, steps=75, instance_weight=how)
    skipped = [event for event in sick.of(f"head {SICK}") if event[2] == "skipped"]
    first = 61 if place == "exp_avg" else 60  # there the step itself makes the weight NaN
    stage = "loss" if place == "student" else "teacher"
    assert skipped == [(step, stage, "skipped") for step in range(first, first + 10)]
    after = (first + 9, "escalation", "restored to its state before step 50")
    assert sick.of(f"head {SICK}")[-1] == after
    assert {event.part for event in sick.events} == {f"head {SICK}"}
    assert healthy_alike(sick, clean)
    assert same(sick.owned(SICK, first + 10), clean.owned(SICK, 50))
    assert not same(sick.owned(SICK), clean.owned(SICK, 50))  # it learns again
    assert all(torch.isfinite(tensor).all() for tensor in sick.trainer.state.owned().values())


@row(15)
def test_where_weights_couple_the_heads_the_others_are_as_if_it_had_been_left_out():
    """Left out by hand: retired from that step on."""

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
    """Saved in the very step after the hit, before the guard would have restored the head."""
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
    assert "restored to its state before step 0" in {event.action for event in events}


@row(16)
@pytest.mark.parametrize("how", ["none", "own"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_an_infinite_logit_skips_its_head_alone(value, how):
    clean = trained(instance_weight=how)
    sick = trained(in_forward(set_logit(value), {3}), instance_weight=how)
    assert sick.of(f"head {SICK}") == [(3, "loss", "skipped")] and len(sick.events) == 1
    assert healthy_alike(sick, clean)
    assert same(sick.owned(SICK, 4), sick.owned(SICK, 3))
    assert sick.health.skipped.tolist() == [0, 0, 1, 0, 0] and not sick.health.streak.any()


@row(16)
@pytest.mark.usefixtures("kept_every_50_steps")
def test_ten_steps_of_infinite_logits_end_in_a_restored_head():
    clean = trained(steps=75)
    sick = trained(in_forward(set_logit(math.inf), range(60, 70)), steps=75)
    after = (69, "escalation", "restored to its state before step 50")
    assert sick.of(f"head {SICK}")[-1] == after and healthy_alike(sick, clean)
    assert same(sick.owned(SICK, 70), clean.owned(SICK, 50))


@row(17)
@pytest.mark.parametrize("loss", ["temi", "sharpened", SINKHORN])
@pytest.mark.parametrize("how", ["none", "own", "mean"])
def test_a_batch_goes_on_as_if_the_nan_sample_had_not_been_drawn(how, loss):
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
    assert len(drawn) > 5 and {event.step for event in found.events} == set(drawn)
    assert {(event.part, event.stage) for event in found.events} == {("batch", "input")}
    assert all("row 7 " in event.reason for event in found.events)
    assert not found.health.skipped.any() and not found.health.streak[OTHERS].any()
    assert all(torch.isfinite(tensor).all() for tensor in found.trainer.state.owned().values())


def _joint(student, teacher, marginal, beta):
    """The logarithms of the summands of TEMI's equation 7, both temperatures 0.1."""
    log_p, log_q = (student / 0.1).log_softmax(-1), (teacher / 0.1).log_softmax(-1)
    return beta * (log_p + log_q) - marginal.log().unsqueeze(1)


def _tied(log_shares):
    """Where the two largest of the last axis are less than 20 nats apart."""
    first, second = log_shares.topk(2).values.unbind(-1)
    return first - second < 20


@row(18)
@hypothesis_settings(max_examples=80, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([1.0, 100.0, 1e4, 6e4, 1e38]),
    clusters=st.integers(2, 60),
    beta=st.sampled_from([0.1, 0.6, 1.0]),
    seed=st.integers(0, 1000),
)
@example(dtype=torch.float16, scale=6e4, clusters=10, beta=0.6, seed=0)
@example(dtype=torch.float16, scale=1e4, clusters=2, beta=0.6, seed=207)  # a tie
def test_huge_logits_stay_near_float64(dtype, scale, clusters, beta, seed):
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randn(2, 2, 5, clusters, generator=generator, dtype=torch.float64).clamp(-1, 1)
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max / 100)
    student, teacher = (signs * min(scale, limit)).to(dtype)
    marginal = torch.rand(2, clusters, generator=generator).softmax(-1)
    low = student.clone().requires_grad_()
    high, exact_teacher = (x.double().clamp(-65504, 65504) for x in (student, teacher))
    high.requires_grad_()

    ours = losses.beta_mi(low, teacher, marginal, beta=beta, clip_min=-3e38)
    joint = _joint(high, exact_teacher, marginal.double(), beta)
    exact = -torch.logsumexp(joint, -1)  # float64, differentiated by autograd
    ours.sum().backward(), exact.sum().backward()
    assert torch.isfinite(ours).all() and torch.isfinite(low.grad).all()
    # Where clusters tie at 1e5 nats, float32's spacing there decides between them: 0.008 nats.
    tied = _tied(joint) | _tied(high / 0.1)
    largest = torch.maximum(high.detach().abs().amax(-1), exact_teacher.abs().amax(-1)) / 0.1
    slack = torch.where(tied, 4 * torch.finfo(torch.float32).eps * beta * largest, 0)
    assert ((ours - exact).abs() <= 2e-3 * (1 + exact.abs()) + slack).all()
    rounding = max(2e-3, torch.finfo(dtype).eps)  # the gradient has the logits' dtype
    off = (low.grad.double() - high.grad.double()).abs()
    allowed = 2e-3 + rounding * high.grad.abs() + beta / 0.1 * slack.unsqueeze(-1)
    assert (off <= allowed).all()


@row(18)
@pytest.mark.parametrize("value", [1e4, -1e4, 6e4, -6e4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_huge_logits_in_either_loss_leave_no_row_dead(dtype, value):
    signs = torch.randn(2, 2, 8, 5).sign()  # [head, view, batch, cluster]
    logits = (signs * value).to(dtype)
    for loss in ("temi", "sharpened"):
        student = logits.clone().requires_grad_()
        if loss == "temi":
            targets = losses.log_probabilities(logits.flip(2), 0.1)
            value_of = losses.temi(student, targets, torch.full((2, 5), 0.2))
        else:
            targets = losses.centered_targets(logits.flip(2), torch.zeros(2, 5), 0.04)
            value_of = losses.sharpened_cross_entropy(student, targets)
        value_of.sum().backward()
        assert torch.isfinite(value_of).all() and torch.isfinite(student.grad).all()
    balanced = losses.sinkhorn_targets(logits, 0.04)
    torch.testing.assert_close(balanced.sum(-1), torch.ones(2, 2, 8).to(balanced.dtype))


@row(19)
@hypothesis_settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    apart=st.floats(10, 6e4),
    clusters=st.integers(2, 100),
    beta=st.sampled_from([0.05, 0.6, 1.0]),
)
def test_disjoint_student_and_teacher_still_learn(dtype, apart, clusters, beta):
    """All of the student's mass on cluster 0, all of the teacher's on cluster 1."""
    student = torch.zeros(1, 1, clusters, dtype=dtype)
    student[..., 0] = apart
    teacher = student.roll(1, -1)
    student.requires_grad_()
    loss = losses.beta_mi(student, teacher, torch.full((1, clusters), 1 / clusters), beta=beta)
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(student.grad).all()
    assert student.grad.any()
    if beta > 0.5:  # lower, the student's own cluster may count for more
        assert student.grad[0, 0, 0] >= 0 >= student.grad[0, 0, 1]


@row(20)
@hypothesis_settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    clusters=st.integers(2, 50),
    empty=st.integers(1, 49),
    scale=st.sampled_from([0.0, 1.0, 1e4]),
)
def test_a_marginal_of_exactly_zero_is_finite(dtype, clusters, empty, scale):
    marginal = torch.full((1, clusters), 1.0)
    marginal[:, :empty] = 0
    marginal = torch.nan_to_num(marginal / marginal.sum())  # all of them may be 0
    logits = (torch.randn(1, 6, clusters) * scale).to(dtype)
    student = logits.clone().requires_grad_()
    loss = losses.beta_mi(student, logits.flip(1), marginal)
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(student.grad).all()


@row(20)
def test_an_empty_cluster_in_training_is_finite_and_said_once(caplog, monkeypatch):
    def strike(trainer, step):
        if step in (3, 5):
            trainer.state.marginal[SICK] = torch.tensor([0.5, 0.5, 0.0, 0.0])

    monkeypatch.setattr(guarded, "MARGINAL_MOMENTUM", 0.99)
    clean, empty = trained(), trained(strike)
    assert all(torch.isfinite(tensor).all() for tensor in empty.owned(SICK).values())
    assert healthy_alike(empty, clean) and not empty.health.skipped.any()
    said = [e.reason for e in empty.events]
    said += [record.getMessage() for record in caplog.records]
    assert len([line for line in said if "marginal" in line]) == 1


@row(21)
def test_collapse_of_one_head_is_flagged_for_that_head(settings, monkeypatch):
    make = pipeline.make_trainer

    def collapsed_trainer(*arguments):
        """Head 2 answers cluster 0 to whatever comes, from the start, and cannot learn."""
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
    path = run(settings(learning_rate=1e-9, max_steps=5)).path
    heads = metrics(path)["heads"]
    assert heads[2]["collapsed"] and heads[2]["clusters_used"] == 1
    assert not any(head["collapsed"] for head in heads if head["head"] != 2)
    assert all_finite(path) and write_report(path).read_text().count(">collapsed</span>") == 1


@row(21)
def test_collapse_of_every_head_is_flagged_and_finite(settings, tmp_path):
    np.savez(tmp_path / "one.npz", features=np.tile(np.linspace(0, 1, 8), (40, 1)))
    path = run(settings(dataset=str(tmp_path / "one.npz"), n_clusters=4)).path
    assert all_finite(path) and len({line["cluster"] for line in assignments(path)}) == 1
    assert all(head["collapsed"] for head in metrics(path)["heads"])
    assert write_report(path).read_text().count(">collapsed</span>") == 4


@row(22)
@hypothesis_settings(max_examples=80, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    width=st.integers(2, 70_000),
    exponent=st.integers(-40, 300),
    bad=st.sampled_from([math.nan, math.inf, -math.inf, -1.0]),
)
def test_a_bad_weight_counts_as_zero_and_the_others_keep_their_proportions(
    dtype, width, exponent, bad
):
    limits = torch.finfo(dtype)
    size = min(max(10.0**exponent, limits.tiny * 4), limits.max / 4)
    weights = (torch.linspace(1, 2, width, dtype=torch.float64) * size).to(dtype)
    weights[0] = bad
    shares = losses.safe_normalize_weights(weights)
    expected = weights.double().masked_fill(torch.arange(width) == 0, 0)
    expected /= expected.max()
    torch.testing.assert_close(shares.double(), expected / expected.sum(), rtol=1e-4, atol=1e-9)
    assert shares[0] == 0


@row(22)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [0.0, math.nan, -1.0, math.inf])
def test_where_no_weight_is_left_all_count_alike(dtype, value):
    shares = losses.safe_normalize_weights(torch.full((2, 5), value, dtype=dtype))
    torch.testing.assert_close(shares.float(), torch.full((2, 5), 0.2))
    weights = losses.instance_weights(torch.full((3, 5), value, dtype=dtype), "own")
    torch.testing.assert_close(weights.float(), torch.full((3, 5), 0.2))


BAD_TEMPERATURES = [0.0, -0.1, 1e-9, 1e9, math.nan, math.inf]


@row(23)
@pytest.mark.parametrize("value", BAD_TEMPERATURES)
@pytest.mark.parametrize("name", ["student_temperature", "teacher_temperature"])
def test_a_bad_temperature_is_refused_by_every_loss(name, value):
    logits, marginal = torch.zeros(1, 2, 4, 3), torch.full((1, 3), 1 / 3)
    calls = [lambda: losses.beta_mi(logits[0], logits[0], marginal, **{name: value})]
    if name == "student_temperature":
        log_q, q = logits.log_softmax(-1), logits.softmax(-1)
        calls += [lambda: losses.temi(logits, log_q, marginal, student_temperature=value)]
        calls += [lambda: losses.sharpened_cross_entropy(logits, q, student_temperature=value)]
    else:
        calls += [lambda: losses.centered_targets(logits, torch.zeros(1, 3), value)]
        calls += [lambda: losses.sinkhorn_targets(logits, value)]
    for call in calls:
        with pytest.raises(ValueError, match=rf"{name} is .*from 0.0001 to 10000"):
            call()


@row(23, 24)
@pytest.mark.parametrize(
    ("name", "values", "allowed"),
    [
        ("student_temp", BAD_TEMPERATURES, "a finite number, at least 0.05, at most 100"),
        ("teacher_temp", BAD_TEMPERATURES, "a finite number, at least 0.04, at most 100"),
        ("beta", [0.0, -0.1, 1.01, math.nan, math.inf], "a finite number, above 0, at most 1"),
    ],
)
def test_a_bad_loss_setting_is_refused_in_file_and_flag(name, values, allowed, tmp_path, train_py):
    for value in values:
        with pytest.raises(SettingsError, match=f"{name.upper()} is .*but must be {allowed}"):
            VisionSettings(**{name: value})
        code, error = train_py(VisionSettings(runs_dir=str(tmp_path / "runs")), f"--{name}={value}")
        assert code == 2 and f"{name.upper()} is" in one_line(error) and allowed in error
    assert not (tmp_path / "runs").exists()


@row(23, 24)
@hypothesis_settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([0.0, 1.0, 1e4, 6e4]),
    ts=st.sampled_from([*EDGES, 0.05, 100.0]),
    tt=st.sampled_from([*EDGES, 0.04, 100.0]),
    beta=st.sampled_from([1e-6, 0.6, 1.0]),
)
def test_the_edges_of_the_ranges_are_finite(dtype, scale, ts, tt, beta):
    logits = (torch.randn(2, 6, 7).clamp(-1, 1) * scale).to(dtype)
    student = logits.clone().requires_grad_()
    loss = losses.beta_mi(
        student,
        logits.flip(1),
        torch.full((2, 7), 1 / 7),
        beta=beta,
        student_temperature=ts,
        teacher_temperature=tt,
    )
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(student.grad).all()


@row(24)
@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        *[("beta", v, r"\(0, 1\]") for v in (0.0, -0.1, 1.01, math.nan, math.inf)],
        *[("clip_min", v, "a finite number") for v in (math.inf, -math.inf, math.nan)],
    ],
)
def test_a_bad_exponent_or_floor_is_refused_with_what_is_allowed(name, value, allowed):
    logits, marginal = torch.zeros(1, 2, 4, 3), torch.full((1, 3), 1 / 3)
    for call in (
        lambda: losses.beta_mi(logits[0], logits[0], marginal, **{name: value}),
        lambda: losses.temi(logits, logits.log_softmax(-1), marginal, **{name: value}),
    ):
        with pytest.raises(ValueError, match=f"{name} is .*expected .*{allowed}"):
            call()


@row(24)
def test_beta_of_one_is_the_mutual_information_itself():
    logits = torch.randn(2, 6, 7, dtype=torch.float64)
    p, q = (logits / 0.1).softmax(-1), (logits.flip(1) / 0.1).softmax(-1)
    marginal = q.mean(1)
    ours = losses.beta_mi(logits, logits.flip(1), marginal, beta=1.0)
    torch.testing.assert_close(ours, -(p * q / marginal.unsqueeze(1)).sum(-1).log())


@row(24)
@pytest.mark.parametrize(
    "value",
    [
        -1e38,
        -1e39,
        -1e300,
    ],
)
def test_a_floor_beyond_float32_is_finite_or_refused_by_name(value):
    logits = torch.randn(1, 4, 3)
    try:
        loss = losses.beta_mi(logits, logits, torch.full((1, 3), 1 / 3), clip_min=value)
    except ValueError as error:
        assert "clip_min" in str(error)
    else:
        assert torch.isfinite(loss).all()
