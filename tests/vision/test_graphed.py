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
from ssl_kd.vision.fast import WARM_UP, Graphed
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.step import HeadTrainer

HEADS, DIM, CLUSTERS, BATCH = 4, 16, 5, 32


class StandIn:
    """Records like a GPU; `off` is added to what a replay leaves of the students."""

    def __init__(self, off=0.0):
        self.off, self.replays = off, 0
        self.trainer: Any = None

    def __call__(self, step, device):
        lies = []

        def replay():
            self.replays += 1
            latest = step()
            self.trainer.state.student[0, 0] += self.off
            lies.append(latest)
            for name, tensor in vars(lies[0]).items():
                if name == "before":
                    for key, value in tensor.items():
                        value.copy_(latest.before[key])
                else:
                    tensor.copy_(getattr(latest, name))
            return lies[0]

        return replay


def trainer(record=None, **changes):
    settings = VisionSettings(hidden_dim=32, bottleneck_dim=16, **changes)
    bank = HeadBank(lambda: TEMIHead(DIM, CLUSTERS, 32, 16), HEADS)
    made = HeadTrainer(bank, settings, Precision.for_device("cpu"), CLUSTERS)
    if record is not None:
        record.trainer = made
        made.graphed = Graphed(made, record)
    return made


def steps(made, replayed, last=SNAPSHOT_EVERY + 6):
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
        rate = 1e-2 / (step + 1)
        if replayed:
            seen.append(made.step(views, rate, step, given))
        else:
            seen.append(made.plain_step(views, torch.tensor(rate), step, given))
    return seen


def plain(**changes):
    made = trainer(**changes)
    made.graphed = Graphed(made)  # so that batches keep their size; it is not asked
    return made


def bits(named):
    """As bytes, in which a NaN equals itself."""
    return {name: tensor.contiguous().numpy().tobytes() for name, tensor in named.items()}


def of(result):
    named = {n: getattr(result, n) for n in ("loss", "grad_norm", "stage", "bad", "smoothed")}
    return bits(named | result.before)


@pytest.mark.parametrize("how", ["none", "mean"])
def test_replayed_steps_are_the_steps_to_the_bit(how):
    record = StandIn()
    fast, whole = trainer(record, instance_weight=how), plain(instance_weight=how)
    mine, theirs = steps(fast, True), steps(whole, False)
    kept = sum(step % SNAPSHOT_EVERY == 0 for step in range(len(mine)))
    # Two shapes are recorded; the smaller batch comes once.
    assert record.replays == len(mine) - kept - 1 - 2 * WARM_UP
    assert bits(fast.tensors()) == bits(whole.tensors()) and fast.state.student[1].isnan().any()
    # No later replay has written over what an earlier one gave.
    assert list(map(of, mine)) == list(map(of, theirs))


def test_a_recording_that_gives_other_bits_is_not_used(caplog):
    record = StandIn(off=1e-6)
    fast, whole = trainer(record), plain()
    steps(fast, True), steps(whole, False)
    assert record.replays == 1 and bits(fast.tensors()) == bits(whole.tensors())
    assert [r.getMessage() for r in caplog.records if "CUDA_GRAPH" in r.getMessage()] == [
        "CUDA_GRAPH: the recorded step gave other bits than the step itself, so steps run as they "
        "are"
    ]


@pytest.mark.parametrize(
    ("error", "expected", "words"),
    [
        (RuntimeError("operation not permitted\nwhen capturing"), SettingsError, "to False"),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError, "out of memory"),
    ],
)
def test_what_cannot_be_recorded_is_said(error, expected, words):
    def record(step, device):
        raise error

    made = trainer()
    made.graphed = Graphed(made, record)
    with pytest.raises(expected, match=words):
        steps(made, True)


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
