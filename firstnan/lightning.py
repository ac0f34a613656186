"""Guard the training steps of a Lightning Trainer by a callback."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch.optim import Optimizer

from firstnan._optimizers import finish_step
from firstnan.loop import Guard

# The package has two names, each with its own class of callbacks.
_HOMES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
_found = [import_module(home).Callback for name, home in _HOMES.items() if find_spec(name)]
if not _found:
    raise ImportError("firstnan.lightning needs Lightning: pip install lightning")
_Callback: Any = type("_Callback", tuple(_found), {})


class GuardCallback(_Callback):
    """Skip bad steps of a Lightning Trainer; if they continue, restore the last good state.

    A run without bad steps has the same bits as without the callback. The Trainer accumulates,
    scales and clips as before; the guard sees unclipped gradients. If a model stays bad, `fit`
    raises `TooFewHealthyParts`. Each optimizer of a manual optimization has its own guard. Events
    are logged as warnings, `guard_skipped` to the loggers and the progress bar.

    Args:
        options: arguments of `Guard`, such as `thresholds`; `locate` is True by default.

    Attributes:
        guards: the `Guard` of each optimizer in the latest training.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.guards: dict[Optimizer, Guard] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Create the guards; raise ValueError for DeepSpeed or FSDP, which hide gradients."""
        strategy = type(trainer.strategy).__name__
        if strategy in ("DeepSpeedStrategy", "FSDPStrategy"):
            raise ValueError(f"GuardCallback does not support {strategy}: use ddp or one device")
        # Lightning calls `training_step`, which may call only modules of the model.
        options = {"locate": [pl_module, *pl_module.children()], **self.options}
        self.guards = {
            each: Guard(pl_module, each, **options).attach() for each in trainer.optimizers
        }

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        """Check the gradient, before it is clipped; remove a bad one."""
        finish_step(self.guards[optimizer])  # its last one in this batch
        self.guards[optimizer].before_step()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Record the step and log what was left out; raise TooFewHealthyParts if nothing helps."""
        for guard in self.guards.values():
            finish_step(guard)
        skipped = sum(int(guard.health.skipped[0]) for guard in self.guards.values())
        pl_module.log("guard_skipped", float(skipped), on_epoch=False, on_step=True, prog_bar=True)
