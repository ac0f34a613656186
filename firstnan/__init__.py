"""Keep training when a loss or gradient is not finite, and name the operation that made it so."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from firstnan.agreement import RankLost
    from firstnan.events import Event, EventLog
    from firstnan.faults import Thresholds
    from firstnan.finite import safe_normalize
    from firstnan.loop import Guard
    from firstnan.parts import TooFewHealthyParts

__all__ = [
    "Event",
    "EventLog",
    "Guard",
    "RankLost",
    "Thresholds",
    "TooFewHealthyParts",
    "safe_normalize",
]
__version__ = "0.1.0"

_HOMES = {
    "agreement": ["RankLost"],
    "events": ["Event", "EventLog"],
    "faults": ["Thresholds"],
    "finite": ["safe_normalize"],
    "loop": ["Guard"],
    "parts": ["TooFewHealthyParts"],
}


def __getattr__(name: str) -> object:
    # Imported on first use: torch takes seconds, and `firstnan.errors` needs none.
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"firstnan.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
