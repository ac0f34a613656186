"""The callback of Lightning, with its own accumulation, precision and clipping."""

import pytest
import torch
from torch import nn

lightning = pytest.importorskip("lightning.pytorch", reason="needs: pip install lightning")

from firstnan import Thresholds, TooFewHealthyParts  # noqa: E402
from firstnan.lightning import GuardCallback  # noqa: E402
from tests.bits import same  # noqa: E402


class Module(lightning.LightningModule):
    def __init__(self, bad=()):
        super().__init__()
        layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1)
        self.net = nn.Sequential(*layers)
        self.bad, self.bits = bad, []

    def training_step(self, batch, index):
        x = batch[0].clone()
        if index in self.bad:
            x[1, 0] = torch.nan
        return self.net(x).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_train_batch_end(self, *_):
        self.bits.append([x.detach().clone() for x in self.state_dict().values()])


def fit(*callbacks, bad=(), **options):
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(64, 4))
    module = Module(bad)
    quiet = ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"]
    options |= dict.fromkeys(quiet, False)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[*callbacks], limit_train_batches=8, **options
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
    return module.bits, trainer


OPTIONS = [
    ({"gradient_clip_val": 0.1}, "in Sequential.0"),
    ({"precision": "bf16-mixed"}, "in Sequential.0"),
    ({"precision": "16-mixed"}, "in Sequential.0"),
    ({"strategy": "ddp"}, "x[1, 0] = torch.nan"),  # which calls `training_step` as `forward`
]


@pytest.mark.parametrize(("options", "place"), OPTIONS, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_a_bad_step_is_left_out_and_the_others_keep_their_bits(options, place, tmp_path):
    plain, _ = fit(**options)
    guard = GuardCallback(events=tmp_path / "events.jsonl")
    healthy, trainer = fit(guard, **options)
    assert all(map(same, plain, healthy)) and len(plain) == 8
    assert not (tmp_path / "events.jsonl").exists()
    assert trainer.callback_metrics["guard_skipped"] == 0
    sick, trainer = fit(guard, bad={3}, **options)
    assert [i for i in range(1, 8) if same(sick[i - 1], sick[i])] == [3]
    assert trainer.callback_metrics["guard_skipped"] == 1
    assert place in (tmp_path / "events.jsonl").read_text()


@pytest.mark.filterwarnings("ignore")
def test_accumulated_batches_are_one_step_and_lasting_faults_stop():
    guard = GuardCallback(locate=False)
    fit(guard, bad={3}, accumulate_grad_batches=2)
    (only,) = guard.guards.values()
    assert [event.step for event in only.events.events] == [1] and only.updates.tolist() == [3]
    with pytest.raises(TooFewHealthyParts, match="not finite"):
        fit(GuardCallback(thresholds=Thresholds(restore_after=2)), bad=range(2, 99))
