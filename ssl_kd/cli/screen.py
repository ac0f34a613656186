"""Show the progress bars, log and result of a command."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import progress as bars
from rich.console import Console
from rich.logging import RichHandler

from ssl_kd.core.errors import printable

_FILE_WIDTH = 250


class _OneLine(logging.Formatter):
    """Formats each message of this library as one line; line breaks in file names are escaped."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.name.startswith(("ssl_kd", "firstnan")):
            record.message = printable(record.message)
        return super().formatMessage(record)


def open_screen() -> Console:
    """Return a console on stderr, and send the library's log messages to it."""
    screen = Console(stderr=True)
    if screen.is_terminal:
        handler: logging.Handler = RichHandler(console=screen, show_path=False, show_time=False)
        handler.setFormatter(_OneLine("%(message)s"))
    else:  # a file or pipe, where no line is wrapped
        handler = logging.StreamHandler()
        handler.setFormatter(_OneLine("%(levelname)-8s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    for library in ("ssl_kd", "ssl_kd_explore"):
        logging.getLogger(library).setLevel(logging.INFO)
    return screen


def result_console() -> Console:
    """Return a console on stdout, as wide as a table needs if that is a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=_FILE_WIDTH)


def print_result(result: Any, files: Mapping[str, Path]) -> None:
    """Print the result of a command, a table or a text, and the title and path of its files."""
    console = result_console()
    console.print(result)
    # soft_wrap: a path broken over two lines cannot be clicked or copied.
    for name, file in files.items():
        console.print(f"{name}: {file}", soft_wrap=True, markup=False)


class ProgressBars:
    """Shows the progress of a run: bars on a terminal, a line every ten seconds elsewhere.

    Call it with `(stage, done, total, info)`; use it as a context manager around the run.
    """

    quiet_seconds = 10.0  # between two lines where there is no terminal

    def __init__(self, screen: Console) -> None:
        self._screen = screen
        columns = (
            *(bars.TextColumn("{task.description:<10}"), bars.BarColumn()),
            *(bars.MofNCompleteColumn(), bars.TimeElapsedColumn(), bars.TimeRemainingColumn()),
            bars.TextColumn("{task.fields[info]}", markup=False),
        )
        self._bars = bars.Progress(*columns, console=screen, disable=not screen.is_terminal)
        self._tasks: dict[str, Any] = {}
        self._printed_at: dict[str, float] = {}

    def __enter__(self) -> ProgressBars:
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._screen.is_terminal:  # rich before 14.2 prints a line even for disabled bars
            self._bars.stop()

    def __call__(self, stage: str, done: int, total: int, info: dict[str, Any]) -> None:
        """Show that `done` of `total` units of a stage are finished, and the values in `info`."""
        text = "  ".join(f"{key} {short(value)}" for key, value in info.items())
        if self._screen.is_terminal:
            if stage not in self._tasks:
                self._tasks[stage] = self._bars.add_task(stage, total=total, info=text)
            self._bars.update(self._tasks[stage], completed=done, total=total, info=text)
            return
        now = time.monotonic()
        last = self._printed_at.get(stage, -self.quiet_seconds)
        if done >= total or now - last >= self.quiet_seconds:
            self._printed_at[stage] = now
            line = f"{stage:<10} {done}/{total}  {text}".rstrip()
            self._screen.print(line, markup=False, highlight=False, soft_wrap=True)


def short(value: object) -> str:
    """Return a float with four significant digits, and anything else as text."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
