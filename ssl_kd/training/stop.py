"""Ctrl-C and SIGTERM: a checkpoint between two steps, then the end."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from ssl_kd.errors import Interrupted


class Resumable(Protocol):
    """A run that can be stopped and resumed."""

    @property
    def path(self) -> Path:
        """Its folder."""
        ...

    @property
    def trained(self) -> bool:
        """Whether there is anything to resume from."""
        ...


class Signals:
    """Raises Ctrl-C and SIGTERM as `Interrupted`: at once, or during training after a step."""

    def __init__(self, folder: Resumable) -> None:
        self.caught: list[int] = []
        self._folder, self._deferred, self._before = folder, False, {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # as Python requires
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._catch)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self.caught.append(number)
        if not self._deferred or len(self.caught) > 1:  # a second signal does not wait
            self._stop()

    def _stop(self) -> None:
        raise Interrupted(self.caught[0], self._folder.path if self._folder.trained else None)

    @contextlib.contextmanager
    def between_steps(self) -> Iterator[None]:
        """Only record signals in `caught`, for a loop that checks it, and raise at the end."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        if self.caught:
            self._stop()


class FinishEarly:
    """Records Ctrl-C in the block, and raises it at the end, with the results so far.

    A second Ctrl-C is raised at once. Outside the main thread nothing changes.

    Attributes:
        wanted: whether the work should end early.
    """

    def __init__(self) -> None:
        self.wanted = False
        self._before: Any = None

    def __enter__(self) -> FinishEarly:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._catch)
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        if self.wanted and kind is None:
            raise KeyboardInterrupt

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self.wanted:
            raise KeyboardInterrupt
        self.wanted = True
