"""Sequences of strings that are created on access."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class LazyStrings(Sequence[str]):
    """A sequence of strings in constant memory, equal to any sequence of the same strings.

    Args:
        n: length.
        read: returns the string of a row, 0 ... n - 1.

    >>> names = LazyStrings(1000, str)
    >>> names[-1], names[2:4], len(names)
    ('999', ['2', '3'], 1000)
    """

    def __init__(self, n: int, read: Callable[[int], str]) -> None:
        self._rows, self._read = range(n), read

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int | slice) -> Any:
        rows = self._rows[row]
        return self._read(rows) if isinstance(rows, int) else [self._read(at) for at in rows]

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)
