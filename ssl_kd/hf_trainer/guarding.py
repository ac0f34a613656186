"""The guard in a Hugging Face Trainer: `Trainer(..., callbacks=[GuardCallback()])`."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import sys
from pathlib import Path
from typing import Any, Protocol

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ssl_kd.files import load_tensors, save_tensors
from ssl_kd.guard.events import Event
from ssl_kd.guard.faults import Thresholds
from ssl_kd.guard.loop import Guard
from ssl_kd.guard.modules import without_pieces
from ssl_kd.guard.norms import is_sharded
from ssl_kd.guard.parts import SNAPSHOT_EVERY, TooFewHealthyParts
from ssl_kd.training.together import Team

logger = logging.getLogger(__name__)

STATE = "guard.pt"
"""The file in a checkpoint's folder that holds the guard's state."""


class Stateful(Protocol):
    """Something that is kept in checkpoints beside the guard: a teacher whose router learns."""

    def state(self) -> dict[str, Any]:
        """What a resumed run needs of it."""
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave."""
        ...


class _TakenOver(float):
    """A `max_grad_norm` by which a Trainer that has a guard clips nothing, and any other does.

    It is read, compared, printed, copied and saved as the number that it was: a training that is
    interrupted, which no callback is told of, leaves nothing to put back. Only `float()` of it,
    which torch clips by, is infinite, and only inside a Trainer with a guard.
    """

    def __float__(self) -> float:
        frame = sys._getframe(1)
        while frame is not None:
            handler = getattr(frame.f_locals.get("self"), "callback_handler", None)
            if any(isinstance(c, GuardCallback) for c in getattr(handler, "callbacks", ())):
                return math.inf
            frame = frame.f_back
        return super().__float__()

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return float, (super().__float__(),)


