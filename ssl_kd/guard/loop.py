"""The guard alone, around any PyTorch loop: the user's own model, optimizer and losses.

Three lines make a loop guarded: `guard = Guard(model, optimizer)`, `guard.backward(loss)` in place
of `loss.backward()` and `guard.step()` in place of `optimizer.step()`.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_

from ssl_kd.guard.events import Event, EventLog
from ssl_kd.guard.faults import Stage, Thresholds
from ssl_kd.guard.finite import compute_dtype
from ssl_kd.guard.health import Health, is_healthy
from ssl_kd.guard.modules import SHARED, ModuleParts, check_closure
from ssl_kd.guard.norms import look, norm_of, read
from ssl_kd.guard.parts import SNAPSHOT_EVERY, TooFewHealthyParts
from ssl_kd.guard.recovery import Recovery
from ssl_kd.guard.terms import LossTerms, by_name
from ssl_kd.guard.update import rescale_
from ssl_kd.guard.verdicts import Verdicts, check_late
from ssl_kd.guard.watch import Locator

_GUARDS: weakref.WeakSet[Guard] = weakref.WeakSet()
"""All of this process: a bad batch may have run through the model of another one."""

_SQUARED = 1e38  # a norm in float64 of which an optimizer's second moment would not be finite
_FIRST_SCALE = 1024.0  # ten halvings from the floor: as many as the guard has patience for


class Guard:
    """Judges each part's loss and gradient norm, and leaves sick parts out of the update.

    A part that is left out keeps its weights, optimizer state and buffers (a BatchNorm's running
    statistics) to the last bit, with any optimizer of `torch.optim` that skips a parameter without
    a gradient; the others are updated as if the sick one had been left out by hand. Buffers that
    a bad batch left not finite elsewhere are put back as well, with an event: those that parts
    share, those of no part, and those in the models of other guards of this process (as of the
    discriminator that the batch ran through). After
    `thresholds.restore_after` bad steps in a row a part goes back to its last good state, then is
    re-initialised, then retired; without a healthy part the loop stops.

    A step may be given up after `backward`, by `optimizer.zero_grad()` or `discard`.

    Costs one wait for the device per step, and one more per `backward` that has to cut out losses
    (loss terms, `through=`, parts beside shared weights). Snapshots need the memory of weights and
    optimizer state once more, on the CPU.

    Where `torch.distributed` has several ranks, they agree on each verdict, so that all take the
    same step: what is bad on one is left out and restored on all, and told by all with the rank
    that saw it. Each rank makes the guard and calls it equally often, with losses of the same
    names; `DistributedDataParallel` (with `no_sync`, too) or FSDP2 averages gradients. Costs one
    small all-reduce wherever there is a wait for the device.

    Args:
        model: the module that is trained.
        optimizer: holds its parameters, none of them float16: keep the weights in float32 and
            compute in half precision under autocast.
        parts: name -> a module, or parameters, that fail alone; each parameter has one owner. What
            is trained and no part owns becomes the part `shared`. By default the whole model is one
            part.
        thresholds: when the guard acts.
        clip_grad: largest gradient norm of a part, > 0, as `torch.nn.utils.clip_grad_norm_`.
        scaler: scale losses as a GradScaler does, but never below 1, and each part's alone where
            parts share neither weights nor loss. Needed under float16 autocast. Hand over losses
            that are not scaled yet.
        snapshot_every: steps between snapshots of each part; 0 takes none.
        fresh_optimizer: a part that goes back to its last good state begins with an empty optimizer
            state, not the one that it had then.
        reinitialise: called with a part's name to give it new weights. By default parts given as
            modules have their `reset_parameters` called; other parts skip this rung.
        events: a file to append the guard's decisions to, one line of JSON each, by the first of
            several ranks; or an `EventLog`.
        in_run: advice names the settings of this project's runs, not the arguments of a loop.
        locate: where a part's loss or gradient is not finite, name the operation that made it so:
            the model's forward and backward pass of that step are run once more, see
            `ssl_kd.guard.watch.Watch`. At most eight times, not in each step of a bad series.
        group: the ranks that train this model; None for all, False for this process alone.

    Attributes:
        locator: its `findings` are step -> the operation that was named; empty without `locate`.
        grad_norm: gradient norm of each part in the last step, before clipping, `[part]` float32 on
            the CPU; NaN for a part that was cut out.

    Raises:
        ValueError: parts and optimizer do not fit, an argument is out of range, a parameter is
            complex or float16, or the optimizer needs a closure (LBFGS). The ranks' guards differ.
        RankLost: another rank does not make its guard.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        parts: Mapping[str, nn.Module | Iterable[nn.Parameter]] | None = None,
        *,
        thresholds: Thresholds | None = None,
        clip_grad: float | None = None,
        scaler: bool = False,
        snapshot_every: int = SNAPSHOT_EVERY,
        fresh_optimizer: bool = False,
        reinitialise: Callable[[str], object] | None = None,
        events: str | Path | EventLog | None = None,
        in_run: bool = False,
        locate: bool = False,
        group: dist.ProcessGroup | Literal[False] | None = None,
    ) -> None:
        if clip_grad is not None and not clip_grad > 0:
            raise ValueError(f"clip_grad is {clip_grad}; expected a number > 0, or None")
        if snapshot_every < 0:
            raise ValueError(f"snapshot_every is {snapshot_every}; expected steps, or 0 for none")
        check_closure(optimizer)
        self.model, self.optimizer = model, optimizer
        self.thresholds, self.clip_grad = thresholds or Thresholds(), clip_grad
        self.steps, self.snapshot_every = 0, snapshot_every
        self._parts = ModuleParts(
            model, optimizer, parts, fresh_optimizer=fresh_optimizer, reinitialise=reinitialise
        )
        names, n = self._parts.names, len(self._parts)
        owners, most = [name for name in names if name != SHARED], self.thresholds.min_parts
        if len(owners) < most:
            raise ValueError(f"min_parts is {most}; expected at most {len(owners)}, the parts")
        self._index = {name: i for i, name in enumerate(names)}
        self._named = owners if parts is not None else []
        self._shared = {self._index[SHARED]} if SHARED in self._index else set()

        # All of the memory is on the CPU: a step reads losses and norms once, and never again.
        self.health = Health.fresh(n)
        for i in range(n):  # without a way to do it, this rung is done already
            self.health.reinitialised[i] = not self._parts.can_reinitialise(i)
        self.recovery = Recovery(
            self._parts, self.health, lambda: self.thresholds, self._shared, in_run
        )
        self.updates = torch.zeros(n, dtype=torch.int64)
        self._scales = scaler
        self.scale = torch.full((n,), _FIRST_SCALE if self._scales else 1.0)
        self._one_scale = bool(self._shared)
        self._squares = bool({"betas", "alpha", "rho", "lr_decay"} & optimizer.defaults.keys())
        self.grad_norm = torch.zeros(n)
        # A fixed limit is one of a part's whole gradient.
        self._terms = LossTerms(lambda: replace(self.thresholds, max_norm=None), in_run)
        settings = f"{self.thresholds}, clip_grad={clip_grad}, snapshot_every={snapshot_every}"
        self._group, self._ranks = group, Verdicts.between(group, self._parts, settings)
        if not isinstance(events, EventLog):
            events = EventLog(events if self._ranks is None or self._ranks.first else None)
        self.events = events
        self.locator = Locator(model if locate else None)
        self._forget()
        self._report_nan_buffers()
        _GUARDS.add(self)

    def backward(
        self,
        losses: Tensor | Mapping[str, Tensor],
        through: Tensor | Sequence[Tensor] | None = None,
        again: Callable[[], Mapping[str, Tensor]] | None = None,
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
            again: of loss terms: where one is not finite on some rank, it is called on all for the
                terms without the rows of the batch that are at fault.

        Raises:
            TypeError: a loss is no tensor.
            ValueError: names or shapes do not fit the parts, or a loss has nothing to do with
                `through`; or the ranks are at different points of their loops, or a term was
                computed under reentrant activation checkpointing.
            RankLost: another rank does not answer.
        """
        if self._ran and all(p.grad is None for p in self._parts.weights()):
            self.discard()  # zero_grad() gave the step up, perhaps halfway through its backward
        if isinstance(losses, Tensor) and losses.ndim == 0:
            if through is not None:
                raise ValueError("through= separates several losses, but one was given")
            self._one_scale |= len(self._parts) > 1
            self._remember(dict.fromkeys(range(len(self._parts)), losses))
            self._run({0: losses})
        else:
            named = by_name(losses, self._named)
            if self._ranks is not None:
                self._ranks.check_graph(named.values())
            if self._named:
                self._backward_parts(named, through)
            else:
                self._backward_terms(named, through, again)

    def discard(self) -> None:
        """Give up the step that was begun: forget its losses and gradients.

        `optimizer.zero_grad()` does as much, except where it fills gradients with zeros
        (`set_to_none=False`) or every loss was cut out: then the next `backward` could as well be
        one more batch of the same step. Buffers that the step spoiled are put back here.
        """
        self._heal_all()
        self._forget()
        for p in self._parts.weights():
            p.grad = None

    def step(self) -> set[str]:
        """In place of `optimizer.step()`.

        Returns:
            The names of the parts that were updated; an average of weights should follow no other.

        Raises:
            TooFewHealthyParts: training cannot continue; sick parts are back at their last good
                state.
            ValueError: the ranks are at different points of their loops.
            RankLost: another rank does not answer.
        """
        self.before_step()
        self.optimizer.step()  # even where nothing is left to do: a scheduler expects the call
        return self.after_step()

    @torch.no_grad()
    def before_step(self) -> None:
        """The half of `step` before `optimizer.step()`, for loops that call it themselves."""
        if self._ranks is None and self._group is None:
            check_late()
        self.events.extend(self._terms.record(self.steps))
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
        scale = torch.tensor([self._scale_of(i) for i in range(len(self._parts))])
        scale = scale.masked_fill(self._mask(self._cut), 1.0)  # its NaN is no overflow
        most = _SQUARED if self._squares and self.clip_grad is None else None
        limits = replace(self.thresholds, max_norm=self.thresholds.max_norm or most)
        stage = self.health.judge(loss, norm, limits, scale=scale)
        healthy = is_healthy(stage)
        absent = absent & healthy
        self._judged = loss, norm, stage, absent
        self.locator.judge(self.steps, stage, self.health.streak, self._ranks)
        self._take_back(healthy, absent, spoiled)
        trained = (healthy & ~absent).tolist()
        if self.snapshot_every:
            due = [i for i, here in enumerate(trained) if here and (self._ranks or gradients[i])]
            self._parts.snapshot(due, self.steps, self.snapshot_every)
        for i, part in enumerate(self._parts):
            if not healthy[i]:
                for p in part.weights:  # no gradient, no update: not even by momentum or decay
                    p.grad = None
            elif gradients[i] and self.clip_grad is not None:
                clip_grads_with_norm_(part.weights, self.clip_grad, norms[i])

    @torch.no_grad()
    def after_step(self, on_fault: Callable[[], object] | None = None) -> set[str]:
        """The half of `step` after `optimizer.step()`: remember, report and escalate.

        Args:
            on_fault: called where a part was not healthy: after the events of it, and before
                anything is put back.

        Returns:
            As `step`.

        Raises:
            TooFewHealthyParts: as `step`.
        """
        loss, norm, stage, absent = self._judged
        healthy = is_healthy(stage)
        self.health.record_(stage, norm, self.thresholds, absent)
        updated = healthy & ~absent
        for i in updated.nonzero().flatten().tolist():
            self._parts[i].buffers.keep(ask=False)
        self._parts.buffers[-1][1].keep(ask=False)
        for _, buffers in self._parts.buffers:
            buffers.end_step()
        if self._scales:
            overflow = stage == int(Stage.OVERFLOW)
            if self._one_scale:
                self.scale[overflow] = self._scale_of(0)
            rescale_(self.scale, updated, overflow, self.updates)
        self.updates += updated
        step, self.steps = self.steps, self.steps + 1
        where = None if self._ranks is None else self._ranks.where
        events = self.recovery.report(step, stage, loss, norm, where)
        self.events.extend([*self.locator.events(step), *events])
        self._forget()
        self.recovery.watch(self.steps)
        if not healthy.all():
            if on_fault is not None:
                on_fault()
            events, hopeless = self.recovery.escalate(step)
            self.events.extend(events)
            if hopeless:
                raise TooFewHealthyParts(f"step {step}: {hopeless}.\n{self.diagnosis(events)}")
        return {self._parts.names[i] for i in updated.nonzero().flatten().tolist()}

    def stop_without(self, terms: Iterable[str], note: str = "") -> None:
        """Raise TooFewHealthyParts where a term was cut out for as long as a sick model may be."""
        if why := self._terms.cut_out_for_good(terms, note):
            step = self.steps - 1
            self.events.extend([Event(step, "run", "escalation", why, "stopped")])
            raise TooFewHealthyParts(f"step {step}: {why}")

    @property
    def terms(self) -> Mapping[str, Health]:
        """Loss term -> what is remembered of it, `[1]` each."""
        return self._terms.health

    def _backward_parts(self, losses: dict[str, Tensor], through: Any) -> None:
        """Cut out the sick parts where weights are shared; elsewhere they hurt only themselves."""
        given = {self._index[name]: loss for name, loss in losses.items()}
        told = {i: loss for i, loss in given.items() if not self.health.retired[i]}
        self._remember(told)
        cut: set[int] = set()
        if (told or self._ranks) and (through is not None or SHARED in self._index):
            loss = norm = torch.zeros(0)
            if told:
                loss, norm = look({self._parts.names[i]: x for i, x in told.items()}, through)
            sick = ~(torch.isfinite(loss) & torch.isfinite(norm))
            cut = {i for i, bad in zip(told, sick.tolist(), strict=True) if bad}
            if self._ranks is not None:
                cut = self._ranks.cut(self.steps, [*told], loss, norm)
            told = {i: loss for i, loss in told.items() if i not in cut}
            self._cut |= cut
        apart = bool(cut) or bool(self.health.retired.any())
        self._run(told, [x for i, x in given.items() if i not in told] if apart else None)

    def _backward_terms(self, losses: dict[str, Tensor], through: Any, again: Any = None) -> None:
        """Cut out the sick terms; the step is lost only where none is left."""
        kept, out, needs = self._terms.look(losses, through, self._ranks, self.steps, again)
        if not out or any(needs):
            total = sum(kept[1:], kept[0])
            self._remember({0: total})
            self._run({0: total}, out or None)
        else:
            self._remember({0: sum(losses.values(), torch.zeros(()))})
            self._cut.add(0)
            self._run({}, [*kept, *out])

    def _remember(self, told: dict[int, Tensor]) -> None:
        for i, loss in told.items():
            seen = loss.detach().to(compute_dtype(loss))
            self._loss[i] = self._loss[i] + seen if i in self._loss else seen

    def _run(self, losses: dict[int, Tensor], left_out: list[Tensor] | None = None) -> None:
        """The backward pass of each part's loss, times its scale; `left_out` stays beside."""
        if self._scales:  # in float32: a scaled loss overflows float16 long before its gradients
            wide = {i: loss.to(compute_dtype(loss)) for i, loss in losses.items()}
            losses = {i: loss * self._scale_of(i) for i, loss in wide.items()}
        values = [*losses.values()]  # beside others, a constant is no mistake
        roots = [loss for loss in values if loss.requires_grad]
        if self._ranks is not None and left_out is not None:
            self._ran |= self._ranks.backward(self.steps, roots, left_out)
        elif values:
            self._ran = True
            with self._ranks.waiting(self.steps) if self._ranks else contextlib.nullcontext():
                torch.autograd.backward(roots or values)

    def _scale_of(self, part: int) -> float:
        # Weights or a loss that parts share cannot be scaled by two factors at once.
        return float(
            self.scale[~self.health.retired].min() if self._one_scale else self.scale[part]
        )

    def _forget(self) -> None:
        self._loss: dict[int, Tensor] = {}
        self._terms.forget()
        self._cut: set[int] = set()
        self._ran = False  # whether there was a backward pass, which leaves gradients
        self.locator.forget()
        if self._ranks is not None:
            self._ranks.forget()

    def _mask(self, parts: Iterable[int]) -> Tensor:
        mask = torch.zeros(len(self._parts), dtype=torch.bool)
        mask[list(parts)] = True
        return mask

    def _read_step(
        self, norms: list[Tensor], absent: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, list[list[int]]]:
        """Loss, gradient norm and absence `[part]`, spoiled buffers: the one wait of the step."""
        losses = [self._loss.get(i, torch.zeros_like(norm)) for i, norm in enumerate(norms)]
        device = self._parts[0].weights[0].device
        zero = torch.zeros((), device=device)
        looks = [buffers.look(zero) for _, buffers in self._parts.buffers]
        probes = [] if self._ranks is None else self._ranks.probes
        loss, norm, probe, *rest = read([losses, norms, probes, *looks], device)
        pairs = zip(self._parts.buffers, rest, strict=True)
        spoiled = [buffers.spoiled(largest.tolist()) for (_, buffers), largest in pairs]
        if self._ranks is not None:
            seen = loss, norm, absent, probe
            loss, norm, absent, spoiled, healed = self._ranks.step(self.steps, seen, spoiled)
            for i, words in healed:
                self._tell_buffers(i, words)
        return loss, norm.masked_fill(self._mask(self._cut), torch.nan), absent, spoiled

    def _take_back(self, healthy: Tensor, absent: Tensor, spoiled: list[list[int]]) -> None:
        """After the step no buffer holds what a batch left there that was not healthy."""
        lost = bool((~healthy & ~self.health.retired).any())
        nothing = lost and not bool((healthy & ~absent).any())
        for i, (_, buffers) in enumerate(self._parts.buffers):
            if nothing or (i < len(self._parts) and not healthy[i]):
                buffers.put_back()
            elif spoiled[i]:
                buffers.heal(spoiled[i])
                where = "" if self._ranks is None else self._ranks.where_buffers(i)
                self._tell_buffers(i, buffers.words(spoiled[i]) + where)
        for other in [*_GUARDS] if lost else []:
            if other is not self:
                other._heal_all()

    def _heal_all(self) -> None:
        """Put back what is spoiled on this rank; several tell it in their next step."""
        for i, (_, buffers) in enumerate(self._parts.buffers):
            if spoiled := buffers.spoiled():
                buffers.heal(spoiled)
                if self._ranks is None:
                    self._tell_buffers(i, buffers.words(spoiled))
                else:
                    self._ranks.put_back(i, spoiled)

    def _tell_buffers(self, i: int, words: str) -> None:
        name = self._parts.buffers[i][0]
        self.events.extend([Stage.BUFFER.event(self.steps, name, detail=f": {words}")])
        self.recovery.counts[i : i + 1, Stage.BUFFER] += 1  # none where it is no part's

    def _report_nan_buffers(self) -> None:
        """There is no good value to put in the place of those that come in as NaN."""
        left = [(name, buffers.nan) for name, buffers in self._parts.buffers if buffers.nan]
        how = None, "left as it is"
        self.events.extend([Stage.BUFFER.event(self.steps, n, *how, f": {nan}") for n, nan in left])

    def diagnosis(self, events: Collection[Event] = ()) -> str:
        """What was seen, how often, and what to change: a line per part that was ever sick."""
        return "\n".join([self.recovery.diagnosis(self.steps, events), *self.locator.lines()])

    def summary(self) -> str:
        """One line: the share of updates that were done, and who is sick or retired."""
        return self.recovery.summary(self.steps, self.updates, self._terms.health)

    def state_dict(self) -> dict[str, Any]:
        """A copy of all that a resumed loop needs beside the model's and the optimizer's state."""
        # The last good states are put in the place of older ones, never written into.
        rest = {"one_scale": self._one_scale, "parts": self._parts.state_dict()}
        return {"steps": self.steps, **copy.deepcopy(self._live()), **rest}

    def _live(self) -> dict[str, Any]:
        return {  # what the next step writes into
            "health": self.health.tensors(),
            "updates": self.updates,
            **self.recovery.tensors(),
            "scale": self.scale,
            "terms": self._terms.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; load the model and the optimizer first.

        Raises:
            ValueError: the state is of other parts, or no state of a guard.
        """
        expected = {"steps", "one_scale", "parts", *self._live()}
        if missing := ", ".join(sorted(expected - state.keys())):
            raise ValueError(f"the state lacks {missing}; expected what Guard.state_dict gave")
        self._parts.load_state_dict(state["parts"])
        self.steps, self._one_scale = state["steps"], state["one_scale"]
        for name, mine in self.health.tensors().items():
            mine.copy_(state["health"][name])
        self._terms.load_state_dict(state["terms"])
        self.updates.copy_(state["updates"])
        self.scale.copy_(state["scale"])
        self.recovery.load(state)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse: a copy would hold on to the model and the optimizer of this one."""
        raise TypeError(
            "a Guard can be neither copied nor pickled: take its state_dict(), make a new Guard "
            "around the copies of model and optimizer, and call its load_state_dict()"
        )
