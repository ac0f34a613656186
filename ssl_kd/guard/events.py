"""What the guard saw and did: one line of JSON per decision."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import asdict, dataclass
from pathlib import Path

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Event:
    """One decision of the guard.

    Attributes:
        step: optimizer step, from 0.
        part: which part, `head 3`; `batch` where the input itself was bad.
        stage: where the fault was found: `input`, `teacher`, `loss`, `gradient`, ...
        reason: what was seen.
        action: what was done, `skipped`.
        value: the number that was seen; None where it is not finite or there is none.
    """

    step: int
    part: str
    stage: str
    reason: str
    action: str
    value: float | None = None

    def line(self) -> str:
        """Return the event as one line of strict JSON."""
        row = asdict(self)
        if row["value"] is not None and not math.isfinite(row["value"]):
            row["value"] = None
        return json.dumps(row)


class EventLog:
    """The events of one run, in memory and appended to a file as they come.

    Events that cannot be written (a full disk) stay in memory, with one warning.

    Args:
        path: the file; None for memory alone.
        announce: log the events too: the first of each kind as a warning, later ones at DEBUG.
    """

    def __init__(self, path: str | Path | None = None, *, announce: bool = False) -> None:
        self.path, self.announce = None if path is None else Path(path), announce
        self.events: list[Event] = []
        self._warned = False
        self._announced: set[tuple[str, str]] = set()

    def __len__(self) -> int:
        return len(self.events)

    def extend(self, events: list[Event]) -> None:
        """Add events, and append them to the file in one write."""
        self.events.extend(events)
        if self.path is not None and events:
            try:
                with open(self.path, "a", encoding="utf-8") as file:
                    file.write("".join(event.line() + "\n" for event in events))
            except OSError as error:
                if not self._warned:
                    logger.warning("events are kept in memory only: %s: %s", self.path, error)
                self._warned = True
        for event in events if self.announce else ():
            kind = (event.stage, event.action)
            level = logging.DEBUG if kind in self._announced else logging.WARNING
            self._announced.add(kind)
            message = "step %d, %s: %s; %s"
            logger.log(level, message, event.step, event.part, event.reason, event.action)
