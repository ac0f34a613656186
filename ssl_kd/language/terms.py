"""What a student learns from beside its text and its teacher's distributions."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn

from ssl_kd.datasets.blocks import Batch


class Term(Protocol):
    """A loss term of an `Objective`, beside `ce` and `kd`; it fails alone, as they do."""

    @property
    def name(self) -> str:
        """Its part of the guard, and its column in `metrics.jsonl`; not `ce`, `kd` or `model`."""
        ...

    @property
    def weight(self) -> float:
        """Of the term in the loss, above 0."""
        ...

    @property
    def module(self) -> nn.Module | None:
        """What is trained with the student and discarded afterwards; None for nothing."""
        ...

    def listening(self) -> AbstractContextManager[None]:
        """Around the forward passes of student and teacher on a batch, to see what it needs."""
        ...

    def __call__(self, batch: Batch, rows: Tensor) -> Tensor:
        """The term of a batch, after the forward passes.

        Args:
            batch: as the student reads it.
            rows: int64 `[n]`, the positions in the flattened `[batch * token]` that predict a token
                that counts.

        Returns:
            A float32 scalar, a sum over what `count` counts.
        """
        ...

    def count(self, batch: Batch) -> int:
        """What the term is a mean over."""
        ...
