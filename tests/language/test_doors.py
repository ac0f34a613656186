"""Settings that fit a run into existing tools and files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ssl_kd.core.errors import InputError, MissingPackage
from ssl_kd.language import prepare as task
from ssl_kd.language.run import run
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.teachers.caching import cache_teacher
from tests.core.runs.test_board import Tracker
from tests.faults.matrix import row as fault


def test_report_to_a_tracker(settings, monkeypatch):
    tracker = Tracker("wandb")
    tracker.__spec__ = sys.__spec__
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    run(settings(report_to="wandb"))
    assert tracker.started["name"] == "a" and tracker.started["config"]["REPORT_TO"] == "wandb"
    assert [step for step, row in tracker.rows if "train_loss" in row] == [2, 4, 6]
    assert [step for step, row in tracker.rows if "eval/perplexity" in row] == [3, 6]
    assert tracker.finished == 1
    assert LanguageSettings(report_to="wandb").boards == {"wandb"}
    assert LanguageSettings(report_to="none").boards == set()
    assert LanguageSettings().boards == {"tensorboard"}


BLOCKED = """
import runpy, sys
missing, *sys.argv = sys.argv[1:]
sys.modules[missing] = None
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    assert "torch" not in sys.modules
"""


@pytest.mark.parametrize(
    ("missing", "script", "flags"),
    [
        ("transformers", "distill.py", ["--max_steps", "5"]),
        ("peft", "distill.py", ["--lora_rank", "4"]),
        ("datasets", "train_sar_kd_stable.py", ["--data_path", "hf:a/b"]),
        ("transformers", "cache_teacher.py", ["--teacher_cache", "cache"]),
    ],
)
@fault(150)
def test_a_missing_package_is_one_line_before_torch_and_any_folder(
    tmp_path, missing, script, flags
):
    path = Path(__file__).parents[2] / "scripts" / script
    words = [sys.executable, "-c", BLOCKED, missing, str(path), *flags]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    expected = f"This needs the package {missing}: pip install 'ssl_kd[llm]'"
    assert done.returncode == 1
    *notes, line = done.stderr.splitlines()
    assert expected in line and all(note.startswith("ssl_kd: preset ") for note in notes)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("work", [run, cache_teacher])
@fault(150)
def test_from_python_no_folder_is_left_where_a_package_is_missing(
    settings, monkeypatch, tmp_path, work
):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    served = {"teacher_url": "http://127.0.0.1:1/v1", "student_model": "llama:1x32"}
    served |= {"teacher_model": "x", "temperature": 1.0, "runs_dir": str(tmp_path / "runs")}
    with pytest.raises(MissingPackage, match="needs the package aiohttp: pip install"):
        work(settings(**served, teacher_cache=str(tmp_path / "cache")))
    assert not (tmp_path / "runs").exists() and not (tmp_path / "cache").exists()


@pytest.mark.parametrize("student", ["llama:1x32", "fresh:1x32", "folder"])
@fault(149)
def test_a_rank_above_the_width_is_refused_before_a_teacher_is_made(
    settings, monkeypatch, models, student
):
    monkeypatch.setattr(task.ModelLoader, "_teacher_of_run", None)  # is not called
    name = models("student") if student == "folder" else student
    with pytest.raises(InputError, match="LORA_RANK is 1,000,000; expected at most"):
        run(settings(student_model=name, lora_rank=10**6))


def test_a_field_that_holds_the_text(settings, tmp_path, tiny):
    path = tmp_path / "rows.jsonl"
    rows = [{"body": example.text, "text": 5} for example in tiny.texts(60).examples]
    path.write_text("\n".join(map(json.dumps, rows)))
    folder = run(settings(data_path=str(path), text_field="body", max_steps=1))
    documents = json.loads((folder / "config.json").read_text())["data"]["documents"]
    assert 40 < documents < 60
    with pytest.raises(ValueError, match="expected a string in the field boddy"):
        run(settings(data_path=str(path), text_field="boddy", run_name="b"))
