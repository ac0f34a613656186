"""Send a run's curves to TensorBoard files, Weights & Biases, or Trackio."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ssl_kd.errors import MissingPackage, UserError, brief

TRACKERS = ("wandb", "trackio")


class BoardUnavailable(UserError, RuntimeError):
    """A tracker (Weights & Biases or Trackio) cannot start logging the run."""


def check_boards(names: Collection[str]) -> None:
    """Raise MissingPackage (an ImportError) if the package of a tracker is not installed."""
    for name in names:
        if name in TRACKERS and importlib.util.find_spec(name) is None:
            raise MissingPackage(
                f"REPORT_TO is {name!r}, but the package {name} is not installed: pip install "
                f"{name}, or set REPORT_TO to 'tensorboard' or 'none'"
            )


class Board:
    """Log a run to TensorBoard files in its folder, or to the project `ssl_kd` of a tracker.

    The run is named after its folder.
    """

    def __init__(
        self, path: Path, names: Collection[str], config: Mapping[str, Any] | None = None
    ) -> None:
        self._writer = None
        if "tensorboard" in names:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(path / "tensorboard"))
        self._trackers = [_start(name, path, config or {}) for name in TRACKERS if name in names]

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._writer is not None:
            self._writer.close()
        for tracker in self._trackers:
            tracker.finish()

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Log finite numbers as scalars, and the mean and the minimum of each list of numbers."""
        scalars: dict[str, float] = {}
        for name, value in row.items():
            values = np.atleast_1d(np.array(value, dtype=float))
            values = values[np.isfinite(values)]
            if len(values) and isinstance(value, list):
                scalars |= {f"{name}_mean": values.mean(), f"{name}_lowest": values.min()}
            elif len(values):
                scalars[name] = float(values[0])
        for name, value in scalars.items():
            if self._writer is not None:
                self._writer.add_scalar(name, value, step)
        for tracker in self._trackers:
            tracker.log(scalars, step=step)


def _start(name: str, path: Path, config: Mapping[str, Any]) -> Any:
    """Start or continue the run named after the folder; return the tracker's module."""
    tracker: Any = importlib.import_module(name)
    options = {"id": path.name, "dir": str(path)} if name == "wandb" else {}
    try:
        tracker.init(
            project="ssl_kd", name=path.name, config=dict(config), resume="allow", **options
        )
    except Exception as error:  # each tracker raises its own exceptions
        raise BoardUnavailable(
            f"{name} does not accept the run ({brief(error)}): log in, set WANDB_MODE=offline for "
            "wandb, or set REPORT_TO to 'none'"
        ) from error
    return tracker
