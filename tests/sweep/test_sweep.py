import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ssl_kd.cli import main
from ssl_kd.core.files.lock import Lock
from ssl_kd.sweep import launch
from ssl_kd.sweep.plan import Sweep
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


@contextmanager
def beside(work):
    """Run `work(begun)` in a thread: from when it sets the event, until it ends after the block."""
    begun = threading.Event()
    thread = threading.Thread(target=work, args=[begun])
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        thread.join()


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
        (["--beta", "0.5,0.50"], "beta-0.5 and beta-0.50 have the same settings"),
        (["--baselines", "true,True"], "have the same settings: give each value once"),
        (["--seed", "0,1,0"], "with a value twice: give each value once. A comma"),
        (["--loss", "temi,iic", "--beta", "0.5,0.6"], "the run loss-iic_beta-0.5 of the grid of"),
        (["--loss", "temi,iic", "--beta", "0.5,0.6"], "in a CSV file, with --list FILE"),
        (["--beta", "0.5,0.6", "--dataset_test", "nowhere"], "nowhere"),
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
    assert "N_HEADS was its default, and is 4" in capsys.readouterr().err
    assert sweep("--seed", "0,1") == 2
    assert "a sweep of other settings (of BETA, and now of SEED)" in capsys.readouterr().err


def test_settings_that_do_not_change_the_result_may_change_when_a_sweep_continues(folder):
    assert sweep("--beta", "0.5,0.6") == 0
    assert sweep("--beta", "0.5,0.6,0.8", "--log_every", "7", "--report_to", "none") == 0
    assert "LOG_EVERY = 7" in (folder / "config.py").read_text()
    assert len(read_runs([folder])[0]) == 3


def test_the_order_of_the_flags_makes_no_other_runs(folder, capsys):
    assert sweep("--beta", "0.5,0.6", "--seed", "0,1") == 0
    assert sweep("--seed", "0,1,2", "--beta", "0.5,0.6") == 0
    assert len(order(folder)) == len(read_runs([folder])[0]) == 6
    assert sweep("--seed", "0,1", "--beta", "0.5,0.6", "--dry_run") == 0
    assert "--run_name beta-0.5_seed-0" in capsys.readouterr().out


def test_a_damaged_plan_is_named(folder, capsys):
    assert sweep("--beta", "0.5,0.6") == 0
    (folder / "sweep.json").write_text("{")
    assert sweep("--beta", "0.5,0.6") == 1
    assert "sweep.json cannot be read" in capsys.readouterr().err


def test_the_plan_is_written_by_one_process_at_a_time(folder):
    folder.mkdir(parents=True)

    def another_of_the_job_array(locked):
        with Lock(folder / "sweep.lock"):
            (folder / "config.py").touch()
            locked.set()
            time.sleep(0.3)
            (folder / "config.py").unlink()

    with beside(another_of_the_job_array):
        assert sweep("--beta", "0.5,0.6") == 0
    assert len(read_runs([folder])[0]) == 2


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

    def earlier(locked):
        with Lock(run / ".lock"):
            locked.set()
            time.sleep(0.5)
            write_run(run, BETA=0.5, acc=0.5)

    assert sweep("--beta", "0.5,0.6") == 0
    shutil.rmtree(run)
    run.mkdir()
    with beside(earlier):
        assert sweep("--beta", "0.5,0.6") == 0
    assert len(order(folder)) == 2  # no third process was started


def test_two_sweeps_of_one_name_share_the_runs(folder):
    words = ["--beta", "0.5,0.6,0.8"]
    assert sweep(*words) == 0
    for beta in (0.6, 0.8):
        shutil.rmtree(folder / f"beta-{beta}")

    def another_sweep():
        with Lock(folder / "logs" / "beta-0.6.lock"):
            locked.set()
            began = time.monotonic()
            while not (folder / "beta-0.8").exists() and time.monotonic() < began + HANG:
                time.sleep(0.02)
            write_run(folder / "beta-0.6", BETA=0.6, acc=0.5)

    locked = threading.Event()
    thread = threading.Thread(target=another_sweep)
    thread.start()
    locked.wait()
    assert sweep(*words) == 0
    thread.join()
    assert [line.split()[0] for line in order(folder)][3:] == ["beta-0.8"]


def environment(folder, name):
    return json.loads((folder / name / "environment.json").read_text())


def test_a_run_is_not_a_rank_of_the_launcher_of_the_sweep(folder, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setenv("SLURM_PROCID", "1")
    assert sweep("--beta", "0.5,0.6") == 0
    assert not {"SLURM_STEP_NUM_TASKS", "SLURM_PROCID"} & set(environment(folder, "beta-0.6"))
    assert not (folder / "beta-0.5").exists()


def test_runs_are_divided_between_the_gpus(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 7,9")  # CUDA does not know the last
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8))
    assert sweep("--beta", "0.5,0.6", "--seed", "0..2") == 0
    runs = [environment(folder, path.name) for path in folder.glob("beta*")]
    assert {run["CUDA_VISIBLE_DEVICES"] for run in runs} == {"4", "7"}
    assert {run["OMP_NUM_THREADS"] for run in runs} == {"4"}


