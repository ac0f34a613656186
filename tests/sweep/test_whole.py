"""Sweeps of real runs: three objectives, one of them the user's, killed and continued."""

import signal
import subprocess
import sys
import time

import pytest

from ssl_kd.sweep.records import read_runs
from tests.processes import PYTHONPATH, python

SWEEP = ["-m", "ssl_kd", "sweep", "--name", "s", "--loss", "temi,scan,my_loss.Harder"]
SWEEP += ["--seed", "0,1", "--method", "heads", "--max_steps", "100", "--checkpoint_every", "20"]
SWEEP += ["--n_heads", "4", "--baselines", "false", "--report_to", "tensorboard"]
OWN = '''
from ssl_kd.vision.train.objectives import Sharpened


class Harder(Sharpened):
    """`Sharpened` with targets that are sharpened once more."""

    def targets(self, logits, marginal):
        targets, mean = super().targets(logits, marginal)
        targets = targets.square()
        return targets / targets.sum(-1, keepdim=True), mean
'''


def scores(folder):
    """Return the scores of all runs but their seconds."""
    records, unfinished = read_runs([folder / "runs" / "s"])
    assert not unfinished
    return {
        record.path.name: {k: v for k, v in record.scores.items() if k != "seconds"}
        for record in records
    }


@pytest.mark.slow
def test_a_killed_sweep_continues_to_the_same_table(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
        (folder / "my_loss.py").write_text(OWN)
    assert python(whole, *SWEEP).returncode == 0
    process = subprocess.Popen(
        [sys.executable, *SWEEP],
        cwd=killed,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={"PYTHONPATH": PYTHONPATH},
    )
    second = killed / "runs" / "s" / "loss-temi_seed-1"
    while not any(second.glob("checkpoint*")):
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    result = python(killed, *SWEEP, text=True)
    assert result.returncode == 0
    assert len(scores(whole)) == 6
    assert scores(killed) == scores(whole)
    for run in scores(whole):
        assert any((whole / "runs" / "s" / run / "tensorboard").iterdir())
    table = python(whole, "-m", "ssl_kd", "table", "runs/s", "--out", "table.tex", text=True)
    assert table.returncode == 0
    assert r"my\_loss.Harder & 2 &" in (whole / "table.tex").read_text()
