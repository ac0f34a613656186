"""Send a run's curves to TensorBoard files, Weights & Biases, or Trackio."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ssl_kd.core.errors import MissingPackage, UserError, brief

TRACKERS = ("wandb", "trackio")


class BoardUnavailable(UserError, RuntimeError):
    """A tracker (Weights & Biases or Trackio) cannot start logging the run."""


def check_boards(names: Collection[str]) -> None:
    """Raise MissingPackage (an ImportError) if the package of a board is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            package = name if name in TRACKERS else f"'ssl_kd[{name}]'"
            raise MissingPackage(
                f"REPORT_TO is {name!r}, but the package {name} is not installed: pip install "
                f"{package}, or set REPORT_TO to 'auto' or 'none'"
            )


class Board:
    """Log a run to TensorBoard files in its folder, or to the project `ssl_kd` of a tracker.

    The run is named after its folder.
    """

    def __init__(
        self, path: Path, names: Collection[str], config: Mapping[str, Any] | None = None
    ) -> None:
        self._folder = path / "tensorboard" if "tensorboard" in names else None
        self._writer: Any = None  # of the files, opened by the first call of `log`
        self.last_step = -1  # that was logged
        self._trackers = [_start(name, path, config or {}) for name in TRACKERS if name in names]

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._writer is not None:
            self._writer.close()
        for tracker in self._trackers:
            tracker.finish()

    def resume(self, step: int) -> None:
        """Continue after `step` steps; TensorBoard hides what was logged of later ones before."""
        self.last_step = step

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Log finite numbers as scalars, and mean, minimum and maximum of each list of numbers."""
        scalars: dict[str, float] = {}
        for name, value in row.items():
            values = np.atleast_1d(np.array(value, dtype=float))
            values = values[np.isfinite(values)]
            if len(values) and isinstance(value, list):
                scalars[f"{name}_mean"] = float(values.mean())
                scalars[f"{name}_lowest"] = float(values.min())
                scalars[f"{name}_highest"] = float(values.max())
            elif len(values):
                scalars[name] = float(values[0])
        if self._folder is not None and self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=self.last_step + 1)
        self.last_step = step
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
