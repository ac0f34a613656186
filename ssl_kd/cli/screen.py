"""What a command shows while it works: a live bar of each stage, and the log beside it."""

from __future__ import annotations

import logging
import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ssl_kd.errors import printable


class _OneLine(logging.Formatter):
    """Writes each message of this library as one line, whatever a file that it names is called."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.name.startswith("ssl_kd"):
            record.message = printable(record.message)
        return super().formatMessage(record)


def open_screen() -> Console:
    """The terminal, or what stands in for it, with the library's log on it."""
    screen = Console(stderr=True)
    if screen.is_terminal:
        handler: logging.Handler = RichHandler(console=screen, show_path=False, show_time=False)
        handler.setFormatter(_OneLine("%(message)s"))
    else:  # a file of the output: no line is broken
        handler = logging.StreamHandler()
        handler.setFormatter(_OneLine("%(levelname)-8s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("ssl_kd").setLevel(logging.INFO)
    return screen


class ProgressBars:
    """Draws the stages of a run: a live bar on a terminal, a line now and then elsewhere.

    Call it with `(stage, done, total, info)`; use it as a context manager around the run.
    """

    quiet_seconds = 10.0  # between two lines where there is no terminal

    def __init__(self, screen: Console) -> None:
        self._screen = screen
        self._bars = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[info]}", markup=False),
            console=screen,
            disable=not screen.is_terminal,
        )
        self._tasks: dict[str, Any] = {}
        self._spoken: dict[str, float] = {}

    def __enter__(self) -> ProgressBars:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._screen.is_terminal:  # rich before 14.2 ends bars that it never drew, by a line
            self._bars.stop()

    def __call__(self, stage: str, done: int, total: int, info: dict[str, Any]) -> None:
        """Show that `done` of `total` units of a stage are done."""
        words = "  ".join(f"{key} {short(value)}" for key, value in info.items())
        if not self._screen.is_terminal:
            now = time.monotonic()
            last = self._spoken.get(stage, -self.quiet_seconds)
            if done >= total or now - last >= self.quiet_seconds:
                self._spoken[stage] = now
                line = f"{stage:<10} {done}/{total}  {words}".rstrip()
                self._screen.print(line, markup=False, highlight=False, soft_wrap=True)
            return
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total, info=words)
        self._bars.update(self._tasks[stage], completed=done, total=total, info=words)


def short(value: object) -> str:
    """A number to four digits; anything else as it is."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
