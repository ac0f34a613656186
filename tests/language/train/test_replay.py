"""A recorded step of a student is run again and explained, or found healthy."""

import contextlib
import json
import math
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from firstnan import TooFewHealthyParts  # noqa: E402
from firstnan.diagnosis import Cause  # noqa: E402
from ssl_kd import cli  # noqa: E402
from ssl_kd.core.files import CorruptFileError  # noqa: E402
from ssl_kd.core.runs.fault_bundle import save_bundle  # noqa: E402
from ssl_kd.language.run import run  # noqa: E402
from ssl_kd.language.train.fault_explainer import trained  # noqa: E402
from ssl_kd.language.train.replay import replay  # noqa: E402
from ssl_kd.language.train.step import Distiller  # noqa: E402
from tests.bits import same  # noqa: E402
from tests.bundles import rewrite  # noqa: E402
from tests.faults.matrix import row  # noqa: E402

UP = "model.layers.1.mlp.up_proj.weight"
LATE = 21  # a token that the first step does not see


@pytest.fixture
def strike(monkeypatch):
    """`change(distiller)` before some steps of a run; the trained weights of each step's begin."""

    def prepare(change=lambda distiller: None, steps=()):
        begins, step = [], Distiller.step

        def struck(self, batches, rate):
            if self.guard.steps in steps:
                change(self)
            begins.append({name: p.detach().clone() for name, p in trained(self).items()})
            return step(self, batches, rate)

        monkeypatch.setattr(Distiller, "step", struck)
        return begins

    return prepare


@pytest.fixture
def recorded(settings, monkeypatch):
    """A short run, which may stop early: its explanations and its bundles, both by part.

    As the runs that began before a teacher was judged: a sick one is not refused.
    """
    judged = "ssl_kd.language.run.judge_teachers"
    monkeypatch.setattr(
        judged, lambda task: (task, [{"name": "teacher"}], {"teacher": ["unheard"]})
    )

    def go(**changes):
        asked = settings(**{"max_steps": 4, "eval_every": 4, **changes})
        with contextlib.suppress(TooFewHealthyParts):
            run(asked)
        path = Path(asked.runs_dir) / "a"
        events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
        words = {e["part"]: e["reason"] for e in reversed(events) if e["stage"] == "replay"}
        return words, {
            f.stem.rpartition("-step")[0]: f for f in (path / "faults").glob("*.safetensors")
        }

    return go


@pytest.fixture
def sick(models, tmp_path):
    """A copy of a model's folder with a NaN in one row of a weight."""

    def copy(name="teacher", weight=UP, row=3):
        folder = Path(shutil.copytree(models(name), tmp_path / f"sick {name}"))
        tensors = load_file(folder / "model.safetensors")
        tensors[weight][row] = math.nan
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return str(folder)

    return copy


@pytest.fixture
def bundle(recorded, sick):
    """Of a run of one step whose teacher is sick."""
    return recorded(teacher_model=sick(), max_steps=1)[1]["kd"]


def spoil_student(distiller):
    distiller.student.get_parameter("model.layers.0.mlp.up_proj.weight").data[2, 1] = math.nan


def check(report, words, cause, op):
    """The replay names the operation, cause and rows that the run named."""
    assert report.reproduced and report.diagnosis.cause == cause and report.fault.op == op
    rows = ", ".join(map(str, report.bundle.indices.tolist()))
    assert words.startswith(f"rows {rows}: {op}, forward pass")
    assert f": {cause.value}: {report.diagnosis.words}. {report.diagnosis.remedy}" in words
    text = str(report)
    assert f"rows {rows} of the text" in text and f"first op {op}, forward pass" in text
    assert f"cause    {cause.value}: {report.diagnosis.words}" in text


# --- what is found again --------------------------------------------------------------------------


@row(72)
def test_a_poisoned_teacher_is_found_again_with_the_students_weights_of_that_step(
    recorded, sick, strike
):
    """Cross-entropy trained on in that very step."""
    begins = strike()
    words, bundles = recorded(teacher_model=sick(weight="model.embed_tokens.weight", row=LATE))
    assert bundles.keys() == {"kd"} and len(begins) == 4
    report = replay(bundles["kd"])
    check(report, words["kd"], Cause.POISONED_WEIGHT, "aten.embedding")
    assert "teacher weight model.embed_tokens.weight came in not finite" in str(report)
    step = report.bundle.step
    assert step > 0
    kept = {n: t for n, t in report.bundle.tensors.items() if not n.startswith("rng")}
    assert same(kept, begins[step]) and not same(begins[step], begins[step + 1])


@row(72)
def test_a_poisoned_student_is_found_again_in_every_term(recorded, strike):
    strike(spoil_student, steps=(2,))
    words, bundles = recorded()
    assert bundles.keys() == {"ce", "kd", "model"}
    for part, bundle in bundles.items():
        report = replay(bundle)
        check(report, words[part], Cause.POISONED_WEIGHT, "aten.mm")
        assert report.bundle.event.step == 3
        assert "student weight model.layers.0.mlp.up_proj.weight came in not" in str(report)


