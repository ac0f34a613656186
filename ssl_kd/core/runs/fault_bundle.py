"""Save the first faulty step of each head or layer to a small file, from which it can be rerun."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from torch import Tensor

from firstnan.diagnosis import Diagnosis, report
from firstnan.events import Event
from firstnan.microscope import Fault
from ssl_kd.core.errors import InputError
from ssl_kd.core.files import CorruptFileError, load_tensors, save_tensors

logger = logging.getLogger(__name__)

DTYPES = ("float32", "float16", "bfloat16")
"""Data types in which a recorded step may have been computed."""

_FORMAT, _FROM_ZERO = "ssl_kd flight recorder 3", "ssl_kd flight recorder 2"
_KINDS = {"event": dict, "indices": Tensor, "tensors": dict, "settings": dict, "left_out": list}
_EVENT = {"step": int, "part": str, "stage": str, "reason": str, "action": str}
_EVENT |= {"value": float | int | None}
_MOST = 8  # largest number of bundles per run


@dataclass(frozen=True)
class Bundle:
    """A step in which a part of the model failed, with everything needed to run it again."""

    event: Event  # the fault
    indices: Tensor  # of the samples or tokens in the batch
    tensors: dict[str, Tensor]  # the batch (`views`) and the state before the step
    settings: dict[str, Any]
    left_out: list[str] = field(default_factory=list)  # tensors dropped for the size limit

    @property
    def step(self) -> int:
        """The step counted from 0, on which its random numbers depend."""
        return self.event.step - 1


def save_bundle(path: str | Path, bundle: Bundle, limit_mib: float = 64) -> None:
    """Write a bundle to a file atomically; above the limit, drop `views`, then the largest tensor.

    In the settings, NumPy numbers become Python numbers, and objects of other types become `str`.
    """
    tensors = dict(bundle.tensors)
    first = sorted(tensors, key=lambda name: (name == "views", tensors[name].nbytes), reverse=True)
    left_out = list(bundle.left_out)
    while sum(tensor.nbytes for tensor in tensors.values()) > limit_mib * 2**20:
        left_out.append(first.pop(0))
        del tensors[left_out[-1]]
    content = {
        "format": _FORMAT,
        "event": _plain(asdict(bundle.event)),
        "indices": bundle.indices.detach().cpu(),
        # Cloned: a view would bring the whole storage behind it into the file.
        "tensors": {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()},
        "settings": _plain(bundle.settings),
        "left_out": left_out,
    }
    save_tensors(path, content)


def _plain(value: Any) -> Any:
    """Convert a value to built-in types, so that loading the file executes no code."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(inner) for inner in value]
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else str(value)


def load_bundle(path: str | Path) -> Bundle:
    """Read a bundle, and execute no code from the file.

    Raises InputError if the file cannot be a bundle, and CorruptFileError if it is damaged.
    """
    with open(path, "rb") as file:
        if (start := file.read(2)) and start != b"PK":  # torch writes a bundle as a zip file
            raise InputError(
                f"{path} is not a fault bundle. Expected one of the .pt files in a run's folder "
                "faults"
            )
    content = load_tensors(path)
    form = content.pop("format", None) if isinstance(content, dict) else None
    if form not in (_FORMAT, _FROM_ZERO):
        raise CorruptFileError(
            f"{path} is not a fault bundle that this version of ssl_kd can read: its format is "
            f"{str(form)[:50]!r}, expected {_FORMAT!r}. Install the commit that wrote it (`commit` "
            "in config.json of the run), or record the fault again."
        )
    if not (
        has_fields(content, _KINDS)
        and has_fields(content["event"], _EVENT)
        and all(isinstance(tensor, Tensor) for tensor in content["tensors"].values())
        and all(isinstance(name, str) for name in content["left_out"])
    ):
        raise CorruptFileError(
            f"{path} is damaged: a field is missing, unknown, or of the wrong type. Expected "
            f"{', '.join(_KINDS)}: run training again to record the fault again."
        )
    event = Event(**content["event"])
    if form == _FROM_ZERO:  # its events count the steps from 0
        event = replace(event, step=event.step + 1)
    return Bundle(**{**content, "event": event})


