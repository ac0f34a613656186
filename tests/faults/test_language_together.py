"""Test rows 102 to 109: several processes that train one student or fill one cache."""

import os
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from ssl_kd import cli  # noqa: E402
from ssl_kd.language.run import run  # noqa: E402
from ssl_kd.language.train import step as steps  # noqa: E402
from tests.faults.matrix import row  # noqa: E402
from tests.language import conftest as given  # noqa: E402
from tests.language import test_ranks as language  # noqa: E402
from tests.language.test_ranks import (  # noqa: E402
    assert_near,
    bytes_in,
    cached,
    flags_of,
    lines,
    metrics,
    torchrun,
    work,
)
from tests.processes import HANG  # noqa: E402
from tests.ranks import NAN, run_joined  # noqa: E402
from tests.scripts import conftest as commands  # noqa: E402

models, settings = given.models, given.settings
of_kind, script = language.of_kind, commands.script


def sick(rank, settings, bad_rank, term):
    """Run with a NaN term on one rank in step 2, and return the run folder."""
    terms = steps.Distiller.terms

    def and_spoil(self, batch, first=None):
        losses = terms(self, batch, first)
        if self.guard.steps == 2 and rank == bad_rank:
            losses[term] = losses[term] * NAN
        return losses

    steps.Distiller.terms = and_spoil
    return str(run(settings))


def never_healthy(rank, settings):
    """Run with all terms NaN on the second rank from step 1 on."""
    terms = steps.Distiller.terms

    def and_spoil(self, batch, first=None):
        bad = self.guard.steps >= 1 and rank == 1
        losses = terms(self, batch, first)
        return {name: x * NAN if bad else x for name, x in losses.items()}

    steps.Distiller.terms = and_spoil
    return str(run(settings))


def die(rank, settings):
    """Run, and let the second rank die in step 2."""
    step = steps.Distiller.step

    def and_die(self, batches, learning_rate):
        if self.guard.steps == 2 and rank == 1:
            os._exit(7)
        return step(self, batches, learning_rate)

    steps.Distiller.step = and_die
    return str(run(settings))


@row(107)
def test_a_term_that_is_nan_on_one_rank_is_left_out_by_all(settings):
    one, two = settings(run_name="one"), settings(run_name="two")
    run_joined(sick, 1, one, 0, "kd")
    results = run_joined(sick, 2, two, 1, "kd")
    folders = [Path(one.runs_dir) / name for name in ("one", "two")]
    assert results == [str(folders[1])] * 2
    assert_near(*folders)
    alone, together = (lines(folder, "events.jsonl") for folder in folders)
    assert [event["action"] for event in alone] == [event["action"] for event in together]
    assert "the loss is not finite on rank 1 of 2" in together[0]["reason"]
    assert metrics(folders[1])["learned_from"] == {"ce": 6, "kd": 5}
    found = next(event for event in together if event["stage"] == "replay")
    assert found["action"] == "explained" and "rows " in found["reason"]
    assert len([*(folders[1] / "faults").glob("*.safetensors")]) == 1


@row(104)
def test_all_ranks_stop_where_one_does_not_become_healthy(settings):
    own = settings(stop_after=2)
    first, second = run_joined(never_healthy, 2, own)
    assert first.startswith("TooFewHealthyParts: step 3") and "on rank 1 of 2" in first, first
    assert second.startswith("RankStopped: rank 1 of 2 stopped with rank 0: step 3"), second
    folder = Path(own.runs_dir) / own.run_name
    assert [path.stem for path in (folder / "checkpoint").glob("*.pt")] == [
        "step_000000002",
        "step_000000003",
    ]
    assert any("restored" in event["action"] for event in lines(folder, "events.jsonl"))


@row(108)
def test_a_rank_that_dies_ends_the_other(settings):
    first, second = run_joined(die, 2, settings())
    assert second is None and first.startswith("RankLost: rank 0 of 2"), first


@row(102)
@pytest.mark.slow
def test_sigterm_to_torchrun_leaves_a_checkpoint(settings):
    long = settings(run_name="long", max_steps=100_000, eval_every=100_000, checkpoint_every=50_000)
    process = torchrun("distill.py", *flags_of(long))
    metrics_file = Path(long.runs_dir) / "long" / "metrics.jsonl"
    deadline = time.monotonic() + HANG
    while not (metrics_file.exists() and metrics_file.stat().st_size):
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    log = process.communicate(timeout=HANG)[1]
    assert process.returncode != 0
    assert "Stopped by SIGTERM; a checkpoint is in" in log, log
    assert "-m torch.distributed.run --nproc_per_node 2 " in log and "--resume" in log
    assert len([*(metrics_file.parent / "checkpoint").glob("step_*.pt")]) == 1


@row(105)
def test_a_batch_without_a_row_for_each_rank_is_refused(settings):
    first, second = run_joined(work, 2, settings(batch_size=1))
    assert first.startswith("SettingsError: BATCH_SIZE is 1, the rows of all 2 ranks together")
    assert "BATCH_SIZE is 1" in second


@row(105)
def test_a_router_that_several_ranks_would_train_is_refused(settings):
    first, _ = run_joined(work, 2, settings(router_mode="sar"))
    assert first.startswith("SettingsError: ROUTER_MODE is 'sar', but 2 processes"), first


@row(105)
@pytest.mark.parametrize(
    "words",
    [
        ["sft_lora", "test", "--model", "m", "--data-path", "d"],
        ["test_ultra_stable"],
        ["verify"],
    ],
)
def test_settings_that_ranks_cannot_share_are_refused(words, script, monkeypatch, capfd):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    if words == ["verify"]:
        code, (out, err) = cli.main(words), capfd.readouterr()
    else:
        code, out, err = script(*words)
    messages = [line for line in (out + err).splitlines() if "rank 1 of 2" in line]
    assert code in (1, 2) and len(messages) == 1 and "python alone" in messages[0], (out, err)


@row(109)
def test_a_crash_costs_a_cache_of_ranks_one_file_of_each(of_kind, tmp_path):
    own = of_kind("kd", cache_method="sample:48", batch_size=3, teacher_cache=str(tmp_path / "one"))
    (alone,) = run_joined(cached, 1, own)
    two = own.replace(teacher_cache=str(tmp_path / "two"))
    first, second = run_joined(cached, 2, two, 1)
    assert second is None and "RankLost" in first
    there = bytes_in(tmp_path / "two" / "teacher.partial").keys() & {*alone}
    again = run_joined(cached, 2, two)
    assert there and {*again[0], *again[1]} == {*alone} - there
    assert bytes_in(tmp_path / "one") == bytes_in(tmp_path / "two")
