"""Record the guard's decisions as events, one line of JSON each."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Event:
    """One decision of the guard.

    Attributes:
        step: number of the optimizer step; `first_step` of the guard is the first.
        part: name of the part, such as `model`; `run` if the event is of no part.
        stage: where the fault was found: `loss`, `gradient`, ..., or a caller's own.
        reason: what the guard saw.
        action: what the guard did, such as `skipped`.
        value: the bad number; None if it is not finite, or if the event has none.
    """

    step: int
    part: str
    stage: str
    reason: str
    action: str
    value: float | None = None

    def __str__(self) -> str:
        """Return the event as one line for people."""
        value = "" if self.value is None else f" ({self.value:.3g})"
        return f"step {self.step}, {self.part}: {self.reason}{value}; {self.action}"

    def line(self) -> str:
        """Return the event as one line of strict JSON."""
        is_finite = self.value is not None and math.isfinite(self.value)
        return json.dumps(asdict(self) | {"value": self.value if is_finite else None})


class EventLog:
    """Keep the events of one run in memory, and append each to a file.

    If the file cannot be written (a full disk), warn once and keep the events in memory only.

    Args:
        path: the file; None to keep the events in memory only.
        announce: also log each event, the first of each kind as a warning, later ones as DEBUG.
    """

    def __init__(self, path: str | Path | None = None, *, announce: bool = False) -> None:
        self.path, self.announce = None if path is None else Path(path), announce
        self.events: list[Event] = []
        self._warned, self._n_told = False, 0
        self._announced: set[tuple[str, str]] = set()

    def __len__(self) -> int:
        return len(self.events)

    def log_new(self, reports: Mapping[int, object]) -> list[Event]:
        """Log the events since the last call as warnings unless announced, and return them.

        `reports` holds what is known of the faults of a step; it is logged before its events.
        """
        new, self._n_told = self.events[self._n_told :], len(self.events)
        if self.announce:
            return new
        reported = set[int]()
        for event in new:
            if event.step in reports and event.step not in reported:
                reported.add(event.step)
                logger.warning("step %d:\n%s", event.step, reports[event.step])
            if event.stage != "origin" or event.step not in reports:
                logger.warning("%s", event)
        return new

    def extend(self, events: list[Event]) -> None:
        """Add events to the log, and append them to the file in one write."""
        self.events.extend(events)
        if self.path is not None and events:
            try:
                with open(self.path, "a", encoding="utf-8") as file:
                    file.write("".join(event.line() + "\n" for event in events))
            except OSError as error:
                if not self._warned:
                    message = "cannot write events to %s (%s); they are kept in memory only"
                    logger.warning(message, self.path, error)
                self._warned = True
        if not self.announce:
            return
        for event in events:
            kind = (event.stage, event.action)
            level = logging.DEBUG if kind in self._announced else logging.WARNING
            self._announced.add(kind)
            message = "step %d, %s: %s; %s"
            logger.log(level, message, event.step, event.part, event.reason, event.action)
