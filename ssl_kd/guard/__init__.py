"""The guard: keeps training when losses or gradients are not finite, and finds out why."""

from ssl_kd.guard.agreement import RankLost
from ssl_kd.guard.events import Event, EventLog
from ssl_kd.guard.faults import Thresholds
from ssl_kd.guard.finite import safe_normalize, safe_normalize_weights
from ssl_kd.guard.loop import Guard
from ssl_kd.guard.parts import TooFewHealthyParts

__all__ = [
    "Event",
    "EventLog",
    "Guard",
    "RankLost",
    "Thresholds",
    "TooFewHealthyParts",
    "safe_normalize",
    "safe_normalize_weights",
]
