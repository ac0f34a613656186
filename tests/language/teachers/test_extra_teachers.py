"""Several teachers with weights: the mean of their divergences, and faults by teacher."""

import json
import math
import shutil
from functools import partial

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from ssl_kd.core.errors import InputError  # noqa: E402
from ssl_kd.core.settings import SettingsError  # noqa: E402
from ssl_kd.language.losses.teacher_output import logits_of  # noqa: E402
from ssl_kd.language.losses.token_distillation import next_token_targets  # noqa: E402
from ssl_kd.language.models.frozen import FrozenTeacher  # noqa: E402
from ssl_kd.language.run import run  # noqa: E402
from ssl_kd.language.settings import LanguageSettings  # noqa: E402
from ssl_kd.language.teachers.live import Live  # noqa: E402
from tests.bits import same  # noqa: E402
from tests.faults.matrix import row as fault  # noqa: E402
from tests.language.test_run import config, log_lines, table, weights  # noqa: E402


@pytest.fixture
def teachers(tiny):
    return [FrozenTeacher(tiny.model(seed=seed, spread=0.3)) for seed in (0, 5)]


def params(distiller):
    return {name: p.detach().clone() for name, p in distiller.student.named_parameters()}


def trained_student(tiny, teachers, weights, **changes):
    source = Live(*teachers, names=["A", "B"], weights=weights)
    return tiny.distiller(source=source, **changes)


def test_the_term_is_the_weighted_mean_of_divergences(tiny, teachers):
    """By definition, in float64; and not the divergence to the mixture of the teachers."""
    batch = tiny.blocks().batch(range(4))
    distiller = trained_student(tiny, teachers, (6.0, 2.0), temperature=1.0)
    rows, _ = next_token_targets(batch.input_ids, batch.counts)
    with torch.no_grad():
        logits = distiller.student(**batch.model_inputs()).logits.flatten(0, 1)[rows]
    log_q = logits.double().log_softmax(-1)
    log_p = [logits_of(teacher(batch, rows)).double().log_softmax(-1) for teacher in teachers]
    each = [(p.exp() * (p - log_q)).sum(-1).mean() for p in log_p]
    mixture = (0.75 * log_p[0].exp() + 0.25 * log_p[1].exp()).log()
    to_mixture = (mixture.exp() * (mixture - log_q)).sum(-1).mean()
    kd = distiller.step([batch], 0.0).kd
    assert kd == pytest.approx(float(0.75 * each[0] + 0.25 * each[1]), rel=1e-5)
    assert abs(kd - float(to_mixture)) > 0.05


@fault(121)
def test_a_faulty_teacher_costs_the_term_alone_and_is_named(tiny, teachers):
    """The step is to the bit the one by cross-entropy; the event says which teacher and weight."""
    batch = tiny.blocks().batch(range(4))
    alone = tiny.distiller()
    alone.step([batch], 1e-2)
    with torch.no_grad():
        teachers[1].model.model.layers[0].mlp.up_proj.weight[3, 2] = math.nan
    distiller = trained_student(tiny, teachers, (0.7, 0.3))
    result = distiller.step([batch], 1e-2)
    assert result.updated and not result.learned("kd") and result.learned("ce")
    assert same(params(alone), params(distiller))
    reasons = [
        event.reason for event in distiller.guard.events.events if event.action == "explained"
    ]
    assert len(reasons) == 1 and "teacher B weight model.layers.0.mlp.up_proj.weight" in reasons[0]
    assert "the model's file is damaged" in reasons[0] and "rows 0, 1, 2, 3" in reasons[0]


# --- runs -----------------------------------------------------------------------------------------


@pytest.fixture
def two(models):
    return f"{models('teacher')},{models('student')}"


@pytest.fixture
def weighted(models):
    """TEACHER_MODEL with two weights."""
    return lambda a, b: f"{a}*{models('teacher')}, {b} * {models('student')}"


def test_a_run_learns_from_all_of_them(settings, models, two, weighted):
    settings = partial(settings, max_steps=2, eval_every=2)
    path = run(settings(teacher_model=weighted(0.7, 0.3)))
    recorded, rows = config(path), table(path)
    assert [recorded["teacher"]["name"], *(one["name"] for one in recorded["beside"])] == two.split(
        ","
    )
    names = ["teacher", f"teacher {models('student')}", "student before", "student"]
    assert list(rows) == names and len({row["nll"] for row in rows.values()}) == 4
    other = run(settings(teacher_model=weighted(0.3, 0.7), run_name="b"))
    as_well = run(settings(teacher_model=weighted(7, 3), run_name="c"))
    assert weights(other) != weights(path) == weights(as_well)
    kinds = [settings(run_name="d"), settings(run_name="e", teacher_model=models("student"))]
    first, second = (log_lines(run(kind))[0]["kd"] for kind in kinds)
    between = log_lines(path)[0]["kd"]  # of the first steps: the students are nearly the same
    assert between == pytest.approx(0.7 * first + 0.3 * second, rel=0.02)


@fault(121)
def test_a_second_teacher_that_is_not_finite_is_refused_by_name(settings, models, tmp_path):
    sick = tmp_path / "sick"
    shutil.copytree(models("student"), sick)
    tensors = load_file(sick / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = math.nan
    save_file(tensors, sick / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=rf"the teacher {sick} on held-out .*layers\.1\.mlp\.down"):
        run(settings(teacher_model=f"{models('teacher')},{sick}"))


def test_a_folder_with_a_comma_in_its_name_is_one_teacher(settings, models, tmp_path):
    shutil.copytree(models("teacher"), tmp_path / "a,b")
    assert settings(teacher_model=str(tmp_path / "a,b")).teacher_names == (str(tmp_path / "a,b"),)
    assert json.loads((tmp_path / "a,b" / "config.json").read_text())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher_model": "0.7*a,b"}, "a weight above 0 before each name"),
        ({"teacher_model": "0.7*a,-0.3*b"}, "a weight above 0 before each name"),
        ({"teacher_model": "0.7*a,nan*b"}, "a weight above 0 before each name"),
        ({"teacher_model": "x*a,0.3*b"}, "a weight above 0 before each name"),
        ({"teacher_model": "0.7*a,0.3*"}, "separated by commas"),
        ({"teacher_model": "a,"}, "separated by commas"),
        ({"teacher_model": "train,b"}, "'train' and 'none' cannot be combined"),
        ({"teacher_model": "a,train:1x16:2"}, "'train' and 'none' cannot be combined"),
        ({"teacher_cache": "c"}, "tokenizer: set TEACHER_CACHE to None\\.$"),
        ({"align": "chunks"}, "set ALIGN to 'auto'"),
        ({"router_mode": "auto"}, "ROUTER_MODE to 'native'"),
    ],
)
def test_settings_that_do_not_go_with_several(changes, message):
    with pytest.raises(SettingsError, match=message):
        LanguageSettings(**{"teacher_model": "a,b", **changes})
