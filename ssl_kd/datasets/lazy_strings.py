"""Strings that are made when they are read, so that a sequence of any length takes no memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload


class LazyStrings(Sequence[str]):
    """A sequence of strings in constant memory, equal to any sequence of the same strings.

    Args:
        n: how many.
        read: returns the string of a row, 0 ... n - 1.

    >>> names = LazyStrings(1000, str)
    >>> names[-1], names[2:4], len(names)
    ('999', ['2', '3'], 1000)
    """

    def __init__(self, n: int, read: Callable[[int], str]) -> None:
        self._rows, self._read = range(n), read

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, row: int) -> str: ...

    @overload
    def __getitem__(self, row: slice) -> list[str]: ...

    def __getitem__(self, row: int | slice) -> str | list[str]:
        rows = self._rows[row]
        return self._read(rows) if isinstance(rows, int) else [self._read(at) for at in rows]

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        pairs = zip(self, other, strict=False)
        return len(self) == len(other) and all(mine == theirs for mine, theirs in pairs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self[:3]}, {len(self)} in all)"