def test_a_teacher_with_another_tokenizer(recorded, models, sick):
    foreign = {"teacher_model": sick("foreign"), "student_model": models("student")}
    words, bundles = recorded(align="chunks", max_steps=2, **foreign)
    check(replay(bundles["kd"]), words["kd"], Cause.POISONED_WEIGHT, "aten.mm")


def test_a_router_that_learns_is_recorded_and_learns_nothing_from_a_replay(
    recorded, models, strike
):
    def spoil(distiller):
        name, weight = next(iter(distiller.teacher.mixture.router_parameters().items()))
        gates.append(name)
        weight.data[1, 2] = math.nan

    gates = []
    strike(spoil, steps=(2,))
    sar = {"teacher_model": models("mixture"), "router_mode": "sar", "router_lr": 1e-2}
    words, bundles = recorded(**sar)
    report = replay(bundles["kd"])
    check(report, words["kd"], Cause.POISONED_WEIGHT, report.fault.op)
    assert report.fault.poisoned.startswith("teacher weight") and gates[0] in report.fault.poisoned


# --- what is not ----------------------------------------------------------------------------------


@row(73)
@pytest.mark.parametrize("what", ["text", "teacher"])
def test_another_text_or_teacher_than_the_runs_is_refused(
    recorded, tiny, text_file, sick, tmp_path, what
):
    teacher = sick()
    _, bundles = recorded(teacher_model=teacher, max_steps=1)
    if what == "text":
        Path(text_file).write_text(json.dumps({"text": "another text " * 40}) + "\n")
    else:
        shutil.rmtree(teacher)
        tiny.folder(Path(teacher), seed=9)
    with pytest.raises(ValueError, match="the text or the teacher has changed since the run") as e:
        replay(bundles["kd"])
    assert str(bundles["kd"]) in str(e.value) and "restore them" in str(e.value)


def test_a_bundle_over_the_size_limit_shows_the_recorded_diagnosis(recorded, sick, monkeypatch):
    monkeypatch.setattr(save_bundle, "__defaults__", (1e-3,))
    words, bundles = recorded(teacher_model=sick(), max_steps=1)
    report = replay(bundles["kd"])
    assert not report.reproduced
    assert "exceeded the size limit: not run again" in str(report)
    assert f"then     {words['kd']}" in str(report)


# --- what is damaged ------------------------------------------------------------------------------


def _without(name):
    return lambda values: values.pop(name)


HEAD = "student lm_head.weight"


DAMAGES = [
    ("tensors", _without(HEAD), "lm_head.weight' is missing or is not"),
    ("tensors", lambda t: t.update({HEAD: t[HEAD][0]}), "lm_head.weight' is missing or is not"),
    (
        "tensors",
        lambda t: t.update({HEAD: t[HEAD].double()}),
        "lm_head.weight' is missing or is not",
    ),
    ("tensors", _without("rng cpu"), "random state"),
    ("tensors", lambda t: t.update({"rng cpu": torch.zeros(3)}), "random state"),
    ("settings", lambda s: s["replay"].update(student="nn"), "replay settings"),
    ("settings", lambda s: s["replay"].pop("learns_from"), "replay settings"),
    ("settings", lambda s: s.update(TEMPERATURE="much"), "TEMPERATURE is 'much'"),
    ("settings", lambda s: s.update(COLOUR=1), "COLOUR"),
    ("settings", lambda s: s.update(replay=[1]), "not a step of the language mode"),
    ("indices", lambda i: i.fill_(10**6), "indices are not all from 0 to"),
    ("indices", lambda i: i.fill_(-1), "indices are not all from 0 to"),
    ("indices", lambda i: i.resize_(0), "indices are not all from 0 to"),
    ("indices", lambda i: i.unsqueeze_(0), "indices are not int64"),
    ("event", _without("part"), "a field is missing"),
]


@row(73)
def test_a_damaged_bundle_is_refused_by_name(bundle, tmp_path):
    damaged = tmp_path / "damaged.safetensors"
    for where, change, words in DAMAGES:
        rewrite(bundle, lambda content: change(content[where]), damaged)  # noqa: B023
        with pytest.raises((CorruptFileError, ValueError), match=words) as raised:
            replay(damaged)
        assert str(damaged) in str(raised.value)


# --- the command line -----------------------------------------------------------------------------


def test_the_command_line_reports_whether_the_fault_recurred(bundle, models, tmp_path, capfd):
    assert cli.main(["replay", str(bundle)]) == 0
    out, _ = capfd.readouterr()
    assert "fault    kd, step 1: the loss is not finite" in out
    assert "cause    poisoned weight: teacher weight" in out
    large = tmp_path / "large.safetensors"
    rewrite(bundle, lambda content: content.update(left_out=["student lm_head.weight"]), large)
    assert cli.main(["replay", str(large)]) == 1
    assert "exceeded the size limit" in capfd.readouterr().out
    (tmp_path / "sick teacher" / "model.safetensors").unlink()
    assert cli.main(["replay", str(bundle)]) == 1
    out, err = capfd.readouterr()
    assert out == "" and "sick teacher" in err
