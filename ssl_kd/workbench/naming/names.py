"""Store the names of clusters, at every level of the tree, in `names.json`."""

from __future__ import annotations

import math
import re
import reprlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from ssl_kd.errors import InputError, printable
from ssl_kd.files import CorruptFileError, atomic_write_json, strict_json

FILE = "names.json"
FORMAT = 1


@dataclass(frozen=True)
class Name:
    """The name of one cluster.

    Args:
        text: the name.
        made: the automatic name, which differs from `text` after an edit; None without one.
        words: words of the automatic name and their weights, heaviest first.
    """

    text: str
    made: str | None = None
    words: tuple[tuple[str, float], ...] = ()

    @property
    def edited(self) -> bool:
        """True if a person chose the name."""
        return self.text != self.made


@dataclass(frozen=True, repr=False)
class Names:
    """Names of the clusters of every level; the name of an unnamed cluster is its number.

    Args:
        levels: level (`cluster`, `level_5`, ...) -> cluster number -> name.

    >>> names = Names({"cluster": {0: Name("cat", "cat"), 1: Name("dog", "dog")}})
    >>> names.of("cluster", 1), names.of("cluster", 7)
    ('dog', '7')
    >>> names
    Names(cluster: 2 named)
    """

    levels: Mapping[str, Mapping[int, Name]] = field(default_factory=dict)

    def __repr__(self) -> str:
        counts = [f"{level}: {len(names)} named" for level, names in self.levels.items()]
        return f"Names({'; '.join(counts)})"

    def of(self, level: str, cluster: int) -> str:
        """Return the name of a cluster, or its number if it has no name."""
        name = self.levels.get(level, {}).get(cluster)
        return str(cluster) if name is None else name.text

    def column(self, level: str, clusters: NDArray[np.integer]) -> NDArray[np.object_]:
        """Return the names of an array of cluster numbers, `[n]` -> `[n]`."""
        unique, inverse = np.unique(clusters, return_inverse=True)
        return np.array([self.of(level, int(c)) for c in unique], dtype=object)[inverse]

    def edited(self, edits: Mapping[str, Mapping[int, str]]) -> Self:
        """Return a copy with the names that a person chose.

        If an automatic name equals a chosen name of the same level, the automatic one is dropped.

        Args:
            edits: level -> cluster number -> name; an empty name removes the present one.

        Raises:
            InputError: two clusters of a level would have the same name.
        """
        levels = {level: dict(names) for level, names in self.levels.items()}
        for level, new_names in edits.items():
            taken = {text.strip().casefold() for text in new_names.values()}
            names = {
                cluster: name
                for cluster, name in levels.get(level, {}).items()
                if cluster in new_names or name.edited or name.text.casefold() not in taken
            }
            levels[level] = names
            for cluster, text in new_names.items():
                name = names.pop(cluster, Name(""))
                if text.strip():
                    names[cluster] = replace(name, text=printable(text.strip()))
            _refuse_equal(level, names)
        return type(self)(levels)

    @property
    def edits(self) -> dict[str, dict[int, str]]:
        """The names that a person chose, in the form that `edited` takes."""
        return {
            level: {cluster: name.text for cluster, name in names.items() if name.edited}
            for level, names in self.levels.items()
        }

    def save(self, folder: str | Path) -> Path:
        """Write or replace `names.json` in a folder, and return its path."""
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
        """Read and check `names.json` of a folder; return no names if the file does not exist.

        Raises:
            CorruptFileError: the file is damaged.
            InputError: another version wrote the file, or two clusters of a level have the same
                name.
        """
        path = Path(folder) / FILE
        if not path.is_file():
            return cls()
        try:
            content = strict_json(path.read_bytes())
            if content["format"] != FORMAT:
                raise InputError(
                    f"{path} has format {content['format']!r}, expected {FORMAT}: another version "
                    "wrote the file. Move it away and name the clusters again"
                )
            levels = {
                level: {_number(cluster): _name(entry) for cluster, entry in names.items()}
                for level, names in content["levels"].items()
            }
        except InputError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CorruptFileError(
                f"{path} is damaged ({type(error).__name__}: {error}): repair the file, or delete "
                "it and name the clusters again"
            ) from error
        for level, names in levels.items():
            _refuse_equal(level, names, f"{path}: ")
        return cls(levels)


def _number(text: str) -> int:
    if not re.fullmatch("-1|0|[1-9][0-9]{0,8}", text):  # "01" would be a second 1
        raise ValueError(f"a cluster is {reprlib.repr(text)}; expected its number, such as 3")
    return int(text)


def _name(entry: dict) -> Name:
    text, made = entry["name"], entry.get("made")
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"`name` is {reprlib.repr(text)}; expected text that is not empty")
    if not isinstance(made, str | None):
        raise ValueError(f"`made` is {reprlib.repr(made)}; expected text or null")
    words = tuple((str(word), float(weight)) for word, weight in entry.get("words", []))
    if not all(math.isfinite(weight) for _, weight in words):
        raise ValueError(f"`words` of {text!r} has a weight that is not finite")
    return Name(printable(text.strip()), made, words)


def _refuse_equal(level: str, names: Mapping[int, Name], where: str = "") -> None:
    counts = Counter(name.text.casefold() for name in names.values())
    if equal := [text for text, count in counts.items() if count > 1]:
        clusters = [str(c) for c, name in names.items() if name.text.casefold() == equal[0]]
        raise InputError(
            f"{where}the clusters {' and '.join(clusters)} of {level} are all called {equal[0]!r}: "
            "rename one, or merge them"
        )
