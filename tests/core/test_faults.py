"""What ssl_kd adds to the guard: settings to change, and its own kinds of faults."""

from pathlib import Path

import pytest
import torch

import firstnan
from firstnan.faults import Stage
from firstnan.microscope import Microscope
from ssl_kd.core.faults import REMEDIES, OwnStage, diagnose
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.vision.settings import VisionSettings

HEADS = {"learning_rate": 4.0, "clip_grad": None, "student_temp": 0.1, "teacher_temp": 0.04}
HEADS |= {"use_fp16": True, "rebuild_damaged": False}
STUDENT = {"temperature": 0.05, "learning_rate": 3e-3, "clip_grad": 1.0}
STUDENT |= {"model_dtype": "auto", "rebuild_damaged": False}
SQUARE = torch.tensor([1e25]).square
POISONED = torch.full((1, 4), float("nan"))


@pytest.mark.parametrize(
    ("step", "settings", "advice"),
    [
        (lambda: (torch.tensor([0.9]).half() / 0.04).exp(), HEADS, ["TEACHER_TEMP 0.04 -> 0.1"]),
        (lambda: torch.tensor([1e5]).half(), HEADS, ["USE_FP16 True -> False"]),
        (lambda: torch.tensor([1e5]).to(torch.float8_e5m2).float(), HEADS, []),
        (SQUARE, HEADS, ["LEARNING_RATE 4 -> 0.4", "CLIP_GRAD None -> 1"]),
        (lambda: torch.tensor([2.0]).acos(), HEADS, []),
        (lambda: (torch.tensor([0.9]).half() / 0.05).exp(), STUDENT, ["TEMPERATURE 0.05 -> 0.125"]),
        (lambda: torch.tensor([1e5]).half(), STUDENT, ["MODEL_DTYPE auto -> float32"]),
        (lambda: torch.zeros(1).half().log(), STUDENT, ["MODEL_DTYPE auto -> float32"]),
        (lambda: torch.zeros(1).log(), STUDENT, []),
        (SQUARE, STUDENT, ["LEARNING_RATE 0.003 -> 0.0003"]),
        (SQUARE, {"learning_rate": 50.0}, ["LEARNING_RATE 50 -> 0.5"]),  # a tenth is too much, too
        (lambda: torch.tensor([1e5]).half(), None, []),  # the caller has no settings
        (lambda: POISONED @ torch.ones(4, 2), HEADS, ["REBUILD_DAMAGED False -> True"]),
    ],
)
def test_the_settings_to_change_and_the_values_to_try(step, settings, advice):
    with Microscope({"input": POISONED}) as scope:
        result = step()
    found = diagnose(scope.fault(result), settings, usual_lr=0.5)
    assert [str(a) for a in found.advice] == advice


def test_a_guard_gives_the_advice_of_its_caller():
    model = torch.nn.Linear(2, 1)
    guard = firstnan.Guard(model, torch.optim.SGD(model.parameters(), 0.1), advice=REMEDIES)
    guard.backward(model(torch.full((1, 2), float("nan"))).sum())
    guard.step()
    assert int(OwnStage.TEACHER) == 1  # as checkpoints store it
    assert guard.diagnosis().endswith(f"What to change: {REMEDIES[Stage.LOSS]}.")


def test_the_guard_itself_names_nothing_of_this_project():
    fields = {name for name in {*VisionSettings.rules(), *LanguageSettings.rules()} if "_" in name}
    fields -= {"clip_grad", "spike_factor", "stop_after"}  # arguments of the guard itself
    fields -= {"gradient_checkpointing", "run_name", "learning_rate"}  # of others, and a cause
    for file in Path(firstnan.__file__).parent.glob("*.py"):
        text = file.read_text(encoding="utf-8").lower()
        assert [w for w in (*fields, "ssl_kd", "student", "teacher") if w in text] == [], file
