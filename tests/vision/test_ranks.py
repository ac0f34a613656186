"""Heads on several processes give the bits of one process, after any fault."""

import collections
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits

from firstnan.faults import Thresholds
from ssl_kd.core.errors import BAD_INPUT
from ssl_kd.core.files import sha256_file
from ssl_kd.core.precision import Precision
from ssl_kd.core.runs.ranks import Ranks
from ssl_kd.vision import fit, training_rows
from ssl_kd.vision.ranks import HeadRanks
from ssl_kd.vision.run import run
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.train import step as guarded
from ssl_kd.vision.train.heads import HeadBank, TEMIHead
from ssl_kd.vision.train.step import HeadTrainer
from tests.kill_writers import on_change
from tests.processes import HANG, ROOT
from tests.ranks import run_joined
from tests.vision.test_run import FAST as OF_RUNS

NAN = float("nan")
FAST = {**OF_RUNS, "n_heads": 5, "n_clusters": 10, "method": "heads", "device": "cpu"}
FAST["epochs"] = None


def save_digits(folder):
    """Save 64 digits in a feature file, and 32 more as the test split."""
    digits = load_digits()
    x, labels = digits.data.astype(np.float32), digits.target  # pyright: ignore
    for name, rows in (("train", slice(0, 64)), ("test", slice(64, 96))):
        np.savez(folder / f"digits_{name}.npz", features=x[rows], labels=labels[rows])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    save_digits(folder)
    return folder


@pytest.fixture
def settings(data, tmp_path):
    def change(name, **changes):
        folders = {
            "dataset": str(data / "digits_train.npz"),
            "embeddings_dir": str(tmp_path / f"embeddings {name}"),
            "runs_dir": str(tmp_path / "runs"),
            "run_name": name,
        }
        return {**FAST, **folders, **changes}

    return change


# -- what a rank does -----------------------------------------------------------------------------


def work(rank, settings, *faults):
    """Run with injected faults; return the outcome, its message, an exit code and seconds."""
    for fault, *words in faults:
        fault(rank, *words)
    begun = time.monotonic()
    try:
        run(VisionSettings(**settings))
    except BaseException as error:
        code = getattr(error, "exit_code", 128 + getattr(error, "signal", 0))
        return type(error).__name__, str(error), code, time.monotonic() - begun
    return "done", "", 0, time.monotonic() - begun


def before_step(do):
    """Call `do(trainer, step)` before each step."""
    step = HeadTrainer.step

    def wrapped(self, views, learning_rate, number=None, fixed_targets=None):
        do(self, number)
        return step(self, views, learning_rate, number, fixed_targets)

    mock.patch.object(HeadTrainer, "step", wrapped).start()


def spoil(rank, heads, at):
    """Weights of some heads are NaN from some steps on, until they are restored."""

    def do(trainer, step):
        first = trainer.bank.first
        for head in set(heads) & set(range(first, first + trainer.bank.n_heads)):
            if step in at:
                trainer.state.student[head - first] = NAN

    before_step(do)


def restoring_after(rank, steps):
    """A head is restored after so many bad steps in a row."""
    mock.patch.object(fit, "Thresholds", partial(Thresholds, restore_after=steps)).start()


def strike(rank, who, number, at):
    """A rank gets a signal at a step."""
    if rank == who:
        before_step(lambda trainer, step: step == at and os.kill(os.getpid(), number))


def strike_file(rank, who, at, folder):
    """A rank is killed at a change of the run's files."""
    if rank == who:
        on_change(lambda n, path, opened: n == at and os.kill(os.getpid(), 9), folder)


def in_chunks(rank, size):
    """So many heads at a time."""

    def chunks(n_heads, *other):
        return [slice(i, min(i + size, n_heads)) for i in range(0, n_heads, size)]

    mock.patch.object(guarded, "head_chunks", chunks).start()


def with_few_in_the_graph(rank):
    mock.patch.object(training_rows, "GRAPH_ROWS", 40).start()
    mock.patch.object(training_rows, "ROWS_PER_CLUSTER", 1).start()


CALLS = collections.Counter()


def count(rank):
    for name in ("all_reduce", "all_gather_object", "send", "recv", "broadcast", "barrier"):
        real = getattr(dist, name)

        def counted(*words, _real=real, _name=name, **more):
            CALLS[_name] += 1
            return _real(*words, **more)

        mock.patch.object(dist, name, counted).start()


def counted(rank, settings, upto):
    """Return the number of collectives from step 1 to step `upto`, both counted from 0."""
    count(rank)
    seen = {}
    before_step(lambda trainer, step: seen.update({step: CALLS.copy()}))
    result = work(rank, settings)
    assert result[0] == "done", result
    return dict(seen[upto] - seen[1])


# -- what is compared -----------------------------------------------------------------------------


def left(path):
    """All that a run left, but for times and what the settings say of the folder."""
    path = Path(path)
    metrics = json.loads((path / "metrics.json").read_text())
    del metrics["seconds"]
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    times = ("time", "samples_per_second")
    return {
        "model": sha256_file(path / "model.safetensors"),
        "assignments": sha256_file(path / "assignments.csv"),
        "metrics": metrics,
        "log": [{k: v for k, v in line.items() if k not in times} for line in lines],
        "events": (path / "events.jsonl").read_text(),
        "checkpoints": {p.name: sha256_file(p) for p in (path / "checkpoint").glob("*.pt")},
        "faults": sorted(p.name for p in path.glob("faults/*")),
    }


def folder_of(settings):
    return Path(settings["runs_dir"]) / settings["run_name"]


