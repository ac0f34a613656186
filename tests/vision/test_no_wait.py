"""A step never waits for the device, tested on a simulated one."""

import pytest
import torch

from firstnan.parts import SNAPSHOT_EVERY
from heads.cosine_head import CosineHead
from ssl_kd.core.memory import to_device_async
from ssl_kd.core.precision import DeviceInfo, Precision
from ssl_kd.core.runs.clock import no_progress
from ssl_kd.vision import extract
from ssl_kd.vision import training_rows as rows_module
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.teachers.network import Transform
from ssl_kd.vision.train import learner as training
from ssl_kd.vision.train import step as guarded
from ssl_kd.vision.train.heads import HeadBank, TEMIHead
from ssl_kd.vision.train.objectives import OBJECTIVES
from ssl_kd.vision.train.pairs import PairSampler
from ssl_kd.vision.train.step import HeadTrainer
from tests.fake_cuda import fake_cuda
from tests.marks import slow
from tests.vision.own_loss import SINKHORN

HEADS, DIM, CLUSTERS, BATCH = 5, 6, 4, 16
GPU = DeviceInfo("cuda", "T4", (7, 5))


class Bank(HeadBank):
    """Begins with zeros: real heads are made on the CPU, of numbers that are looked at."""

    def initial_weights(self, seed):
        return torch.zeros(self.n_heads, self.n_parameters)


def _trainer(bank, **changes):
    """Heads on the device."""
    settings = VisionSettings(**changes)
    return HeadTrainer(bank, settings, Precision.for_device(GPU, settings.use_fp16), CLUSTERS)


def _waits_of_steps(head=TEMIHead, targets=lambda: None, **changes):
    bank = Bank(lambda: head(DIM, CLUSTERS), HEADS)
    with fake_cuda() as device:
        trainer = _trainer(bank, **changes)
        device.clear()
        for number in (0, 1, 2, SNAPSHOT_EVERY):
            result = trainer.step(torch.zeros(2, BATCH, DIM), 1e-2, number, targets())
            assert result.loss.device.type == result.stage.device.type == "cuda"
        return device.waits


LEARNING = [loss for loss in OBJECTIVES if loss != "fixed"]
OBJECTIVE = [*({"loss": loss} for loss in LEARNING), {"clip_grad": None}, {"loss": SINKHORN}]
WEIGHTED = [of | {"instance_weight": how} for of in OBJECTIVE for how in ("none", "own", "mean")]


@pytest.mark.parametrize(
    "how",
    [
        *WEIGHTED[::3],
        *map(slow, WEIGHTED[1::3]),
        *map(slow, WEIGHTED[2::3]),
        {"targets": lambda: torch.zeros(2, BATCH, CLUSTERS)},
        {"use_fp16": True},
        {"head": CosineHead},  # batched by vmap
    ],
)
def test_a_step_waits_for_no_device(how):
    assert _waits_of_steps(**{"teacher_temp": 0.05} | how) == []


@pytest.mark.parametrize(
    "what",
    [
        lambda norm: norm.max().item(),
        lambda norm: bool((norm > 1).any()),
        slow(lambda norm: norm.tolist()),
        slow(lambda norm: norm.cpu()),
        lambda norm: torch.tensor([1.0]).to(norm.device),
    ],
    ids=["item", "bool", "tolist", "cpu", "a copy to the device"],
)
def test_a_wait_in_a_step_is_seen(monkeypatch, what):
    whole = guarded.part_norms

    def waiting(gradient):
        norm = whole(gradient)
        what(norm)
        return norm

    monkeypatch.setattr(guarded, "part_norms", waiting)
    waits = _waits_of_steps()
    assert waits and all(wait.startswith("step.py: norm = part_norms(") for wait in waits)


class _OnDevice(torch.Tensor):
    """Real numbers that say they are elsewhere."""

    device = torch.device("cuda")


