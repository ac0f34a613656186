"""With a cache the teacher's weights need not be there."""

import json
import logging
import shutil
from pathlib import Path

import pytest

from ssl_kd.language.caching import cache_teacher
from ssl_kd.language.run import run
from ssl_kd.report import write_report
from ssl_kd.settings import SettingsError
from ssl_kd.store import FingerprintMismatch
from tests.faults.matrix import row as fault


@pytest.fixture
def cached(settings, tiny, tmp_path):
    """Settings of a run from a cache, with a teacher of its own that can go."""
    own = settings(
        teacher_model=tiny.folder(tmp_path / "teacher"),
        student_model=tiny.folder(tmp_path / "student", seed=4),
        teacher_cache=str(tmp_path / "cache"),
    )
    cache_teacher(own)
    return own


def losses(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row["train_loss"] for row in map(json.loads, lines) if "train_loss" in row]


@pytest.mark.parametrize("left", ["nothing", "tokenizer"])
@fault(125)
def test_a_run_goes_on_from_the_cache_alone(cached, caplog, left):
    there = run(cached)
    teacher = Path(cached.teacher_model)
    if left == "nothing":
        shutil.rmtree(teacher)
    else:
        (teacher / "model.safetensors").unlink()
    gone = run(cached.replace(run_name="gone"))
    assert losses(gone) == losses(there) and len(losses(there)) > 1
    assert "learns from TEACHER_CACHE alone and the table has no row of the teacher" in caplog.text
    names = [row["name"] for row in json.loads((gone / "metrics.json").read_text())["table"]]
    assert names == ["student before", "student"]
    assert write_report(gone).exists()
    if left == "tokenizer":  # which is all that new weights need
        caplog.set_level(logging.INFO)
        run(cached.replace(student_model="llama:1x16", run_name="new"))


def test_what_the_cache_cannot_stand_for_is_refused(cached, tiny, tmp_path):
    shutil.rmtree(cached.teacher_model)
    with pytest.raises(SettingsError, match="'fresh:1x16' is made of the teacher .* llama:LAYERSx"):
        run(cached.replace(student_model="fresh:1x16"))
    with pytest.raises(FileNotFoundError, match="no folder"):
        run(cached.replace(teacher_cache=None))
    with pytest.raises(FileNotFoundError, match="no folder"):
        run(cached.replace(teacher_cache=str(tmp_path / "other")))
    with pytest.raises(FingerprintMismatch, match="block_size"):
        run(cached.replace(block_size=16))
    foreign = tiny.folder(tmp_path / "foreign", tokenizer=tiny.other_tokenizer)
    with pytest.raises(FingerprintMismatch, match="tokenizer"):
        run(cached.replace(student_model=foreign))
