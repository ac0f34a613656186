"""CUDA_GRAPH: replayed steps are the steps to the bit, or are not replayed.

There is no GPU here: what stands in for a graph runs the step anew at each replay, and puts what it
gives where the last replay's lay, as a graph does.
"""

import logging
from typing import Any

import pytest
import torch
from torch import nn

from ssl_kd.guard.parts import SNAPSHOT_EVERY
from ssl_kd.guard.precision import Precision
from ssl_kd.heads import HeadBank, TEMIHead
from ssl_kd.settings import SettingsError
from ssl_kd.vision.fast import WARM_UP, Graphed, _all
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.step import HeadTrainer

HEADS, DIM, CLUSTERS, BATCH = 4, 16, 5, 32


class StandIn:
    """Records like a GPU; `off` is added to what a replay leaves of the students."""

    def __init__(self, off=0.0):
        self.off, self.replays = off, 0
        self.trainer: Any = None

    def _frozen(self):
        """What a graph would go on to use, whatever Python says by then."""
        places = [tensor.data_ptr() for tensor in self.trainer.state.tensors().values()]
        return places, repr(self.trainer.thresholds), repr(self.trainer.settings)

    def __call__(self, step, device):
        lies, frozen = [], self._frozen()

        def replay():
            self.replays += 1
            assert self._frozen() == frozen
            lies.append(step())
            self.trainer.state.student[0, 0] += self.off
            for at, latest in zip(_all(lies[0]), _all(lies[-1]), strict=True):
                at.copy_(latest)
            return lies[0]

        return replay


def trainer(record=None, **changes):
    settings = VisionSettings(**{"device": "cpu", "hidden_dim": 32, "bottleneck_dim": 16} | changes)
    bank = HeadBank(lambda: TEMIHead(DIM, CLUSTERS, 32, 16), HEADS)
    made = HeadTrainer(bank, settings, Precision.for_device(settings.device), CLUSTERS)
    if record is not None:
        record.trainer = made
        made.graphed = Graphed(made, record)
    return made


def steps(made, last=SNAPSHOT_EVERY + 6):
    """A head goes sick, a sample is bad, a batch is smaller, clusters are given."""
    seen = []
    for step in range(last):
        g = torch.Generator().manual_seed(step)
        views = torch.randn(2, BATCH - 8 * (step == 9), DIM, generator=g)
        given = torch.rand(2, BATCH, CLUSTERS, generator=g).softmax(-1) if step % 4 == 1 else None
        if given is not None and len(views[0]) != BATCH:
            given = given[:, : len(views[0])]
        if step == 20:
            made.state.student[1, 7] = torch.nan
        if step == 23:
            views[1, 5, 2] = torch.inf
        if (
            step == SNAPSHOT_EVERY + 3
        ):  # the sick head goes back, and all are read from a checkpoint
            made.recovery.restore(1)
            made.load({name: tensor.clone() for name, tensor in made.tensors().items()})
        seen.append(made.step(views, 1e-2 / (step + 1), step, given))
    return seen


def bits(named):
    """As bytes, in which a NaN equals itself."""
    return {name: tensor.cpu().contiguous().numpy().tobytes() for name, tensor in named.items()}


def of(result):
    named = {n: getattr(result, n) for n in ("loss", "grad_norm", "stage", "bad", "smoothed")}
    return bits(named | result.before)


@pytest.mark.parametrize("how", ["none", "mean"])
def test_replayed_steps_are_the_steps_to_the_bit(how):
    record = StandIn()
    fast, whole = trainer(record, instance_weight=how), trainer(instance_weight=how)
    mine, theirs = steps(fast), steps(whole)
    kept = sum(step % SNAPSHOT_EVERY == 0 for step in range(len(mine)))
    # Two shapes are recorded; the smaller batch comes once.
    assert record.replays == len(mine) - kept - 1 - 2 * WARM_UP
    assert fast.graphed.replays == record.replays - 2
    assert bits(fast.tensors()) == bits(whole.tensors())
    assert any(int(result.stage[1]) for result in mine), "a head was sick"
    # No later replay has written over what an earlier one gave.
    assert list(map(of, mine)) == list(map(of, theirs))


def test_a_recording_that_gives_other_bits_is_not_used(caplog):
    record = StandIn(off=1e-6)
    fast, whole = trainer(record), trainer()
    steps(fast), steps(whole)
    assert record.replays == 1 and bits(fast.tensors()) == bits(whole.tensors())
    assert [r.getMessage() for r in caplog.records if "CUDA_GRAPH" in r.getMessage()] == [
        "CUDA_GRAPH: the recorded step gave other bits than the step itself, so steps run as they "
        "are"
    ]


def test_what_cannot_be_recorded_is_said(caplog):
    def record(step, device):
        raise error

    made, whole = trainer(), trainer()
    made.graphed, error = Graphed(made, record), torch.OutOfMemoryError("CUDA out of memory")
    steps(made), steps(whole)
    assert "there is no memory for a recording, so steps run as they are" in caplog.text
    assert bits(made.tensors()) == bits(whole.tensors())

    made.graphed, error = Graphed(made, record), RuntimeError("capture failed")
    error.__context__ = RuntimeError("operation not permitted\nwhen capturing")
    with pytest.raises(SettingsError, match="recorded: operation not permitted. Set CUDA_GRAPH"):
        steps(made)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpus_own_recording_is_the_step_to_the_bit(compiled):
    settings = {"compile": compiled, "device": "cuda"}
    fast, whole = trainer(cuda_graph=True, **settings), trainer(**settings)
    mine, theirs = steps(fast), steps(whole)
    assert fast.graphed.replays > SNAPSHOT_EVERY / 2
    assert bits(fast.tensors()) == bits(whole.tensors())
    assert list(map(of, mine)) == list(map(of, theirs))


def test_heads_that_draw_are_refused_and_a_cpu_is_told(caplog):
    class Dropping(TEMIHead):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.dropped = nn.Dropout(0.1)

    settings, precision = VisionSettings(cuda_graph=True), Precision.for_device("cpu")
    bank = HeadBank(lambda: Dropping(DIM, CLUSTERS, 32, 16), HEADS)
    with pytest.raises(SettingsError, match="CUDA_GRAPH is for heads that draw nothing"):
        HeadTrainer(bank, settings, precision, CLUSTERS)
    with caplog.at_level(logging.INFO):
        assert trainer(cuda_graph=True).graphed is None
    assert "CUDA_GRAPH is for GPUs: on cpu steps run as they are" in caplog.text