def test_batched_reads_are_bit_exact():
    odd = torch.tensor([1e-45, -0.0, 3.4e38, torch.inf, -torch.nan])
    sent = [torch.tensor([7, 0, -3], dtype=torch.int8), odd, torch.tensor(True), torch.arange(6)]
    sent += [torch.rand(3, 4).t(), torch.empty(0)]
    there = [tensor.as_subclass(_OnDevice) for tensor in sent]
    for mine, theirs in zip(sent, training._read(*there), strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert mine.contiguous().numpy().tobytes() == theirs.numpy().tobytes()


@pytest.mark.parametrize("held", [False, True], ids=["from the CPU", "held on the device"])
def test_a_look_at_ten_steps_waits_once_and_so_does_a_record(held):
    bank = Bank(lambda: TEMIHead(DIM, CLUSTERS), HEADS)
    itself = torch.arange(40)[:, None]
    sampler = PairSampler(itself, torch.ones(40, 1, dtype=torch.bool), BATCH, seed=0)
    with fake_cuda() as device:
        embeddings = torch.zeros(40, DIM, device="cuda")

        def gather(rows):
            return embeddings[to_device_async(rows, embeddings.device)]

        learner = training.HeadsLearner(
            _trainer(bank),
            training.Plan(sampler, 100, None),
            gather if held else lambda rows: torch.zeros(len(rows), DIM),
            clusters=torch.zeros(40, dtype=torch.int64),
        )
        device.clear()
        for step in range(20):
            learner.learn(step)
            learner.look(step + 1)
            assert len(device.waits) == (step + 1) // 10
        learner.record(20)
        assert len(device.waits) == 3 and device.pageable == []


# Operations that start a kernel, and GB that these read and write: the largest TEMI heads with the
# paper's weights, and the defaults on digits. Lower them with what they measure; 0.15 GB is 0.03 ms
# of an H200, and a launch 5 microseconds of a host.
BUDGET = {(512, 768, 1000, 50): (345, 22.5), (256, 64, 10, 48): (345, 0.51)}


@pytest.mark.parametrize(("shape", "budget"), BUDGET.items(), ids=str)
def test_a_step_keeps_to_its_launches_and_bytes(shape, budget):
    batch, dim, clusters, heads = shape
    settings = VisionSettings(instance_weight="mean")
    default = settings.hidden_dim, settings.bottleneck_dim
    widths = (512, 256) if clusters == 1000 else default
    bank = Bank(lambda: TEMIHead(dim, clusters, *widths), heads)
    with fake_cuda() as device:
        trainer = HeadTrainer(bank, settings, Precision.for_device(GPU), clusters)
        views = torch.zeros(2, batch, dim, device="cuda")
        device.clear()
        trainer.step(views, 1e-3, 1)
    launches, gigabytes = budget
    assert 0.9 * launches < device.launches.total() <= launches
    assert 0.9 * gigabytes < device.bytes.total() / 1e9 <= gigabytes


def test_where_a_batch_keeps_its_size_a_good_sample_stands_in_for_each_bad_one():
    bad = torch.zeros(2, 6, dtype=torch.bool)
    assert guarded.good_samples(bad) is None and guarded.good_samples(bad, in_place=True) is None
    bad[1, 0] = bad[0, 3] = True
    assert guarded.good_samples(bad).tolist() == [1, 2, 4, 5]
    assert guarded.good_samples(bad, in_place=True).tolist() == [1, 1, 2, 1, 4, 5]


def test_embeddings_are_held_on_the_device_where_they_fit(monkeypatch):
    rows = object.__new__(rows_module.TrainingRows)
    rows._in_memory = torch.rand(10, DIM)
    assert rows.on(torch.device("cpu")) is rows
    with fake_cuda() as device:
        monkeypatch.setattr(rows_module, "free_memory", lambda device: 3 * rows._in_memory.nbytes)
        gather = rows.on(torch.device("cuda"))
        device.clear()
        assert gather(torch.tensor([3, 1])).device.type == "cuda"
        assert device.waits == device.pageable == []
        monkeypatch.setattr(rows_module, "free_memory", lambda device: rows._in_memory.nbytes)
        assert rows.on(torch.device("cuda")) is rows


class _Event:
    """Of the device that is not there."""

    seen: list = []

    def record(self):
        _Event.seen.append("copied")

    def synchronize(self):
        _Event.seen.append("waited")


def test_extraction_waits_for_a_batch_when_the_next_one_is_under_way(monkeypatch):
    class Images:
        kind = "image"

        def __len__(self):
            return 8

    class Writer:
        missing, rows, dtype = [(0, 8)], 8, torch.float32

        def lacks(self, row):
            return True

        def append(self, embeddings, rows):
            _Event.seen.append(f"written {rows.tolist()}")

    monkeypatch.setattr(torch.cuda, "Event", _Event, raising=False)
    monkeypatch.setattr(_Event, "seen", [])
    transform = Transform(size=8, resize=8)
    with fake_cuda() as device:

        class Embed:
            teacher = None  # is named in errors only

            def __call__(self, images):
                _Event.seen.append("begun")
                sent = images.pin_memory().to("cuda", non_blocking=True)
                return transform.normalize(sent).flatten(1)

        embed = Embed()
        images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
        batches = [extract.Batch([i, i + 1], images, []) for i in (0, 2, 4)]
        embed(images)  # sends what all batches share
        device.clear()
        _Event.seen.clear()
        extract._write(Writer(), Images(), embed, iter(batches), no_progress)
        assert device.waits == device.pageable == []
    first, second = ["begun", "copied"], ["waited", "written [0, 1]"]
    assert _Event.seen[:6] == [*first, *first, *second]
    assert _Event.seen[6:] == [*first, "waited", "written [2, 3]", "waited", "written [4, 5]"]
