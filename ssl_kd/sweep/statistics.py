"""Means over seeds with their intervals, and paired differences between groups of runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from scipy import stats

from ssl_kd.core.errors import InputError
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.sweep.records import Record
from ssl_kd.vision.settings import VisionSettings

SEED = "SEED"
_SETTINGS = {"vision": VisionSettings, "language": LanguageSettings}
LOWER_IS_BETTER = {"perplexity", "nll", "bits_per_byte", "kl", "ece", "repetition"}
LOWER_IS_BETTER |= {"faults", "seconds"}


@dataclass(frozen=True)
class Mean:
    """A mean of `n` values; `half` is half of its 95 % interval by Student's t, None for one."""

    value: float
    half: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """Return the mean of values; their spread is that of a sample."""
        n = len(values)
        if n < 2:
            return cls(fmean(values), None, n)
        half = float(stats.t.ppf(0.975, n - 1)) * stdev(values) / math.sqrt(n)
        return cls(fmean(values), half, n)


@dataclass(frozen=True)
class Difference:
    """A difference from the baseline, paired by seed.

    Attributes:
        mean: of the differences, and its interval.
        p: of the paired t-test, corrected by Holm for the other groups; None below two pairs.
    """

    mean: Mean
    p: float | None


@dataclass(frozen=True)
class Group:
    """Runs whose settings are the same but for the seed."""

    settings: Mapping[str, Any]  # those in which the groups differ
    records: tuple[Record, ...]

    @property
    def name(self) -> str:
        """The settings as `beta=0.5, loss=temi`; `all runs` for a single group."""
        own = ", ".join(f"{name.lower()}={value}" for name, value in self.settings.items())
        return own or "all runs"

    @property
    def seeds(self) -> set[Any]:
        """The seeds of the runs."""
        return {record.settings.get(SEED) for record in self.records}

    def mean(self, score: str) -> Mean | None:
        """Return the mean of a score over the seeds; None if a run does not have it.

        Runs of one seed are no independent samples: they count once, by their mean.
        """
        if any(score not in record.scores for record in self.records):
            return None
        return Mean.of(list(self.by_seed(score).values()))

    def by_seed(self, score: str) -> dict[Any, float]:
        """Return the score of each seed; the mean of runs with the same one."""
        values: dict[Any, list[float]] = {}
        for record in self.records:
            if score in record.scores:
                values.setdefault(record.settings.get(SEED), []).append(record.scores[score])
        return {seed: fmean(of_seed) for seed, of_seed in values.items()}


def grouped(records: Sequence[Record]) -> list[Group]:
    """Group runs that differ only in the seed, in the order of their first runs.

    Settings that do not change the result, such as LOG_EVERY, are compared only if a sweep varies
    them.

    Raises:
        InputError: there are runs of `train` and of `distill`.
    """
    modes = {record.mode: record.path for record in records}
    if len(modes) > 1:
        where = ", ".join(f"{path} is of mode {mode}" for mode, path in modes.items())
        raise InputError(f"A table has runs of one mode, but {where}: give one mode's runs")
    free = {name.upper() for mode in modes for name in _SETTINGS[mode].free_on_resume}
    free -= {name for record in records for name in record.swept}
    names = dict.fromkeys(name for record in records for name in record.settings)
    differing = [
        name
        for name in names
        if name not in {SEED, *free}
        and len({repr(record.settings.get(name)) for record in records}) > 1
    ]
    found: dict[str, list[Record]] = {}
    for record in records:
        key = repr([record.settings.get(name) for name in differing])
        found.setdefault(key, []).append(record)
    return [
        Group({name: of_group[0].settings.get(name) for name in differing}, tuple(of_group))
        for of_group in found.values()
    ]


def baseline(groups: Sequence[Group], against: str | None) -> Group:
    """Return the group that others are compared with: the first, or that of `beta=0.5`.

    Raises:
        InputError: `against` fits no group, or several of them.
    """
    if against is None:
        return groups[0]
    parts = [part.strip().partition("=") for part in against.split(",")]
    fitting = [group for group in groups if group.name == against] or [
        group
        for group in groups
        if all(str(group.settings.get(name.upper())) == text for name, _, text in parts)
    ]
    if len(fitting) != 1:
        raise InputError(
            f"--against is {against!r}, which fits {len(fitting)} of the {len(groups)} groups; "
            f"expected one of: {'; '.join(group.name for group in groups)}"
        )
    return fitting[0]


def best(groups: Sequence[Group], score: str) -> list[Group]:
    """Return the groups with the best mean; none if there is nothing to compare."""
    means = {id(group): mean.value for group in groups if (mean := group.mean(score))}
    if len(set(means.values())) < 2:
        return []
    chosen = min(means.values()) if score in LOWER_IS_BETTER else max(means.values())
    return [group for group in groups if means.get(id(group)) == chosen]


def differences(groups: Sequence[Group], base: Group, score: str) -> list[Difference | None]:
    """Return the difference of each group from the baseline, over the seeds that both have.

    The entry of the baseline is None, and that of a group without a common seed.
    """
    reference = base.by_seed(score)
    changes: list[list[float]] = []
    for group in groups:
        own = {} if group is base else group.by_seed(score)
        changes.append(
            [value - reference[seed] for seed, value in own.items() if seed in reference]
        )
    tested = [i for i, of_group in enumerate(changes) if len(of_group) > 1]
    corrected = holm([_p_value(changes[i]) for i in tested])
    p_values = dict(zip(tested, corrected, strict=True))
    return [
        Difference(Mean.of(of_group), p_values.get(i)) if of_group else None
        for i, of_group in enumerate(changes)
    ]


def _p_value(changes: Sequence[float]) -> float:
    """Return the p-value of the t-test that the mean of paired differences is 0."""
    if stdev(changes) == 0:
        return 1.0 if changes[0] == 0 else 0.0
    n = len(changes)
    t = fmean(changes) / (stdev(changes) / math.sqrt(n))
    return float(2 * stats.t.sf(abs(t), n - 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number (Holm 1979, Scandinavian J. Statistics 6)."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    corrected = [0.0] * len(p_values)
    highest = 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = highest
    return corrected
