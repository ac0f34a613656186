"""The guard: keeps training when losses or gradients are not finite, and finds out why."""

from ssl_kd.guard.agreement import RankLost
from ssl_kd.guard.events import Event, EventLog
from ssl_kd.guard.faults import Thresholds
from ssl_kd.guard.finite import safe_normalize, safe_normalize_weights
from ssl_kd.guard.loop import Guard
from ssl_kd.guard.parts import TooFewHealthyParts
from ssl_kd.guard.precision import (
    DeviceInfo,
    Precision,
    UnsupportedDevice,
    promote_to_fp32,
)

__all__ = [
    "DeviceInfo",
    "Event",
    "EventLog",
    "Guard",
    "Precision",
    "RankLost",
    "Thresholds",
    "TooFewHealthyParts",
    "UnsupportedDevice",
    "promote_to_fp32",
    "safe_normalize",
    "safe_normalize_weights",
]