def has_fields(values: object, kinds: Mapping[str, Any]) -> bool:
    """Return whether `values` is a dictionary with exactly the keys and value types of `kinds`."""
    return (
        isinstance(values, dict)
        and values.keys() == kinds.keys()
        and all(isinstance(values[name], kind) for name, kind in kinds.items())
    )


class FlightRecorder:
    """Save the first fault of each part of the model, and at most eight bundles per run.

    The bundles in `folder`, such as `head-3-step300.pt`, count after a resume, too.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._recorded = {file.stem.rpartition("-step")[0] for file in self.folder.glob("*.pt")}

    def wants(self, part: str) -> bool:
        """Return whether a fault of this part would be saved."""
        return len(self._recorded) < _MOST and _slug(part) not in self._recorded

    def bundles(self) -> list[Path]:
        """Return the saved bundles, oldest first."""
        return sorted(self.folder.glob("*.pt"), key=lambda file: file.stat().st_mtime_ns)

    def record(self, bundle: Bundle) -> Path | None:
        """Save a fault and return the path; None if `wants` is false or the write fails."""
        part, step = bundle.event.part, bundle.event.step
        if not self.wants(part):
            return None
        self._recorded.add(_slug(part))
        path = self.folder / f"{_slug(part)}-step{step}.pt"
        try:
            save_bundle(path, bundle)
        except OSError as error:
            logger.warning("step %d, %s: the fault could not be recorded: %s", step, part, error)
            return None
        return path


def _slug(part: str) -> str:
    return re.sub(r"\W+", "-", part)


def damaged(path: str | Path, reason: str) -> CorruptFileError:
    """Return the error to raise for a bundle whose content is not a valid recorded step."""
    return CorruptFileError(f"{path} cannot be run again: {reason}. Use a bundle that a run wrote")


@dataclass(frozen=True)
class Replay:
    """The result of running a recorded step again; `str()` gives a report of a few lines."""

    bundle: Bundle
    reproduced: bool  # whether the step failed again
    fault: Fault | None  # the first operation with an output that is not finite
    diagnosis: Diagnosis | None  # None without `fault`
    sample: str = ""  # the sample that caused the fault; empty if the data did not cause it
    seen: tuple[tuple[str, str], ...] = ()  # (label, text) of a step without a `fault`

    def __str__(self) -> str:
        """Return the report: the fault, its place, inputs and cause, and what to change."""
        event, fault, how = self.bundle.event, self.fault, self.bundle.settings["replay"]
        rows = [("fault", f"{event.part}, step {event.step}: {event.reason}")]
        if not how["exact"]:
            rows.append(("note", "the state is from a later step; the fault may not appear again"))
        if fault is not None and self.diagnosis is not None:
            where = f"backward pass ({fault.node})" if fault.backward else "forward pass"
            rows.append(("first op", f"{fault.op}, {where}"))
            rows += [("at", str(fault.place))] if fault.place else []
            rows += report(fault, self.diagnosis)
            rows += [("sample", self.sample)] if self.sample else []
        elif self.reproduced or self.seen:
            rows += self.seen
        else:
            where = f"recorded on {how['device']}; run again on the CPU"
            rows.append(("seen", f"{where}, the same step is healthy"))
            if how["exact"]:
                meaning = (
                    "the recorded numbers do not cause the fault: a bit may have flipped in "
                    "memory, a kernel of the device may be faulty, or a test injected the fault. "
                    "If it happens again, test the memory and run with --device cpu"
                )
                rows.append(("meaning", meaning))
        return "\n".join(f"{name:<9}{value}" for name, value in rows)
