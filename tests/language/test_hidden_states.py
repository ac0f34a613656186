"""The term by hidden states: layer maps, values, faults, settings."""

import json
import math
import os
import signal

import pytest
import torch
from safetensors.torch import load_file

from ssl_kd.datasets.blocks import make_blocks
from ssl_kd.language.hidden_states import HiddenStates, layer_map
from ssl_kd.language.run import run
from ssl_kd.language.sources import Plain
from ssl_kd.language.step import Distiller
from ssl_kd.losses.token_distillation import next_token_targets
from ssl_kd.report import write_report
from ssl_kd.settings import SettingsError
from ssl_kd.teachers.frozen import FrozenTeacher
from ssl_kd.teachers.student import add_lora
from ssl_kd.training.stop import Interrupted
from tests.bits import same
from tests.faults.matrix import row as fault
from tests.oracles.features import state_oracle

HIDDEN = {"alpha_hidden": 0.3}
ALONE = {"alpha_ce": 0.01, "alpha_kd": 0.0, "alpha_hidden": 1.0}


@pytest.fixture
def distil(tiny):
    """A distiller of a tiny student and its teacher, with this term."""

    def make(student=None, teacher=None, precision=None, **changes):
        student = tiny.model(seed=1, spread=0.2) if student is None else student
        precision = precision or tiny.precision
        teacher = tiny.model(spread=0.3) if teacher is None else teacher
        frozen = FrozenTeacher(teacher, dtype=precision.teacher)
        settings = tiny.settings(**{**HIDDEN, **changes})
        others, weight = [], settings.alpha_hidden
        if weight:
            others = [HiddenStates(weight, student, frozen.model, settings.layer_map)]
        return Distiller(student, settings, precision, Plain(frozen), others=others)

    return make


def inside(model, batch, layer):
    """What a layer puts out, by transformers' own means."""
    hidden = model.model(**batch.model_inputs(), output_hidden_states=True, use_cache=False)
    return hidden.hidden_states[layer + 1]


# --- layer maps -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "depths", "pairs"),
    [
        ("last", (2, 6), [(1, 5)]),
        ("uniform", (3, 12), [(0, 3), (1, 7), (2, 11)]),
        ("uniform", (4, 4), [(0, 0), (1, 1), (2, 2), (3, 3)]),
        ("uniform", (3, 2), [(0, 0), (1, 0), (2, 1)]),
        ("0:1,1:3", (2, 4), [(0, 1), (1, 3)]),
    ],
)
def test_a_layer_map_names_pairs(spec, depths, pairs):
    assert layer_map(spec, *depths) == pairs


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("2:1", "LAYER_MAP is '2:1', but the student has 2 layers: name layers of it from 0 to 1"),
        ("0:1,1:9", "the teacher has 4 layers: name layers of it from 0 to 3"),
    ],
)
def test_a_layer_that_is_not_there_is_named(spec, words):
    with pytest.raises(SettingsError, match=words):
        layer_map(spec, 2, 4)


@pytest.mark.parametrize("spec", ["first", "0-1", "0:1,", "1:x", "-1:0"])
def test_a_map_of_another_form_is_refused(tiny, spec):
    with pytest.raises(SettingsError, match="LAYER_MAP is .*STUDENT:TEACHER"):
        tiny.settings(layer_map=spec)


# --- values ---------------------------------------------------------------------------------------


def test_the_term_is_the_formula_of_what_the_layers_put_out(tiny, distil):
    distiller = distil(layer_map="0:0")
    batch = make_blocks(tiny.texts(), tiny.tokenizer, 100, packing=True).batch([0, 3, 1])
    assert batch.packed
    found = distiller.terms(batch)
    rows, _ = next_token_targets(batch.input_ids, batch.counts)
    teacher = distiller.source.model
    with torch.no_grad():
        s, t = (inside(m, batch, 0) for m in (distiller.student, teacher))
        expected = state_oracle(*(x.flatten(0, 1)[rows].double() for x in (s, t))).sum()
    assert found["hidden"].item() == pytest.approx(float(expected), rel=1e-5)
    assert distiller.counts([batch])["hidden"] == distiller.counts([batch])["ce"] == len(rows)


def test_several_pairs_are_their_mean(tiny, distil):
    student, batch = tiny.model(seed=1, spread=0.2), tiny.blocks().batch(range(4))
    one, two, both = (distil(student, layer_map=m) for m in ("0:0", "1:1", "0:0,1:1"))
    terms = [d.terms(batch) for d in (one, two, both)]
    a, b, mean = (term["hidden"].item() for term in terms)
    assert mean == pytest.approx((a + b) / 2, rel=1e-5) and a != b


def test_a_student_of_its_teachers_weights_is_at_no_distance(tiny, distil):
    batch = tiny.blocks().batch(range(4))
    found = distil(tiny.model(spread=0.3), layer_map="uniform").terms(batch)
    assert abs(found["hidden"].item()) < 1e-5


def test_another_width_and_depth_learns_with_a_projection(tiny, distil):
    narrow = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    student = tiny.model(seed=1, spread=0.2, num_hidden_layers=1, **narrow)
    distiller = distil(student, layer_map="uniform", **ALONE)
    batch = tiny.blocks().batch(range(4))
    (hidden,) = distiller.others
    assert [tuple(p.weight.shape) for p in hidden.module] == [(32, 16)]
    before = hidden.module[0].weight.clone()
    results = [distiller.step([batch], 3e-2) for _ in range(11)]
    assert not torch.equal(hidden.module[0].weight, before)
    assert results[-1].terms["hidden"] < 0.8 * results[0].terms["hidden"]
    assert distiller.learned == {"ce": 11, "hidden": 11}


