"""Settings of the loss that move over a run: SCHEDULE. No torch here: checks and help read it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ssl_kd.settings import SettingsError, nearest

if TYPE_CHECKING:
    from ssl_kd.language.settings import LanguageSettings

MOVE = ("temperature", "alpha_kd", "alpha_ce", "alpha_hidden", "alpha_attention")
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


def moves_of(settings: LanguageSettings) -> list[Move]:
    """What SCHEDULE says.

    Raises:
        SettingsError: another form, a setting that does not move, one named twice, or an end that
            the setting may not have.
    """
    if settings.schedule is None:
        return []
    moves = []
    for part in settings.schedule.split(","):
        if re.fullmatch(FORM, part) is None:
            raise SettingsError(
                f"SCHEDULE is {settings.schedule!r}, but must be NAME:END or NAME:END:cosine,"
                " separated by commas, as in 'temperature:1, alpha_hidden:0.1:cosine'."
            )
        word, end, *shape = (piece.strip() for piece in part.split(":"))
        name = word.lower()
        if name not in MOVE:
            raise SettingsError(
                f"SCHEDULE names {word}, but only {', '.join(MOVE)} move.{nearest(name, MOVE)}"
            )
        value = type(settings).parse(name, end)
        moves.append(Move(name, value, *(shape or ["linear"])))
    if len({move.name for move in moves}) < len(moves):
        raise SettingsError(f"SCHEDULE is {settings.schedule!r}, which names a setting twice.")
    return moves


def at_step(settings: LanguageSettings, step: int, steps: int) -> LanguageSettings:
    """The settings as they are in a step, without SCHEDULE itself.

    Args:
        settings: of the run.
        step: from 0.
        steps: of the run.
    """
    moves = moves_of(settings)
    values = {move.name: move.at(getattr(settings, move.name), step, steps) for move in moves}
    return settings.replace(schedule=None, **values)


def check_schedule(settings: LanguageSettings) -> None:
    """Raise SettingsError where SCHEDULE is of no use, or ends where nothing can be learned."""
    moves = moves_of(settings)
    for move in moves:
        if not getattr(settings, move.name):
            raise SettingsError(
                f"SCHEDULE moves {move.name.upper()}, which begins at 0, and then is no part of"
                " the loss: begin it above 0, at 0.001 say, or leave it out."
            )
    if settings.teacher_cache and any(move.name == "temperature" for move in moves):
        raise SettingsError(
            "SCHEDULE moves TEMPERATURE, but TEACHER_CACHE holds answers at one temperature: leave"
            " one of them."
        )
    if moves:
        at_step(settings, 1, 2)
