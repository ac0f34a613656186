"""Skip a part, restore it, re-initialize it once, retire it, stop: with an event for each step."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from firstnan.events import Event
from firstnan.faults import N_KINDS, Kinds, Stage, Thresholds
from firstnan.health import Health, Tally


class Recovery:
    """Report the faults of parts, and restore parts that stay unhealthy.

    `parts` are `ModuleParts`, or a caller's own with the same `names`, `note`, `finite`, `restore`
    and `reinitialize`. `health` is changed in place. `shared` is as in `Health.escalate`, `advice`
    as in `Guard`, also for kinds of faults that the caller detects.

    The methods take the number of steps before this one; `first_step` is added to it in events.
    """

    def __init__(
        self,
        parts: Any,
        health: Health,
        advice: dict[Kinds, str],
        shared: Collection[int] = (),
        *,
        first_step: int = 1,
    ) -> None:
        self.parts = parts
        self.health = health
        self.shared = shared
        self.first_step = first_step
        self.advice = {stage: stage.kind.advice for stage in Stage} | advice
        self.kinds = {int(kind): kind for kind in self.advice}
        # How often each fault was seen, `[part, stage]`.
        self.counts = torch.zeros(len(parts.names), N_KINDS, dtype=torch.int64)
        self._ranks: dict[tuple[int, Kinds], str] = {}  # the ranks that last saw each fault

    def report(
        self,
        step: int,
        stage: Tensor,
        loss: Tensor,
        norm: Tensor,
        where: Callable[[int], str] = lambda part: "",
    ) -> list[Event]:
        """Count the faults of a step, and return an event for each; the tensors are `[part]`.

        `where(part)` names the ranks that saw the fault; it is appended to the reason.
        """
        numbers = stage.cpu().long().unsqueeze(1)
        self.counts.scatter_add_(1, numbers, torch.ones_like(numbers))
        events = []
        for part, (number,) in enumerate(numbers.tolist()):
            if (fault := self.kinds[number]).kind.reason:
                value = float((loss if fault.kind.value == "loss" else norm)[part])
                ranks = self._ranks[part, fault] = where(part)
                name = self.parts.names[part]
                events.append(fault.event(step + self.first_step, name, value, detail=ranks))
        return events

    def escalate(
        self,
        step: int,
        thresholds: Thresholds,
        judge: Callable[[Tally, Thresholds], str] = Tally.hopeless,
    ) -> tuple[list[Event], str]:
        """Carry out what `Health.escalate` decides; waits for the device.

        Returns the events, and why training cannot continue ("" if it can). If it cannot, every
        unhealthy part is restored to its last good state.
        """
        streaks = self.health.streak.tolist()
        actions, why = self.health.escalate(thresholds, self.shared, judge)
        if why:
            events = self.give_up(step, why)
            restored = any(event.action.startswith("restored") for event in events)
            state = "the last good state was restored"
            why += f"; {state if restored else 'there is no good state to restore'}"
            return [*events[:-1], replace(events[-1], reason=why)], why
        events = []
        for part, action in actions.items():
            if action == "reinitialize":
                self.parts.reinitialize(part, step + 1)
                done = "re-initialized"
            else:  # a retired part is restored too, so that its weights are finite
                done = self._restore(part)
                done = "retired" if action == "retire" else done
            reason = f"{streaks[part]} bad steps in a row"
            name, number = self.parts.names[part], step + self.first_step
            events.append(Event(number, name, "escalation", reason, done))
        return events, ""

    def restore_what_is_not_finite(self, step: int) -> list[Event]:
        """Restore every part with a NaN or infinity in its state; call this before a checkpoint."""
        number = step + self.first_step
        return [
            Stage.WEIGHT.event(number, self.parts.names[part], action=self._restore(part))
            for part, finite in enumerate(self.parts.finite())
            if not finite
        ]

    def give_up(self, step: int, why: str) -> list[Event]:
        """Restore every unhealthy part, so that a resumed run starts healthy; return the events."""
        streaks, finite = self.health.streak.tolist(), self.parts.finite()
        self.health.streak.zero_()
        reason, number = "it was not healthy when the run stopped", step + self.first_step
        events = [
            Event(number, self.parts.names[part], "escalation", reason, self._restore(part))
            for part, streak in enumerate(streaks)
            if streak or not finite[part]
        ]
        return [*events, Event(number, "run", "escalation", why, "stopped")]

    def _restore(self, part: int) -> str:
        before = self.parts.restore(part)
        if before is None:
            return "left unchanged: there is no good state to restore"
        return f"restored to its state before step {before + self.first_step}{self.parts.note}"

    def diagnosis(self, steps: int, events: Collection[Event] = ()) -> str:
        """Return one line for each part that was ever unhealthy: the faults and what to change.

        If `events` are passed, each line also names the last action that they report.
        """
        done = {event.part: event.action for event in events}
        lines = []
        for part, counts in enumerate(self.counts.tolist()):
            name = self.parts.names[part]
            seen = {s: counts[s] for s in reversed(self.advice) if self.advice[s] and counts[s]}
            if seen:
                ranks = {s: self._ranks.get((part, s), "") for s in seen}
                last = {s: f", last{where}" if where else "" for s, where in ranks.items()}
                often = ", ".join(f"{s.kind.reason} ({n} times{last[s]})" for s, n in seen.items())
                state = f" It was {done[name]}." if name in done else ""
                advice = self.advice[max(seen, key=lambda stage: seen[stage])]
                lines.append(f"{name}, {steps} steps: {often}.{state} What to change: {advice}.")
        return "\n".join(lines)


def with_all_kinds(counts: Tensor) -> Tensor:
    """Return saved counts `[part, stage]` with zeros for kinds of fault that were added since."""
    return nn.functional.pad(counts, (0, max(0, N_KINDS - counts.shape[1])))
