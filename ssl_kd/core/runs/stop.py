"""Handle Ctrl-C and SIGTERM, so that a run saves a checkpoint before it ends."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from ssl_kd.core.errors import Interrupted
from ssl_kd.core.runs.folder import RunFolder


class Signals:
    """Raise Ctrl-C and SIGTERM as `Interrupted`: at once, or after `between_steps`.

    The error names the run folder, if it can be resumed.
    """

    def __init__(self, folder: RunFolder | None = None) -> None:
        self.caught: list[int] = []
        self._folder = folder
        self._deferred = False
        self._before = {}

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
        folder = self._folder
        path = None if folder is None or not folder.trained else folder.path
        raise Interrupted(self.caught[0], path)

    @contextlib.contextmanager
    def between_steps(self) -> Iterator[None]:
        """Collect signals in `caught` during the block, and raise `Interrupted` at its end."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        if self.caught:
            self._stop()
