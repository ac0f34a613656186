"""The explainer of a student's faults: its findings, when it runs, and what it records."""

import math

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import diagnosis, diagnosis_language  # noqa: E402
from firstnan import TooFewHealthyParts  # noqa: E402
from firstnan.diagnosis import Cause  # noqa: E402
from ssl_kd.core.runs.fault_bundle import FlightRecorder, load_bundle  # noqa: E402
from ssl_kd.language.models.frozen import FrozenTeacher  # noqa: E402
from ssl_kd.language.train.fault_explainer import FaultExplainer, examine  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture
def explained_distiller(tiny, tmp_path):
    """A student whose faults are recorded; its batches are `blocks.batch`."""

    def make(teacher=None, **changes):
        answers = FrozenTeacher(tiny.model(spread=0.3) if teacher is None else teacher)
        distiller = tiny.distiller(answers, **changes)
        distiller.explainer = FaultExplainer(
            distiller, distiller.guard, distiller.ranks, FlightRecorder(tmp_path)
        )
        return distiller

    return make


def explained(distiller):
    return [e for e in distiller.guard.events.events if e.stage == "replay"]


def root_at_zero(distiller):
    """The student's states stay as they are, their slope is infinite."""
    layers = distiller.student.model.layers
    layers[0].register_forward_hook(lambda module, args, out: out + (out * 0).sqrt())


@pytest.mark.parametrize("changes", [{"stop_after": 1}, {"stop_after": None}, {}])
def test_a_gradient_is_explained_before_the_guard_restores(
    tiny, explained_distiller, tmp_path, monkeypatch, changes
):
    monkeypatch.setattr("ssl_kd.language.train.step.RESTORE_AFTER", 1 if changes else 20)
    distiller = explained_distiller(**changes)
    blocks = tiny.blocks()
    distiller.step([blocks.batch(range(4))], 1e-2)
    distiller.guard.snapshot_every = 1
    distiller.step([blocks.batch(range(4, 8))], 1e-2)  # another state than the one that is kept
    root_at_zero(distiller)
    before = {f"student {n}": p.clone() for n, p in distiller.student.named_parameters()}
    try:
        distiller.step([blocks.batch([1, 2]), blocks.batch([3])], 1e-2)
        assert not changes.get("stop_after")
    except TooFewHealthyParts:
        assert changes["stop_after"] == 1
    (event,) = explained(distiller)
    assert event.action == "explained" and event.part == "model"
    assert "rows 1, 2: aten.div, backward pass" in event.reason and "root of zero" in event.reason
    (path,) = tmp_path.glob("*.safetensors")
    bundle = load_bundle(path)
    assert path.name == "model-step3.safetensors" and bundle.indices.tolist() == [1, 2]
    for name, weight in before.items():
        assert torch.equal(bundle.tensors[name], weight)


@pytest.mark.parametrize("value", [math.nan, -3e38])
def test_a_weight_of_the_teacher_is_named_though_it_be_finite(tiny, explained_distiller, value):
    teacher = tiny.model(spread=0.3)
    name = "model.layers.0.mlp.up_proj.weight"
    teacher.get_parameter(name).data[5] = value
    found = examine(explained_distiller(teacher), tiny.blocks().batch([7, 8]), "kd")
    assert found is not None and found[1].cause == Cause.POISONED_WEIGHT
    assert found[1].words.startswith(f"teacher weight {name} ")


def test_a_part_is_explained_once_and_recorded_once(tiny, explained_distiller, tmp_path):
    distiller = explained_distiller()
    distiller.student.lm_head.weight.data[0, 0] = math.nan
    for rows in ([1, 2], [3, 4]):
        distiller.step([tiny.blocks().batch(rows)], 1e-2)
    assert [e.part for e in explained(distiller)] == ["ce", "kd", "model"]
    assert distiller.explainer.explained == {"ce", "kd", "model"}
    assert (
        len(list(tmp_path.glob("*-step1.safetensors")))
        == len(list(tmp_path.glob("*.safetensors")))
        == 3
    )


def test_an_event_reports_missing_memory_for_the_replay(tiny, explained_distiller, monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("ssl_kd.language.train.fault_explainer.examine", full)
    distiller = explained_distiller()
    distiller.student.lm_head.weight.data[0, 0] = math.nan
    distiller.step([tiny.blocks().batch([1, 2])], 1e-2)
    assert {e.action for e in explained(distiller)} == {"not found again"}
    assert explained(distiller)[0].reason == "rows 1, 2: not enough memory to run the step again"


def test_injected_faults_of_every_kind_are_found():
    kinds = diagnosis_language.KINDS
    score = diagnosis.measure(kinds, injections=len(kinds))
    assert score.right == score.total == len(kinds), score.misses
