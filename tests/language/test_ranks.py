"""Several ranks train one student and leave the same run as one process."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402

from ssl_kd.core.shards import writer  # noqa: E402
from ssl_kd.language.run import run  # noqa: E402
from ssl_kd.language.settings import LanguageSettings  # noqa: E402
from ssl_kd.language.teachers.caching import cache_teacher  # noqa: E402
from ssl_kd.language.train import step as steps  # noqa: E402
from tests.faults.inject import metrics  # noqa: E402
from tests.marks import slow  # noqa: E402
from tests.processes import HANG, ROOT, free_port  # noqa: E402
from tests.ranks import run_joined  # noqa: E402

NEAR = 1e-6


def work(rank, settings):
    """Run, and return the folder."""
    return str(run(settings))


def by(world, settings):
    """Run with `world` ranks, and return the folder."""
    if world == 1:
        return run(settings)
    path = Path(settings.runs_dir) / settings.run_name
    results = run_joined(work, world, settings)
    assert results == [str(path)] * world, results
    return path


def lines(path, name):
    return [json.loads(line) for line in (path / name).read_text().splitlines()]


def assert_near(one, two, near=NEAR):
    """Check that two runs learned the same up to rounding."""
    for a, b in zip(lines(one, "metrics.jsonl"), lines(two, "metrics.jsonl"), strict=True):
        a, b = (row.get("eval", row) for row in (a, b))
        for name in a.keys() - {"tokens_per_second", "gpu_memory_gb"}:
            if isinstance(a[name], float):
                least = 10 * near if name == "grad_norm" else near
                assert math.isclose(a[name], b[name], rel_tol=least, abs_tol=least), (name, a, b)
            else:
                assert a[name] == b[name], (name, a, b)
    for file in ("student/model.safetensors", "student/adapter_model.safetensors"):
        if (one / file).exists():
            ours, theirs = load_file(one / file), load_file(two / file)
            assert ours.keys() == theirs.keys()
            for name, value in ours.items():
                assert (value - theirs[name]).abs().max() < 1e-4, name
    for ours, theirs in zip(metrics(one)["table"], metrics(two)["table"], strict=True):
        assert ours["name"] == theirs["name"]
        assert math.isclose(ours["nll"], theirs["nll"], rel_tol=10 * near)
    for name in ("tokens", "learned_from", "success_rate", "best_step", "steps", "events"):
        assert metrics(one)[name] == metrics(two)[name], name


# --- the same as one process ----------------------------------------------------------------------

KINDS = {
    "kd": {},
    "accumulation": {"batch_size": 3, "gradient_accumulation_steps": 2},
    "chunks": {"teacher_model": "foreign", "align": "chunks", "student_model": "student"},
    "adapters": {"student_model": "student", "lora_rank": 2},
    "on-policy": {"on_policy": 0.5, "max_new_tokens": 6},
    "offline": {"student_text": 0.5, "student_model": "student", "max_new_tokens": 6},
}


@pytest.fixture
def of_kind(settings, models):
    """Return a function that makes the settings of a kind of run."""

    def get(kind, **changes):
        own = {**KINDS[kind], **changes}
        for name in ("teacher_model", "student_model"):
            if own.get(name) in ("foreign", "student"):
                own[name] = models(own[name])
        return settings(**own)

    return get


@pytest.mark.parametrize(
    "kind", [slow("accumulation"), slow("adapters"), "chunks", "on-policy", slow("offline")]
)
def test_two_ranks_learn_what_one_process_learns(of_kind, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one, two = by(1, of_kind(kind, run_name="one")), by(2, of_kind(kind, run_name="two"))
    # Left padding is as wide as the longest prompt of a rank.
    assert_near(one, two, 1e-5 if kind in ("on-policy", "offline") else NEAR)


def test_ranks_train_a_teacher_together(settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    change = {"teacher_model": "train:1x16:3", "max_steps": 2}
    two = by(2, settings(**change, run_name="two"))
    assert metrics(two)["table"][0]["name"] == "teacher"
    assert_near(by(1, settings(**change, run_name="one")), two)  # finds it


# --- going on -------------------------------------------------------------------------------------


def stopped(rank, settings, at, by_rank):
    """Run, get SIGTERM on one rank in step `at`, and return the folder."""
    step = steps.Distiller.step

    def and_stop(self, batches, learning_rate):
        if self.guard.steps == at and rank == by_rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batches, learning_rate)

    steps.Distiller.step = and_stop
    return str(run(settings))


@pytest.mark.parametrize(("first", "then"), [(2, 1), slow(1, 2)])
def test_a_run_resumes_with_another_number_of_ranks(of_kind, first, then):
    half, last = of_kind("chunks", run_name="half", checkpoint_every=100), first - 1
    results = run_joined(stopped, first, half, 3, last)
    assert "stopped by signal 15" in results[0] and len(results) == first, results
    assert all("RankStopped" in words and "stopped by signal 15" in words for words in results[1:])
    folder = Path(half.runs_dir) / "half"
    assert [path.stem for path in (folder / "checkpoint").glob("*.pt")] == ["step_000000004"]
    by(then, half.replace(resume=True))
    assert_near(by(1, of_kind("chunks", run_name="whole")), folder)


# --- the command ----------------------------------------------------------------------------------


def torchrun(script, *flags, **options):
    """Start two processes of a script by torchrun."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    words += ["--master_port", str(free_port()), str(ROOT / "scripts" / script), *flags]
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, env=os.environ | own, **pipes, **options)


def flags_of(settings, **changes):
    """Return the settings that differ from the defaults, as flags."""
    given, usual = settings.replace(**changes).to_dict(), LanguageSettings().to_dict()
    pairs = [(name.lower(), value) for name, value in given.items() if value != usual[name]]
    return [f"--{name}={value}" for name, value in pairs]


@pytest.mark.slow
def test_torchrun_distils_as_python_alone_does(settings):
    process = torchrun("distill.py", *flags_of(settings(run_name="two")))
    out, log = process.communicate(timeout=HANG)
    assert process.returncode == 0, log
    two = Path(settings().runs_dir) / "two"
    assert (two.parent / "latest").resolve() == two.resolve()
    assert_near(by(1, settings(run_name="one")), two)
    assert out.count("Student: ") == 1 and (two / "report.html").exists()
    assert log.count("train      6/6") == 1  # the first alone has the screen


# --- the teacher's cache --------------------------------------------------------------------------


def cached(rank, settings, dies=None):
    """Write a cache of many files, and return those of this rank; one rank may die in between."""
    writer.SHARD_BYTES = 1 << 14
    save, written = writer.ShardWriter._save, []

    def and_count(self, entry, tensors):
        if rank == dies and len(written) == 2:
            os._exit(7)
        save(self, entry, tensors)
        written.append(entry["file"])

    writer.ShardWriter._save = and_count
    cache_teacher(settings)
    return written


def bytes_in(folder):
    paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.mark.parametrize("method", ["sample:48", slow("hidden")])
def test_ranks_share_a_cache_whose_bytes_are_those_of_one(of_kind, tmp_path, method):
    change = {"cache_method": method, "batch_size": 3, "teacher_cache": str(tmp_path / "one")}
    own = of_kind("kd", **change)
    (alone,) = run_joined(cached, 1, own)
    first, second = run_joined(cached, 2, own.replace(teacher_cache=str(tmp_path / "two")))
    assert len(alone) >= 6 and sorted(first + second) == sorted(alone), (first, second)
    assert abs(len(first) - len(second)) <= 2
    assert bytes_in(tmp_path / "one") == bytes_in(tmp_path / "two")
