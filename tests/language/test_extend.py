"""A finished run goes on when it is given more steps."""

import json
import os
import shutil
import signal
from unittest.mock import Mock

import pytest

from ssl_kd.errors import Interrupted
from ssl_kd.language.run import run
from ssl_kd.settings import SettingsError
from ssl_kd.training.folder import RunFinished, RunFolderError
from ssl_kd.training.schedule import learning_rate_at


def read(path, name):
    return json.loads((path / name).read_text())


def rows(path):
    lines = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row for row in lines if "train_loss" in row}


def weights(path):
    return (path / "student" / "model.safetensors").read_bytes()


@pytest.fixture
def finished(settings):
    """Settings of a run of four steps that is over, and where it is."""
    own = settings(max_steps=4, log_every=1, checkpoint_every=1)
    return own, run(own)


def test_a_finished_run_goes_on_by_more_steps(finished, caplog):
    own, path = finished
    before = rows(path), read(path, "metrics.json")
    caplog.set_level("INFO")
    assert run(own.replace(resume=True, run_name="a", max_steps=9)) == path
    after = rows(path)
    for step, row in before[0].items():
        assert after[step] == row
    for step in range(5, 10):  # as a run of nine steps would have them from here on
        rate = learning_rate_at(step - 1, 9, own.peak_lr, own.warmup_fraction)
        assert after[step]["learning_rate"] == rate
    assert after[5]["learning_rate"] > before[0][4]["learning_rate"]
    assert read(path, "metrics.json")["steps"] == 9 and read(path, "metrics_4.json") == before[1]
    config = read(path, "config.json")
    assert config["extended"] == [{"from": 4, "to": 9}] and config["settings"]["MAX_STEPS"] == 9
    assert "goes on from step 4 to 9; learning rates are those of 9 steps in all" in caplog.text
    # And once more.
    run(own.replace(resume=True, run_name="a", max_steps=10))
    assert [e["to"] for e in read(path, "config.json")["extended"]] == [9, 10]


def test_an_extension_that_is_interrupted_ends_to_the_bit_as_one_that_is_not(finished, tmp_path):
    own, path = finished
    shutil.copytree(path, tmp_path / "runs" / "b")
    longer = own.replace(resume=True, max_steps=9)

    def stop(stage, done, total, info):
        if stage == "train" and done == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        run(longer.replace(run_name="b"), progress=stop)
    with pytest.raises(SettingsError, match="MAX_STEPS was 9 and is now 4"):
        run(own.replace(resume=True, run_name="b"))
    other = run(longer.replace(run_name="b"))
    assert weights(other) == weights(run(longer.replace(run_name="a")))


def test_what_does_not_extend_a_run(finished, monkeypatch):
    own, path = finished
    before = weights(path)
    for same_or_fewer in (4, 3):
        with pytest.raises(RunFinished, match="is finished; .*; a larger --max_steps extends it"):
            run(own.replace(resume=True, run_name="a", max_steps=same_or_fewer))
    with pytest.raises(SettingsError, match="TEMPERATURE was 2.0 and is now 3.0"):
        run(own.replace(resume=True, run_name="a", max_steps=9, temperature=3.0))
    with pytest.raises(RunFolderError, match="no unfinished run"):  # nobody said which
        (path / "report.html").write_text("")
        run(own.replace(resume=True, run_name=None, max_steps=9))
    # A failure before the first step leaves the run finished, and it can be extended after.
    with monkeypatch.context() as patch, pytest.raises(FileNotFoundError):
        patch.setattr("ssl_kd.language.run.prepare", Mock(side_effect=FileNotFoundError))
        run(own.replace(resume=True, run_name="a", max_steps=9))
    assert weights(path) == before and read(path, "metrics.json")["steps"] == 4
    shutil.rmtree(path / "checkpoint")
    with pytest.raises(RunFolderError, match="its checkpoints are gone: .* a new run, with .*st"):
        run(own.replace(resume=True, run_name="a", max_steps=9))
