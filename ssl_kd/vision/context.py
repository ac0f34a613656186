"""What all stages of one run share."""

from __future__ import annotations

from dataclasses import dataclass

from ssl_kd.guard.precision import Precision
from ssl_kd.training.clock import Clock, Progress
from ssl_kd.training.folder import RunFolder
from ssl_kd.training.stop import Signals
from ssl_kd.vision.ranks import HeadRanks


@dataclass(frozen=True)
class RunContext:
    """What all stages of one run share.

    Attributes:
        folder: the run's files.
        precision: dtypes and device.
        clock: seconds of each stage.
        signals: Ctrl-C and SIGTERM.
        tell: shows progress.
        together: the ranks of a training in several processes; None for a process by itself.
    """

    folder: RunFolder
    precision: Precision
    clock: Clock
    signals: Signals
    tell: Progress
    together: HeadRanks | None
