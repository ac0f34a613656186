"""Leave bad losses and gradients out of the update, in any PyTorch loop.

Three lines guard a loop: `guard = Guard(model, optimizer)`, `guard.backward(loss)` in place of
`loss.backward()` and `guard.step()` in place of `optimizer.step()`.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn, SupportsIndex, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_

from firstnan._hooks import weakly
from firstnan._norms import look, norm_of, read
from firstnan._optimizers import Optimizers
from firstnan._skipped_steps import withhold
from firstnan._terms import LossTerms, by_name
from firstnan._verdicts import OnRanks, Verdicts
from firstnan.events import Event, EventLog
from firstnan.faults import Kinds, Observation, Stage, Thresholds
from firstnan.finite import compute_dtype
from firstnan.health import Health, is_healthy, rescale_
from firstnan.parts import SHARED, SNAPSHOT_EVERY, ModuleParts, Parameters, TooFewHealthyParts
from firstnan.recovery import Recovery, with_all_kinds
from firstnan.watch import Locator

_GUARDS: weakref.WeakSet[Guard] = weakref.WeakSet()  # a bad batch may reach another's model

_SQUARED = 1e38  # a norm, in float32, that an optimizer may not be able to square
_FIRST_SCALE = 1024.0  # ten halvings above the minimum of 1, as many as `restore_after`


class Guard:
    """Check each part's loss and gradient norm, and leave unhealthy parts out of the update.

    A part that is left out keeps its weights, optimizer state and buffers to the last bit, with any
    optimizer of `torch.optim` that skips parameters without a gradient; the others are updated as
    if you had left it out by hand. Buffers that parts share, or in models of other guards (such as
    a discriminator), are put back if a bad batch made them non-finite. After many bad steps in a
    row (see `Thresholds`) a part is restored to its last good state, then re-initialized, then
    retired; without a healthy part the loop stops.

    Each step waits for the device once, and each `backward` once more if it may have to leave out
    losses (loss terms, `through=`, parts that share weights). Snapshots hold a second copy of
    weights and optimizer state, on the CPU.

    The ranks of `torch.distributed` decide alike: make the guard on each, and call it equally often
    with losses of the same names.

    Args:
        model: the module to train.
        optimizer: holds the parameters, none float16; several take or skip a step together.
        parts: name -> module or parameters that may fail independently; no parameter in two parts.
            Trained weights in no part become the part `shared`. By default the whole model is one
            part.
        thresholds: when the guard acts.
        clip_grad: largest gradient norm of a part, > 0, as in `torch.nn.utils.clip_grad_norm_`.
        scaler: scale the (unscaled) losses as a GradScaler does, needed under float16 autocast; a
            part that shares neither weights nor loss has its own scale.
        snapshot_every: steps between snapshots of each part; 0 takes none.
        fresh_optimizer: clear the optimizer state of a restored part instead of restoring it.
        events: a file to which the first rank appends events, one line of JSON each; or an
            `EventLog`.
        locate: name the operation that made a loss or gradient non-finite, by running the model
            again (see `firstnan.watch.Watch`); or the modules that the loop calls instead of it.
        group: the ranks that train this model; None for all, False for this process alone.
        advice: kind of fault -> what to change in your program, in place of the guard's own words.
        first_step: number of the first step in events and messages; 0 if your loop's log begins so.

    Attributes:
        locator: its `findings` map a step to the operation that was named; empty without `locate`.
        grad_norm: gradient norm of each part in the last step, before clipping, `[part]` float32 on
            the CPU; NaN for a part that was cut out.

    Raises:
        TypeError: the model is no module, or the optimizer no optimizer.
        ValueError: parts and optimizer do not fit, an argument is out of range, a parameter is
            float16, the optimizer needs a closure (LBFGS), or the ranks' guards differ.
        RankLost: another rank does not make its guard.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
        parts: Mapping[str, Parameters] | None = None,
        *,
        thresholds: Thresholds | None = None,
        clip_grad: float | None = None,
        scaler: bool = False,
        snapshot_every: int = SNAPSHOT_EVERY,
        fresh_optimizer: bool = False,
        events: str | Path | EventLog | None = None,
        locate: bool | Sequence[nn.Module] = False,
        group: dist.ProcessGroup | Literal[False] | None = None,
        advice: Mapping[Kinds, str] | None = None,
        first_step: int = 1,
    ) -> None:
        if clip_grad is not None and not clip_grad > 0:
            raise ValueError(f"clip_grad is {clip_grad}; expected a number > 0, or None")
        if snapshot_every < 0:
            raise ValueError(
                f"snapshot_every is {snapshot_every}; expected a number of steps, or 0 for none"
            )
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"model is a {type(model).__name__}; expected the module that the loop trains, as "
                "in Guard(model, optimizer); of parameters without a module, make one: "
                "nn.ParameterList(parameters)"
            )
        self.model, self.optimizer = model, cast(Any, optimizer)  # one, or several
        self.thresholds, self.clip_grad = thresholds or Thresholds(), clip_grad
        self.steps = 0
        self.snapshot_every = snapshot_every
        self.first_step = first_step
        self._optimizers = Optimizers(optimizer)
        self._optimizers.watch_steps(weakly(self._refuse_unjudged))
        self._parts = ModuleParts(model, self._optimizers, parts, fresh_optimizer=fresh_optimizer)
        names, n = self._parts.names, len(self._parts)
        owners, most = [name for name in names if name != SHARED], self.thresholds.min_parts
        if len(owners) < most:
            raise ValueError(
                f"min_parts is {most}; expected at most {len(owners)}, the number of parts"
            )
        self._index = {name: i for i, name in enumerate(names)}
        self._named = owners if parts is not None else []
        self._one_scale = SHARED in self._index

        # This state is on the CPU: a step reads losses and norms from the device once.
        self.health = Health.fresh(n)
        for i, part in enumerate(self._parts):  # what cannot be re-initialized skips this rung
            self.health.reinitialized[i] = not part.resets
        shared = {self._index[SHARED]} if SHARED in self._index else set()
        words = dict(advice or {})
        self.recovery = Recovery(self._parts, self.health, words, shared, first_step=first_step)
        self.updates = torch.zeros(n, dtype=torch.int64)
        self._scales = scaler
        self.scale = torch.full((n,), _FIRST_SCALE if scaler else 1.0)
        settings = {key for group in self._optimizers.groups for key in group}
        squares = bool({"betas", "alpha", "rho", "lr_decay"} & settings) and clip_grad is None
        limit = self.thresholds.max_norm or (_SQUARED if squares else None)
        self._limits = replace(self.thresholds, max_norm=limit)
        self.grad_norm = torch.zeros(n)
        self._terms = LossTerms(self.thresholds, self.recovery.advice)
        rules = f"{self.thresholds}, clip_grad={clip_grad}, snapshot_every={snapshot_every}"
        self._ranks = Verdicts(group, self._parts, rules)
        if not isinstance(events, EventLog):
            events = EventLog(events if self._ranks.rank == 0 else None)
        self.events = events
        self.locator = Locator(model, locate)
        self._forget()
        for name, buffers in self._parts.buffers:
            if buffers.nan:  # there is no good value to go back to
                event = Stage.BUFFER.event(0, name, None, "left as it is", f": {buffers.nan}")
                self.events.extend([event])
        _GUARDS.add(self)

    def backward(
        self,
        losses: Tensor | Mapping[str, Tensor],
        through: Tensor | Sequence[Tensor] | None = None,
        again: Callable[[], Mapping[str, Tensor]] | None = None,
    ) -> None:
        """Call this in place of `loss.backward()`, once or several times before a `step`.

        Args:
            losses: a single loss; or part name -> loss; or, without `parts`, term name -> loss
                term. A term with a bad loss or gradient is cut out of the backward pass; the others
                are used.
            through: the tensor(s) from which every loss was computed (logits, features). Each
                loss is also judged by its gradient there, so that its NaN reaches no shared weight;
                the operations after `through` run backward twice.
            again: returns all terms, computed without the bad rows of the batch; called on all
                ranks if a loss term is not finite on some rank.

        Raises:
            TypeError: a loss is not a tensor.
            ValueError: names or shapes do not fit the parts, a loss was not computed from
                `through`, the ranks are at different points of their loops, or a term was computed
                under reentrant activation checkpointing.
            RankLost: another rank does not respond.
        """
        if self._ran and all(p.grad is None for p in self._parts.weights()):
            self.discard()  # zero_grad() gave the step up, perhaps halfway through its backward
        if isinstance(losses, Tensor) and losses.ndim == 0:
            if through is not None:
                raise ValueError(
                    "through= separates several losses, but `losses` is a single tensor: pass a "
                    "dictionary of name -> loss, or leave through= out"
                )
            self._one_scale |= len(self._parts) > 1
            self._remember(dict.fromkeys(range(len(self._parts)), losses))
            self._run({0: losses})
            return
        named = by_name(losses, self._named)
        self._ranks.check_graph(named.values())
        if self._named:
            self._backward_parts(named, through)
        else:
            self._backward_terms(named, through, again)

    def discard(self) -> None:
        """Abandon the current step: forget its losses and gradients, and put back bad buffers.

        `optimizer.zero_grad()` has the same effect unless it fills gradients with zeros
        (`set_to_none=False`) or every loss was cut out; in these cases the guard would take the
        next `backward` for another batch of the same step.
        """
        self._heal_all()
        self._forget()
        for p in self._parts.weights():
            p.grad = None

    def step(self) -> set[str]:
        """Call this in place of `optimizer.step()`.

        Returns:
            The names of the parts that were updated; average the weights of these only.

        Raises:
            TooFewHealthyParts: training cannot continue; unhealthy parts were restored to their
                last good state.
            ValueError: the ranks are at different points of their loops.
            RankLost: another rank does not respond.
        """
        self.before_step()
        self._optimizers.step(self)
        return self.after_step()

    def attach(self) -> Guard:
        """Guard every later `step` of the optimizers, so that the loop needs no other line.

        Gradients are judged when the first optimizer steps: clip by `clip_grad`, since clipping in
        the loop hides spikes, and if a GradScaler scales several optimizers, call its `unscale_`
        for each of them before. Events are logged as warnings. Replaces a guard attached before.
        Raises ValueError with `scaler=True`: use a GradScaler.
        """
        if self._scales:
            raise ValueError("an attached guard cannot scale losses: use torch.amp.GradScaler")
        self._optimizers.attach(self)
        return self

    def _refuse_unjudged(self, *_: object) -> None:
        """Raise ValueError if an optimizer steps after `backward` without the guard's `step`."""
        if self._ran and not self.is_judged and not self._optimizers.is_attached:
            raise ValueError(
                "an optimizer takes a step after guard.backward, which no guard has judged, so it "
                "could write NaN into the weights: call guard.step() in place of optimizer.step(), "
                "or guard.attach() once before the loop, which stays as it is"
            )

    def detach(self) -> None:
        """Undo `attach`, and finish the last step of optimizers that step in turn, as in a GAN."""
        self._optimizers.detach()

    @torch.no_grad()
    def before_step(self) -> None:
        """Run the first half of `step`, for loops that step by hand (momentum: after `attach`)."""
        self.events.extend(self._terms.record(self.step_number))
        self._parts.check_gradients()
        gradients = [[p.grad for p in part.weights if p.grad is not None] for part in self._parts]
        if self._scales:
            for i, grads in enumerate(gradients):
                for g in grads:
                    g.mul_(1 / self._scale_of(i))
        norms = [norm_of(grads) for grads in gradients]
        absent = [i not in self._loss and not gradients[i] for i in range(len(self._parts))]
        loss, norm, absent, spoiled = self._read_step(norms, torch.tensor(absent))
        self.grad_norm = norm
        scale = None
        if self._scales:
            scale = torch.tensor([self._scale_of(i) for i in range(len(self._parts))])
            scale = scale.masked_fill(self._cut, 1.0)  # its NaN is not an overflow
        stage = Observation(self.health, loss, norm, self._limits, scale=scale).stage()
        healthy = is_healthy(stage)
        absent = absent & healthy
        self._judged, self.is_judged = (loss, norm, stage, healthy, absent), True
        self.locator.judge(self.step_number, stage, self.health.streak, self._ranks)
        trained = (healthy & ~absent).tolist()
        lost = bool((~healthy & ~self.health.retired).any())
        self.skips = lost and not any(trained)
        self._take_back(healthy, lost, spoiled)
        if self.snapshot_every:
            due = [i for i, here in enumerate(trained) if here]
            self._parts.snapshot(due, self.steps, self.snapshot_every)
        for i, part in enumerate(self._parts):
            if not healthy[i]:
                self.withheld += withhold(part.weights)
            elif gradients[i] and self.clip_grad is not None:
                clip_grads_with_norm_(part.weights, self.clip_grad, norms[i])

    @torch.no_grad()
    def after_step(self, on_fault: Callable[[], object] | None = None) -> set[str]:
        """Run the second half of `step`: write events, and restore parts that stay unhealthy.

        Args:
            on_fault: called if a part was unhealthy, after its events are written and before
                anything is restored.

        Returns:
            The names of the parts that were updated.

        Raises:
            TooFewHealthyParts: training cannot continue.
        """
        loss, norm, stage, healthy, absent = self._judged
        some_absent = absent if bool(absent.any()) else None
        self.health.record_(stage, norm, self.thresholds, some_absent)
        updated = healthy & ~absent
        for i, (_, buffers) in enumerate(self._parts.buffers):
            if i == len(self._parts) or updated[i]:
                buffers.keep(ask=False)
            buffers.end_step()
        if self._scales:
            overflow = stage == int(Stage.OVERFLOW)
            if self._one_scale:
                self.scale[overflow] = self._scale_of(0)
            rescale_(self.scale, updated, overflow, self.updates)
        self.updates += updated
        step, self.steps = self.steps, self.steps + 1
        events = self.recovery.report(step, stage, loss, norm, self._ranks.where)
        self.events.extend([*self.locator.events, *events])
        self._forget()
        if not healthy.all():
            if on_fault is not None:
                on_fault()
            events, hopeless = self.recovery.escalate(step, self.thresholds)
            self.events.extend(events)
            if hopeless:
                number = step + self.first_step
                raise TooFewHealthyParts(f"step {number}: {hopeless}.\n{self.diagnosis(events)}")
        return {self._parts.names[i] for i in updated.nonzero().flatten().tolist()}

    def stop_without(self, terms: Iterable[str], note: str = "") -> None:
        """Raise TooFewHealthyParts if one of these loss terms was cut out of too many steps.

        `note` is inserted into the message after the number of steps.
        """
        if why := self._terms.cut_out_for_good(terms, note):
            step = self.step_number - 1
            self.events.extend([Event(step, "run", "escalation", why, "stopped")])
            raise TooFewHealthyParts(f"step {step}: {why}")

    @property
    def step_number(self) -> int:
        """Number of the present step in events and messages."""
        return self.first_step + self.steps

    @property
    def terms(self) -> Mapping[str, Health]:
        """The `Health` of each loss term by name, tensors `[1]`."""
        return self._terms.health

    def _backward_parts(self, losses: dict[str, Tensor], through: Any) -> None:
        all_losses = {self._index[name]: loss for name, loss in losses.items()}
        kept = {i: loss for i, loss in all_losses.items() if not self.health.retired[i]}
        self._remember(kept)
        cut: set[int] = set()
        if through is not None or SHARED in self._index:
            loss, norm = look({self._parts.names[i]: x for i, x in kept.items()}, through)
            sick = (~(torch.isfinite(loss) & torch.isfinite(norm))).tolist()
            cut = {i for i, bad in zip(kept, sick, strict=True) if bad}
            cut = self._ranks.cut(self.step_number, cut)
            kept = {i: loss for i, loss in kept.items() if i not in cut}
            self._cut[list(cut)] = True
        apart = bool(cut) or bool(self.health.retired.any())
        self._run(kept, [x for i, x in all_losses.items() if i not in kept] if apart else None)

    def _backward_terms(self, losses: dict[str, Tensor], through: Any, again: Any) -> None:
        kept, cut, learns = self._terms.look(losses, through, self._ranks, self.step_number, again)
        if not cut or learns:
            total = sum(kept[1:], kept[0])
            self._remember({0: total})
            self._run({0: total}, cut or None)
        else:
            self._remember({0: sum(losses.values(), torch.zeros(()))})
            self._cut[0] = True
            self._run({}, [*kept, *cut])

    def _remember(self, losses: dict[int, Tensor]) -> None:
        self.locator.read(losses.values())
        for i, loss in losses.items():
            value = loss.detach().to(compute_dtype(loss))
            self._loss[i] = self._loss[i] + value if i in self._loss else value

    def _run(self, losses: dict[int, Tensor], left_out: list[Tensor] | None = None) -> None:
        """Run the backward pass of each part's loss, times its scale, without `left_out`."""
        if self._scales:  # in float32: a scaled loss overflows float16 long before its gradients
            wide = {i: loss.to(compute_dtype(loss)) for i, loss in losses.items()}
            losses = {i: loss * self._scale_of(i) for i, loss in wide.items()}
        roots = [x for x in losses.values() if x.requires_grad]  # one of several may be constant
        if left_out is None:  # torch raises an error if all of them are
            roots = roots or list(losses.values())
        self._ran |= bool(roots)  # also if it fails halfway
        self._ran |= self._ranks.backward(self.step_number, roots, left_out)

    def _scale_of(self, part: int) -> float:
        # Weights or a loss that parts share cannot be scaled by two factors at once.
        return float(
            self.scale[~self.health.retired].min() if self._one_scale else self.scale[part]
        )

    def _forget(self) -> None:
        self._loss: dict[int, Tensor] = {}
        self._terms.forget()
        self._cut = torch.zeros(len(self._parts), dtype=torch.bool)
        self.withheld: list[tuple[Tensor, Tensor | None]] = []  # bad weights, gradients
        self.is_judged = self.skips = False  # by `before_step`; whether it leaves nothing to update
        self._ran = False  # whether there was a backward pass, which leaves gradients
        self.locator.forget()
        self._ranks.forget()

    def _read_step(
        self, norms: list[Tensor], absent: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, OnRanks]:
        """Return loss, gradient norm and absence `[part]`, and bad buffers; wait once."""
        losses = [self._loss.get(i, torch.zeros_like(norm)) for i, norm in enumerate(norms)]
        device = self._parts[0].weights[0].device
        looks = [buffers.look() for _, buffers in self._parts.buffers]
        loss, norm, probe, *rest = read([losses, norms, self._ranks.probes, *looks], device)
        pairs = zip(self._parts.buffers, rest, strict=True)
        bad = [buffers.spoiled(largest.tolist()) for (_, buffers), largest in pairs]
        bad = {i: indices for i, indices in enumerate(bad) if indices}
        agreed = self._ranks.step(self.step_number, (loss, norm, absent, probe), bad)
        loss, norm, absent, spoiled, healed = agreed
        for i, buffers in healed.items():
            self._report_buffers(i, *buffers)
        return loss, norm.masked_fill(self._cut, torch.nan), absent, spoiled

    def _take_back(self, healthy: Tensor, lost: bool, spoiled: OnRanks) -> None:
        for i, (_, buffers) in enumerate(self._parts.buffers):
            if self.skips or (i < len(self._parts) and not healthy[i]):
                buffers.put_back()
            elif i in spoiled:
                buffers.put_back(spoiled[i][0])
                self._report_buffers(i, *spoiled[i])
        if lost:
            for other in list(_GUARDS):
                if other is not self:
                    other._heal_all()

    def _heal_all(self) -> None:
        """Put back this rank's non-finite buffers; with several ranks, the next step reports it."""
        for i, (_, buffers) in enumerate(self._parts.buffers):
            if spoiled := buffers.spoiled():
                buffers.put_back(spoiled)
                if self._ranks.world == 1:
                    self._report_buffers(i, spoiled)
                else:
                    self._ranks.healed.setdefault(i, set()).update(spoiled)

    def _report_buffers(self, i: int, indices: Sequence[int], where: str = "") -> None:
        part, buffers = self._parts.buffers[i]
        detail = f": {buffers.names(indices)}{where}"
        self.events.extend([Stage.BUFFER.event(self.step_number, part, detail=detail)])
        self.recovery.counts[i : i + 1, Stage.BUFFER] += 1  # buffers outside every part have no row

    def log_events(self) -> list[Event]:
        """Log the events since the last call with what was located, and return them."""
        return self.events.log_new(self.locator.reports)

    def diagnosis(self, events: Collection[Event] = ()) -> str:
        """Return one line for each part that was ever unhealthy: the faults and what to change."""
        located = [f"Step {step}:\n{found}" for step, found in self.locator.findings.items()]
        return "\n".join([self.recovery.diagnosis(self.steps, events), *located])

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state that a resumed loop needs besides model and optimizer."""
        written = {  # by the next step; good states are replaced, and need no copy
            "health": self.health.tensors(),
            "updates": self.updates,
            "counts": self.recovery.counts,
            "scale": self.scale,
            "terms": self._terms.state_dict(),
        }
        rest = {"one_scale": self._one_scale, "parts": self._parts.state_dict()}
        return {"steps": self.steps, **copy.deepcopy(written), **rest}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; load the model and the optimizer first.

        Raises:
            ValueError: the state has other parts, or does not come from a `Guard`.
        """
        if missing := ", ".join(sorted(self.state_dict().keys() - state.keys())):
            raise ValueError(f"the state lacks {missing}; expected what Guard.state_dict returned")
        self._parts.load_state_dict(state["parts"])
        self.steps, self._one_scale = state["steps"], state["one_scale"]
        for name, mine in self.health.tensors().items():
            mine.copy_(state["health"][name])
        self._terms.load_state_dict(state["terms"])
        self.updates.copy_(state["updates"])
        self.scale.copy_(state["scale"])
        self.recovery.counts.copy_(with_all_kinds(state["counts"]))

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to copy or pickle: the copy would hold this guard's model and optimizer."""
        raise TypeError(
            "a Guard can be neither copied nor pickled: take its state_dict(), make a new Guard "
            "around the copies of model and optimizer, and call its load_state_dict()"
        )
