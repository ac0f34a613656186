"""Test rows 39 to 45 and 82: checkpoints, processes, the system."""

import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ssl_kd.core.files import CorruptFileError, save_tensors, sha256_file
from ssl_kd.core.runs.folder import RunFolderError
from ssl_kd.core.shards.shards import read_manifest, write_manifest
from ssl_kd.vision.estimator import MultiHeadClusterer
from ssl_kd.vision.model import ClusterModel
from ssl_kd.vision.run import run
from ssl_kd.vision.train.heads import TEMIHead
from tests.faults.inject import (
    ROOT,
    content,
    flags_of,
    flip_bit,
    locked,
    log_lines,
    newest_checkpoint,
    one_line,
    stopped,
    train_in,
    weights,
)
from tests.faults.matrix import row
from tests.kill_writers import kill_again_and_again, on_change
from tests.marks import slow
from tests.processes import HANG, start


def steps_kept(folder):
    """Return all steps up to the newest complete checkpoint."""
    complete = max((folder / "checkpoint").glob("*.sha256"), default=None)
    return set(range(int(complete.stem.rpartition("_")[2]))) if complete else set()


@row(39)
@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_killed_at_twenty_random_positions_the_weights_are_the_uninterrupted_runs(settings):
    asked = settings(max_steps=100, checkpoint_every=10)
    runs = Path(asked.runs_dir)
    found = kill_again_and_again(train_in, steps_kept, runs, run, asked, kills=20)
    assert found.kills == 20 and found.resumed > 5
    for path in found.folders:
        assert weights(path) == weights(found.straight)
        assert log_lines(path) == log_lines(found.straight)
        assert not list((path / "checkpoint").glob(".*"))


@row(39)
def test_half_a_file_of_a_killed_run_is_cleared_away(settings):
    path = stopped(settings, "parts")
    for name in ("checkpoint/.step_000000030.pt.1a2b3c4d.tmp", ".metrics.json.1a2b3c4d.tmp"):
        (path / name).write_bytes(b"half a file")
    run(settings(run_name="parts", resume=True))
    assert not list(path.rglob("*.tmp"))


def struck_by(number, step, command, folder, errors):
    """Run a command that sends itself one signal while it writes the checkpoint of a step."""
    sent = []

    def strike(position, path, written):
        if f"step_{step:09}" in path and written and not sent:  # a second one would not wait
            sent.append(number)
            os.kill(os.getpid(), number)

    sys.orig_argv, sys.argv = command, command[1:]
    os.chdir(folder)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    on_change(strike, folder)
    runpy.run_path(command[1], run_name="__main__")


@row(40)
@pytest.mark.slow
def test_a_signal_leaves_a_checkpoint_and_the_command_to_resume(settings, tmp_path):
    """Stop at step 10, resume with the printed command, stop at step 20, and resume to the end."""
    path, errors = tmp_path / "runs" / "a run", tmp_path / "errors"
    command = [sys.executable, str(ROOT / "train.py"), *flags_of(settings(run_name="a run"))]
    for number, step in ((signal.SIGTERM, 10), (signal.SIGINT, 20)):
        process = start(struck_by, number, step, command, tmp_path, errors)
        process.join(HANG)
        assert process.exitcode == 128 + number, errors.read_text()
        match = re.search(
            r"Stopped by (\w+); a checkpoint is in (.*); continue with: (.*)",
            one_line(errors.read_text()),
        )
        assert match is not None and (match[1], match[2]) == (number.name, str(path))
        assert step <= newest_checkpoint(path)[1]["step"] < step + 10
        assert not list(path.rglob("*.tmp"))
        command = shlex.split(match[3])
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=HANG)
    assert done.returncode == 0, done.stderr
    assert "report.html" in done.stdout and (path / "report.html").exists()
    whole = run(settings(run_name="whole"))
    assert weights(path) == weights(whole) and log_lines(path) == log_lines(whole)


