"""A recorded step is run again and explained, or found healthy."""

import copy
import dataclasses
import math

import pytest
import torch
from torch import nn

from firstnan import Event
from firstnan.diagnosis import Cause
from ssl_kd.core.faults import CHANGES
from ssl_kd.core.files import CorruptFileError
from ssl_kd.core.precision import Precision
from ssl_kd.core.runs.fault_bundle import FlightRecorder, save_bundle
from ssl_kd.vision.fit import make_trainer
from ssl_kd.vision.replay import bundle_of, replay
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.train.learner import HeadFault
from tests.bundles import rewrite

DIM, BATCH, CLUSTERS = 6, 16, 4


class NaiveHead(nn.Module):
    """Divides by a norm, as many do; a row of zeros is 0 / 0."""

    def __init__(self, in_dim, n_clusters):
        super().__init__()
        self.linear = nn.Linear(in_dim, n_clusters, bias=False)

    def forward(self, x):
        z = self.linear(x)
        return z / z.norm(dim=-1, keepdim=True)


def record(tmp_path, spoil, exact=True, targets=None, **changes):
    """Two steps of three heads, `spoil(trainer, views)` before the second; its bundle of head 1."""
    settings = dataclasses.replace(
        VisionSettings(n_heads=3, hidden_dim=10, batch_size=BATCH), **changes
    )
    trainer = make_trainer(settings, DIM, CLUSTERS, Precision.for_device("cpu"))
    views = torch.randn(2, BATCH, DIM)
    trainer.step(views, 1e-2)
    spoil(trainer, views)
    before = {name: tensor[1:2].clone() for name, tensor in trainer.state.tensors().items()}
    result = trainer.step(views, 1e-2, fixed_targets=targets)
    stage = trainer.recovery.kinds[int(result.stage[1])]
    reason = stage.kind.reason or "nothing"
    event = Event(1, "head 1", stage.name.lower(), reason, "skipped")
    samples = torch.arange(100, 100 + 2 * BATCH).view(2, BATCH)
    fault = HeadFault(1, event, samples, views, 1e-2, before, exact, targets)
    bundle = bundle_of(trainer, fault, dataclasses.asdict(settings))
    path = FlightRecorder(tmp_path).record(bundle)
    assert path is not None
    return path


@pytest.mark.parametrize("weight", ["none", "own", "mean"])
def test_a_poisoned_weight_is_named_by_owner_and_layer(tmp_path, weight):
    def spoil(trainer, views):
        trainer.bank.unflatten(trainer.state.student)["bottleneck.weight"][1, 2, 3] = torch.nan

    report = replay(record(tmp_path, spoil, instance_weight=weight))
    assert report.reproduced and report.diagnosis.cause == Cause.POISONED_WEIGHT
    text = str(report)
    assert "fault    head 1, step 1: the loss is not finite" in text
    assert "student weight bottleneck.weight came in not finite (1 of 50 values NaN" in text
    assert "temi.py" in text and "first op aten.baddbmm, forward pass" in text


def test_a_step_towards_fixed_targets_is_run_again_with_them(tmp_path):
    def spoil(trainer, views):
        trainer.by_loss.fill_(False)
        trainer.state.student[1, 0] = torch.inf
        trainer.state.teacher[1] = 0.0  # is not needed

    targets = torch.arange(2 * BATCH).view(1, 2, BATCH) % CLUSTERS
    path = record(tmp_path, spoil, targets=targets)
    report = replay(path)
    assert report.reproduced and report.fault.poisoned.startswith("student weight")
    for wrong in (targets[..., :3], targets - 1, targets.float()):
        rewrite(path, lambda content, wrong=wrong: content["tensors"].update(given=wrong))
        with pytest.raises(CorruptFileError, match="`given` is not int64"):
            replay(path)


def test_a_users_head_is_placed_at_its_line(tmp_path):
    def spoil(trainer, views):
        views[:, 2] = 0

    path, head = record(tmp_path, spoil, head=f"{__name__}.NaiveHead"), f"{__name__}.NaiveHead"
    report = replay(path, head=head)
    assert report.fault.op == "aten.div" and report.diagnosis.cause == Cause.ZERO_NORM
    assert report.fault.place.file == __file__ and report.fault.place.text.startswith("return z /")