def test_checkpointed_activations_and_adapters_give_the_same_step(tiny, distil):
    batch = tiny.blocks().batch(range(4))
    results = []
    for checkpointing in (False, True):
        student = tiny.model(seed=1, spread=0.2)
        distiller = distil(student, gradient_checkpointing=checkpointing)
        results.append((distiller.step([batch], 1e-2), student.state_dict()))
    assert results[0][0] == results[1][0] and same(results[0][1], results[1][1])
    adapted = distil(add_lora(tiny.model(seed=1, spread=0.2), 4), **ALONE)
    first, *_, last = (adapted.step([batch], 3e-2) for _ in range(6))
    assert last.terms["hidden"] < 0.9 * first.terms["hidden"]


def test_half_precision_follows_float32(tiny, distil):
    batch, found = tiny.blocks().batch(range(4)), []
    for precision in (tiny.precision, tiny.half()):
        distiller = distil(tiny.model(seed=1, spread=0.2), precision=precision)
        found.append(distiller.step([batch], 1e-2).terms)
    assert found[1]["hidden"] == pytest.approx(found[0]["hidden"], rel=0.02)


def test_hidden_states_of_any_architecture(tiny, distil):
    student, teacher = (tiny.model("GPT2", seed=s, spread=0.2) for s in (1, 2))
    distiller = distil(student, teacher, layer_map="uniform")
    first, *_, last = (distiller.step([tiny.blocks().batch(range(4))], 1e-2) for _ in range(8))
    assert last.terms["hidden"] < first.terms["hidden"]


# --- faults ---------------------------------------------------------------------------------------


@fault(122)
def test_a_nan_in_a_term_leaves_the_step_as_without_it_to_the_bit(tiny, distil):
    name = "hidden"
    batch = tiny.blocks().batch(range(4))
    sick, alone = distil(), distil(**{f"alpha_{name}": 0.0})
    spoiled = sick.source.model.model.layers[1]
    # After the term has recorded it: the teacher itself goes on as it was.
    term = next(term for term in sick.others if term.name == name)
    record = term._record

    def poisoned(which, module, inputs, out):
        record(which, module, inputs, out)
        if module is spoiled:
            term._recorded[which] = term._recorded[which] * math.nan

    term._record = poisoned
    for _ in range(2):
        got, expected = sick.step([batch], 1e-2), alone.step([batch], 1e-2)
        assert got.updated and math.isnan(got.terms[name]) and name not in expected.terms
        assert (got.loss, got.grad_norm) == (expected.loss, expected.grad_norm)
    assert same(sick.student.state_dict(), alone.student.state_dict())
    assert {e.part for e in sick.guard.events.events} == {name}
    assert any(e.action == "explained" for e in sick.guard.events.events)


def test_nothing_is_kept_or_hooked_between_steps(tiny, distil):
    distiller = distil()
    distiller.step([tiny.blocks().batch(range(4))], 1e-2)
    for model in (distiller.student, distiller.source.model):
        assert not any(module._forward_hooks for module in model.modules())
    assert all(not term._recorded for term in distiller.others)


# --- settings and runs ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"teacher_model": "none"}, "TEACHER_MODEL is 'none': name a teacher"),
        ({"teacher_cache": "cache"}, "TEACHER_CACHE holds distributions alone: set it to None"),
        ({"align": "chunks"}, "ALIGN is 'chunks': set it to 'auto'"),
        ({"router_mode": "all"}, "ROUTER_MODE is 'all': set it to 'native'"),
        ({"router_weights": "router.safetensors"}, "ROUTER_WEIGHTS is another router's"),
    ],
)
def test_what_does_not_fit_is_refused(tiny, changes, words):
    with pytest.raises(SettingsError, match=f"ALPHA_HIDDEN compares layers.*{words}"):
        tiny.settings(alpha_hidden=0.5, **changes)


def test_a_run_logs_and_shows_them(settings):
    path = run(settings(**HIDDEN, alpha_kd=0.0, baseline=True))
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "train_loss" in line]
    assert len(lines) == 3
    for line in lines:
        assert line["hidden"] > 0 and line["kd"] > 0
        assert line["hidden_success_rate"] == 1
        weighed = 0.5 * line["ce"] + 0.3 * line["hidden"]
        assert line["train_loss"] == pytest.approx(weighed)
    found = json.loads((path / "metrics.json").read_text())
    assert found["learned_from"] == {"ce": 6, "hidden": 6}
    page = write_report(path).read_text()
    assert "hidden states (hidden)" in page


def test_interrupted_and_resumed_it_ends_with_the_same_bits(settings):
    """A projection learns beside the student, and is resumed with it."""
    whole = run(settings(**HIDDEN, run_name="whole"))
    own = settings(**HIDDEN, run_name="halves")

    def stop(stage, done, total, info):
        if stage == "train" and done == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        run(own, progress=stop)
    halves = run(own.replace(resume=True))
    a, b = (load_file(path / "student" / "model.safetensors") for path in (whole, halves))
    assert same(a, b)
