"""COMPILE: the same step within rounding, the same guard to the bit, compiled once."""

import pytest
import torch

from ssl_kd.guard.faults import Stage
from ssl_kd.guard.precision import Precision
from ssl_kd.heads import HeadBank, TEMIHead
from ssl_kd.settings import SettingsError
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.step import HeadTrainer

HEADS, DIM, CLUSTERS, BATCH = 4, 16, 5, 32


def _trainer(head=TEMIHead, **changes):
    settings = VisionSettings(hidden_dim=32, bottleneck_dim=16, **changes)
    bank = HeadBank(lambda: head(DIM, CLUSTERS, 32, 16), HEADS)
    return HeadTrainer(bank, settings, Precision.for_device("cpu"), CLUSTERS)


def _views(step):
    return torch.randn(2, BATCH, DIM, generator=torch.Generator().manual_seed(step))


def _copies(trainer):
    return {name: tensor.clone() for name, tensor in trainer.state.owned().items()}


@pytest.mark.slow
def test_a_compiled_step_is_the_step_and_a_sick_head_keeps_every_bit():
    eager, fast, again = _trainer(), _trainer(compile=True), _trainer(compile=True)
    for step in range(6):
        if step == 3:
            for trainer in (eager, fast, again):
                trainer.state.student[1, 7] = torch.nan
            before = _copies(fast)
        views = _views(step)
        if step == 4:
            views[1, 5, 2] = torch.inf  # the batch keeps its size, so nothing is compiled anew
        with torch._dynamo.config.patch(error_on_recompile=step > 1):
            seen = [
                trainer.step(views.clone(), 1e-2 / (step + 1), step) for trainer in (fast, again)
            ]
        whole = eager.step(views, 1e-2 / (step + 1), step)
        assert torch.equal(whole.stage, seen[0].stage)
        assert torch.equal(whole.bad, seen[0].bad)
        if step < 4:
            assert torch.allclose(whole.loss, seen[0].loss, rtol=1e-5, equal_nan=True)
    assert int(seen[0].stage[1]) in (Stage.LOSS, Stage.TEACHER)
    for name, tensor in fast.state.owned().items():
        mine, theirs, began = (
            x[1].numpy().tobytes() for x in (tensor, again.state.owned()[name], before[name])
        )
        assert mine == theirs == began, name
        others = [0, 2, 3]
        assert torch.equal(tensor[others], again.state.owned()[name][others])
        if name in ("teacher", "marginal"):  # Adam's first steps are signs of gradients near 0
            assert torch.allclose(tensor[others], eager.state.owned()[name][others], atol=2e-3)


class Breaks(TEMIHead):
    """Looks at its numbers, which one graph cannot."""

    @staticmethod
    def stacked(parameters, x):
        logits = TEMIHead.stacked(parameters, x)
        return logits if logits.sum() < 1e9 else logits * 2


def test_what_cannot_be_compiled_is_said():
    with pytest.raises(
        SettingsError, match=r"COMPILE: .*(Data-dependent|Dynamic) .*Set COMPILE to False"
    ):
        _trainer(Breaks, compile=True).step(_views(0), 1e-2)
