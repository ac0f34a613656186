"""The time of a run's stages, and its progress."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

Progress = Callable[[str, int, int, dict[str, Any]], None]
"""Called as `progress(stage, done, total, info)`."""


class Clock:
    """Measures seconds per stage."""

    def __init__(self) -> None:
        self.began, self.stages = time.perf_counter(), {}

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Time the block as this stage."""
        start = time.perf_counter()
        yield
        self.stages[stage] = round(time.perf_counter() - start, 2)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each stage, and `total` since the clock was made."""
        return self.stages | {"total": round(time.perf_counter() - self.began, 2)}


def no_progress(stage: str, done: int, total: int, info: dict[str, Any]) -> None:
    """A `Progress` that shows nothing."""
