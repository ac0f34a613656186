"""Rows of the fault matrix: a student's step is recorded when it goes wrong, and run again."""

import contextlib
import json

import pytest
import torch

pytest.importorskip("transformers")

from ssl_kd.files import CorruptFileError  # noqa: E402
from ssl_kd.guard.parts import TooFewHealthyParts  # noqa: E402
from ssl_kd.language.replay import replay  # noqa: E402
from ssl_kd.language.run import run  # noqa: E402
from ssl_kd.language.step import Distiller  # noqa: E402
from ssl_kd.teachers.causal import load_causal_lm  # noqa: E402
from ssl_kd.teachers.student import NotFinite  # noqa: E402
from ssl_kd.training.fault_bundle import load_bundle  # noqa: E402
from tests.faults.inject import events  # noqa: E402
from tests.faults.inject_language import NAN, UP, write_lines  # noqa: E402
from tests.faults.matrix import row  # noqa: E402


@pytest.fixture(autouse=True)
def as_before_models_were_judged(monkeypatch):
    """A run that began with a sick model, as older ones did: today it is refused before step 0."""
    run = "ssl_kd.language.run"
    unheard = ([{"name": "teacher"}], {"teacher": ["unheard"]})
    monkeypatch.setattr(f"{run}.judge_teachers", lambda task: (task, *unheard))
    monkeypatch.setattr(
        f"{run}.judge_student", lambda *args: ({"name": "student before"}, ["unheard"])
    )


def recorded(world, **changes):
    """The folder of a run, which may have stopped, and its first bundle."""
    with contextlib.suppress(TooFewHealthyParts, NotFinite):
        run(world.settings(**changes))
    (path,) = (folder for folder in world.runs.iterdir() if folder.name != "latest")
    return path, min((path / "faults").glob("*.pt"))


@row(72)
@pytest.mark.parametrize("who", ["teacher", "student"])
def test_a_poisoned_weight_is_found_again(world, who):
    folder = world.spoilt(who, lambda tensors: tensors[UP][3].fill_(NAN))
    path, bundle = recorded(world, **{f"{who}_model": str(folder)})
    report = replay(bundle)
    (words,) = (
        event["reason"]
        for event in events(path)
        if event["stage"] == "replay" and event["part"] == report.bundle.event.part
    )
    assert report.reproduced and f"{who} weight {UP} came in not finite" in str(report)
    rows = ", ".join(map(str, report.bundle.indices.tolist()))
    assert words.startswith(f"rows {rows}: {report.fault.op}, forward pass")
    assert f"{report.diagnosis.cause.value}: {report.diagnosis.words}" in words
    begin = load_causal_lm(str(folder if who == "student" else world.student)).model
    for name, weight in begin.named_parameters():  # of step 0: none has moved, not even by ce
        kept = load_bundle(bundle).tensors[f"student {name}"]
        assert torch.equal(kept.nan_to_num(7), weight.nan_to_num(7))


@row(72)
def test_a_gradient_that_is_not_finite_is_found_again(world, monkeypatch):
    """The student's norm has a root that is 0 there; the loss is finite."""
    made = Distiller.__init__

    def with_a_root(self, student, *args, **options):
        made(self, student, *args, **options)
        norm = student.model.norm
        norm.register_forward_hook(lambda module, inputs, out: out + (out * 0).sqrt())

    monkeypatch.setattr(Distiller, "__init__", with_a_root)
    _, bundle = recorded(world, stop_after=1)
    report = replay(bundle)
    assert report.bundle.event.stage == "gradient" and report.fault.backward
    assert report.fault.op == "aten.div" and report.diagnosis.cause.value == "zero norm"


@row(73)
@pytest.mark.parametrize("what", ["text", "teacher", "bundle"])
def test_what_is_not_that_of_the_run_is_refused(world, what):
    folder = world.spoilt("teacher", lambda tensors: tensors[UP][3].fill_(NAN))
    lines = [json.loads(line) for line in world.text.read_text().splitlines()]
    text = write_lines(world.own / "text.jsonl", lines)
    _, bundle = recorded(world, teacher_model=str(folder), data_path=str(text), max_steps=1)
    assert replay(bundle).reproduced
    if what == "text":
        write_lines(text, lines[1:])
    elif what == "teacher":
        (folder / "model.safetensors").write_bytes(
            (world.teacher / "model.safetensors").read_bytes()
        )
    else:
        bundle.write_bytes(bundle.read_bytes()[:-100])
    error = CorruptFileError if what == "bundle" else ValueError
    words = "cannot be read" if what == "bundle" else "the data or the teacher are not those"
    with pytest.raises(error, match=words) as raised:
        replay(bundle)
    assert str(bundle) in str(raised.value)
