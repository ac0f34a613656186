"""A Chromium for tests and benchmarks: one on the path, or playwright's own."""

from __future__ import annotations

import shutil
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
