"""A Chromium for tests and benchmarks: one on the path, or playwright's own."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
# Without a graphics card it draws on the processor; in a container it has no sandbox of its own.
FLAGS = ("--no-sandbox", "--enable-unsafe-swiftshader")


def chromium(playwright: Any) -> str | None:
    """Where it is; None: nowhere."""
    own = playwright.chromium.executable_path
    found = next(filter(None, map(shutil.which, NAMES)), None)
    return found or (own if Path(own).is_file() else None)


def launch(playwright: Any) -> Any:
    """Start it.

    Raises:
        FileNotFoundError: there is none.
    """
    path = chromium(playwright)
    if path is None:
        raise FileNotFoundError(
            f"no {', '.join(NAMES)} is on the path, and `playwright install chromium` was not run"
        )
    return playwright.chromium.launch(executable_path=path, args=FLAGS)


def until(page: Any, script: str, arg: Any = None, *, seconds: float = 60) -> None:
    """Wait until a function of JavaScript says yes; asked from here, as the page allows no eval."""
    end = time.monotonic() + seconds
    while not page.evaluate(script, arg):
        if time.monotonic() > end:
            raise TimeoutError(f"after {seconds:.0f} s it still is not so: {script}")
        page.wait_for_timeout(50)


def settle(page: Any) -> None:
    """Wait until the map has had the same size and place for 20 frames."""
    page.evaluate("""async () => { const canvas = document.querySelector("#canvas");
      for (let last = "", same = 0; same < 20;) {
        await new Promise(requestAnimationFrame);
        const now = JSON.stringify([canvas.getBoundingClientRect(), explore.plot.screen(0)]);
        same = now === last ? same + 1 : 0;
        last = now; } }""")
