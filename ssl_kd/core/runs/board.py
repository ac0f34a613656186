"""Send curves and events of a run to TensorBoard, Weights & Biases, Trackio or MLflow."""

from __future__ import annotations

import importlib
import importlib.util
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from firstnan.events import Event, EventLog
from ssl_kd.core.errors import MissingPackage, UserError, brief
from ssl_kd.core.runs.writer import read_json_lines

TRACKERS = ("wandb", "trackio", "mlflow")
PROJECT = "ssl_kd"
EVENTS = "guard/events"
_ROWS = 10_000  # of a table of events


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

    The run is named after its folder. Events of the guard are marks: each record has their number
    since the record before (`guard/events`), so that they are spikes below the losses, and what
    happened is a text at the step (TensorBoard), an alert for the first of each kind and a table
    (Weights & Biases, Trackio), or a tag and the file `events.jsonl` (MLflow).

    Args:
        path: the folder of the run.
        names: where to log: `tensorboard` or some of `TRACKERS`; empty for nowhere.
        config: the settings.
        events: the log of the guard; its events reach the board with the next record.
    """

    def __init__(
        self,
        path: Path,
        names: Collection[str],
        config: Mapping[str, Any] | None = None,
        events: EventLog | None = None,
    ) -> None:
        self.last_step = -1  # that was logged
        self._n_of_step = 0  # events logged at `last_step`
        self._events, self._n_told = EventLog() if events is None else events, 0
        self._services = [
            _start(name, path, config or {}) for name in ("tensorboard", *TRACKERS) if name in names
        ]

    def __enter__(self) -> Board:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if self._n_told < len(self._events):
            self.log(max(self.last_step, self._events.events[-1].step), {})
        for service in self._services:
            service.finish(self.last_step, error)

    def resume(self, step: int) -> None:
        """Continue after `step` steps; TensorBoard hides what was logged of later ones before."""
        self.last_step = step
        for service in self._services:
            service.resume(step)

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Log finite numbers as scalars, a list of numbers as a band, and the guard's new events.

        A band is the median, the minimum and the maximum of the finite numbers of the list.
        """
        new, self._n_told = self._events.events[self._n_told :], len(self._events)
        scalars: dict[str, float] = {}
        bands: list[str] = []
        for name, value in row.items():
            values = np.atleast_1d(np.array(value, dtype=float))
            values = values[np.isfinite(values)]
            if len(values) and isinstance(value, list):
                bands.append(name)
                scalars[f"{name}_median"] = float(np.median(values))
                scalars[f"{name}_lowest"] = float(values.min())
                scalars[f"{name}_highest"] = float(values.max())
            elif len(values):
                scalars[name] = float(values[0])
        if is_first := step != self.last_step:
            self.last_step, self._n_of_step = step, 0
        self._n_of_step += len(new)
        if is_first or new:  # a second record of a step does not hide the events of the first
            scalars[EVENTS] = float(self._n_of_step)
        for service in self._services:
            service.log(scalars, bands, step)
            if new:
                service.mark(new)


class _Service(Protocol):
    """What shows a run."""

    def resume(self, step: int) -> None:
        """Continue after `step` steps."""
        ...

    def log(self, scalars: Mapping[str, float], bands: Sequence[str], step: int) -> None:
        """Show numbers; those of a band are `_median`, `_lowest` and `_highest` of its name."""
        ...

    def mark(self, events: Sequence[Event]) -> None:
        """Show events of the guard."""
        ...

    def finish(self, step: int, error: BaseException | None) -> None:
        """End the run after `step` steps; it failed, or was stopped, if there is an error."""
        ...


def _start(name: str, path: Path, config: Mapping[str, Any]) -> _Service:
    """Start or continue the run named after the folder."""
    kinds = {"tensorboard": _TensorBoard, "mlflow": _MLflow}
    try:
        if name in kinds:
            return kinds[name](path, config)
        return _Tracker(name, path, config)
    except Exception as error:  # each tracker raises its own exceptions
        offline = {"wandb": "set WANDB_MODE=offline, ", "mlflow": "set MLFLOW_TRACKING_URI, "}
        raise BoardUnavailable(
            f"{name} does not accept the run ({brief(error)}): log in, {offline.get(name, '')}or "
            "set REPORT_TO to 'none'"
        ) from error


