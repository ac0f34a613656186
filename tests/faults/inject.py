"""Run fast trainings, inject faults into them, and read their files."""

import contextlib
import csv
import json
import shutil
import signal
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ssl_kd.core.files import load_tensors
from ssl_kd.core.files.lock import Lock
from ssl_kd.core.precision import Precision
from ssl_kd.core.runs.stop import Interrupted
from ssl_kd.vision.cache import EmbeddingStore
from ssl_kd.vision.data import open_dataset
from ssl_kd.vision.extract import Extraction
from ssl_kd.vision.run import run
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.teachers import load_teacher
from ssl_kd.vision.train.heads import HeadBank, TEMIHead
from ssl_kd.vision.train.pairs import PairSampler
from ssl_kd.vision.train.step import HeadTrainer
from tests.processes import HANG, pipe, start
from tests.train_heads import train

ROOT = Path(__file__).parents[2]
FAST = {
    "method": "heads",
    "n_heads": 4,
    "hidden_dim": 16,
    "batch_size": 32,
    "n_neighbors": 5,
    "epochs": 10_000,
    "max_steps": 30,
    "log_every": 5,
    "checkpoint_every": 10,
    "device": "cpu",
    "baselines": False,
}


def flags_of(settings, **more):
    """Return the flags for all settings that differ from the defaults, and for `more`."""
    default = type(settings)().to_dict()
    changed = {name: v for name, v in settings.to_dict().items() if v != default[name]}
    return [
        f"--{'' if value else 'no-'}{name.lower()}"
        if isinstance(value, bool)
        else f"--{name.lower()}={value}"
        for name, value in (changed | more).items()
    ]


def one_line(error):
    """Return the command's error line; check that it is the only one and the last."""
    (line,) = [line for line in error.splitlines() if line.startswith("ssl_kd: ")]
    assert error.rstrip().endswith(line) and "Traceback" not in error
    return line


def cache(settings, shard_rows=16, **changes):
    """Embed the data of `settings` like a run, in shards of 16 rows."""
    data = open_dataset(settings.dataset, "train")
    teacher = load_teacher("features", dataset=data)
    folder, precision = settings.embeddings_dir, Precision.for_device("cpu")
    return Extraction(
        data, teacher, folder, split="train", precision=precision, shard_rows=shard_rows, **changes
    ).store()


def opened(settings, **changes):
    return EmbeddingStore.open(settings.embeddings_dir, "train", **changes)


def content(folder):
    """Return the content of all files in a folder except locks, by relative path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file() and not path.name.endswith("lock")
    }


def no_run(settings):
    """Return whether the folder of runs is empty."""
    runs = Path(settings.runs_dir)
    return not runs.exists() or not list(runs.iterdir())


def weights(path):
    return (Path(path) / "model.safetensors").read_bytes()


def all_finite(path):
    tensors = safetensors.torch.load_file(Path(path) / "model.safetensors").values()
    return all(torch.isfinite(tensor).all() for tensor in tensors)


def metrics(path):
    return json.loads((Path(path) / "metrics.json").read_text())


def events(path):
    return [json.loads(line) for line in (Path(path) / "events.jsonl").read_text().splitlines()]


def log_lines(path):
    rows = [json.loads(line) for line in (Path(path) / "metrics.jsonl").read_text().splitlines()]
    times = ("time", "samples_per_second")
    return [{name: v for name, v in row.items() if name not in times} for row in rows]


def assignments(path):
    with open(Path(path) / "assignments.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def flip_bit(path):
    """Flip one bit in the middle of a file."""
    data = bytearray(Path(path).read_bytes())
    data[len(data) // 2] ^= 16
    Path(path).write_bytes(data)


def _hold(path, pipe):
    with Lock(path):
        pipe.send("held")
        pipe.recv()


@contextlib.contextmanager
def locked(path):
    """Hold a lock from another process inside a `with` block; yield its process ID."""
    mine, theirs = pipe()
    holder = start(_hold, path, theirs)
    try:
        assert mine.poll(HANG) and mine.recv() == "held"
        yield holder.pid
    finally:
        mine.send("enough")
        holder.join(HANG)


def stop_at(step):
    """Return a `progress` callback that sends this process SIGTERM after `step` steps."""

    def progress(stage, done, total, info):
        if stage == "train" and done == step:
            signal.raise_signal(signal.SIGTERM)

    return progress


def train_in(folder, run, settings):
    """Start or resume the run in this folder."""
    if not (folder / "config.json").exists():  # killed before the run folder was complete
        shutil.rmtree(folder, ignore_errors=True)
    place = {"run_name": folder.name, "runs_dir": str(folder.parent)}
    run(settings.replace(**place, resume=folder.exists()))


def stopped(settings, name, step=25, **changes):
    """Stop a run after `step` steps and return its folder."""
    with pytest.raises(Interrupted):
        run(settings(run_name=name, **changes), progress=stop_at(step))
    return Path(settings().runs_dir) / name


def newest_checkpoint(path):
    """Return the path and the content of a run's last checkpoint."""
    newest = max((Path(path) / "checkpoint").glob("*.pt"))
    return newest, load_tensors(newest)


