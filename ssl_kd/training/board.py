"""TensorBoard's files of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


class Board:
    """TensorBoard's files, where asked for; a context manager.

    Args:
        path: the run folder.
        wanted: if false, nothing is written.
    """

    def __init__(self, path: Path, wanted: bool) -> None:
        self._writer = None
        if wanted:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(path / "tensorboard"))

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """A number becomes a scalar, a list of them a histogram; what is not finite is left out."""
        if self._writer is None:
            return
        for name, value in row.items():
            values = np.atleast_1d(np.array(value, dtype=float))
            values = values[np.isfinite(values)]
            if not len(values):
                continue
            if isinstance(value, list):
                self._writer.add_histogram(name, values, step)
                self._writer.add_scalar(f"{name}_mean", values.mean(), step)
                self._writer.add_scalar(f"{name}_lowest", values.min(), step)
            else:
                self._writer.add_scalar(name, values[0], step)
