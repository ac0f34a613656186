"""Measure how long each stage of a run takes, and define the progress callback."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

Progress = Callable[[str, int, int, dict[str, Any]], None]
"""Type of a progress callback, called as `progress(stage, done, total, info)`."""


class Clock:
    """Measure the seconds that each stage of a run takes."""

    def __init__(self) -> None:
        self.began, self.stages = time.perf_counter(), {}

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Measure the time of the `with` block and store it under `stage`."""
        start = time.perf_counter()
        yield
        self.stages[stage] = round(time.perf_counter() - start, 2)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each stage, and under `total` the seconds since the clock was created."""
        return self.stages | {"total": round(time.perf_counter() - self.began, 2)}


def no_progress(stage: str, done: int, total: int, info: dict[str, Any]) -> None:
    """Do nothing: the progress callback for runs that show no progress."""
