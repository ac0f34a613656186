"""Whether a GPU's teacher waits for images: decoding needs cores before it needs GPUs."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator

import torch

from ssl_kd.vision.loading import Batch


class Clocked:
    """How long a CUDA device computed, without waiting for it: a context manager, again and again.

    Args:
        device: the device; its current stream is timed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._seconds = 0.0

    def __enter__(self) -> None:
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record(torch.cuda.current_stream(self.device))
        self._open.append(events)

    def __exit__(self, *exception: object) -> None:
        self._open[-1][1].record(torch.cuda.current_stream(self.device))
        while len(self._open) > 1 and self._open[0][1].query():
            self._add()

    def seconds(self) -> float:
        """The sum; waits for what is under way."""
        torch.cuda.synchronize(self.device)
        while self._open:
            self._add()
        return self._seconds

    def _add(self) -> None:
        began, ended = self._open.popleft()
        self._seconds += began.elapsed_time(ended) / 1000


class Pace:
    """How many images came, in how many seconds, and how many of these were spent waiting."""

    def __init__(self) -> None:
        self.images, self.seconds, self.waited = 0, 0.0, 0.0

    def each(self, loaded: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches, clocked."""
        first = asked = time.perf_counter()
        for batch in loaded:
            now = time.perf_counter()
            self.waited += now - asked
            self.images += len(batch.rows)
            yield batch
            asked = time.perf_counter()
            self.seconds = asked - first


def keeping_up(
    images: int, seconds: float, waited: float, computed: float, workers: int
) -> str | None:
    """What a GPU lost by waiting for images, and how many threads would decode them in time.

    Args:
        images: that were embedded.
        seconds: that it took.
        waited: seconds of them in which the next images were not decoded yet.
        computed: seconds in which the device computed, some of them while these were waited for.
        workers: threads that decoded.

    Returns:
        A sentence; None where less than a tenth of the time was lost.
    """
    idle = min(waited, seconds - computed)
    if not images or computed <= 0 or idle < 0.1 * seconds:
        return None
    needed = math.ceil(workers * (computed + idle) / computed)
    return (
        f"the teacher waited for images {100 * idle / seconds:.0f} % of the time: {workers} "
        f"workers decode {images / seconds:.0f} a second, it embeds {images / computed:.0f}; "
        f"{needed} workers, with a core each, would keep up"
    )
