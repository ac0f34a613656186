"""Test rows 96 to 100: commands, settings, folders."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from firstnan import Guard, Thresholds
from ssl_kd import MultiHeadClusterer, cli
from ssl_kd.core.errors import InputError
from ssl_kd.vision.run import run
from tests.faults.inject import events, no_run, one_line, stopped, weights
from tests.faults.matrix import row
from tests.marks import slow
from tests.processes import HANG, python

ROOT = Path(__file__).parents[2]


@row(96)
@pytest.mark.parametrize(
    ("size", "rank"),
    [
        ("WORLD_SIZE", "RANK"),
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        ("PMI_SIZE", "PMI_RANK"),
        ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ],
)
def test_one_of_two_ranks_is_refused_by_its_number(
    settings, train_py, monkeypatch, capfd, size, rank
):
    monkeypatch.setenv(size, "2")
    monkeypatch.setenv(rank, "1")
    code, error = train_py(settings())
    line = one_line(error)
    assert code == 2 and f"rank 1 of 2 ({size}" in line and "MASTER_ADDR" in line
    for command in (cli.distill, cli.cache_teacher):
        assert command(["--teacher_cache", "kept", "--data_path", "none.txt"]) == 2
        assert f"rank 1 of 2 ({size}" in one_line(capfd.readouterr().err)
    with pytest.raises(InputError, match="rank 1 of 2"):
        MultiHeadClusterer().fit(np.eye(20))
    assert no_run(settings())


@row(96)
@pytest.mark.parametrize("size", ["1", ""])
def test_one_rank_alone_trains(monkeypatch, settings, train_py, size):
    monkeypatch.setenv("WORLD_SIZE", size)
    monkeypatch.setenv("SLURM_NTASKS", "2")  # a batch script is one process
    code, error = train_py(settings(max_steps=1))
    assert code == 0, error


@row(97)
def test_a_working_folder_that_is_gone_is_named(settings, train_py, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    code, error = train_py(settings())
    monkeypatch.chdir(tmp_path)
    assert code == 2 and "current folder no longer exists" in one_line(error)
    assert no_run(settings())


@row(98)
@pytest.mark.parametrize(
    "tail", [b'{"step": 12, "lo\xe4', slow(b"\xff\xfe\xc3(\n"), slow(b"\0" * 40)]
)
def test_a_damaged_tail_of_the_log_does_not_keep_a_run_from_being_resumed(
    settings, train_py, tail, caplog
):
    whole = run(settings(run_name="whole"))
    path = stopped(settings, "a")
    with open(path / "metrics.jsonl", "ab") as file:
        file.write(tail)
    code, error = train_py(settings(run_name="a", resume=True))
    assert code == 0 and "1 line(s) that cannot be read were removed" in caplog.text, error
    assert weights(path) == weights(whole)
    steps = [(p / "metrics.jsonl").read_bytes().count(b'"step"') for p in (path, whole)]
    assert steps[0] == steps[1]


@row(99)
def test_a_norm_above_the_threshold_skips_the_step_of_its_part_alone():
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 1), "b": torch.nn.Linear(4, 1)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parts = {name: list(part.parameters()) for name, part in model.items()}
    guard = Guard(model, optimizer, parts, thresholds=Thresholds(max_norm=2.0))
    for step in range(30):
        x = torch.randn(8, 4)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        levels, seen = guard.health.level.clone(), guard.health.seen.clone()
        guard.optimizer.zero_grad()
        large = step in (7, 9)
        losses = {name: model[name](x).sigmoid().mean() for name in parts}
        guard.backward(
            {name: loss * (1000 if large and name == "a" else 1) for name, loss in losses.items()}
        )
        assert guard.step() == ({"b"} if large else {"a", "b"})
        assert torch.equal(before["a.weight"], model["a"].weight) is large
        assert not torch.equal(before["b.weight"], model["b"].weight)
        if large:
            assert guard.health.level[0] == levels[0] and guard.health.seen[0] == seen[0]
    events = [(e.step, e.part, e.stage, e.action) for e in guard.events.events]
    assert events == [(8, "a", "large", "skipped"), (10, "a", "large", "skipped")]
    for event in guard.events.events:
        assert event.value and event.value > 2 and "above the fixed threshold" in event.reason
    assert guard.health.skipped.tolist() == [2, 0]


@row(99)
def test_a_student_above_the_norm_threshold_stops_with_advice(world, distill):
    asked = world.settings(grad_norm_threshold=1e-6, run_name="a", max_steps=50)
    code, error = distill(asked)
    assert code == 3 and "--grad_norm_threshold None" in error and "--learning_rate" not in error
    parts = error.partition("GRAD_NORM_THRESHOLD is 1e-06, and the gradient norms of the 10 steps ")
    assert parts[2].startswith("that it skipped were ") and "leave it out" in parts[2]
    assert [event["stage"] for event in events(world.runs / "a")[:10]] == ["large"] * 10


@row(48, 100)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"import sys\nsys.exit(0)\n", "line 1: expected only lines of `NAME"),
        (b"SEED = __import__('os').mkdir('trace')\n", "line 1: SEED must be a plain literal"),
        ("SEED = 1\n".encode("utf-16"), "is UTF-16, expected UTF-8: save it as UTF-8"),
        (b"SEED = " + b"-" * 5000 + b"1", "line 1"),
        (None, "cannot be read as a settings file: Is a directory"),
    ],
    ids=["exit", "a call", "UTF-16", "deep", "a folder"],
)
def test_an_invalid_settings_file_is_named_and_not_executed(
    settings, train_py, tmp_path, text, message, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.py"
    path.mkdir() if text is None else path.write_bytes(text)
    code, error = train_py(settings(), f"--config={path}")
    assert code == 2 and str(path) in one_line(error) and message in error
    assert no_run(settings()) and not (tmp_path / "trace").exists()


LEAVES = """
import logging, sys
from pathlib import Path
from ssl_kd.cli.failures import guarded
from ssl_kd.cli.screen import ProgressBars, open_screen

