"""What the clusters of every level are called, and the file that keeps it."""

from __future__ import annotations

import math
import re
import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from ssl_kd.errors import InputError, printable
from ssl_kd.files import CorruptFileError, atomic_write_json, strict_json

FILE = "names.json"
FORMAT = 1
SHOWN = 3  # words of a name, where the second and third say nearly as much as the first
LEAST = 1 / 3  # of the first word's weight

Weighted = Sequence[tuple[str, float]]


@dataclass(frozen=True)
class Name:
    """What one cluster is called.

    Args:
        text: the name.
        made: what it was called before a person edited it; None: no name was found.
        words: those that speak for it and their weights, the heaviest first.
    """

    text: str
    made: str | None = None
    words: tuple[tuple[str, float], ...] = ()

    @property
    def edited(self) -> bool:
        """Whether a person gave it."""
        return self.text != self.made


@dataclass(frozen=True, repr=False)
class Names:
    """What the clusters of every level are called. One without a name keeps its number.

    Args:
        levels: level, as the column is called (`cluster`, `level_5`) -> cluster -> name.

    >>> names = Names({"cluster": {0: Name("cat", "cat"), 1: Name("dog", "dog")}})
    >>> names.of("cluster", 1), names.of("cluster", 7)
    ('dog', '7')
    >>> names
    Names(cluster: 2 named, cat, dog)
    """

    levels: Mapping[str, Mapping[int, Name]] = field(default_factory=dict)

    def __repr__(self) -> str:
        texts = {level: [name.text for name in of.values()] for level, of in self.levels.items()}
        shown = [
            f"{level}: {len(of)} named" + "".join(f", {text}" for text in of[:SHOWN])
            for level, of in texts.items()
        ]
        return f"Names({'; '.join(shown)})"

    def of(self, level: str, cluster: int) -> str:
        """A cluster's name, or its number."""
        found = self.levels.get(level, {}).get(cluster)
        return str(cluster) if found is None else found.text

    def column(self, level: str, clusters: NDArray[np.integer]) -> NDArray[np.object_]:
        """The names of many, `[n]` -> `[n]`."""
        known, places = np.unique(clusters, return_inverse=True)
        return np.array([self.of(level, int(c)) for c in known], dtype=object)[places]

    def edited(self, edits: Mapping[str, Mapping[int, str]]) -> Self:
        """These, with names that a person gave, level -> cluster -> name; an empty one goes.

        Where another cluster of the level was called so by no person, it loses that name.

        Raises:
            InputError: a person gave two clusters of a level the same name.
        """
        levels = {level: dict(names) for level, names in self.levels.items()}
        for level, given in edits.items():
            taken = {text.strip().casefold() for text in given.values()}
            names = {
                cluster: name
                for cluster, name in levels.get(level, {}).items()
                if cluster in given or name.edited or name.text.casefold() not in taken
            }
            levels[level] = names
            for cluster, text in given.items():
                if not text.strip():
                    names.pop(cluster, None)
                    continue
                name = names.get(cluster, Name(""))
                names[cluster] = replace(name, text=printable(text.strip()))
            _refuse_twins(level, names)
        return type(self)(levels)

    @property
    def edits(self) -> dict[str, dict[int, str]]:
        """Those that a person gave: what `edited` takes."""
        return {
            level: {cluster: name.text for cluster, name in names.items() if name.edited}
            for level, names in self.levels.items()
        }

    def save(self, folder: str | Path) -> Path:
        """Write `names.json`; a file that is there is replaced."""
        levels = {
            level: {
                str(cluster): {
                    "name": name.text,
                    "made": name.made,
                    "words": [[word, round(weight, 6)] for word, weight in name.words],
                }
                for cluster, name in sorted(names.items())
            }
            for level, names in self.levels.items()
        }
        path = Path(folder) / FILE
        atomic_write_json(path, {"format": FORMAT, "levels": levels})
        return path

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read `names.json`, in which names may have been edited by hand; none where it is not.

        Raises:
            CorruptFileError: it is not such a file.
            InputError: a later version wrote it; two clusters of a level have the same name.
        """
        path = Path(folder) / FILE
        if not path.is_file():
            return cls()
        try:
            found = strict_json(path.read_bytes())
            if found["format"] != FORMAT:
                raise InputError(
                    f"{path} has format {found['format']!r}, expected {FORMAT}: another version "
                    "wrote it. Move it away and name the clusters again"
                )
            levels = {
                level: {_number(cluster): _read(entry) for cluster, entry in names.items()}
                for level, names in found["levels"].items()
            }
        except InputError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CorruptFileError(
                f"{path} is damaged ({type(error).__name__}: {error}): mend it, or delete it and "
                "name the clusters again"
            ) from error
        for level, names in levels.items():
            _refuse_twins(level, names, path)
        return cls(levels)


def named(words: Mapping[int, Weighted], shown: int = SHOWN) -> dict[int, Name]:
    """Names of one level from each cluster's words, heaviest first; no two are the same.

    A name is the heaviest word, and up to `shown` that weigh at least a third of it. Clusters of
    the same name say one word more each, until there is none: then their numbers.
    """
    taken = {
        cluster: sum(weight >= LEAST * own[0][1] for _, weight in own[:shown])
        for cluster, own in words.items()
        if own
    }

    def same() -> list[int]:
        keys = {c: frozenset(word for word, _ in words[c][:n]) for c, n in taken.items()}
        often = Counter(keys.values())
        return [cluster for cluster, key in keys.items() if often[key] > 1]

    while longer := [cluster for cluster in same() if taken[cluster] < len(words[cluster])]:
        for cluster in longer:
            taken[cluster] += 1
    twins, names = set(same()), {}
    for cluster, n in taken.items():
        text = ", ".join(word for word, _ in words[cluster][:n])
        text = f"{text} ({cluster})" if cluster in twins else text
        names[cluster] = Name(text, text, tuple(words[cluster]))
    return names


def siblings(levels: Mapping[str, NDArray[np.integer]], level: str) -> dict[int, list[int]]:
    """Of each cluster of a level, those that it is to be told apart from.

    They are the other parts of the same cluster of the next coarser level; of one that is its only
    part, and at the coarsest level, all the others.

    Args:
        levels: level -> each sample's cluster `[n]`, coarsest first; -1 is no cluster.
        level: one of them.
    """
    own, order = levels[level], list(levels)
    all_ = np.unique(own[own >= 0]).tolist()
    others = {cluster: [c for c in all_ if c != cluster] for cluster in all_}
    if place := order.index(level):
        parents = levels[order[place - 1]]
        inside = (own >= 0) & (parents >= 0)
        pairs = np.unique(np.stack([parents[inside], own[inside]]), axis=1)
        for parent in np.unique(pairs[0]):
            parts = pairs[1][pairs[0] == parent].tolist()
            if len(parts) > 1:
                others |= {part: [c for c in parts if c != part] for part in parts}
    return others


def _number(text: str) -> int:
    if not re.fullmatch("-1|0|[1-9][0-9]{0,8}", text):  # "01" would be a second 1
        raise ValueError(f"cluster {reprlib.repr(text)}, expected a number")
    return int(text)


def _read(entry: dict) -> Name:
    text, made = entry["name"], entry.get("made")
    if not isinstance(text, str) or not text.strip() or not isinstance(made, str | None):
        raise ValueError(f"the name {reprlib.repr(text)}, made {reprlib.repr(made)}, expected text")
    words = tuple((str(word), float(weight)) for word, weight in entry.get("words", []))
    if not all(math.isfinite(weight) for _, weight in words):
        raise ValueError("a word's weight is no number")
    return Name(printable(text.strip()), made, words)


def _refuse_twins(level: str, names: Mapping[int, Name], path: Path | None = None) -> None:
    texts: Iterable[str] = (name.text.casefold() for name in names.values())
    twins = [text for text, times in Counter(texts).items() if times > 1]
    if twins:
        both = [str(c) for c, name in names.items() if name.text.casefold() == twins[0]]
        where = "" if path is None else f"{path}: "
        raise InputError(
            f"{where}{' and '.join(both)} of {level} are both called {twins[0]!r}: give each "
            "a name of its own, or merge them"
        )