# --- Training without a run folder: five heads, a fault in head 2 -------------------------------

CPU = Precision.for_device("cpu")
HEADS, DIM, CLUSTERS, BATCH = 5, 6, 4, 16
SICK, OTHERS = 2, [0, 1, 3, 4]


def make_trainer(thresholds=None, precision=CPU, make_head=None, **objective):
    """Return a trainer of a bank of small heads."""
    bank = HeadBank(make_head or (lambda: TEMIHead(DIM, CLUSTERS, 10, 5)), HEADS)
    settings = VisionSettings(**{"batch_size": BATCH, **objective})
    return HeadTrainer(bank, settings, precision, CLUSTERS, thresholds)


def problem(n=40):
    """Return embeddings `[n, DIM]` and a sampler of their neighbors."""
    x = torch.randn(n, DIM, generator=torch.Generator().manual_seed(9))
    neighbors = torch.cdist(x, x).fill_diagonal_(9e9).argsort(1)[:, :4]
    return x, PairSampler(neighbors, torch.ones_like(neighbors).bool(), BATCH, 0)


@dataclass
class Trained:
    """A trainer, its events, and the state of every head before each step."""

    trainer: HeadTrainer
    events: list = field(default_factory=list)
    before: list = field(default_factory=list)

    @property
    def health(self):
        return self.trainer.state.health

    def owned(self, head, step=None):
        """Return the state of a head before a step, or at the end."""
        tensors = self.trainer.state.owned() if step is None else self.before[step]
        return {name: tensor[head] for name, tensor in tensors.items()}

    def of(self, part):
        """Return the events of one part as (step from 0 as in `strike`, stage, action)."""
        return [(e.step - 1, e.stage, e.action) for e in self.events if e.part == part]


def trained(strike=lambda trainer, step: None, steps=6, data=None, **options):
    """Train, and call `strike(trainer, step)` before each step."""
    x, sampler = problem()
    training = Trained(make_trainer(**options))

    def before_each():
        strike(training.trainer, len(training.before))
        owned = training.trainer.state.owned().items()
        training.before.append({name: tensor.clone() for name, tensor in owned})
        return False

    gather = (x if data is None else data).__getitem__
    train(
        training.trainer,
        sampler,
        gather,
        steps,
        on_events=training.events.extend,
        should_stop=before_each,
    )
    return training


def healthy_alike(a, b):
    """Return whether the healthy heads of two trainings are bit-identical."""
    mine, theirs = a.trainer.state.tensors(), b.trainer.state.tensors()
    return all(torch.equal(mine[name][OTHERS], theirs[name][OTHERS]) for name in mine)


def in_forward(change, steps):
    """Return a strike that applies `change(logits)` in the students' forward pass in `steps`."""

    def strike(trainer, step):
        bank = getattr(trainer.bank, "bank", trainer.bank)
        trainer.bank = _FaultyBank(bank, change) if step in steps else bank

    return strike


class _FaultyBank:
    """A bank that applies `change` to the students' logits."""

    def __init__(self, bank, change):
        self.bank, self.change = bank, change

    def __getattr__(self, name):
        return getattr(self.bank, name)

    def __call__(self, parameters, x, *, training=False):
        logits = self.bank(parameters, x, training=training)
        return self.change(logits) if training else logits


def set_logit(value, heads=SICK):
    """Return a change that sets one logit of the faulty head to `value`."""

    def change(logits):
        mask = torch.zeros_like(logits, dtype=torch.bool)
        mask[heads, 0, 0] = True
        return torch.where(mask, value, logits)  # masked_fill would change the memory layout

    return change


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, change):
        ctx.change = change
        return logits.clone()

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        grad = grad.clone()
        ctx.change(grad)
        return grad, None


def set_gradient(value):
    """Return a change that sets one gradient entry of the faulty head's logits to `value`."""
    return lambda logits: _Gradient.apply(logits, lambda g: g[SICK, 0].fill_(value))


def scale_gradient(factor):
    """Return a change that multiplies the gradient of the faulty head's logits by `factor`."""
    return lambda logits: _Gradient.apply(logits, lambda g: g[SICK].mul_(factor))
