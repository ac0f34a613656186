"""The settings of the vision mode, and the file that a user edits."""

import re
from pathlib import Path

import pytest

from ssl_kd.cli.flags import read_settings
from ssl_kd.settings import SettingsError
from ssl_kd.vision.settings import VisionSettings

CONFIG = Path(__file__).parents[2] / "config.py"


def test_the_config_file_is_written_from_the_declarations():
    assert CONFIG.read_text(encoding="utf-8") == VisionSettings.file_text()
    assert VisionSettings.from_file(CONFIG) == VisionSettings()


@pytest.mark.parametrize("name", VisionSettings.rules())
def test_help_names_the_range_that_the_code_checks(name):
    rule = VisionSettings.rules()[name][2]
    assert rule.help
    text = f"{rule.help} {rule.bounds}"
    numbers = {float(n) for n in re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", text)}
    bounds = {rule.low, rule.above, rule.high, rule.below} - {None, 0}
    assert bounds <= numbers  # 0 as the lower end of a size or a share is implied


REFUSED = {
    "student_temp": [0.049],
    "teacher_temp": [0.039],
    "beta": [0.0, 1.01],
    "learning_rate": [0.0, float("nan")],
    "clip_grad": [0.0, float("inf")],
    "batch_size": [0],
    "n_clusters": [1, "many"],
    "seed": [-1],
    "teacher": ["dinov2_vitx14", "dinov", "timm:"],
    "run_name": ["../elsewhere", "latest"],
    "device": ["cuda:x"],
    "head": ["TEMIHead", "heads/mine.py"],
}
EDGES = {
    "student_temp": [0.05],
    "teacher_temp": [0.04],
    "beta": [1.0],
    "clip_grad": [None],
    "n_clusters": [None, "auto"],
    "learning_rate": [10.0],
    "teacher": ["dinov2_vitg14_reg", "timm:vit_small_patch14_dinov2.lvd142m"],
    "device": ["cuda:1"],
    "head": ["heads.cosine_head.CosineHead"],
}


@pytest.mark.parametrize("name", REFUSED)
def test_out_of_range_is_refused_by_name_and_the_edge_is_allowed(name):
    for value in REFUSED[name]:
        with pytest.raises(SettingsError, match=f"^{name.upper()} is "):
            VisionSettings(**{name: value})
    for value in EDGES.get(name, []):
        assert getattr(VisionSettings(**{name: value}), name) == value


def test_a_sharpened_teacher_may_not_be_softer_than_its_student():
    with pytest.raises(SettingsError, match="TEACHER_TEMP is 0.2 and STUDENT_TEMP 0.1"):
        VisionSettings(loss="sharpened", teacher_temp=0.2, student_temp=0.1)
    VisionSettings(loss="temi", teacher_temp=0.2, student_temp=0.1)


def test_rows_per_device_are_the_batch_of_every_process(monkeypatch, tmp_path):
    """Processes share the heads, not the rows: each forms its heads' losses on whole batches."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    words = ["--per_device_train_batch_size", "16"]
    assert read_settings(VisionSettings, words, tmp_path / "no.py", prog="x").batch_size == 16
    assert VisionSettings.from_dict({"per_device_train_batch_size": 16}).batch_size == 16