def work():
    screen = open_screen()
    with ProgressBars(screen) as progress:
        progress.quiet_seconds = 0.0
        for step in range(3000):
            progress("train", step, 3000, {"loss": "1.0"})
            logging.getLogger("ssl_kd.x").info("a line of the log")
            print("a line of the result", file=sys.stdout if step % 2 else sys.stderr)
    Path("report.html").write_text("the report")
    return 0

sys.exit(guarded(work))
"""


@row(152)
@pytest.mark.parametrize("unbuffered", ["", slow("1")])
@pytest.mark.parametrize("closed", ["stdout", "stderr", "both"])
def test_a_reader_that_leaves_does_not_end_the_run(tmp_path, closed, unbuffered):
    """Write more than a pipe holds, before and after its reader closes it."""
    out = subprocess.DEVNULL if closed == "stderr" else subprocess.PIPE
    err = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "both": subprocess.STDOUT}
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", LEAVES]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=out, stderr=err[closed]
    ) as job:
        pipe = job.stderr if closed == "stderr" else job.stdout
        assert pipe is not None and pipe.readline()
        pipe.close()
        assert job.wait(HANG) == 0
    assert (tmp_path / "report.html").read_text() == "the report"


@row(152)
@pytest.mark.parametrize("words", [["--help"], ["config", "train"], ["train", "--help-all"], ["x"]])
def test_a_command_with_a_closed_pipe_keeps_its_exit_code(tmp_path, words):
    reader, writer = os.pipe()
    os.close(reader)
    done = python(tmp_path, "-m", "ssl_kd", *words, stdout=writer, stderr=writer)
    os.close(writer)
    assert done.returncode == (2 if words == ["x"] else 0)


@row(152)
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is full")
def test_a_result_that_cannot_be_written_is_still_a_failure(tmp_path):
    with open("/dev/full", "w") as full:
        done = python(tmp_path, "-m", "ssl_kd", "config", "train", stdout=full, text=True)
    assert done.returncode == 1 and one_line(done.stderr).endswith("No space left on device")


@row(153)
@pytest.mark.parametrize("utf8", ["0", ""])
@pytest.mark.parametrize("locale", ["C", "POSIX"])
def test_names_outside_ascii_are_read_under_any_locale(tmp_path, locale, utf8):
    folder = tmp_path / "Füße"
    folder.mkdir()
    (folder / "einstellungen ☃.py").write_text('RUNS_DIR = "läufe"\nLERNING_RATE = 1\n', "utf-8")
    env = {"LC_ALL": locale, "PYTHONUTF8": utf8, "PYTHONCOERCECLOCALE": "0"}
    train = ["-m", "ssl_kd", "train"]
    done = python(folder, *train, "--config", "einstellungen ☃.py", env=env)
    line = one_line(done.stderr.decode())
    assert done.returncode == 2 and "einstellungen ☃.py, line 2: There is no setting" in line
    done = python(folder, *train, "--runs_dir", "läufe", "--seed", "é", env=env)
    assert "SEED is 'é', but must be" in one_line(done.stderr.decode())