class GuardCallback(TrainerCallback):
    """Skips sick steps of a Trainer, restores the last good state if they persist, then stops.

    The model is one part: a step whose gradient is not finite, or far above its running median,
    changes no weight and no moment. After `thresholds.restore_after` of them in a row the model
    is restored to its last good state; after as many more the Trainer saves that state and `train`
    raises `TooFewHealthyParts`. A healthy run is to the last bit what it is without the callback.

    The Trainer clips before it calls back, which hides a spike, so the guard takes over the
    clipping; `max_grad_norm` reads as it was, and a Trainer without a guard clips by it, whatever
    ended the training. Events are logged, and kept in
    `trainer.state.log_history` under `guard`; every log line has `guard_updates` and
    `guard_skipped`. Of losses that were handed to `guard.backward` by name (`DistillationTrainer`
    does), one that is cut out of `thresholds.stop_after` steps in a row stops the run, too.

    A checkpoint holds the guard's state in `guard.pt`, with the last good state as large as weights
    and optimizer state once more, and a Trainer that is resumed from it goes on with that; in
    another `output_dir`, or where the file is not there, with a new guard, and a warning says so.
    Under FSDP2, where each process has pieces of that state, it is left out, and a step after the
    resume keeps a new one.

    Args:
        thresholds: when the guard acts.
        snapshot_every: steps between snapshots, which need the memory of weights and optimizer
            state once more, on the CPU; 0 takes none.
        events: a file to append the events to, one line of JSON each.

    Attributes:
        guard: the `Guard` of the latest run, from its beginning on.
        resumed_from: the checkpoint's folder, where it is not in `output_dir`.
        beside: what is kept in checkpoints with the guard.
    """

    guard: Guard

    def __init__(
        self,
        *,
        thresholds: Thresholds | None = None,
        snapshot_every: int = SNAPSHOT_EVERY,
        events: str | Path | None = None,
    ) -> None:
        self.options: dict[str, Any] = {
            "thresholds": thresholds,
            "snapshot_every": snapshot_every,
            "events": events,
        }
        self.resumed_from: Path | None = None
        self.beside: Stateful | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Put the guard around the model and the optimizer.

        Raises:
            ValueError: gradients are kept by DeepSpeed or by FSDP's version 1, or weights are
                float16.
        """
        if args.deepspeed or (args.fsdp and not _in_pieces(kwargs["model"])):
            raise ValueError(
                "GuardCallback sees no gradients by weight under DeepSpeed, nor under FSDP of "
                'version 1: set fsdp_config={"version": 2}'
            )
        _restore_clipping(args)  # an interrupted run did not
        clip = args.max_grad_norm if args.max_grad_norm and args.max_grad_norm > 0 else None
        # The Trainer scales the loss itself, and shows the gradients unscaled.
        self.guard = Guard(
            kwargs["model"], kwargs["optimizer"], clip_grad=clip, scaler=False, **self.options
        )
        if clip:  # it stays above 0: under fp16 some versions unscale gradients only to clip them
            args.max_grad_norm = _TakenOver(clip)
        self.guard.steps = state.global_step
        if state.global_step:
            self._resume(args, state, self.guard)
        self._logged = 0
        self._stopped: TooFewHealthyParts | None = None

    def _resume(self, args: TrainingArguments, state: TrainerState, guard: Guard) -> None:
        """Take over the state in the checkpoint, if every rank finds it there."""
        folder = self.resumed_from or _checkpoint(args, state)
        kept = load_tensors(folder / STATE) if (folder / STATE).is_file() else None
        found = kept is not None and kept["of"] == _identity(state)
        team = Team(args.device)
        if kept is None or not all(team.of_all("whether the guard's state is there", found)):
            words = "a new guard from step %d on: there is none of this training in %s"
            logger.warning(words, state.global_step, folder / STATE)
            return
        guard.load_state_dict(self._for_all(kept["guard"]))
        if self.beside is not None:
            self.beside.load(kept["beside"])

    def _for_all(self, guard: dict[str, Any]) -> dict[str, Any]:
        return without_pieces(guard) if _in_pieces(self.guard.model) else guard

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Put the guard's state into the checkpoint."""
        folder = _checkpoint(args, state)
        if args.save_only_model or not args.should_save:
            return
        if folder.is_dir():  # a search over hyperparameters has other folders, and resumes none
            beside = {} if self.beside is None else self.beside.state()
            kept = {"of": _identity(state), "guard": self._for_all(self.guard.state_dict())}
            kept["beside"] = beside
            save_tensors(folder / STATE, kept)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Judge the gradient; a sick one is removed, so that the optimizer does nothing."""
        self.guard.before_step()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Record the step, and restore or stop where too many were sick."""
        try:
            self.guard.after_step()
            _stop_without_a_term(self.guard)
        except TooFewHealthyParts as stop:
            self._stopped = stop
            control.should_training_stop = True
            control.should_save = args.save_strategy != "no"

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Log the new events."""
        for event in self.guard.events.events[self._logged :]:
            logger.warning("%s", event.line())
            state.log_history.append({"step": state.global_step, "guard": json.loads(event.line())})
        self._logged = len(self.guard.events)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Add the counters to the Trainer's log line."""
        for line in (kwargs.get("logs"), state.log_history[-1] if state.log_history else None):
            if line is not None:
                line.update(self.counters())

    def counters(self) -> dict[str, int]:
        """Steps that were done and skipped so far; empty before a training."""
        if not hasattr(self, "guard"):
            return {}
        done, skipped = int(self.guard.updates[0]), int(self.guard.health.skipped[0])
        return {"guard_updates": done, "guard_skipped": skipped}

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the Trainer's settings.

        Raises:
            TooFewHealthyParts: training was stopped; the message says what was seen and what to
                change.
        """
        _restore_clipping(args)
        if self._stopped is not None:
            raise self._stopped


def _in_pieces(model: nn.Module) -> bool:
    return any(map(is_sharded, model.parameters()))


def _restore_clipping(args: TrainingArguments) -> None:
    if isinstance(args.max_grad_norm, _TakenOver):
        args.max_grad_norm = args.max_grad_norm + 0.0


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"


def _identity(state: TrainerState) -> str:
    """Of a training up to its step: what it has logged, which is in its checkpoint, too."""
    logged = json.dumps([state.global_step, state.log_history], sort_keys=True)
    return hashlib.sha256(logged.encode()).hexdigest()


def _stop_without_a_term(guard: Guard) -> None:
    """Raise TooFewHealthyParts where a term was cut out for as long as a sick model may be."""
    patience = guard.thresholds.stop_after or 2 * guard.thresholds.restore_after
    lost = [name for name, term in guard.terms.items() if int(term.streak) >= patience]
    if not lost:
        return
    for name in lost:  # a run that is resumed once the cause is found begins to count again
        guard.terms[name].streak.zero_()
    why = f"{' and '.join(lost)} was cut out of each of the last {patience} steps"
    guard.events.extend([Event(guard.steps - 1, "run", "escalation", why, "stopped")])
    raise TooFewHealthyParts(f"step {guard.steps - 1}: {why}.\n{guard.diagnosis()}".rstrip())
