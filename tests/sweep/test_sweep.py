import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ssl_kd.cli import main
from ssl_kd.core.files.lock import Lock
from ssl_kd.sweep import launch
from ssl_kd.sweep.records import read_runs
from tests.processes import HANG
from tests.sweep.test_table import write_run

FAKE = Path(__file__).with_name("fake_run.py")
START = f"""
import sys
from ssl_kd.cli import main
from ssl_kd.core.files.lock import Lock
from ssl_kd.sweep import launch
launch.PROGRAM = (sys.executable, {str(FAKE)!r})
raise SystemExit(main(["sweep", *sys.argv[1:]]))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the folder of the sweep `s`, whose runs only write their files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "PROGRAM", (sys.executable, str(FAKE)))
    return tmp_path / "runs" / "s"


def sweep(*words):
    return main(["sweep", "--name", "s", *words])


def order(folder):
    return (folder / "order.txt").read_text().splitlines()


def test_all_runs_are_trained_and_their_table_is_printed(folder, capsys):
    assert sweep("--beta", "0.5,0.6", "--seed", "0..2", "--jobs", "2") == 0
    records, unfinished = read_runs([folder])
    assert [record.path.name for record in records] == [
        f"beta-{beta}_seed-{seed}" for beta in ("0.5", "0.6") for seed in range(3)
    ]
    assert not unfinished
    table = capsys.readouterr().out
    assert "56.0 ± 2.5" in table
    assert "57.0 ± 2.5" in table
    assert "+1.0" in table


def test_a_finished_run_is_not_repeated_and_more_values_are_added(folder):
    assert sweep("--beta", "0.5,0.6", "--seed", "0,1") == 0
    assert sweep("--beta", "0.5,0.6", "--seed", "0..2") == 0
    assert len(order(folder)) == 6
    assert len(read_runs([folder])[0]) == 6


def test_a_failed_run_is_named_left_out_and_tried_again_by_the_same_command(folder, capsys):
    words = ["--beta", "0.5,0.9", "--seed", "0,1"]
    assert sweep(*words) == 1
    printed = capsys.readouterr()
    assert "failed with code 3: the reason of the failure" in printed.out
    assert "beta-0.9_seed-1: failed: the reason of the failure" in printed.err
    assert "55.5" in printed.out  # the mean of the two that are finished
    (folder / "mended").touch()
    assert sweep(*words) == 0
    assert len(order(folder)) == 6
    assert "failed" not in capsys.readouterr().out


def test_what_fails_beside_others_is_tried_once_more_alone(folder):
    assert sweep("--beta", "0.5,0.6,0.9", "--jobs", "2") == 1
    failures = [line for line in order(folder) if line.startswith("beta-0.9")]
    assert len(failures) == 2


def test_the_first_run_of_each_cache_is_trained_before_the_others(folder):
    words = ["--image_size", "32,64", "--beta", "0.5,0.6", "--dataset", "digits"]
    assert sweep(*words, "--jobs", "2") == 0
    first = [line.split()[0] for line in order(folder)[:2]]
    assert first == ["image_size-32_beta-0.5", "image_size-64_beta-0.5"]


def test_a_job_array_shares_the_runs(folder):
    words = ["--beta", "0.5,0.6", "--seed", "0,1", "--world", "2"]
    assert sweep(*words, "--rank", "0") == 0
    assert len(order(folder)) == 2
    assert sweep(*words, "--rank", "1") == 0
    assert len(read_runs([folder])[0]) == 4


def test_a_dry_run_prints_the_commands_and_writes_nothing(folder, capsys):
    assert sweep("--beta", "0.5,0.6", "--dry_run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.startswith("ssl_kd train --config") for line in lines] == [True, True]
    assert not folder.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--beta", "0.5,7"], "BETA is 7"),
        (["--beta", "0.5"], "Nothing is swept"),
        (["--beta", "0.5,0.6", "--dataset", "nowhere"], "nowhere"),
        (["--beta", "0.5,0.6", "--n_haeds", "3"], "--n_heads"),
    ],
)
def test_bad_settings_are_refused_before_any_run(folder, capsys, words, message):
    assert sweep(*words) == 2
    assert message in capsys.readouterr().err
    assert not folder.exists()


def test_another_sweep_of_the_same_name_is_refused(folder, capsys):
    assert sweep("--beta", "0.5,0.6") == 0
    assert sweep("--beta", "0.5,0.6", "--n_heads", "4") == 2
    assert "N_HEADS was 'its default', and is 4" in capsys.readouterr().err
    assert sweep("--seed", "0,1") == 2
    assert "other settings" in capsys.readouterr().err


def test_the_folder_of_all_runs_is_a_setting(folder, tmp_path):
    assert sweep("--beta", "0.5,0.6", "--runs_dir", "elsewhere") == 0
    assert len(read_runs([tmp_path / "elsewhere" / "s"])[0]) == 2
    assert not folder.exists()


def test_a_name_with_a_slash_is_refused(folder, capsys):
    assert main(["sweep", "--name", "../x", "--seed", "0,1"]) == 2
    assert "without slashes" in capsys.readouterr().err


def _started(folder, *words):
    """Start a sweep as a process, and wait until its slow run has begun."""
    process = subprocess.Popen(
        [sys.executable, "-c", START, "--name", "s", *words],
        cwd=folder.parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    began = folder / "beta-0.7" / "began"
    while not began.exists():
        assert process.poll() is None
        time.sleep(0.05)
    return process


def test_sigterm_stops_the_runs_and_the_same_command_continues_them(folder):
    words = ["--beta", "0.7,0.5"]
    process = _started(folder, *words)
    process.send_signal(signal.SIGTERM)
    with process:
        _, errors = process.communicate(timeout=HANG)
    assert process.returncode == 128 + signal.SIGTERM
    assert "continue with: ssl_kd sweep --name s" in errors
    assert sweep(*words) == 0
    assert order(folder)[:2] == ["beta-0.7 False", "beta-0.7 True"]
    assert len(read_runs([folder])[0]) == 2


def test_a_run_that_an_earlier_sweep_still_trains_is_waited_for(folder, monkeypatch):
    monkeypatch.setattr(launch, "_SECONDS", 0.05)
    run = folder / "beta-0.5"

    def earlier():
        with Lock(run / ".lock"):
            locked.set()
            time.sleep(0.5)
            write_run(run, BETA=0.5, acc=0.5)

    assert sweep("--beta", "0.5,0.6") == 0
    shutil.rmtree(run)
    run.mkdir()
    locked = threading.Event()
    thread = threading.Thread(target=earlier)
    thread.start()
    locked.wait()
    assert sweep("--beta", "0.5,0.6") == 0
    thread.join()
    assert len(order(folder)) == 2  # no third process was started


def test_a_sweep_whose_runs_all_fail_has_no_table(folder, capsys):
    assert sweep("--seed", "0,1") == 1
    printed = capsys.readouterr()
    assert printed.err.count("failed: the reason of the failure") == 2
    assert not printed.out
    assert main(["table", str(folder)]) == 2
    assert "None of 2 runs is finished" in capsys.readouterr().err


def test_a_folder_of_something_else_is_refused(folder, capsys):
    folder.mkdir(parents=True)
    (folder / "letter.txt").touch()
    assert sweep("--seed", "0,1") == 2
    assert "something else than a sweep" in capsys.readouterr().err
