"""Read a grid of settings from the command line: which flags have several values, and which."""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ssl_kd.core.errors import InputError
from ssl_kd.core.settings import Settings, SettingsError

Combination = Mapping[str, str]
"""Setting -> its value in a run, as text."""

_OF_THE_SWEEP = ("run_name", "resume", "extend")
_MAX_RUNS = 10_000
_MAX_NAME = 150  # characters, before a number that tells equal names apart


@dataclass(frozen=True)
class Grid:
    """The settings that differ between the runs of a sweep, and flags that all runs share."""

    axes: Mapping[str, tuple[str, ...]]
    flags: tuple[str, ...]

    @classmethod
    def read(cls, settings: type[Settings], argv: Sequence[str]) -> Grid:
        r"""Take the flags with several values out of a command line.

        `a,b,c` are three values, `0..4` are the five whole numbers from 0 to 4, and `\,` is a comma
        within a value. The text of an object in JSON is one value.

        Raises:
            SettingsError: a setting is swept twice, or belongs to the sweep itself.
        """
        axes: dict[str, tuple[str, ...]] = {}
        flags: list[str] = []
        words = list(argv)
        while words:
            word = words.pop(0)
            name, equals, text = word.partition("=")
            field = _field(settings, name)
            if field in _OF_THE_SWEEP:
                raise SettingsError(
                    f"{name} is not for a sweep, which names its runs and continues them itself: "
                    "leave it out, and name the sweep by --name"
                )
            if field is None or (not equals and (not words or words[0].startswith("--"))):
                flags.append(word)
                continue
            if not equals:
                text = words.pop(0)
            values = _values(settings, field, text)
            if len(values) == 1:
                flags += [name, values[0]]
            elif field == "runs_dir":
                raise SettingsError(f"RUNS_DIR is {text}; all runs of a sweep are in one folder")
            elif field in axes:
                raise SettingsError(f"{name} is swept twice: give all of its values in one flag")
            else:
                axes[field] = tuple(values)
        return cls(axes, tuple(flags))

    def combinations(self, rows: Sequence[Combination] = ()) -> dict[str, Combination]:
        """Return every combination of the axes by its name; each row of `rows` with all of them.

        Raises:
            InputError: there are no axes and no rows, too many runs, or an axis is in `rows`.
        """
        if rows and (twice := sorted(set(rows[0]) & set(self.axes))):
            raise InputError(f"{twice[0].upper()} is swept, and is a column of --list: choose one")
        product = [
            dict(zip(self.axes, values, strict=True))
            for values in itertools.product(*self.axes.values())
        ]
        found = [{**row, **values} for row in rows or [{}] for values in product]
        if len(found) == 1 and not found[0]:
            raise InputError(
                "Nothing is swept: give a setting several values, such as --beta 0.5,0.6 or "
                "--seed 0..4"
            )
        if len(found) > _MAX_RUNS:
            raise InputError(f"The grid has {len(found):,} runs; at most {_MAX_RUNS:,} are allowed")
        named: dict[str, Combination] = {}
        for combination in found:
            if combination in named.values():
                continue
            name = _name(combination)
            if name in named:
                name = f"{name}_{len(named)}"
            named[name] = combination
        return named


def read_list(file: Path, settings: type[Settings]) -> list[Combination]:
    """Read combinations from a CSV file: a column for each setting, and a row for each run.

    Raises:
        InputError: the file has no rows, a row of another length, or a column that is no setting.
    """
    with open(file, encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines)
        rows = list(reader)
    if not rows:
        raise InputError(f"{file} has no rows: a line of settings, then a line for each run")
    if any(None in row or None in row.values() for row in rows):
        raise InputError(f"{file} has rows of different lengths")
    return [{settings.named(name): text for name, text in row.items()} for row in rows]


def _field(settings: type[Settings], flag: str) -> str | None:
    """Return the setting of a flag; None if the word is no flag of a setting."""
    if not flag.startswith("--"):
        return None
    try:
        return settings.named(flag[2:])
    except SettingsError:
        return None


def _values(settings: type[Settings], field: str, text: str) -> list[str]:
    kind = settings.rules()[field][0]
    if kind is dict:
        return [text]
    values: list[str] = []
    for part in re.split(r"(?<!\\),", text):
        ends = re.fullmatch(r"(\d{1,18})\.\.(\d{1,18})", part)
        if kind is int and ends:
            first, last = map(int, ends.groups())
            if last < first or last - first >= _MAX_RUNS:
                raise SettingsError(f"{field.upper()} is {part}; expected a range such as 0..4")
            values += map(str, range(first, last + 1))
        else:
            values.append(part.replace("\\,", ","))
    return values


def _name(combination: Combination) -> str:
    """Return the name of a run's folder: `beta-0.5_seed-0`."""
    parts = (f"{field}-{text}" for field, text in combination.items())
    name = re.sub(r"[^\w.+=-]+", "-", "_".join(parts))
    return name[:_MAX_NAME]
