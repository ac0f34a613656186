"""Send a run's curves to TensorBoard files, Weights & Biases, Trackio or MLflow."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ssl_kd.core.errors import MissingPackage, UserError, brief

TRACKERS = ("wandb", "trackio", "mlflow")
PROJECT = "ssl_kd"


class BoardUnavailable(UserError, RuntimeError):
    """A tracker, such as Weights & Biases, cannot start logging the run."""


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

    def __exit__(self, kind: object, *exception: object) -> None:
        if self._writer is not None:
            self._writer.close()
        for tracker in self._trackers:
            if isinstance(tracker, _MLflow):
                tracker.finish("FINISHED" if kind is None else "FAILED")
            else:
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
    """Start or continue the run named after the folder; return what has `log` and `finish`."""
    try:
        if name == "mlflow":
            return _MLflow(path, config)
        tracker: Any = importlib.import_module(name)
        options = {"id": path.name, "dir": str(path)} if name == "wandb" else {}
        tracker.init(
            project=PROJECT, name=path.name, config=dict(config), resume="allow", **options
        )
    except Exception as error:  # each tracker raises its own exceptions
        offline = {"wandb": "set WANDB_MODE=offline, ", "mlflow": "set MLFLOW_TRACKING_URI, "}
        raise BoardUnavailable(
            f"{name} does not accept the run ({brief(error)}): log in, {offline.get(name, '')}or "
            "set REPORT_TO to 'none'"
        ) from error
    return tracker


class _MLflow:
    """A run of MLflow, in the experiment `ssl_kd` of MLFLOW_TRACKING_URI."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self._mlflow: Any = importlib.import_module("mlflow")
        self._mlflow.set_experiment(PROJECT)
        file = path / "mlflow_run.txt"  # its id there, by which a resumed run continues
        if file.exists():
            self._mlflow.start_run(run_id=file.read_text(encoding="ascii"))
            return
        run = self._mlflow.start_run(run_name=path.name)
        path.mkdir(parents=True, exist_ok=True)
        file.write_text(run.info.run_id, encoding="ascii")
        self._mlflow.log_params({name: str(value)[:500] for name, value in config.items()})

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(scalars), step=step)

    def finish(self, status: str) -> None:
        self._mlflow.end_run(status)
