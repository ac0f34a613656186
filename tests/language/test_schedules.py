"""Weights and temperature that move over a run, and a run that ends where it no longer helps."""

import copy
import json
import os
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ssl_kd.language.run import run
from ssl_kd.language.schedules import Move
from ssl_kd.language.train import train
from ssl_kd.settings import SettingsError
from ssl_kd.teachers.frozen import FrozenTeacher
from ssl_kd.training.stop import Interrupted
from tests.bits import same


@pytest.mark.parametrize(
    ("shape", "values"),
    [("linear", [4, 3.25, 2.5, 1.75, 1]), ("cosine", [4, 3.5607, 2.5, 1.4393, 1])],
)
def test_a_setting_goes_from_its_own_value_to_the_end(shape, values):
    found = [Move("temperature", 1.0, shape).at(4.0, step, 5) for step in range(5)]
    assert found == pytest.approx(values, abs=1e-4)
    assert found[0] == 4.0 and found[-1] == 1.0
    assert Move("temperature", 1.0, shape).at(4.0, 0, 1) == 4.0  # a run of one step


def test_a_schedule_is_read_in_either_case_and_with_spaces(tiny):
    settings = tiny.settings(schedule=" TEMPERATURE: 1, alpha_kd:0.1 : cosine,alpha_ce:1e-2")
    assert settings.moves == [
        Move("temperature", 1.0, "linear"),
        Move("alpha_kd", 0.1, "cosine"),
        Move("alpha_ce", 0.01, "linear"),
    ]
    now = settings.at_step(2, 5)
    assert now.schedule is None
    values = now.temperature, now.alpha_kd, now.alpha_ce
    assert values == pytest.approx((1.5, 0.3, 0.255))


@pytest.mark.parametrize(
    ("schedule", "changes", "words"),
    [
        ("temperature 4:1", {}, "must be NAME:END or NAME:END:cosine"),
        ("temperature:1:square", {}, "must be NAME:END"),
        ("alpha_kb:1", {}, "names alpha_kb, .* move. Did you mean alpha_kd?"),
        ("learning_rate:1", {}, "names learning_rate, but only temperature, alpha_kd"),
        ("alpha_kd:1,alpha_kd:2", {}, "names a setting twice"),
        ("temperature:0", {}, "TEMPERATURE is 0.0, but must be .* at least 0.05"),
        ("alpha_kd:-1", {}, "ALPHA_KD is -1.0"),
        ("alpha_hidden:1", {}, "moves ALPHA_HIDDEN, which begins at 0.*: begin it above 0"),
        ("alpha_kd:0,alpha_ce:0", {}, "ALPHA_KD and ALPHA_CE are both 0"),
        ("temperature:1", {"teacher_cache": "cache"}, "TEACHER_CACHE holds answers at one"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(tiny, schedule, changes, words):
    with pytest.raises(SettingsError, match=words):
        tiny.settings(schedule=schedule, **changes)


def test_each_step_is_that_of_its_own_temperature_and_weights(tiny):
    """To the bit the step of a distiller that has these values from the beginning."""
    batch, own = tiny.blocks().batch(range(4)), {"temperature": 4.0, "alpha_kd": 0.8}
    teacher = FrozenTeacher(tiny.model(spread=0.3))
    moved = tiny.distiller(teacher, schedule="temperature:1,alpha_kd:0.2:cosine", **own)
    for step, (temperature, weight) in enumerate([(4, 0.8), (2.5, 0.5), (1, 0.2)]):
        plain = tiny.distiller(teacher, temperature=temperature, alpha_kd=weight)
        moved.follow(step, 3)
        assert moved.weights == {"ce": 0.5, "kd": pytest.approx(weight)}
        moved.weights["kd"] = weight  # 0.5 up to rounding of the cosine
        plain.load(copy.deepcopy(moved.state()))
        results = [distiller.step([batch], 1e-2) for distiller in (moved, plain)]
        assert results[0] == results[1]
        assert same(moved.student.state_dict(), plain.student.state_dict())


def test_what_moves_is_a_column_and_nothing_else_is(tiny):
    teacher, rows = FrozenTeacher(tiny.model(spread=0.3)), []
    schedule = {"schedule": "alpha_kd:0.1", "temperature": 1.0}
    train(tiny.distiller(teacher, **schedule), tiny.blocks(), 5, on_log=rows.append)
    assert [row["alpha_kd"] for row in rows] == pytest.approx([0.5, 0.4, 0.3, 0.2, 0.1])
    assert all("temperature" not in row for row in rows)
    for row in rows:
        assert row["train_loss"] == pytest.approx(0.5 * row["ce"] + row["alpha_kd"] * row["kd"])
    rows.clear()
    train(tiny.distiller(teacher), tiny.blocks(), 1, on_log=rows.append)
    assert "alpha_kd" not in rows[0]


def lines_of(path, key):
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if key in row]


def interrupted_at(step):
    def stop(stage, done, total, info):
        if stage == "train" and done == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return stop


def test_interrupted_and_resumed_it_moves_on_to_the_same_bits(settings):
    own = settings(schedule="temperature:1, alpha_kd:0.1:cosine", baseline=True)
    whole = run(own.replace(run_name="whole"))
    with pytest.raises(Interrupted):
        run(own, progress=interrupted_at(2))
    halves = run(own.replace(resume=True))
    a, b = (load_file(path / "student" / "model.safetensors") for path in (whole, halves))
    assert same(a, b)
    for name in ("temperature", "alpha_kd"):
        values = [row[name] for row in lines_of(halves, "train_loss")]
        assert values == [row[name] for row in lines_of(whole, "train_loss")]
        assert values == sorted(values, reverse=True) and values[-1] in (1.0, 0.1)


def own_folder(settings):
    return Path(settings.runs_dir) / settings.run_name
