"""Test rows 101 to 106: several processes that train the heads of one run."""

import json
import os
import random
import signal
import subprocess
import time

import pytest
import torch

from ssl_kd.core.errors import BAD_INPUT, GUARD_STOPPED, InputError
from ssl_kd.core.files import load_tensors, sha256_file
from ssl_kd.core.files.lock import Lock
from ssl_kd.vision.extend import extend
from ssl_kd.vision.replay import replay
from ssl_kd.vision.settings import VisionSettings
from tests.faults.matrix import row
from tests.processes import HANG
from tests.ranks import run_joined
from tests.vision import test_ranks as heads
from tests.vision.test_ranks import (
    HERE,
    alone,
    command,
    folder_of,
    left,
    restoring_after,
    same,
    spoil,
    strike,
    strike_file,
    trained,
    work,
)

data, settings = heads.data, heads.settings
SOON = 300
"""Seconds on a machine that does much else; less than the ranks' timeout of 10 minutes."""


def kill_again_and_again(settings, seed, kills):
    """Kill ranks at random steps and file changes, and resume with another world size."""
    draw, done, runs = random.Random(seed), 0, 0
    straight = alone(settings)
    while done < kills:
        runs += 1
        name, ended = str(runs), False
        path = folder_of(settings(name))
        while not ended:
            world = draw.randint(2, 3)
            resume = (path / "config.json").exists()
            assert resume or not any(path.glob("*")), "half a folder"
            faults = []
            if done < kills:
                at_step = strike, draw.randrange(world), signal.SIGKILL, draw.randrange(30)
                at_file = strike_file, 0, draw.randint(1, 40), path
                faults = [draw.choice([at_step, at_file])]
            results = run_joined(work, world, settings(name, resume=resume), *faults)
            ended = [one and one[0] for one in results] == ["done"] * world
            if not ended:
                assert results.count(None) == 1, results
                lost = [one for one in results if one]
                assert all(one[0] in ("RankLost", "RankStopped") for one in lost), results
                assert all(one[3] < SOON and f"of {world}" in one[1] for one in lost), results
                done += 1
        same(straight, left(path))


@row(101)
@pytest.mark.parametrize(
    ("seed", "kills"), [(2, 1), *(pytest.param(s, 4, marks=pytest.mark.slow) for s in range(5))]
)
def test_killed_ranks_lose_nothing(settings, seed, kills):
    kill_again_and_again(settings, seed, kills)


@row(102)
def test_a_run_is_resumed_by_any_number_of_ranks(settings):
    """Stop one of two ranks, all of three, and end alone."""
    asked = settings("a")
    path, done = folder_of(asked), 0
    for world, stopped in ((2, [0]), (3, [0, 1, 2])):
        first = 13 + done
        strikes = [(strike, rank, signal.SIGTERM, first + rank) for rank in stopped]
        results = run_joined(work, world, asked, *strikes)
        assert results[0][0] == "Interrupted", results
        assert {one[2] for one in results} == {128 + signal.SIGTERM}
        assert all("stopped with rank 0" in one[1] for one in results[1:])
        assert not (path / "metrics.json").exists()
        done = max(int(p.stem[5:]) for p in (path / "checkpoint").glob("*.pt"))
        assert first < done <= first + 7, "all go on to the next record, and no further"
        asked = settings("a", resume=True)
    same(alone(settings), trained(1, asked))


@row(102)
@pytest.mark.slow
def test_with_the_mean_all_stop_at_the_same_step(settings):
    changes = {"instance_weight": "mean"}
    straight = trained(2, settings("straight", **changes))
    results = run_joined(work, 2, settings("a", **changes), (strike, 1, signal.SIGTERM, 13))
    assert [one[2] for one in results] == [128 + signal.SIGTERM] * 2, results
    done = max(int(p.stem[5:]) for p in (folder_of(settings("a")) / "checkpoint").glob("*.pt"))
    assert done == 15  # the next log record
    same(straight, trained(2, settings("a", resume=True, **changes)))


