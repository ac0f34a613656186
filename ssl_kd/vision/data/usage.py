"""Describe what of a data source is used and what is not, in one form for every kind of source."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ssl_kd.core.errors import printable

logger = logging.getLogger(__name__)

SHOWN = 5
"""Names of one entry that a message shows; the run's files hold all of them."""


@dataclass(frozen=True)
class LeftOut:
    """A part of a data source that is not used."""

    what: str  # with a count: "12 images in valid/", "column y", "1 file .heic"
    reason: str  # and the way to use it, if there is one
    names: Sequence[str] = ()  # of the files, rows or columns, if there are several

    def __str__(self) -> str:
        names = ""
        if self.names:
            more = f", and {len(self.names) - SHOWN:,} more" if len(self.names) > SHOWN else ""
            names = f" ({', '.join(self.names[:SHOWN])}{more})"
        return printable(f"{self.what}{names}: {self.reason}")


@dataclass(frozen=True)
class Usage:
    """What is used of a data source, with counts, and what is left out."""

    used: str  # "60 images in 3 folders", "120 rows: features from column embedding, 16 wide"
    left_out: Sequence[LeftOut] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """Return the description as plain values, for the files of a run."""
        return {"used": self.used, "left_out": [asdict(part) for part in self.left_out]}

    def log(self, name: str) -> None:
        """Log what is used of the source `name`, and each part that is left out."""
        logger.info("%s: %s", printable(name), printable(self.used))
        for part in self.left_out:
            logger.warning("%s: not used: %s", printable(name), part)


def counted(n: int, singular: str, plural: str | None = None) -> str:
    """Return a number with its noun.

    >>> counted(1, "image"), counted(1200, "image"), counted(0, "class", "classes")
    ('1 image', '1,200 images', '0 classes')
    """
    return f"{n:,} {singular if n == 1 else plural or singular + 's'}"
