"""The guard alone, around any PyTorch loop: the user's own model, optimizer and losses.

Three lines make a loop guarded: `guard = Guard(model, optimizer)`, `guard.backward(loss)` in place
of `loss.backward()` and `guard.step()` in place of `optimizer.step()`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ssl_kd.guard.events import Event, EventLog
from ssl_kd.guard.health import REASONS, Health, Stage, Thresholds, is_healthy
from ssl_kd.guard.parts import TooFewHealthyParts, rescale_

logger = logging.getLogger(__name__)

WHOLE, SHARED = "model", "shared"
"""The part without `parts=`; the part of the weights that no given part owns."""

_WINDOW = 100  # steps; a part that misses more than a tenth of them is reported
_FIRST_SCALE = 1024.0  # ten halvings from the floor: as many as the guard has patience for

_ADVICE = {
    Stage.LOSS: "look for NaN in the inputs and for log or division of 0 in the loss; lower the "
    "learning rate",
    Stage.GRADIENT: "where the loss had been growing lower the learning rate; otherwise look for "
    "sqrt, log or a norm at 0 (torch.autograd.set_detect_anomaly(True) names the operation); under "
    "float16 autocast pass scaler=True",
    Stage.SPIKE: "lower the learning rate or set clip_grad; where such jumps are normal raise "
    "Thresholds.spike_factor",
}


@dataclass
class _Part:
    """One part: what the optimizer updates of it, and its last good state."""

    name: str
    weights: list[nn.Parameter]
    modules: list[nn.Module] = field(default_factory=list)
    buffers: list[tuple[nn.Module, str]] = field(default_factory=list)
    kept: list[Tensor | None] = field(default_factory=list)  # buffers after the last healthy step
    good: dict[str, Any] | None = None
    due: int = 0  # the step from which the next snapshot may be taken

    def live(self) -> list[Tensor | None]:
        """The buffers as they are now: a module may have put another tensor in the place."""
        return [module._buffers[name] for module, name in self.buffers]

    def put_back(self, buffers: list[Tensor | None]) -> None:
        """Give the buffers the values that `live` showed."""
        for (module, name), now, value in zip(self.buffers, self.live(), buffers, strict=True):
            if now is not None and value is not None:
                now.copy_(value)
            else:  # made by a forward pass, the first one as a rule
                where = self.weights[0].device
                module._buffers[name] = None if value is None else value.to(where, copy=True)


class Guard:
    """Judges each part's loss and gradient norm, and leaves sick parts out of the update.

    A part that is left out keeps its weights, optimizer state and buffers (a BatchNorm's running
    statistics) to the last bit, with any optimizer of `torch.optim` that skips a parameter without
    a gradient; the others are updated as if the sick one had been left out by hand. After
    `thresholds.restore_after` bad steps in a row a part goes back to its last good state, then is
    re-initialised, then retired; without a healthy part the loop stops.

    A step may be given up after `backward`, by `optimizer.zero_grad()` or `discard`.

    Costs one wait for the device per step, and one more per `backward` that has to cut out losses
    (loss terms, `through=`, parts beside shared weights). Snapshots need the memory of weights and
    optimizer state once more, on the CPU. One process: ranks would not agree on what is cut out.

    Args:
        model: the module that is trained.
        optimizer: holds its parameters. float16 parameters are given float32 masters in it, so
            build the guard after the weights are loaded and before the first step.
        parts: name -> a module, or parameters, that fail alone; each parameter has one owner. What
            is trained and no part owns becomes the part `shared`. By default the whole model is one
            part.
        thresholds: when the guard acts.
        clip_grad: largest gradient norm of a part, > 0, as `torch.nn.utils.clip_grad_norm_`.
        scaler: scale losses as a GradScaler does, but never below 1, and each part's alone where
            parts share neither weights nor loss; by default where there are float16 parameters.
            Needed under float16 autocast. Hand over losses that are not scaled yet.
        snapshot_every: steps between snapshots of each part; 0 takes none.
        fresh_optimizer: a part that goes back to its last good state begins with an empty optimizer
            state, not the one that it had then.
        reinitialise: called with a part's name to give it new weights. By default parts given as
            modules have their `reset_parameters` called; other parts skip this rung.
        events: a file to append the guard's decisions to, one line of JSON each.

    Attributes:
        grad_norm: gradient norm of each part in the last step, before clipping, `[part]` float32 on
            the CPU; NaN for a part that was cut out.

    Raises:
        ValueError: parts and optimizer do not fit, an argument is out of range, or a parameter is
            complex.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        parts: Mapping[str, nn.Module | Iterable[nn.Parameter]] | None = None,
        *,
        thresholds: Thresholds | None = None,
        clip_grad: float | None = None,
        scaler: bool | None = None,
        snapshot_every: int = 100,
        fresh_optimizer: bool = False,
        reinitialise: Callable[[str], object] | None = None,
        events: str | Path | None = None,
    ) -> None:
        if clip_grad is not None and not clip_grad > 0:
            raise ValueError(f"clip_grad is {clip_grad}; expected a number > 0, or None")
        if snapshot_every < 0:
            raise ValueError(f"snapshot_every is {snapshot_every}; expected steps, or 0 for none")
        self.model, self.optimizer = model, optimizer
        self.thresholds, self.clip_grad = thresholds or Thresholds(), clip_grad
        self.snapshot_every, self.reinitialise = snapshot_every, reinitialise
        self.fresh_optimizer = fresh_optimizer
        self.events = EventLog(None if events is None else Path(events))
        self.steps = 0

        given = parts is not None
        self._parts = _divide(model, optimizer, parts)
        own = sum(part.name != SHARED for part in self._parts)
        if own < self.thresholds.min_parts:
            raise ValueError(f"min_parts is {self.thresholds.min_parts}; the parts are {own}")
        self._masters = _promote(optimizer)
        swap = {id(p): master for p, master in self._masters}
        for part in self._parts:
            part.weights = [swap.get(id(p), p) for p in part.weights]
        self._index = {part.name: i for i, part in enumerate(self._parts)}
        self._named = [p.name for p in self._parts if p.name != SHARED] if given else []
        self._own = {id(p) for part in self._parts for p in part.weights}
        self._beside = {self._index[SHARED]} if SHARED in self._index else set()

        # All of the memory is on the CPU: a step reads losses and norms once, and never again.
        self.health = Health.fresh(len(self._parts))
        for i, part in enumerate(self._parts):  # without a way to do it, this rung is done already
            self.health.reinitialised[i] = reinitialise is None and not _resettable(part)
        self.updates = torch.zeros(len(self._parts), dtype=torch.int64)
        self.counts = torch.zeros(len(self._parts), len(Stage), dtype=torch.int64)
        self.skipped_before = torch.zeros_like(self.health.skipped)  # until the last full window
        self.unsteady = torch.zeros_like(self.health.retired)
        self._scales = bool(self._masters) if scaler is None else scaler
        self.scale = torch.full((len(self._parts),), _FIRST_SCALE if self._scales else 1.0)
        self._one_scale = bool(self._beside)
        self.grad_norm = torch.zeros(len(self._parts))
        self._terms: dict[str, Health] = {}
        self._keep_buffers(range(len(self._parts)))
        self._forget()

    # -- the step ---------------------------------------------------------------------------------

    def backward(
        self,
        losses: Tensor | Mapping[str, Tensor],
        through: Tensor | Sequence[Tensor] | None = None,
    ) -> None:
        """In place of `loss.backward()`; may be called several times before a `step`.

        Args:
            losses: one loss for all; or name -> loss of a part, or a vector `[part]`, in the order
                of `parts`; or, without `parts`, name -> loss term of the same weights. A term whose
                loss or gradient is bad is cut out of the backward pass, and the rest goes on alone.
            through: tensor(s) that every loss was computed from (logits, features). The gradient of
                each loss is first taken there alone, so that a NaN in one never reaches the weights
                that they share; this runs what lies between twice. Without it a loss is cut out
                only where its own value is bad.

        Raises:
            TypeError: a loss is no tensor.
            ValueError: names or shapes do not fit the parts, or a loss has nothing to do with
                `through`.
        """
        weights = (p for part in self._parts for p in part.weights)
        if self._ran and all(p.grad is None for p in weights):
            self.discard()  # zero_grad() gave the step up, perhaps halfway through its backward
        if isinstance(losses, Tensor) and losses.ndim == 0:
            if through is not None:
                raise ValueError("through= tells several losses apart; there is one")
            self._one_scale |= len(self._parts) > 1
            self._remember(dict.fromkeys(range(len(self._parts)), losses))
            self._run({0: losses})
        elif self._named:
            self._backward_parts(self._by_name(losses), through)
        else:
            self._backward_terms(self._by_name(losses), through)

    def discard(self) -> None:
        """Give up the step that was begun: forget its losses and gradients.

        `optimizer.zero_grad()` does as much, except where it fills gradients with zeros
        (`set_to_none=False`) or every loss was cut out: nothing then tells it from a batch more.
        """
        self._forget()
        for p in [p for p, _ in self._masters] + [p for part in self._parts for p in part.weights]:
            p.grad = None

    def step(self) -> set[str]:
        """In place of `optimizer.step()`.

        Returns:
            The names of the parts that were updated; an average of weights should follow no other.

        Raises:
            TooFewHealthyParts: it is no use to go on; sick parts are back at their last good state.
        """
        self.before_step()
        self.optimizer.step()  # even where nothing is left to do: a scheduler expects the call
        return self.after_step()

    @torch.no_grad()
    def before_step(self) -> None:
        """The half of `step` before `optimizer.step()`, for loops that call it themselves."""
        self._to_masters()
        self._record_terms()
        for group in self.optimizer.param_groups:
            if any(p.grad is not None and id(p) not in self._own for p in group["params"]):
                raise ValueError(
                    "the optimizer holds a gradient of a parameter that was not there, or not "
                    "trained, when the guard was made: make a new Guard"
                )
        gradients = [[p.grad for p in part.weights if p.grad is not None] for part in self._parts]
        if self._scales:
            for i, grads in enumerate(gradients):
                for g in grads:
                    g.mul_(1 / self._scale_of(i))
        norms = [_norm(grads) for grads in gradients]
        loss, norm = self._read_step(norms)
        self.grad_norm = norm
        scale = torch.tensor([self._scale_of(i) for i in range(len(self._parts))])
        scale = scale.masked_fill(self._mask(self._cut), 1.0)  # its NaN is no overflow
        stage = self.health.judge(loss, norm, self.thresholds, scale=scale)
        healthy = is_healthy(stage)
        for i, part in enumerate(self._parts):
            if not healthy[i]:
                for p in part.weights:  # no gradient, no update: not even by momentum or decay
                    p.grad = None
                part.put_back(part.kept)
            elif gradients[i]:
                if self.snapshot_every and self.steps >= part.due:
                    self._snapshot(part)
                if self.clip_grad is not None:
                    clip_grads_with_norm_(part.weights, self.clip_grad, norms[i])
        absent = [i not in self._loss and not gradients[i] for i in range(len(self._parts))]
        self._judged = loss, norm, stage, torch.tensor(absent) & healthy

    @torch.no_grad()
    def after_step(self) -> set[str]:
        """The half of `step` after `optimizer.step()`: remember, report and escalate.

        Returns:
            As `step`.

        Raises:
            TooFewHealthyParts: as `step`.
        """
        self._write_masters()
        for _, master in self._masters:  # the model's own zero_grad() does not reach it
            master.grad = None
        loss, norm, stage, absent = self._judged
        healthy = is_healthy(stage)
        self.health.record_(stage, norm, self.thresholds, absent)
        updated = healthy & ~absent
        self._keep_buffers(updated.nonzero().flatten().tolist())
        if self._scales:
            overflow = stage == int(Stage.OVERFLOW)
            if self._one_scale:
                self.scale[overflow] = self._scale_of(0)
            rescale_(self.scale, updated, overflow, self.updates)
        self.updates += updated
        step, self.steps = self.steps, self.steps + 1
        self._forget()
        for i, (part, what) in enumerate(zip(self._parts, stage.tolist(), strict=True)):
            self.counts[i, what] += 1
            if what in REASONS:
                value = loss[i] if what == Stage.LOSS else norm[i]
                done = {Stage.DEAD: "reported", Stage.OVERFLOW: "loss scale halved"}
                action = done.get(Stage(what), "skipped")
                self._report(step, part.name, Stage(what), action, value)
        if self.steps % _WINDOW == 0:
            self._watch()
        if not healthy.all():
            self._escalate(step)
        return {part.name for part, done in zip(self._parts, updated, strict=True) if done}

    # -- losses -----------------------------------------------------------------------------------

    def _by_name(self, losses: Tensor | Mapping[str, Tensor]) -> dict[str, Tensor]:
        if isinstance(losses, Tensor):
            if not self._named or losses.shape != (len(self._named),):
                vector = f"a vector of {len(self._named)}, one per part, " if self._named else ""
                raise ValueError(
                    f"losses have the shape {tuple(losses.shape)}; expected one number without "
                    f"dimensions, {vector}or a dictionary"
                )
            return dict(zip(self._named, losses.unbind(), strict=True))
        if not isinstance(losses, Mapping):
            raise TypeError(f"the loss is {losses!r}; expected a tensor, or a dictionary of them")
        if not losses:
            raise ValueError("there is no loss in the dictionary")
        for name, loss in losses.items():
            if self._named and name not in self._named:
                raise ValueError(f"no part is named {name!r}; there are {', '.join(self._named)}")
            if not isinstance(loss, Tensor):
                raise TypeError(f"loss {name!r} is {loss!r}; expected a tensor")
            if loss.ndim:
                raise ValueError(f"loss {name!r} has the shape {tuple(loss.shape)}, not one number")
        return dict(losses)

    def _backward_parts(self, losses: dict[str, Tensor], through: Any) -> None:
        """Cut out the sick parts where weights are shared; elsewhere they hurt only themselves."""
        told = {self._index[name]: loss for name, loss in losses.items()}
        told = {i: loss for i, loss in told.items() if not self.health.retired[i]}
        self._remember(told)
        if told and (through is not None or SHARED in self._index):
            names = [self._parts[i].name for i in told]
            loss, norm = _look(dict(zip(names, told.values(), strict=True)), through)
            sick = ~(torch.isfinite(loss) & torch.isfinite(norm))
            cut = {i for i, bad in zip(told, sick.tolist(), strict=True) if bad}
            told = {i: loss for i, loss in told.items() if i not in cut}
            self._cut |= cut
        self._run(told)

    def _backward_terms(self, losses: dict[str, Tensor], through: Any) -> None:
        """Cut out the sick terms; the step is lost only where none is left."""
        kept = []
        for name, loss, norm in zip(losses, *_look(losses, through), strict=True):
            health = self._terms.setdefault(name, Health.fresh(1))
            stage = health.judge(loss[None], norm[None], self.thresholds)
            if is_healthy(stage):
                kept.append(losses[name])
            before = self._seen.get(name)
            if before is None or is_healthy(before[0]):  # the first bad one of a step is the cause
                self._seen[name] = (stage, loss, norm)
        if len(kept) == len(losses) or any(loss.requires_grad for loss in kept):
            total = sum(kept[1:], kept[0])
            self._remember({0: total})
            self._run({0: total})
        else:
            self._remember({0: sum(losses.values(), torch.zeros(()))})
            self._cut.add(0)

    def _record_terms(self) -> None:
        """Remember and report the loss terms of a step, however many backward passes it had."""
        for name, (stage, loss, norm) in self._seen.items():
            health, what = self._terms[name], Stage(int(stage))
            missed = int(health.streak)
            health.record_(stage, norm[None], self.thresholds)
            action, streak = "reported", int(health.streak)
            if not is_healthy(stage):
                action = "cut out"
                if streak % self.thresholds.restore_after == 0:
                    action += f", {streak} times in a row: {_ADVICE[what]}"
            if what in REASONS:
                value = loss if what == Stage.LOSS else norm
                self._report(self.steps, name, what, action, value)
            elif missed:
                reason = f"healthy again after {missed} steps"
                self.events.extend([Event(self.steps, name, "loss", reason, "taken in again")])

    def _remember(self, told: dict[int, Tensor]) -> None:
        for i, loss in told.items():
            seen = loss.detach().float()
            self._loss[i] = self._loss[i] + seen if i in self._loss else seen

    def _run(self, losses: dict[int, Tensor]) -> None:
        """The backward pass of each part's loss, times its scale."""
        if self._scales:  # in float32: a scaled loss overflows float16 long before its gradients
            losses = {i: loss.float() * self._scale_of(i) for i, loss in losses.items()}
        if losses:  # beside others, a constant is no mistake
            values = [*losses.values()]
            self._ran = True
            torch.autograd.backward([loss for loss in values if loss.requires_grad] or values)
            self._to_masters()

    @torch.no_grad()
    def _to_masters(self) -> None:
        """Gather gradients in the masters, where optimizer.zero_grad() finds them."""
        for p, master in self._masters:
            if p.grad is not None:
                wide, p.grad = p.grad.float(), None
                master.grad = wide if master.grad is None else master.grad + wide

    def _scale_of(self, part: int) -> float:
        # Weights or a loss that parts share cannot be scaled by two factors at once.
        return float(
            self.scale[~self.health.retired].min() if self._one_scale else self.scale[part]
        )

    def _forget(self) -> None:
        self._loss: dict[int, Tensor] = {}
        self._seen: dict[str, tuple[Tensor, Tensor, Tensor]] = {}  # loss terms of this step
        self._cut: set[int] = set()
        self._ran = False  # whether there was a backward pass, which leaves gradients

    def _mask(self, parts: Iterable[int]) -> Tensor:
        mask = torch.zeros(len(self._parts), dtype=torch.bool)
        mask[list(parts)] = True
        return mask

    def _read_step(self, norms: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Loss and gradient norm `[part]` on the CPU: the one wait of the step."""
        losses = [self._loss.get(i, torch.zeros_like(norm)) for i, norm in enumerate(norms)]
        loss, norm = _read([*losses, *norms], self._parts[0].weights[0].device)
        return loss, norm.masked_fill(self._mask(self._cut), torch.nan)

    # -- escalation -------------------------------------------------------------------------------

    def _escalate(self, step: int) -> None:
        """Restore, re-initialise or retire what stays sick."""
        streaks = self.health.streak.tolist()
        try:
            actions = self.health.escalate(self.thresholds, self._beside)
        except TooFewHealthyParts as error:
            done = {
                part.name: self._restore(part)
                for part, streak in zip(self._parts, streaks, strict=True)
                if streak
            }
            self.events.extend(
                [Event(step, name, "escalation", str(error), what) for name, what in done.items()]
            )
            raise TooFewHealthyParts(f"step {step}: {error}.\n{self.diagnosis(done)}") from None
        for i, action in actions.items():
            part = self._parts[i]
            if action == "restore":
                done = self._restore(part)
            elif action == "reinitialise":
                done = self._reinitialise(part, step)
            else:
                done = f"retired; {self._restore(part)}"
            reason = f"{streaks[i]} bad steps in a row"
            self.events.extend([Event(step, part.name, "escalation", reason, done)])

    def _report(self, step: int, part: str, stage: Stage, action: str, value: Tensor) -> None:
        event = Event(step, part, stage.name.lower(), REASONS[stage], action, float(value))
        self.events.extend([event])

    def _watch(self) -> None:
        """Warn of parts that are sick often, but never long enough to be restored."""
        missed = self.health.skipped - self.skipped_before
        unsteady = (missed > _WINDOW // 10) & ~self.health.retired
        for i in (unsteady & ~self.unsteady).nonzero().flatten().tolist():
            name = self._parts[i].name
            logger.warning("%s missed %d of the last %d steps", name, missed[i], _WINDOW)
        self.skipped_before.copy_(self.health.skipped)
        self.unsteady.copy_(unsteady)

    def _snapshot(self, part: _Part) -> None:
        """Remember a part that this step's loss and gradient have just shown to be good."""
        state = [dict(self.optimizer.state.get(p, {})) for p in part.weights]
        part.due = self.steps + self.snapshot_every
        if _finite([*part.weights, *part.live(), *(v for row in state for v in row.values())]):
            part.good = {
                "step": self.steps,
                "weights": [_to_cpu(p) for p in part.weights],
                "state": [{k: _to_cpu(v) for k, v in row.items()} for row in state],
                "buffers": [_to_cpu(b) for b in part.live()],
            }

    def _restore(self, part: _Part) -> str:
        """Put one part back to its last good state; what was done, in words."""
        if part.good is None:
            return "left as it is: there is no good state to go back to"
        for p, weight, saved in zip(
            part.weights, part.good["weights"], part.good["state"], strict=True
        ):
            p.copy_(weight)
            if self.fresh_optimizer:
                self.optimizer.state.pop(p, None)
                continue
            live = self.optimizer.state[p]
            for key in live.keys() - saved.keys():
                del live[key]
            for key, value in saved.items():
                if isinstance(value, Tensor) and key in live:
                    live[key].copy_(value)  # on its device, which need not be the weight's
                else:
                    live[key] = copy.deepcopy(value)
        part.put_back(part.good["buffers"])
        self._sync(part)
        fresh = ", with a fresh optimizer" if self.fresh_optimizer else ""
        return f"restored to its state before step {part.good['step']}{fresh}"

    def _reinitialise(self, part: _Part, step: int) -> str:
        """New weights and an empty optimizer state; the loop's random numbers are not touched."""
        gpus = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
        with torch.random.fork_rng(gpus):
            torch.manual_seed(step * len(self._parts) + self._index[part.name])
            if self.reinitialise is not None:
                self.reinitialise(part.name)
            else:
                for module in part.modules:
                    for child in module.modules():
                        if callable(reset := getattr(child, "reset_parameters", None)):
                            reset()
        for p, master in self._masters:
            if any(master is mine for mine in part.weights):
                master.copy_(p)
        for p in part.weights:
            self.optimizer.state.pop(p, None)
        part.good, part.due = None, 0
        self._sync(part)
        return "re-initialised"

    def _sync(self, part: _Part) -> None:
        """After a part was changed from outside the step."""
        self._keep_buffers([self._index[part.name]])
        self._write_masters()

    def _write_masters(self) -> None:
        for p, master in self._masters:
            p.copy_(master)

    def _keep_buffers(self, parts: Iterable[int]) -> None:
        for i in parts:
            self._parts[i].kept = [None if b is None else b.clone() for b in self._parts[i].live()]

    # -- what a user asks for ---------------------------------------------------------------------

    def diagnosis(self, done: Mapping[str, str] | None = None) -> str:
        """What was seen, how often, and what to change: a line per part that was ever sick."""
        lines = []
        for part, counts in zip(self._parts, self.counts, strict=True):
            seen = {stage: int(counts[stage]) for stage in _ADVICE if counts[stage]}
            if seen:
                often = ", ".join(f"{REASONS[s]} ({n} times)" for s, n in seen.items())
                state = f" It was {done[part.name]}." if done and part.name in done else ""
                advice = _ADVICE[max(seen, key=lambda stage: seen[stage])]
                lines.append(
                    f"{part.name}, {self.steps} steps: {often}.{state} What to change: {advice}."
                )
        return "\n".join(lines)

    def summary(self) -> str:
        """One line: the share of updates that were done, and who is sick or retired."""
        done, skipped = int(self.updates.sum()), int(self.health.skipped.sum())
        line = f"step {self.steps}: {100 * done / max(done + skipped, 1):.1f} % of updates done"
        rows = [(p.name, self.health.streak[i], i) for i, p in enumerate(self._parts)]
        rows += [(name, health.streak[0], None) for name, health in self._terms.items()]
        if sick := [f"{name} {int(streak)}" for name, streak, _ in rows if streak]:
            line += f"; bad steps in a row: {', '.join(sick)}"
        if gone := [name for name, _, i in rows if i is not None and self.health.retired[i]]:
            line += f"; retired: {', '.join(gone)}"
        if often := [p.name for p, bad in zip(self._parts, self.unsteady, strict=True) if bad]:
            line += f"; below 90 % in the last {_WINDOW} steps: {', '.join(often)}"
        return line

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed loop needs beside the model's and the optimizer's own state."""
        return {
            "steps": self.steps,
            "health": self.health.tensors(),
            "updates": self.updates,
            "counts": self.counts,
            "skipped_before": self.skipped_before,
            "unsteady": self.unsteady,
            "scale": self.scale,
            "one_scale": self._one_scale,
            "terms": {name: health.tensors() for name, health in self._terms.items()},
            "parts": {part.name: {"good": part.good, "due": part.due} for part in self._parts},
            "masters": [master.detach() for _, master in self._masters],
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; load the model and the optimizer first.

        Raises:
            ValueError: the state is of other parts.
        """
        if list(state["parts"]) != [part.name for part in self._parts]:
            raise ValueError(
                f"the state is of the parts {', '.join(state['parts'])}; "
                f"this guard has {', '.join(self._index)}"
            )
        self.steps, self._one_scale = state["steps"], state["one_scale"]
        self.health = Health(**_copies(state["health"]))
        self._terms = {name: Health(**_copies(row)) for name, row in state["terms"].items()}
        for name in ("updates", "counts", "skipped_before", "unsteady", "scale"):
            getattr(self, name).copy_(state[name])
        for part in self._parts:
            part.good = copy.deepcopy(state["parts"][part.name]["good"])
            part.due = state["parts"][part.name]["due"]
        for (_, master), saved in zip(self._masters, state["masters"], strict=True):
            master.copy_(saved)
        self._write_masters()
        self._keep_buffers(range(len(self._parts)))


def _divide(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    given: Mapping[str, nn.Module | Iterable[nn.Parameter]] | None,
) -> list[_Part]:
    """The parts; what the optimizer trains beyond them is the last one, `shared`."""
    held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    for name, p in model.named_parameters():
        if id(p) in held and p.is_complex():
            raise ValueError(f"parameter {name!r} is complex; the guard's norms are of real ones")
    if given is None:
        # In the model's order, in which clip_grad_norm_(model.parameters()) sums, too.
        weights = {id(p): p for p in model.parameters() if id(p) in held} | held
        return [_Part(WHOLE, list(weights.values()), [model], _buffers(model))]
    if not given or SHARED in given:
        raise ValueError(f"parts are {list(given)}; expected names, other than {SHARED!r}")
    owner: dict[int, str] = {}
    taken: set[tuple[int, str]] = set()
    parts = []
    for name, what in given.items():
        own = what.parameters() if isinstance(what, nn.Module) else what
        own = [own] if isinstance(own, nn.Parameter) else own  # which would be iterated by row
        part = _Part(name, [*{id(p): p for p in own if p.requires_grad}.values()])
        if not part.weights:
            raise ValueError(f"part {name!r} has no parameter that is trained")
        for p in part.weights:
            if id(p) not in held:
                raise ValueError(f"part {name!r}: one of {tuple(p.shape)} is not in the optimizer")
            if id(p) in owner:
                raise ValueError(
                    f"{name!r} and {owner[id(p)]!r} share a parameter of shape {tuple(p.shape)}; "
                    "leave it out of both, or hand over loss terms instead of parts"
                )
            owner[id(p)] = name
        if isinstance(what, nn.Module):
            part.modules, part.buffers = [what], _buffers(what)
            taken |= {(id(module), key) for module, key in part.buffers}
        parts.append(part)
    if rest := [p for key, p in held.items() if key not in owner and p.requires_grad]:
        buffers = [(m, key) for m, key in _buffers(model) if (id(m), key) not in taken]
        parts.append(_Part(SHARED, rest, [], buffers))
    return parts


def _buffers(model: nn.Module) -> list[tuple[nn.Module, str]]:
    # Buffers that a module does not save are caches: they may change their shape as they like.
    return [
        (module, name)
        for module in model.modules()
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    ]


def _resettable(part: _Part) -> bool:
    children = (child for module in part.modules for child in module.modules())
    return any(callable(getattr(child, "reset_parameters", None)) for child in children)


def _promote(optimizer: torch.optim.Optimizer) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Put float32 masters into the optimizer in place of float16 parameters: `(model's, master)`.

    Raises:
        ValueError: the optimizer has already made steps with the float16 ones.
    """
    pairs = []
    for group in optimizer.param_groups:
        for i, p in enumerate(group["params"]):
            if p.dtype != torch.float16:
                continue
            if optimizer.state.get(p):
                raise ValueError(
                    "the optimizer holds moments of float16 parameters; make the Guard before the "
                    "first step, or the parameters float32"
                )
            master = nn.Parameter(p.detach().float(), requires_grad=p.requires_grad)
            group["params"][i] = master
            pairs.append((p, master))
    if pairs:
        logger.warning("%d float16 parameters got float32 masters in the optimizer", len(pairs))
    return pairs


def _norm(gradients: list[Tensor]) -> Tensor:
    """L2 norm of all of them as one, in float32 at least."""
    rows = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    wide = (torch.float32, torch.float64)
    return get_total_norm(
        [g if g.dtype in wide else torch.linalg.vector_norm(g, dtype=torch.float32) for g in rows]
    )


def _look(losses: dict[str, Tensor], through: Any) -> tuple[Tensor, Tensor]:
    """Loss and gradient norm at `through` of each, `[loss]`, on the CPU: waits for the device."""
    values = [loss.detach().float() for loss in losses.values()]
    norms = [torch.ones_like(value) for value in values]
    if through is not None:
        tensors = [through] if isinstance(through, Tensor) else list(through)
        norms = [_norm_at(tensors, name, loss) for name, loss in losses.items()]
    return _read([*values, *norms], values[0].device)


def _read(values: list[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Both halves of a list of numbers on a device, as vectors on the CPU, in one wait."""
    first, second = torch.stack([v.to(device, torch.float32) for v in values]).cpu().view(2, -1)
    return first, second


def _norm_at(tensors: list[Tensor], name: str, loss: Tensor) -> Tensor:
    if not loss.requires_grad:  # a constant, as a term has it that found nothing in this batch
        return torch.zeros_like(loss)
    gradients = torch.autograd.grad(loss, tensors, retain_graph=True, allow_unused=True)
    if not (reached := [g for g in gradients if g is not None]):
        raise ValueError(f"loss {name!r} was not computed from `through`: add what it came from")
    return _norm(reached)


def _to_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return copy.deepcopy(value)


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _finite(values: list[Any]) -> bool:
    """Whether every tensor is finite: one wait for the device."""
    flags = [torch.isfinite(v).all() for v in values if isinstance(v, Tensor)]
    return not flags or bool(torch.stack([flag.to(flags[0].device) for flag in flags]).all())
