"""What all ways to keep a teacher's answer have in common."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import Self

from ssl_kd.datasets.blocks import Batch
from ssl_kd.language.teacher_fingerprint import TeacherFingerprint
from ssl_kd.losses.teacher_output import LinearTeacher, LogitsTeacher, TeacherOutput, TopKTeacher
from ssl_kd.store.shards import Columns, Content, Manifest

Whole = LinearTeacher | LogitsTeacher
"""A whole distribution."""
Live = Whole | TopKTeacher
"""What a teacher itself answers; one on a server its likeliest tokens alone."""


class Kept(ABC):
    """How a cache keeps a teacher's answer: what of it, in which columns, and back."""

    name: ClassVar[str]
    """The CACHE_METHOD."""
    finite: ClassVar[tuple[str, ...]] = ()
    """Columns that hold finite numbers alone."""
    below_inf: ClassVar[tuple[str, ...]] = ()
    """Columns of logarithms: -inf is that of 0."""

    @property
    def bounds(self) -> Mapping[str, tuple[float, float]]:
        """Smallest and largest value of columns, where not every finite number can be."""
        return {}

    @classmethod
    @abstractmethod
    def planned(cls, answer: Live, fingerprint: TeacherFingerprint, vocabulary: int | None) -> Self:
        """For a teacher that answers like this.

        Args:
            answer: at some positions.
            fingerprint: method, k and temperature.
            vocabulary: number of tokens that the tokenizer has; None: as many as the teacher.

        Raises:
            InputError: such an answer cannot be kept in this way.
        """

    @classmethod
    @abstractmethod
    def of(cls, manifest: Manifest) -> Self:
        """As a manifest says it.

        Raises:
            ValueError: it lacks something.
        """

    @property
    @abstractmethod
    def header(self) -> Manifest:
        """What the manifest says beside the fingerprint."""

    @property
    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What a report says beside the method's name."""

    @property
    @abstractmethod
    def columns(self) -> Columns:
        """Shape and dtype of what is kept at one position."""

    @abstractmethod
    def content(self, answer: Live, batch: Batch, rows: Tensor) -> Content:
        """What is kept of an answer.

        Args:
            answer: at `rows`.
            batch: what the teacher was asked about.
            rows: int64 `[n]` into its flattened `[batch * token]` positions.

        Returns:
            The `columns`, `[n, ...]`, with `lost`, the mass that is not kept, and `error` in nats;
            `error` is NaN where there is no finite answer.
        """

    @abstractmethod
    def answer(self, column: Callable[[str], Tensor]) -> TeacherOutput:
        """The answer at some positions, from what the columns hold there."""

    def save(self, folder: Path, answer: Live) -> list[Path]:
        """Write what is kept once for all positions; the files, those already there included."""
        return []

    def load(self, folder: Path) -> Self:
        """With what `save` wrote.

        Raises:
            CorruptFileError: it is damaged or missing; the message names the file.
        """
        return self

    def __str__(self) -> str:
        return f"{self.name} {next(iter(self.facts.values()))}"

    def bytes_a_position(self) -> int:
        """Bytes of the columns at one position."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.columns.values())