def test_a_named_device_is_that_of_all_runs(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert sweep("--beta", "0.5,0.6", "--device", "cpu") == 0
    assert environment(folder, "beta-0.6")["CUDA_VISIBLE_DEVICES"] == "4,7"


def test_as_many_runs_begin_as_the_memory_holds_when_they_have_grown(monkeypatch):
    memory = launch._Memory(lambda: 250)
    allowed = []
    for memory.largest in (0, 100):
        allowed += [memory.has_room(n_running) for n_running in range(3)]
    assert allowed == [True, False, False, True, True, False]


class Running:
    """Stands in for a run that is trained on a GPU."""

    def __init__(self, gpu):
        self.gpu = gpu


def pool_with_gpus(monkeypatch, free, gpus, device="auto", jobs=8):
    """A sweep on GPUs with `free` bytes each, a list that a test changes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (free[number], 1000))
    plan = Sweep(Path(), "train", {"DEVICE": device}, {}, {})
    return launch._Pool(plan, jobs, gpus, print)


def test_as_many_runs_begin_as_the_memory_of_the_gpu_holds(monkeypatch):
    free = [1000]
    pool: Any = pool_with_gpus(monkeypatch, free, ())
    assert pool._gpu_with_room() == ""  # this process has chosen the GPU
    pool.running = {1: Running("")}
    assert pool._gpu_with_room() is None  # its size is unknown
    for free[0] in (900, 700, 750):
        pool.gpu_memory[""].measure(1)
    assert pool.gpu_memory[""].largest == 300
    pool.gpu_memory[""].measure(2)  # not of one run
    assert pool._gpu_with_room() == ""
    pool.running[2] = Running("")
    free[0] = 400
    assert pool._gpu_with_room() is None  # 1000 bytes do not hold three runs of 360
    pool.running = {}
    assert pool._gpu_with_room() == ""


def test_a_run_gets_a_gpu_with_room(monkeypatch):
    free = [1000, 1000]
    pool: Any = pool_with_gpus(monkeypatch, free, ("4", "7"))
    assert pool._gpu_with_room() == "4"
    pool.running = {1: Running("4")}
    assert pool._gpu_with_room() == "7"
    pool.running[2] = Running("7")
    free[:] = [900, 200]
    for memory in pool.gpu_memory.values():
        memory.measure(1)
    assert pool._gpu_with_room() == "4"
    free[0] = 50  # another user's process has come
    assert pool._gpu_with_room() is None


@pytest.mark.parametrize(
    ("device", "jobs", "known"),
    [("auto", 2, [""]), ("cuda:1", 2, [""]), ("cpu", 2, []), ("mps", 2, []), ("auto", 1, [])],
)
def test_a_gpu_is_looked_at_if_runs_share_it(monkeypatch, device, jobs, known):
    pool: Any = pool_with_gpus(monkeypatch, [1000, 500], (), device, jobs)
    assert list(pool.gpu_memory) == known
    if device == "cuda:1":
        assert pool.gpu_memory[""].free() == 500


def test_runs_stop_if_the_sweep_itself_fails(folder):
    runs = {f"beta-{beta}": {"beta": beta} for beta in ("0.5", "0.7", "0.6")}
    plan = Sweep(folder, "train", {}, runs, dict.fromkeys(runs, "")).save(1)

    def full_disk(outcome):
        if outcome.name == "beta-0.6":
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        launch.run_sweep(plan, list(runs), jobs=2, on_end=full_disk)
    with pytest.raises(ProcessLookupError):
        os.kill(int((folder / "beta-0.7" / "began").read_text()), 0)


def test_a_reason_is_not_that_of_an_earlier_attempt(tmp_path):
    log = tmp_path / "a.log"
    log.write_text("ssl_kd: an earlier reason\n")
    assert launch._reason(log, 1, 0) == "an earlier reason"
    assert launch._reason(log, 1, log.stat().st_size) == "exit code 1"


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


def test_the_reports_of_all_runs_show_the_whole_sweep(folder):
    """The runs that ended first, too, and the one that failed is named."""
    assert sweep("--beta", "0.5,0.6,0.9", "--jobs", "1") == 1
    for name, other in (("beta-0.5", "beta-0.6"), ("beta-0.6", "beta-0.5")):
        report = (folder / name / "report.html").read_text()
        assert report.startswith("<p><!-- the sweep -->") and report.endswith("</p>")
        assert f'xlink:href="../{other}/report.html"' in report
        assert "beta-0.9 (the reason of the failure)" in report
