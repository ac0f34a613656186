"""Samples ranked by a score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as arrow
from numpy.typing import NDArray


class Ranked:
    """Samples with a score each, the highest first; equal scores by row.

    Args:
        names: name of the sample of every row of the store.
        rows: the rows `[m]`.
        scores: their scores `[m]`.
        columns: further columns `[m]`.
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
        """Return the samples with at least this score."""
        return self.only(self.scores >= threshold)

    def top(self, k: int) -> Ranked:
        """Return the first k."""
        return self.only(slice(k))

    def only(self, places: NDArray[np.bool_] | slice) -> Ranked:
        """Return the samples at some places of this order."""
        columns = {name: values[places] for name, values in self.columns.items()}
        return Ranked(self._names, self.rows[places], self.scores[places], columns)

    def frame(self) -> arrow.Table:
        """Return `row`, `file`, `score` and the further columns as a table."""
        names = [self._names[row] for row in self.rows.tolist()]
        columns = {"row": self.rows, "file": arrow.array(names, arrow.string())}
        return arrow.table({**columns, "score": self.scores, **self.columns})
