"""Where the curves of a run are shown: TensorBoard's files, Weights & Biases, Trackio."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ssl_kd.errors import MissingPackage, UserError

TRACKERS = ("wandb", "trackio")
PROJECT = "ssl_kd"


class BoardUnavailable(UserError, RuntimeError):
    """A tracker that does not take the run; the message says why and what to do."""


def check_boards(names: Collection[str]) -> None:
    """See that the packages are there, before any work.

    Raises:
        ImportError: one is not installed; says how to install it.
    """
    for name in names:
        if name in TRACKERS and importlib.util.find_spec(name) is None:
            raise MissingPackage(
                f"REPORT_TO is {name!r}, and the package {name} is not installed: pip install "
                f"{name}, or set REPORT_TO to 'tensorboard' or 'none'"
            )


class Board:
    """Hands the numbers of a run on to those who draw them; a context manager.

    Args:
        path: the run folder; its name is the run's.
        names: of `tensorboard` (files in the folder), `wandb` and `trackio` (of the project
            `ssl_kd`); none of them for none.
        config: settings, for those that keep them.

    Raises:
        BoardUnavailable: a tracker cannot be reached, or its credentials are missing.
    """

    def __init__(
        self, path: Path, names: Collection[str], config: Mapping[str, Any] | None = None
    ) -> None:
        self._writer = None
        if "tensorboard" in names:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(path / "tensorboard"))
        self._trackers = [_begun(name, path, config or {}) for name in TRACKERS if name in names]

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._writer is not None:
            self._writer.close()
        for tracker in self._trackers:
            tracker.finish()

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """A number becomes a scalar, a list of them a histogram; what is not finite is left out.

        (Trackers get a list's mean and its lowest value.)
        """
        scalars: dict[str, float] = {}
        for name, value in row.items():
            values = np.atleast_1d(np.array(value, dtype=float))
            values = values[np.isfinite(values)]
            if not len(values):
                continue
            if not isinstance(value, list):
                scalars[name] = float(values[0])
                continue
            scalars |= {f"{name}_mean": float(values.mean()), f"{name}_lowest": float(values.min())}
            if self._writer is not None:
                self._writer.add_histogram(name, values, step)
        for name, value in scalars.items():
            if self._writer is not None:
                self._writer.add_scalar(name, value, step)
        for tracker in self._trackers:
            tracker.log(scalars, step=step)


def _begun(name: str, path: Path, config: Mapping[str, Any]) -> Any:
    """A tracker's module with a run of this name; one that is resumed goes on."""
    tracker: Any = importlib.import_module(name)
    own = {"id": path.name, "dir": str(path)} if name == "wandb" else {}
    try:
        tracker.init(project=PROJECT, name=path.name, config=dict(config), resume="allow", **own)
    except Exception as error:  # the network and each tracker have exceptions of their own
        reason = " ".join(str(error).split())[:200]
        raise BoardUnavailable(
            f"{name} does not take the run ({reason}): log in there, set WANDB_MODE=offline for "
            "wandb, or set REPORT_TO to 'none'"
        ) from error
    return tracker