def test_a_poisoned_teacher_is_distinguished_from_the_student(tmp_path):
    def spoil(trainer, views):
        trainer.state.teacher[1] = torch.inf

    report = replay(record(tmp_path, spoil))
    assert report.fault.poisoned.startswith("teacher weight")


def test_a_bad_row_of_the_batch_is_named_by_its_number(tmp_path):
    def spoil(trainer, views):
        views[1, 5, 2] = torch.nan

    report = replay(record(tmp_path, spoil))
    assert report.reproduced and report.diagnosis.cause == Cause.POISONED_INPUT
    assert "row 121 of the training data" in str(report)
    assert "REBUILD_DAMAGED False -> True" in str(report)


def test_a_fault_that_does_not_recur_is_reported_as_external(tmp_path):
    report = replay(record(tmp_path, lambda trainer, views: None))
    assert not report.reproduced and report.fault is None
    assert "recorded on cpu; run again on the CPU, the same step is healthy" in str(report)
    assert "the recorded numbers do not cause the fault" in str(report)


@pytest.mark.parametrize(("times", "seen"), [(102.0, True), (98.0, False)])
def test_a_spike_is_judged_by_the_median_before_it(tmp_path, times, seen):
    def spoil(trainer, views):
        norm = float(copy.deepcopy(trainer).step(views, 1e-2).grad_norm[1])
        trainer.state.health.seen.fill_(50)
        trainer.state.health.level.fill_(math.log(norm / times))

    report = replay(record(tmp_path, spoil))
    assert report.reproduced == seen and report.fault is None
    assert ("LEARNING_RATE 0.004 -> 0.0004" in str(report)) == seen
    assert (CHANGES["spike"] in str(report)) == seen


def test_a_state_of_a_later_step_is_reported(tmp_path):
    report = replay(record(tmp_path, lambda trainer, views: None, exact=False))
    assert "the state is from a later step; the fault may not appear again" in str(report)
    assert "the recorded numbers do not cause the fault" not in str(report)


def _without(*names):
    def change(values):
        for name in names:
            del values[name]

    return change


@pytest.mark.parametrize(
    ("where", "change", "words"),
    [
        ("tensors", _without("views"), "views are not"),
        ("tensors", lambda t: t.update(views=t["views"][0]), "views are not"),
        ("tensors", lambda t: t.update(views=t["views"].double()), "views are not"),
        ("tensors", lambda t: t.update(views=t["views"][:, :0]), "views are not"),
        ("tensors", _without("marginal"), "marginal is not"),
        ("tensors", lambda t: t.update(marginal=t["marginal"][0]), "marginal is not"),
        ("tensors", _without("student"), "student is not float32"),
        ("tensors", lambda t: t.update(scale=t["scale"].to(torch.complex64)), "scale is not"),
        ("settings", _without("replay"), "not a step that can be run again"),
        ("settings", lambda s: s.update(replay=[1]), "replay settings"),
        ("settings", lambda s: s["replay"].update(student="nn"), "replay settings"),
        ("settings", lambda s: s["replay"].pop("scale"), "replay settings"),
        ("settings", lambda s: s.update(head=3), "HEAD is 3"),
        ("settings", lambda s: s.update(beta="much"), "BETA is 'much'"),
        ("settings", _without("head", "beta"), "not those of this version: beta, head"),
        ("settings", lambda s: s.update({"4": 1}), "not those of this version: 4"),
        ("", lambda c: c.update(indices=c["indices"][0]), "indices are not"),
    ],
)
def test_a_bundle_that_holds_no_step_is_refused(tmp_path, where, change, words):
    path = record(tmp_path, lambda trainer, views: None)
    rewrite(path, lambda content: change(content[where] if where else content))
    with pytest.raises((CorruptFileError, ValueError), match=words) as raised:
        replay(path)
    assert str(path) in str(raised.value)


def test_without_its_batch_a_bundle_cannot_be_run(tmp_path, monkeypatch):
    monkeypatch.setattr(save_bundle, "__defaults__", (1e-3,))
    path = record(tmp_path, lambda trainer, views: None)
    with pytest.raises(ValueError, match="views.* was over its size limit"):
        replay(path)