@row(102)
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_a_signal_to_torchrun_leaves_a_checkpoint_soon(settings, number):
    changes = settings("a", max_steps=10**6)
    path = folder_of(changes)
    with subprocess.Popen(command(2, changes), stderr=subprocess.PIPE, **HERE) as process:
        try:
            deadline = time.monotonic() + HANG
            while not any(path.glob("checkpoint/*.sha256")):
                assert time.monotonic() < deadline and process.poll() is None, process.communicate()
                time.sleep(0.1)
            pid = process.pid  # torchrun forwards the signal to its processes
            if number == signal.SIGKILL:
                pid = int((path / ".lock").read_text())  # rank 0
            os.kill(pid, number)
            _, error = process.communicate(timeout=SOON)
        finally:
            process.kill()
    assert process.returncode != 0
    if number == signal.SIGKILL:
        assert "rank 1 of 2 lost other ranks" in error or "rank 1 of 2 waited" in error
    else:
        assert error.count("a checkpoint is in") == 1 and "--resume" in error
    digest = max(path.glob("checkpoint/*.sha256"))  # a later checkpoint may lack its checksum
    assert digest.read_text() == sha256_file(digest.with_suffix(".pt"))
    assert not list(path.rglob("*.tmp")) or number == signal.SIGKILL
    with Lock(path / ".lock"):  # no process is left that writes
        pass


@row(103)
def test_a_faulty_head_of_another_rank_is_reported_as_by_one_process(settings):
    changes = {"n_heads": 6}
    faults = (spoil, (1, 4, 5), (7, 16)), (spoil, (5,), range(20, 30)), (restoring_after, 4)
    one = alone(settings, *faults, **changes)
    two = trained(2, settings("two", **changes), *faults)
    same(one, two)
    assert one["events"].count("restored") >= 3 and one["faults"]
    for path in (folder_of(settings("two")) / "faults").glob("head-5*"):
        assert replay(path).reproduced


@row(104)
def test_too_few_healthy_heads_stop_all_ranks(settings):
    changes = {"n_heads": 8}
    sick = spoil, range(1, 8), range(5, 30)
    results = run_joined(work, 2, settings("a", **changes), sick, (restoring_after, 2))
    assert [one[2] for one in results] == [GUARD_STOPPED] * 2, results
    assert results[0][0] == "TooFewHealthyParts" and "of 8 parts are left" in results[0][1]
    assert "ssl_kd replay" in results[0][1]
    path = folder_of(settings("a"))
    events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    assert [e["part"] for e in events].count("run") == 1 and events[-1]["action"] == "stopped"
    last = max((path / "checkpoint").glob("*.pt"))
    tensors = load_tensors(last)["tensors"]
    assert torch.isfinite(tensors["student"]).all() and len(tensors["student"]) == 8
    results = run_joined(work, 1, settings("a", resume=True, **changes))
    assert results[0][0] == "done", results  # without the fault


@row(105)
def test_more_ranks_than_heads_are_refused(settings):
    results = run_joined(work, 3, settings("a", n_heads=2))
    assert {one[2] for one in results} == {BAD_INPUT}
    assert "N_HEADS is 2; expected at least 3" in results[0][1]
    assert "start at most 2 processes, or raise --n_heads" in results[0][1]
    assert not folder_of(settings("a")).exists()


@row(105)
def test_a_rank_extends_no_run(settings, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(InputError, match="rank 1 of 2.*python alone"):
        extend(VisionSettings(**settings("a", extend="runs/other")))


@row(106)
def test_a_missing_file_on_rank_0_ends_all_ranks(settings):
    results = run_joined(work, 2, settings("a", dataset="/no/such/file.npz"))
    assert results[0][2] == results[1][2] != 0
    assert "stopped with rank 0" in results[1][1] and "/no/such/file.npz" in results[1][1]
