"""Count the share of each loss term's tokens that updated the student."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any


@dataclass
class Success:
    """The success rate of some steps: shares of target tokens that took part in an update.

    A step that did not update the student counts as 0 for each of its terms; rows that were left
    out of a term lower the rate of that term.
    """

    sums: dict[str, float] = field(default_factory=dict)  # of shares, by loss term
    steps: dict[str, int] = field(default_factory=dict)  # in which the term had tokens

    def add(self, shares: Mapping[str, float]) -> None:
        """Add the share, 0 to 1, of each loss term in one step."""
        for name, share in shares.items():
            self.sums[name] = self.sums.get(name, 0.0) + share
            self.steps[name] = self.steps.get(name, 0) + 1

    @property
    def rates(self) -> dict[str, float]:
        """The mean share of each loss term."""
        return {name: total / self.steps[name] for name, total in self.sums.items()}

    @property
    def rate(self) -> float:
        """The mean of all terms' rates; 0 without a step."""
        return fmean(self.rates.values()) if self.sums else 0.0

    def state(self) -> dict[str, Any]:
        """Return the counts for a checkpoint."""
        return {"sums": dict(self.sums), "steps": dict(self.steps)}
