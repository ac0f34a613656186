"""A step waits for no device, shown on a device that is not there."""

import pytest
import torch

from heads.cosine_head import CosineHead
from ssl_kd.guard.parts import SNAPSHOT_EVERY
from ssl_kd.guard.precision import DeviceInfo, Precision
from ssl_kd.heads import HeadBank, TEMIHead
from ssl_kd.vision import step as guarded
from ssl_kd.vision import train as training
from ssl_kd.vision.objectives import OBJECTIVES
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.step import HeadTrainer
from tests.pretended import pretended_cuda

HEADS, DIM, CLUSTERS, BATCH = 5, 6, 4, 16
SINKHORN = {"loss": "sharpened", "centering": "sinkhorn"}
GPU = DeviceInfo("cuda", "T4", (7, 5))


class Bank(HeadBank):
    """Begins with zeros: real heads are made on the CPU, of numbers that are looked at."""

    def initial_weights(self, seed):
        return torch.zeros(self.n_heads, self.n_parameters)


def _trainer(bank, **changes):
    """Heads on the device."""
    settings = VisionSettings(**changes)
    return HeadTrainer(bank, settings, Precision.for_device(GPU, settings.use_fp16), CLUSTERS)


def _waits_of_steps(head=TEMIHead, given=lambda: None, **changes):
    bank = Bank(lambda: head(DIM, CLUSTERS), HEADS)
    with pretended_cuda() as device:
        trainer = _trainer(bank, **changes)
        device.clear()
        for number in (0, 1, 2, SNAPSHOT_EVERY):
            result = trainer.step(torch.zeros(2, BATCH, DIM), 1e-2, number, given())
            assert result.loss.device.type == result.stage.device.type == "cuda"
        return device.waits


@pytest.mark.parametrize("how", ["none", "own", "mean"])
@pytest.mark.parametrize(
    "changes",
    [*({"loss": loss} for loss in OBJECTIVES), {"clip_grad": None}, SINKHORN],
    ids=[*OBJECTIVES, "unclipped", "sinkhorn"],
)
def test_a_step_waits_for_no_device(changes, how):
    assert _waits_of_steps(instance_weight=how, teacher_temp=0.05, **changes) == []


def test_a_step_towards_clusters_waits_for_no_device():
    assert _waits_of_steps(given=lambda: torch.zeros(2, BATCH, CLUSTERS)) == []


def test_a_step_with_a_loss_scale_waits_for_no_device():
    assert _waits_of_steps(use_fp16=True) == []


def test_a_head_that_is_batched_by_vmap_waits_for_no_device():
    assert _waits_of_steps(CosineHead) == []


@pytest.mark.parametrize(
    "what",
    [
        lambda norm: norm.max().item(),
        lambda norm: bool((norm > 1).any()),
        lambda norm: norm.tolist(),
        lambda norm: norm.cpu(),
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


def test_what_is_read_at_once_is_read_to_the_bit():
    odd = torch.tensor([1e-45, -0.0, 3.4e38, torch.inf, -torch.nan])
    sent = [torch.tensor([7, 0, -3], dtype=torch.int8), odd, torch.tensor(True), torch.arange(6)]
    sent += [torch.rand(3, 4).t(), torch.empty(0)]
    there = [tensor.as_subclass(_OnDevice) for tensor in sent]
    for mine, theirs in zip(sent, training._read(*there), strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert mine.contiguous().numpy().tobytes() == theirs.numpy().tobytes()


def test_a_look_at_ten_steps_waits_once_and_so_does_a_record():
    bank = Bank(lambda: TEMIHead(DIM, CLUSTERS), HEADS)
    with pretended_cuda() as device:
        learner = training.Heads(
            _trainer(bank),
            lambda step: torch.zeros(2, BATCH, dtype=torch.int64).unbind(),
            lambda rows: torch.zeros(len(rows), DIM),
            steps=100,
            on_events=lambda events: None,
            on_fault=lambda fault: None,
        )
        device.clear()
        for step in range(20):
            learner.learn(step)
            learner.look(step + 1)
            assert len(device.waits) == (step + 1) // 10
        learner.record(20)
        assert len(device.waits) == 3
