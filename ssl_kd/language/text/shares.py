"""Count the documents that are left out, split or shortened, and describe their share."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from ssl_kd.core.errors import printable

LARGE = 0.05
"""Share of the documents above which a message is a warning."""


@dataclass(frozen=True)
class Share:
    """How many of some documents are not used as they are.

    `str()` gives a sentence with the counts, the share and one example.
    """

    n: int
    of: int
    noun: str  # "documents"
    what: str  # "left out"
    example: str  # the message about the first of them
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        share = f"{self.n:,} of {self.of:,} {self.noun} ({self.n / self.of:.1%}) {self.what}"
        return printable(f"{share}, for example {self.example}{remedy}")

    @property
    def is_large(self) -> bool:
        """Whether the share is above LARGE."""
        return self.n > LARGE * self.of


def log_shares(logger: logging.Logger, name: str, shares: Iterable[Share]) -> None:
    """Log the shares of the text `name`, large ones as warnings."""
    for share in shares:
        logger.log(logging.WARNING if share.is_large else logging.INFO, "%s: %s", name, share)


@dataclass
class Layout:
    """Count how the documents of a text fit in rows; each list holds a message per document."""

    documents: int = 0  # with a token to train on
    left_out: list[str] = field(default_factory=list)
    in_part: list[str] = field(default_factory=list)  # turns that are left out of a document
    turns: int = 0  # of the assistant
    split: list[str] = field(default_factory=list)  # over several rows
    prompts: int = 0  # before targets
    shortened: list[str] = field(default_factory=list)  # prompts
    tokens: int = 0  # of the shortened prompts, before
    lost: int = 0  # of them

    @property
    def messages(self) -> list[str]:
        """All messages, each once."""
        kinds = (self.left_out, self.in_part, self.shortened, self.split)
        return list(dict.fromkeys(message for messages in kinds for message in messages))

    def leave_out(self, messages: Iterable[str], *, is_used: bool) -> None:
        """Note what is left out of a document that is still used, or why it is left out."""
        if is_used:
            self.in_part.extend(messages)
        elif message := "; ".join(messages):
            self.left_out.append(message)

    def shares(self) -> list[Share]:
        """Return the share of each kind that occurred."""
        remedy = "raise BLOCK_SIZE to keep them whole"
        shares = []
        if self.left_out:
            n, first = len(self.left_out), self.left_out[0]
            shares.append(Share(n, n + self.documents, "documents", "left out", first))
        if self.in_part:
            n, first = len(self.in_part), self.in_part[0]
            turns = "turns of the assistant"
            shares.append(Share(n, max(n, self.turns), turns, "left out of their documents", first))
        if self.shortened:
            what = f"shortened, {self.lost / self.tokens:.0%} of their tokens lost"
            n, first = len(self.shortened), self.shortened[0]
            shares.append(Share(n, self.prompts, "prompts", what, first, remedy))
        if self.split:
            n, first = len(self.split), self.split[0]
            shares.append(Share(n, self.documents, "documents", "split over rows", first, remedy))
        return shares