class _TensorBoard:
    """Files in the folder of a run, written from the first record on."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self._folder = path / "tensorboard"
        self._writer: Any = None
        self._begins = 0
        self._has_bands = False

    def resume(self, step: int) -> None:
        self._begins = step + 1

    def log(self, scalars: Mapping[str, float], bands: Sequence[str], step: int) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=self._begins)
        if bands and not self._has_bands:  # charts with a shaded margin, on the page Custom Scalars
            ends = ("median", "lowest", "highest")
            charts = {band: ["Margin", [f"{band}_{end}" for end in ends]] for band in bands}
            self._writer.add_custom_scalars({"per head": charts})
            self._has_bands = True
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def mark(self, events: Sequence[Event]) -> None:
        for step, of_step in groupby(events, lambda event: event.step):
            self._writer.add_text(EVENTS, "\n\n".join(map(str, of_step)), step)

    def finish(self, step: int, error: BaseException | None) -> None:
        if self._writer is not None:
            self._writer.close()


class _Tracker:
    """A run of Weights & Biases or Trackio, whose modules have the same functions."""

    def __init__(self, name: str, path: Path, config: Mapping[str, Any]) -> None:
        self._module: Any = importlib.import_module(name)
        self._is_wandb = name == "wandb"
        self._path = path
        self._announced: set[tuple[str, str]] = set()
        options = {"id": path.name, "dir": str(path)} if self._is_wandb else {}
        self._module.init(
            project=PROJECT, name=path.name, config=dict(config), resume="allow", **options
        )

    def resume(self, step: int) -> None:
        pass  # both continue the run of this name

    def log(self, scalars: Mapping[str, float], bands: Sequence[str], step: int) -> None:
        self._module.log(dict(scalars), step=step)

    def mark(self, events: Sequence[Event]) -> None:
        for event in events:  # an alert may be an e-mail: one for each kind
            if (event.stage, event.action) not in self._announced:
                self._announced.add((event.stage, event.action))
                self._alert(f"guard: {event.stage}, {event.action}", str(event))

    def _alert(self, title: str, text: str) -> None:
        self._module.alert(title=title[:63], text=text)  # 63 is the most that wandb takes

    def finish(self, step: int, error: BaseException | None) -> None:
        if rows := read_json_lines(self._path / "events.jsonl")[:_ROWS]:
            table = self._module.Table(
                columns=list(rows[0]), data=[list(row.values()) for row in rows]
            )
            self._module.log({"guard/table": table}, step=step)
        if self._is_wandb:
            self._module.finish(exit_code=0 if error is None else 1)
            return
        if error is not None:  # Trackio has no state of a run
            self._alert("the run ended early", brief(error))
        self._module.finish()


class _MLflow:
    """A run of MLflow, in the experiment `ssl_kd` of MLFLOW_TRACKING_URI."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self._mlflow: Any = importlib.import_module("mlflow")
        self._mlflow.set_experiment(PROJECT)
        self._path = path
        file = path / "mlflow_run.txt"  # its id there, by which a resumed run continues
        if file.exists():
            self._mlflow.start_run(run_id=file.read_text(encoding="ascii"))
            return
        run = self._mlflow.start_run(run_name=path.name)
        path.mkdir(parents=True, exist_ok=True)
        file.write_text(run.info.run_id, encoding="ascii")
        self._mlflow.log_params({name: str(value)[:500] for name, value in config.items()})

    def resume(self, step: int) -> None:
        pass  # the metrics of later steps stay; MLflow cannot remove them

    def log(self, scalars: Mapping[str, float], bands: Sequence[str], step: int) -> None:
        self._mlflow.log_metrics(dict(scalars), step=step)

    def mark(self, events: Sequence[Event]) -> None:
        counts = Counter(event["action"] for event in read_json_lines(self._path / "events.jsonl"))
        text = ", ".join(f"{count} {action}" for action, count in counts.most_common())
        self._mlflow.set_tag("guard", text[:500])

    def finish(self, step: int, error: BaseException | None) -> None:
        if read_json_lines(self._path / "events.jsonl"):
            self._mlflow.log_artifact(str(self._path / "events.jsonl"))
        stopped = isinstance(error, KeyboardInterrupt)
        self._mlflow.end_run("FINISHED" if error is None else "KILLED" if stopped else "FAILED")
