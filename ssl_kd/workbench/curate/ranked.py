"""Samples in the order in which they deserve a look, and why: cut anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as arrow
from numpy.typing import NDArray


class Ranked:
    """Some samples and a score of each, the highest first; among equals by their rows.

    Args:
        names: the sample's name, by its row.
        rows: `[m]` rows.
        scores: `[m]`.
        columns: more about each, `[m]`.
    """

    def __init__(
        self,
        names: Sequence[str],
        rows: NDArray[np.int64],
        scores: NDArray[np.floating],
        columns: Mapping[str, NDArray] | None = None,
    ) -> None:
        order = np.lexsort((rows, -scores))
        self._names, self.rows, self.scores = names, rows[order], scores[order]
        self.columns = {name: values[order] for name, values in (columns or {}).items()}

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        best = f", scores {self.scores[0]:.3f} to {self.scores[-1]:.3f}" if len(self) else ""
        return f"Ranked({len(self)} samples{best})"

    def above(self, threshold: float) -> Ranked:
        """Those with at least this score."""
        return self.only(self.scores >= threshold)

    def top(self, k: int) -> Ranked:
        """The first k."""
        return self.only(slice(k))

    def only(self, places: NDArray[np.bool_] | slice) -> Ranked:
        """Some of them, by their places in this order."""
        columns = {name: values[places] for name, values in self.columns.items()}
        return Ranked(self._names, self.rows[places], self.scores[places], columns)

    def frame(self) -> arrow.Table:
        """`row`, `file`, `score` and what more is known, the highest score first."""
        names = [self._names[row] for row in self.rows.tolist()]
        columns = {"row": self.rows, "file": arrow.array(names, arrow.string())}
        return arrow.table({**columns, "score": self.scores, **self.columns})
