"""Read a grid of settings from the command line: which flags have several values, and which."""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ssl_kd.core.errors import InputError
from ssl_kd.core.settings import Settings, SettingsError

Combination = Mapping[str, str]
"""Setting -> its value in a run, as text."""

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("run_name", "resume"),
        "is not for a sweep, which names its runs and continues them itself: leave it out, and "
        "name the sweep by --name",
    ),
    "extend": "is not for a sweep, as it adds samples to one finished run: leave it out",
}
"""Settings that cannot be flags of a sweep, and why."""
_SHARED: Mapping[str, str] = {
    "runs_dir": "all runs of a sweep are in one folder",
    "recipe": "all runs follow one recipe: give one name",
}
"""Settings that all runs share, and why."""
_MAX_RUNS = 10_000
_MAX_NAME = 150  # bytes, before what tells equal names apart; file systems allow 255


@dataclass(frozen=True)
class Grid:
    """The settings that differ between the runs of a sweep, and flags that all runs share."""

    axes: Mapping[str, tuple[str, ...]]
    flags: tuple[str, ...]

    @classmethod
    def read(
        cls,
        settings: type[Settings],
        argv: Sequence[str],
        refused: Mapping[str, str] = REFUSED,
    ) -> Grid:
        r"""Take the flags with several values out of a command line.

        `a,b,c` are three values, `0..4` are the five whole numbers from 0 to 4, and `\,` is a comma
        within a value. The text of an object in JSON is one value.

        Raises:
            SettingsError: a setting is swept twice or has a value twice, or is one of `refused`.
        """
        axes: dict[str, tuple[str, ...]] = {}
        flags: list[str] = []
        words = list(argv)
        while words:
            word = words.pop(0)
            name, equals, text = word.partition("=")
            field = _field(settings, name)
            if field is not None and field in refused:
                raise SettingsError(f"{name} {refused[field]}")
            if field is None or (not equals and (not words or words[0].startswith("--"))):
                flags.append(word)
                continue
            if not equals:
                text = words.pop(0)
            values = _values(settings, field, text)
            if len(set(values)) < len(values):
                raise SettingsError(
                    f"{name} is {text}, with a value twice: give each value once. A comma that "
                    "belongs to a value is written \\,"
                )
            if len(values) == 1:
                flags.append(f"{name}={values[0]}")
            elif field in _SHARED:
                raise SettingsError(f"{field.upper()} is {text}; {_SHARED[field]}")
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
        n_runs = math.prod(map(len, self.axes.values())) * max(1, len(rows))
        if n_runs > _MAX_RUNS:
            raise InputError(
                f"The grid has {n_runs:,} runs; expected at most {_MAX_RUNS:,}: give fewer values, "
                "or the combinations alone in a file (--list)"
            )
        if rows and (twice := sorted(set(rows[0]) & set(self.axes))):
            raise InputError(f"{twice[0].upper()} is swept, and is a column of --list: choose one")
        product = [
            dict(zip(self.axes, values, strict=True))
            for values in itertools.product(*self.axes.values())
        ]
        combinations = [{**row, **values} for row in rows or [{}] for values in product]
        if combinations == [{}]:
            raise InputError(
                "Nothing is swept: give a setting several values, such as --beta 0.5,0.6 or "
                "--seed 0..4"
            )
        different = {tuple(c.items()): c for c in combinations}.values()
        return named(different)


def named(combinations: Iterable[Combination], taken: Iterable[str] = ()) -> dict[str, Combination]:
    """Return combinations by names of folders, `beta-0.5_seed-0`, other than those `taken`.

    A name that is taken, or too long, ends with a digest of the combination. Names that differ only
    in case are equal, as for some file systems.
    """
    names: dict[str, Combination] = {}
    used = {name.casefold() for name in taken}
    for combination in combinations:
        parts = (f"{field}-{text}" for field, text in combination.items())
        whole = re.sub(r"[^\w.+=-]+", "-", "_".join(parts))
        name = whole.encode()[:_MAX_NAME].decode(errors="ignore")
        if name != whole or name.casefold() in used:
            content = json.dumps(sorted(combination.items())).encode()
            name += f"_{hashlib.sha256(content).hexdigest()[:8]}"
        used.add(name.casefold())
        names[name] = combination
    return names


def flags_of(combination: Combination) -> list[str]:
    """Return the flags of a combination; a value may begin with a dash."""
    return [f"--{field}={text}" for field, text in combination.items()]


def read_list(file: Path, settings: type[Settings]) -> list[Combination]:
    """Read combinations from a CSV file: a column for each setting, and a row for each run.

    Raises:
        InputError: the file is not a CSV file in UTF-8, has no rows, a row of another length, or a
            column that is not a setting, is there twice, or belongs to the sweep itself.
    """
    try:
        with open(file, encoding="utf-8-sig", newline="") as lines:
            rows = [row for row in csv.reader(lines, skipinitialspace=True) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(
            f"--list is {file}; expected a CSV file in UTF-8, but it cannot be read ({error})"
        ) from error
    if len(rows) < 2:
        raise InputError(
            f"--list is {file}, which has no runs; expected a line of settings, then a line for "
            "each run"
        )
    try:
        fields = [settings.named(name.strip()) for name in rows[0]]
    except SettingsError as error:
        raise InputError(
            f"--list is {file}, and its first line names the settings: {error}"
        ) from error
    for field in fields:
        if field in REFUSED or field in _SHARED:
            raise InputError(
                f"--list is {file}, with the column {field.upper()}; all runs of a sweep are in "
                "one folder and follow one recipe, and the sweep names and continues them: remove "
                "the column"
            )
        if fields.count(field) > 1:
            raise InputError(f"--list is {file}, with {field.upper()} in several columns: keep one")
    for i, row in enumerate(rows[1:], start=1):
        if len(row) != len(fields):
            raise InputError(
                f"--list is {file}, whose run {i} has {len(row)} values; expected {len(fields)}, "
                "one for each setting of the first line (quote a value that holds a comma)"
            )
    return [dict(zip(fields, row, strict=True)) for row in rows[1:]]


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
        elif kind is float and ".." in part:
            raise SettingsError(
                f"{field.upper()} is {part}, but a range is of whole numbers: list the values, "
                "such as 0.5,0.6,0.7"
            )
        else:
            values.append(part.replace("\\,", ","))
    return values
