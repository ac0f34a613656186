"""Rank samples by a score, and show them as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as arrow
from numpy.typing import NDArray


class Ranked:
    """Samples sorted by score, highest first; samples with equal scores are sorted by row.

    `names` has the name of every sample of the store. `rows`, `scores` and each of the further
    `columns` have a value for each ranked sample, `[m]`.
    """

    def __init__(
        self,
        names: Sequence[str],
        rows: NDArray[np.int64],
        scores: NDArray[np.floating],
        columns: Mapping[str, NDArray] | None = None,
    ) -> None:
        order = np.lexsort((rows, -scores))
        self._names = names
        self.rows = rows[order]
        self.scores = scores[order]
        self.columns = {name: values[order] for name, values in (columns or {}).items()}

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        best = f", scores {self.scores[0]:.3f} to {self.scores[-1]:.3f}" if len(self) else ""
        return f"Ranked({len(self)} samples{best})"

    def above(self, threshold: float) -> Ranked:
        """Return the samples with a score of at least `threshold`."""
        return self.only(self.scores >= threshold)

    def top(self, k: int) -> Ranked:
        """Return the k samples with the highest scores."""
        return self.only(slice(k))

    def only(self, places: NDArray[np.bool_] | slice) -> Ranked:
        """Return the samples at some positions of the ranking, selected by a mask or a slice."""
        columns = {name: values[places] for name, values in self.columns.items()}
        return Ranked(self._names, self.rows[places], self.scores[places], columns)

    def frame(self) -> arrow.Table:
        """Return a table with the columns `row`, `file`, `score` and those of `columns`."""
        names = [self._names[row] for row in self.rows.tolist()]
        columns = {"row": self.rows, "file": arrow.array(names, arrow.string())}
        return arrow.table({**columns, "score": self.scores, **self.columns})
