"""Sweeps of real runs, killed and continued."""

import signal
import subprocess
import sys
import time

import pytest

from ssl_kd.sweep.records import read_runs
from tests.processes import PYTHONPATH, python

SWEEP = ["-m", "ssl_kd", "sweep", "--name", "s", "--beta", "0.5,0.7", "--seed", "0,1"]
SWEEP += ["--method", "heads", "--max_steps", "300", "--checkpoint_every", "20", "--n_heads", "4"]
SWEEP += ["--baselines", "false", "--report_to", "none"]


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
    whole.mkdir()
    killed.mkdir()
    assert python(whole, *SWEEP).returncode == 0
    process = subprocess.Popen(
        [sys.executable, *SWEEP],
        cwd=killed,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={"PYTHONPATH": PYTHONPATH},
    )
    second = killed / "runs" / "s" / "beta-0.5_seed-1"
    while not any(second.glob("checkpoint*")):
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    result = python(killed, *SWEEP, text=True)
    assert result.returncode == 0
    assert scores(killed) == scores(whole)