@row(41)
@pytest.mark.parametrize("harm", ["one bit", slow("truncated"), slow("empty"), "no checksum"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(settings, train_py, harm, caplog):
    whole = run(settings(run_name="whole"))
    path = stopped(settings, "parts")
    newest = path / "checkpoint" / "step_000000025.pt"
    if harm == "one bit":
        flip_bit(newest)
    elif harm == "no checksum":
        newest.with_suffix(".sha256").unlink()
    else:
        newest.write_bytes(newest.read_bytes()[:1000] if harm == "truncated" else b"")
    stages = []
    run(
        settings(run_name="parts", resume=True),
        progress=lambda stage, done, *_: stages.append((stage, done)),
    )
    assert "falling back to the checkpoint before step_000000025" in caplog.text
    assert ("train", 25) in stages and ("train", 20) not in stages  # resumed from step 20
    assert weights(path) == weights(whole) and log_lines(path) == log_lines(whole)


@row(42)
def test_a_setting_that_changes_the_result_is_refused_by_name(settings, train_py):
    path = stopped(settings, "parts")
    before = content(path)
    changed = {"learning_rate": 0.5, "n_heads": 3, "seed": 7}
    code, error = train_py(settings(run_name="parts", resume=True, **changed))
    line = one_line(error)
    assert code == 2 and "LEARNING_RATE was 0.004 and is now 0.5" in line
    assert "N_HEADS was 4 and is now 3" in line and "SEED was 0 and is now 7" in line
    assert "BATCH_SIZE" not in line and content(path) == before


@row(42)
def test_a_setting_that_does_not_change_the_result_may_differ(settings):
    whole = run(settings(run_name="whole"))
    path = stopped(settings, "parts")
    run(settings(run_name="parts", resume=True, checkpoint_every=7, workers=2))
    assert weights(path) == weights(whole)


@row(42)
def test_other_data_under_the_same_name_are_refused(settings, tmp_path, digits, train_py):
    path = stopped(settings, "parts")
    before = content(path / "checkpoint")
    resumed = settings(run_name="parts", resume=True)
    np.savez(tmp_path / "digits.npz", features=np.random.rand(64, 64), labels=digits[1][:64])
    code, error = train_py(resumed)
    assert code == 2 and "the data or the teacher has changed" in one_line(error)
    code, error = train_py(resumed, "--force-recompute")
    assert code == 2 and "the data or the teacher has changed" in one_line(error)
    assert content(path / "checkpoint") == before and not (path / "metrics.json").exists()


def _rewrite(path, change):
    """Change the content of the last checkpoint, with a matching checksum."""
    newest, held = newest_checkpoint(path)
    change(held)
    save_tensors(newest, held)
    newest.with_suffix(".sha256").write_text(sha256_file(newest))


@row(43)
@pytest.mark.parametrize(
    "harm",
    [
        "newer format",
        "older format",
        "without students",
        "other shapes",
        "fewer tensors",
    ],
)
def test_a_checkpoint_that_cannot_be_understood_is_refused_or_left_for_the_one_before(
    settings, harm
):
    whole = run(settings(run_name="whole"))
    path = stopped(settings, "parts")

    def change(held):
        if harm.endswith("format"):
            held |= {"format": 999 if harm == "newer format" else 0, "version": "9.9.9"}
        elif harm == "without students":
            del held["tensors"]["student"]
        elif harm == "fewer tensors":
            del held["tensors"]["recovery.counts"]
        else:
            held["tensors"]["student"] = held["tensors"]["student"][:, :-1].clone()

    _rewrite(path, change)
    checkpoints = content(path / "checkpoint")
    try:
        run(settings(run_name="parts", resume=True))
    except RunFolderError as error:
        assert "step_000000025.pt" in str(error)
        assert ("ssl_kd 9.9.9" in str(error)) == harm.endswith("format")
        assert "without --resume" in str(error) or not harm.endswith("format")
        assert content(path / "checkpoint") == checkpoints
    else:  # never continues from step 25 with foreign weights
        assert not harm.endswith("format")
        assert weights(path) == weights(whole)


@row(43)
def test_a_cache_of_another_version_names_the_way_out(settings, train_py):
    run(settings())
    manifest = Path(settings().embeddings_dir) / "embeddings_train.json"
    write_manifest(manifest, read_manifest(manifest) | {"version": 99})
    code, error = train_py(settings(run_name="b"))
    line = one_line(error)
    assert code == 1 and "embeddings_train.json has version 99" in line
    assert "Use the version of ssl_kd that wrote the file" in line and "--force_recompute" in line


class HungryHead(TEMIHead):
    """Allocates more memory than exists after the 15th training pass."""

    passes = 0

    @staticmethod
    def stacked(parameters, x):
        if torch.is_grad_enabled():
            HungryHead.passes += 1
            if HungryHead.passes > 15:
                torch.empty(2**60)
        return TEMIHead.stacked(parameters, x)


@row(44)
def test_out_of_memory_names_the_settings_to_lower(settings, train_py, monkeypatch):
    monkeypatch.setattr(HungryHead, "passes", 0)
    hungry = settings(run_name="a", head=f"{__name__}.HungryHead")
    code, error = train_py(hungry)
    line = one_line(error)
    path = Path(hungry.runs_dir) / "a"
    assert not list(path.rglob("*.tmp"))
    assert code == 1 and "Out of memory" in line
    assert "BATCH_SIZE" in line and "N_HEADS" in line
    assert not (path / "metrics.json").exists() and newest_checkpoint(path)[1]["step"] == 10
    monkeypatch.setattr(HungryHead, "passes", -1000)
    whole = run(settings(run_name="whole", head=hungry.head))
    assert train_py(hungry, "--resume")[0] == 0  # resume with enough memory
    assert weights(path) == weights(whole)


@row(45)
@pytest.mark.parametrize("place", ["a file", "a folder in /proc", "read-only"])
def test_a_run_folder_that_cannot_be_written_is_refused_before_any_work(
    settings, tmp_path, place, train_py
):
    (tmp_path / "file").write_text("mine")
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    runs = {"a file": tmp_path / "file", "a folder in /proc": "/proc/runs", "read-only": locked}
    if place == "read-only" and os.access(locked, os.W_OK):
        pytest.skip("this user may write anywhere")
    if place == "a folder in /proc" and not Path("/proc").is_dir():
        pytest.skip("no /proc on this system")
    code, error = train_py(settings(runs_dir=str(runs[place])))
    line = one_line(error)
    assert code == 2 and str(runs[place]) in line
    assert not (tmp_path / "embeddings").exists()
    assert (tmp_path / "file").read_text() == "mine" and not list(locked.iterdir())


@row(45)
@pytest.mark.parametrize("held", ["a finished run", "a run in use", "something else"])
def test_a_run_folder_that_holds_something_is_never_overwritten(settings, train_py, tmp_path, held):
    path = tmp_path / "runs" / "a"
    if held == "a finished run":
        assert train_py(settings(run_name="a"))[0] == 0
    elif held == "a run in use":
        stopped(settings, "a")
    else:
        path.mkdir(parents=True)
        (path / "precious.txt").write_text("mine")
    before = content(path)
    shutil.rmtree(tmp_path / "embeddings", ignore_errors=True)
    code, error = train_py(settings(run_name="a"))
    line = one_line(error)
    assert code == 2 and f"{path} already holds" in line
    assert "--run_name" in line and "--resume" in line
    if held == "a run in use":  # by another process
        with locked(path / ".lock") as holder:
            code, error = train_py(settings(run_name="a", resume=True))
            assert code == 1 and f"process {holder} holds" in one_line(error)
            assert content(path) == before
        return
    if held == "a finished run":
        code, error = train_py(settings(run_name="a", resume=True))
        assert code == 2 and "is finished" in one_line(error)
    assert content(path) == before and not (tmp_path / "embeddings").exists()


@row(82)
@pytest.mark.parametrize("name", ["weights", "votes", "projection.mean", "projection.scale"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_model_with_nonfinite_values_is_refused_by_tensor_name(name, value, tmp_path):
    model = ClusterModel(6, 6, 4, 3, hidden_dim=10, bottleneck_dim=5)
    model.get_buffer(name).view(-1)[0] = value
    model.save_pretrained(tmp_path)
    for load in (ClusterModel.from_pretrained, MultiHeadClusterer.from_pretrained):
        with pytest.raises(
            CorruptFileError, match=f"{tmp_path}/model.safetensors: 1 of .* values of {name} are"
        ):
            load(tmp_path)
