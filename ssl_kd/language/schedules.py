"""SCHEDULE: how temperature and weights of the loss move over a run. Imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from ssl_kd.settings import SettingsError, nearest

MOVE = ("temperature", "alpha_kd", "alpha_ce", "alpha_hidden")
FORM = r"\s*\w+\s*:\s*[\d.eE+-]+\s*(:\s*(linear|cosine)\s*)?"


@dataclass(frozen=True)
class Move:
    """One setting's way from its own value to another.

    Attributes:
        name: of the setting.
        end: its value in the last step.
        shape: `linear`, or `cosine` (half a period: slow, fast, slow).
    """

    name: str
    end: float
    shape: str

    def at(self, begin: float, step: int, steps: int) -> float:
        """The value in a step from 0 to `steps - 1`: `begin` in the first, `end` in the last."""
        done = step / max(steps - 1, 1)
        if self.shape == "cosine":
            done = (1 - math.cos(math.pi * done)) / 2
        return (1 - done) * begin + done * self.end  # either end to the bit


def moves_of(schedule: str | None, parse: Callable[[str, str], float]) -> list[Move]:
    """Read SCHEDULE.

    Args:
        schedule: its value.
        parse: checks the value of a setting, by name.

    Raises:
        SettingsError: another form, a setting that does not move, one named twice, or an end that
            the setting may not have.
    """
    if schedule is None:
        return []
    moves = []
    for part in schedule.split(","):
        if re.fullmatch(FORM, part) is None:
            raise SettingsError(
                f"SCHEDULE is {schedule!r}, but must be NAME:END or NAME:END:cosine,"
                " separated by commas, as in 'temperature:1, alpha_hidden:0.1:cosine'."
            )
        word, end, *shape = (piece.strip() for piece in part.split(":"))
        name = word.lower()
        if name not in MOVE:
            raise SettingsError(
                f"SCHEDULE names {word}, but only {', '.join(MOVE)} move.{nearest(name, MOVE)}"
            )
        value = parse(name, end)
        moves.append(Move(name, value, *(shape or ["linear"])))
    if len({move.name for move in moves}) < len(moves):
        raise SettingsError(f"SCHEDULE is {schedule!r}, which names a setting twice.")
    return moves