def trained(world, settings, *faults):
    results = run_joined(work, world, settings, *faults)
    assert [one[0] for one in results] == ["done"] * world, results
    return left(folder_of(settings))


ALONE = {}


def alone(settings, *faults, **changes):
    """Return what one process leaves, trained once for equal changes and faults."""
    key = repr((sorted(changes.items()), faults))
    if key not in ALONE:
        ALONE[key] = trained(1, settings(f"alone {len(ALONE)}", **changes), *faults)
    return ALONE[key]


def same(one, other):
    for name, value in one.items():
        assert value == other[name], name


# -- the bits of one process ----------------------------------------------------------------------


KINDS = {
    "none": {"instance_weight": "none"},
    "own": {"instance_weight": "own", "loss": "sharpened", "use_fp16": True},
    "fixed": {"method": "consensus", "loss": "fixed", "instance_weight": "none"},
    "consensus": {"method": "consensus"},
    "converging": {"max_steps": None, "instance_weight": "own", "log_every": 20},
}
QUICK = ("none", 3), ("consensus", 2), ("converging", 2)
EVERY = [
    pytest.param(kind, world, marks=() if (kind, world) in QUICK else pytest.mark.slow)
    for kind in KINDS
    for world in (2, 3)
]


@pytest.mark.parametrize(("kind", "world"), EVERY)
def test_several_ranks_leave_what_one_process_leaves(settings, kind, world):
    one = alone(settings, (in_chunks, 2), **KINDS[kind])
    same(one, trained(world, settings("several", **KINDS[kind])))


def test_several_ranks_learn_from_rows_beyond_the_graph(settings):
    one = alone(settings, (in_chunks, 2), (with_few_in_the_graph,))
    same(one, trained(2, settings("of 2"), (with_few_in_the_graph,)))
    assert one["model"] != alone(settings)["model"]


def test_trainers_of_the_default_shape_are_slices_of_one():
    settings, cpu = VisionSettings(), Precision.for_device("cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        n, dim = settings.n_heads, 64

        def make():
            return TEMIHead(dim, 10, settings.hidden_dim, settings.bottleneck_dim)

        rows = [range(n), range(n // 3), range(n // 3, n)]
        banks = [HeadBank(make, len(some), some.start) for some in rows]
        trainers = [HeadTrainer(bank, settings, cpu, 10) for bank in banks]
        g = torch.Generator().manual_seed(0)
        for step in range(4):
            x = torch.randn(2, settings.batch_size, dim, generator=g)
            for trainer in trainers:
                trainer.step(x, 1e-3, step)
    finally:
        torch.set_num_threads(threads)
    one, *two = (trainer.tensors() for trainer in trainers)
    for name, whole in one.items():
        assert torch.equal(whole, torch.cat([part[name] for part in two])), name


# -- what agreement costs -------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["none", "own"])
def test_no_collective_runs_between_two_records(settings, how):
    changes = {"instance_weight": how, "log_every": 25, "checkpoint_every": 25}
    assert run_joined(counted, 2, settings("a", **changes), 24) == [{}, {}]


def test_the_mean_over_all_heads_takes_one_all_reduce_a_step(settings):
    changes = {"instance_weight": "mean", "log_every": 25, "checkpoint_every": 25}
    calls = {"all_reduce": 23}
    assert run_joined(counted, 2, settings("a", **changes), 24) == [calls, calls]
    one = trained(1, settings("one", **changes))
    two = left(folder_of(settings("a")))
    for mine, theirs in zip(one["log"], two["log"], strict=True):
        torch.testing.assert_close(theirs["loss"], mine["loss"], rtol=1e-4, atol=1e-4)
        assert theirs["loss"] != pytest.approx(NAN) and theirs["step"] == mine["step"]
    same(two, trained(2, settings("again", **changes)))


# -- torchrun, and what is refused ----------------------------------------------------------------


def command(n, settings):
    words = [f"--{name}={value}" for name, value in settings.items() if not isinstance(value, bool)]
    words += [f"--{'' if v else 'no-'}{k}" for k, v in settings.items() if isinstance(v, bool)]
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}"]
    return [sys.executable, *launch, str(ROOT / "train.py"), *words]


HERE = {
    "cwd": ROOT,
    "env": os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    "text": True,
}


def test_resuming_a_finished_run_is_refused(settings):
    trained(2, settings("a"))
    first, second = run_joined(work, 2, settings("a", resume=True))
    assert first[0] == "RunFinished" and first[2] == BAD_INPUT and second[0] == "done"


@pytest.mark.slow
def test_torchrun_trains_one_run(settings):
    one = trained(1, settings("one"))
    words = command(2, settings("two"))
    done = subprocess.run(words, capture_output=True, timeout=HANG, **HERE)
    assert done.returncode == 0, done.stderr
    same(one, left(folder_of(settings("two"))))
    assert {p.name for p in Path(settings("two")["runs_dir"]).iterdir()} == {"one", "two", "latest"}
    assert (folder_of(settings("two")) / "report.html").exists()
    lines = [line for line in done.stderr.splitlines() if line.startswith("INFO")]
    assert done.stdout.count("Report: ") == 1 and lines[0].startswith("INFO     METHOD is heads")
    assert len(lines) == len(set(lines)), "a line of every process"


@pytest.mark.parametrize(("n", "world"), [(5, 2), (50, 8), (3, 3)])
def test_each_head_belongs_to_one_rank(n, world):
    parts = [HeadRanks(Ranks(rank, world, "cpu"), n).heads for rank in range(world)]
    assert [head for part in parts for head in part] == list(range(n))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
