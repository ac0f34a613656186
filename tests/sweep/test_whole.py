"""Sweeps of real runs: three objectives, one of them the user's, killed and continued."""

import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ssl_kd.sweep.records import read_runs
from tests.processes import PYTHONPATH, python

PAGE = Path(__file__).parents[2] / "docs" / "tutorial_sweep.md"
# The tutorial's command for two seeds, few heads and few steps.
SHORT = "--seed 0,1 --n_heads 4 --max_steps 100 --checkpoint_every 20 --baselines false"


def tutorial():
    """Return the tutorial's objective and the arguments of its sweep."""
    text = PAGE.read_text(encoding="utf-8")
    _, _, after = text.partition("```python\n")
    (command,) = re.findall(r"^ssl_kd (sweep .*)$", text, re.MULTILINE)
    command = command.replace("--seed 0..4", SHORT)
    return after.partition("```")[0], ["-m", "ssl_kd", *shlex.split(command)]


def scores(folder):
    """Return the scores of all runs but their seconds."""
    records, unfinished = read_runs([folder / "runs" / "objectives"])
    assert not unfinished
    return {
        record.path.name: {k: v for k, v in record.scores.items() if k != "seconds"}
        for record in records
    }


@pytest.mark.slow
def test_a_killed_sweep_continues_to_the_same_table(tmp_path):
    objective, sweep = tutorial()
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
        (folder / "my_pica.py").write_text(objective)
    assert python(whole, *sweep).returncode == 0
    process = subprocess.Popen(
        [sys.executable, *sweep],
        cwd=killed,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={"PYTHONPATH": PYTHONPATH},
    )
    second = killed / "runs" / "objectives" / "loss-temi_seed-1"
    while not any(second.glob("checkpoint*")):
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    result = python(killed, *sweep, text=True)
    assert result.returncode == 0
    assert len(scores(whole)) == 6
    assert scores(killed) == scores(whole)
    for run in scores(whole):
        assert any((whole / "runs" / "objectives" / run / "tensorboard").iterdir())
    table = ["-m", "ssl_kd", "table", "runs/objectives", "--out", "table.tex"]
    assert python(whole, *table).returncode == 0
    assert r"my\_pica.PICA & 2 &" in (whole / "table.tex").read_text()
