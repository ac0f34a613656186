"""Recovery: what the guard reports of parts, and what becomes of those that stay sick.

The one ladder for heads, a user's own modules and routers: skip -> restore from the last good state
-> re-initialise once -> retire -> stop. `Health` decides by tensors, `Parts` carries it out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from ssl_kd.guard.events import Event
from ssl_kd.guard.faults import Stage, Thresholds
from ssl_kd.guard.health import Health, Tally
from ssl_kd.guard.parts import Parts, TooFewHealthyParts
from ssl_kd.guard.seeds import seed_of

logger = logging.getLogger(__name__)

WINDOW = 100
"""Steps after each of which parts are reported that missed more than a tenth of them."""


class Recovery:
    """Reports the faults of parts and brings back those that stay sick.

    Args:
        parts: rows of a matrix, or modules.
        health: of each part; changed in place.
        thresholds: asked for at each decision.
        shared: parts that the others share: restored like them, but never counted as left.
        in_run: what to change is a setting of a run, not of a loop.
        first: number of the first of these parts, where there are others elsewhere.

    Attributes:
        counts: `[part, stage]` int64, how often each fault was seen.
        unsteady: boolean `[part]`, whether it missed more than a tenth of the last full window.
    """

    def __init__(
        self,
        parts: Parts,
        health: Health,
        thresholds: Callable[[], Thresholds],
        shared: Collection[int] = (),
        in_run: bool = False,
        first: int = 0,
    ) -> None:
        self.parts, self.health, self.shared, self.in_run = parts, health, shared, in_run
        self.first = first
        self._thresholds = thresholds
        n = len(parts.names)
        self.counts = torch.zeros(n, len(Stage), dtype=torch.int64)
        self.unsteady = torch.zeros(n, dtype=torch.bool)
        self._skipped = torch.zeros(n, dtype=torch.int32)  # until the last full window
        self._last: dict[tuple[int, Stage], str] = {}  # the ranks that last saw it

    def report(
        self,
        step: int,
        stage: Tensor,
        loss: Tensor,
        norm: Tensor,
        where: Callable[[int], str] | None = None,
    ) -> list[Event]:
        """Count the faults of a step, `[part]` each, and put them into words.

        Args:
            step: its number.
            stage: what is wrong with each part.
            loss: their losses.
            norm: their gradient norms.
            where: tells the ranks that saw a part's fault; None for a single process.
        """
        if not stage.any():
            self.counts[:, Stage.HEALTHY] += 1
            return []
        events = []
        seen = {"loss": loss.tolist(), "norm": norm.tolist()}
        for part, number in enumerate(stage.tolist()):
            found = Stage(number)
            self.counts[part, found] += 1
            if found.kind.reason:
                value = seen[found.kind.value][part]
                words = "" if where is None else where(part)
                self._last[part, found] = words
                events.append(found.event(step, self.parts.names[part], value, detail=words))
        return events

    def watch(self, steps: int) -> None:
        """Warn of parts that are sick often, but never long enough to be restored.

        Args:
            steps: how many were done; only at the end of a window is anything looked at.
        """
        if steps % WINDOW:
            return
        skipped, retired = self.health.skipped.cpu(), self.health.retired.cpu()
        missed = skipped - self._skipped
        unsteady = (missed > WINDOW // 10) & ~retired
        for part in (unsteady & ~self.unsteady).nonzero().flatten().tolist():
            name = self.parts.names[part]
            logger.warning("%s missed %d of the last %d steps", name, missed[part], WINDOW)
        self._skipped.copy_(skipped)
        self.unsteady.copy_(unsteady)

    def escalate(
        self, step: int, tell: Callable[[Tally], object] | None = None
    ) -> tuple[list[Event], str]:
        """Restore, re-initialise or retire what stays sick; waits for the device.

        Args:
            step: number of the step that has just been done.
            tell: as in `Health.escalate`.

        Returns:
            What was done, and why training cannot continue; empty where it can. Then every part
            that is sick is back at its last good state.
        """
        streaks = self.health.streak.tolist()
        try:
            actions = self.health.escalate(self._thresholds(), self.shared, tell)
        except TooFewHealthyParts as error:
            return self.give_up(step, str(error)), str(error)
        events = []
        for part, action in actions.items():
            if action == "reinitialise":
                self.parts.reinitialise(part, seed_of(step, self.first + part), step + 1)
                done = "re-initialised"
            else:  # of a part that is retired, too: so that it is finite, whatever becomes of it
                done = self.restore(part)
                done = "retired" if action == "retire" else done
            reason = f"{streaks[part]} bad steps in a row"
            events.append(self._done(step, part, reason, done))
        return events, ""

    def restore(self, part: int) -> str:
        """Put one part back to its last good state; what was done, in words."""
        before = self.parts.restore(part)
        if before is None:
            return "left unchanged: there is no good state to restore"
        return f"restored to its state before step {before}{self.parts.note}"

    def restore_what_is_not_finite(self, step: int) -> list[Event]:
        """Before a checkpoint: restore parts that were hit from outside a step.

        Such a part is not updated any more, but would carry the damage into the file.
        """
        return [
            Stage.WEIGHT.event(step, self.parts.names[part], action=self.restore(part))
            for part, finite in enumerate(self.parts.finite())
            if not finite
        ]

    def give_up(self, step: int, why: str) -> list[Event]:
        """A run that is resumed once the cause is found finds no part in the middle of a fault."""
        streaks, finite = self.health.streak.tolist(), self.parts.finite()
        self.health.streak.zero_()
        events = [
            self._done(step, part, "it was not healthy when the run stopped", self.restore(part))
            for part, streak in enumerate(streaks)
            if streak or not finite[part]
        ]
        return [*events, Event(step, "run", "escalation", why, "stopped")]

    def _done(self, step: int, part: int, reason: str, action: str) -> Event:
        return Event(step, self.parts.names[part], "escalation", reason, action)

    def diagnosis(self, steps: int, events: Collection[Event] = ()) -> str:
        """What was seen, how often, and what to change: a line per part that was ever sick.

        Args:
            steps: how many were done.
            events: the last ones, whose actions are named.
        """
        done = {event.part: event.action for event in events}
        lines = []
        for part, counts in enumerate(self.counts.tolist()):
            name = self.parts.names[part]
            seen = {s: counts[s] for s in reversed(Stage) if s.kind.advice and counts[s]}
            if seen:
                last = {s: self._last.get((part, s), "") for s in seen}
                last = {s: f", last{words}" if words else "" for s, words in last.items()}
                often = [f"{s.kind.reason} ({n} times{last[s]})" for s, n in seen.items()]
                state = f" It was {done[name]}." if name in done else ""
                advice = max(seen, key=lambda stage: seen[stage]).kind.change(self.in_run)
                lines.append(
                    f"{name}, {steps} steps: {', '.join(often)}.{state} What to change: {advice}."
                )
        return "\n".join(lines)

    def summary(self, steps: int, updates: Tensor, terms: Mapping[str, Health]) -> str:
        """One line: the share of updates that were done, and who is sick or retired.

        Args:
            steps: how many were done.
            updates: `[part]`, how often each was updated.
            terms: name -> health of the loss terms beside.
        """
        done, skipped = int(updates.sum()), int(self.health.skipped.sum())
        line = f"step {steps}: {100 * done / max(done + skipped, 1):.1f} % of updates done"
        names, health = self.parts.names, self.health
        rows = list(zip(names, health.streak.tolist(), strict=True))
        rows += [(name, int(term.streak)) for name, term in terms.items()]
        gone, often = health.retired.tolist(), self.unsteady.tolist()
        for what, some in (
            ("bad steps in a row", [f"{name} {streak}" for name, streak in rows if streak]),
            ("retired", [name for name, out in zip(names, gone, strict=True) if out]),
            (
                f"below 90 % in the last {WINDOW} steps",
                [name for name, bad in zip(names, often, strict=True) if bad],
            ),
        ):
            if some:
                line += f"; {what}: {', '.join(some)}"
        return line

    def tensors(self) -> dict[str, Tensor]:
        """Name -> tensor, for a checkpoint."""
        return {"counts": self.counts, "skipped_before": self._skipped, "unsteady": self.unsteady}

    def load(self, tensors: Mapping[str, Any]) -> None:
        """Take over what `tensors` gave."""
        for name, mine in self.tensors().items():
            mine.copy_(tensors[name])
