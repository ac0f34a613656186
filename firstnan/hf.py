"""Guard the training steps of a Hugging Face Trainer by a callback."""

from __future__ import annotations

import inspect
import json
import math
from typing import Any

from firstnan.loop import Guard
from firstnan.parts import TooFewHealthyParts

try:
    from transformers import TrainerCallback, TrainingArguments
    from transformers.trainer_callback import CallbackHandler
except ImportError as error:
    raise ImportError(
        "firstnan.hf needs transformers and accelerate: pip install transformers accelerate"
    ) from error


class _NoClipping(float):
    """An infinite `max_grad_norm`, so that a Trainer does not clip; stores the replaced value."""

    replaced = 0.0


class GuardCallback(TrainerCallback):
    """Skip bad steps of a Trainer, also TRL's; if they continue, restore the last good state, stop.

    A step is bad if its gradient is not finite, or far above the running median of its norms. It
    changes no weight and no optimizer state. After `thresholds.restore_after` bad steps in a row
    the model is restored to its last good state. After as many more, the Trainer saves this state
    and `train` raises `TooFewHealthyParts`. A run without bad steps has the same bits as without
    the callback.

    The guard clips gradients instead of the Trainer, because a Trainer clips before it calls the
    callback, which hides a spike. For this, `args.max_grad_norm` is infinite during the backward
    pass. If a training is interrupted there, the next training with a `GuardCallback` restores it.

    Events are logged and added to `trainer.state.log_history` under `guard`; their `step` counts
    from 1, as the Trainer's. Every log line has
    `guard_updates` and `guard_skipped`, and `guard_left_out` if steps since the last line were
    skipped; if all were, a loss of 0 (a Trainer's `logging_nan_inf_filter` hides NaN) becomes NaN.
    The training also stops if a loss that was passed to `guard.backward` by name is left out of
    `thresholds.stop_after` steps in a row. A resumed training starts with a new guard.

    Args:
        locate: whether to find the operation that made a loss or gradient non-finite.
        options: further arguments of `Guard`, such as `thresholds`, `snapshot_every` and `events`.

    Attributes:
        guard: the `Guard` of the latest training.
    """

    guard: Guard

    def __init__(self, *, locate: bool = True, **options: Any) -> None:
        self.options = {"locate": locate, **options}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Create the guard; raise ValueError for DeepSpeed, FSDP or float16 weights."""
        if args.deepspeed or args.fsdp:
            raise ValueError(
                "GuardCallback does not support DeepSpeed or FSDP, which hide gradients from"
                " callbacks: remove both from the arguments, and start processes with torchrun"
            )
        _restore_clipping(args)
        _move_to_front(self)
        clip = args.max_grad_norm if args.max_grad_norm and args.max_grad_norm > 0 else None
        # The Trainer scales the loss itself, and calls back with unscaled gradients.
        self.guard = Guard(
            kwargs["model"], kwargs["optimizer"], clip_grad=clip, scaler=False, **self.options
        ).attach()
        self.guard.steps = state.global_step
        self._line = self.counters()  # at the last log line with a loss
        self._stopped: TooFewHealthyParts | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Disable the Trainer's clipping until the gradient is computed."""
        if self.guard.clip_grad:  # it stays above 0: some versions unscale fp16 only to clip
            args.max_grad_norm = _NoClipping(math.inf)
            args.max_grad_norm.replaced = self.guard.clip_grad

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check the gradient; remove a bad one, so that the optimizer changes nothing."""
        _restore_clipping(args)
        self.guard.before_step()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the step; restore the model or stop after too many bad steps."""
        try:
            self.guard.after_step()
            self.guard.stop_without(self.guard.terms)
        except TooFewHealthyParts as stop:
            self._stopped = stop
            control.should_training_stop = True
            control.should_save = args.save_strategy != "no"

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the new events."""
        for event in self.guard.log_events():
            state.log_history.append({"step": state.global_step, "guard": json.loads(event.line())})

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the guard's counters to the Trainer's log line, and mark a loss that was replaced."""
        logs, new = kwargs.get("logs") or {}, self.counters()
        marks: dict[str, float] = {**new}
        if new and "loss" in logs:
            old, self._line = self._line, new
            if left_out := new["guard_skipped"] - old["guard_skipped"]:
                marks["guard_left_out"] = left_out
                if new["guard_updates"] == old["guard_updates"] and logs["loss"] == 0:
                    marks["loss"] = math.nan
        for line in (logs, state.log_history[-1] if state.log_history else {}):
            line.update(marks)

    def counters(self) -> dict[str, int]:
        """Return the numbers of updates and skipped steps so far; empty before a training."""
        if not hasattr(self, "guard"):
            return {}
        done, skipped = int(self.guard.updates[0]), int(self.guard.health.skipped[0])
        return {"guard_updates": done, "guard_skipped": skipped}

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raise TooFewHealthyParts if the guard stopped the training."""
        if self._stopped is not None:
            raise self._stopped


def _move_to_front(callback: GuardCallback) -> None:
    """Let the callback change a log line before the reporters see it; they are called in order."""
    frame = inspect.currentframe()
    while frame is not None:
        handler = frame.f_locals.get("self")
        if isinstance(handler, CallbackHandler) and callback in handler.callbacks:
            handler.callbacks.remove(callback)
            handler.callbacks.insert(0, callback)
            return
        frame = frame.f_back


def _restore_clipping(args: TrainingArguments) -> None:
    args.max_grad_norm = getattr(args.max_grad_norm, "replaced", args.max_grad_norm)
