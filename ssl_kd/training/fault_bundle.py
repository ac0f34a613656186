"""The flight recorder: the first fault of a part, saved as a small file that can be run again."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from torch import Tensor

from ssl_kd.errors import InputError
from ssl_kd.files import CorruptFileError, load_tensors, save_tensors
from ssl_kd.guard.diagnosis import Diagnosis, report
from ssl_kd.guard.events import Event
from ssl_kd.guard.microscope import Fault

logger = logging.getLogger(__name__)

DTYPES = ("float32", "float16", "bfloat16")
"""What a recorded step may have been computed in."""

_FORMAT = "ssl_kd flight recorder 2"
_KINDS = {"event": dict, "indices": Tensor, "tensors": dict, "settings": dict, "left_out": list}
_EVENT = {"step": int, "part": str, "stage": str, "reason": str, "action": str}
_EVENT |= {"value": float | int | None}
_MOST = 8  # bundles of a run


@dataclass(frozen=True)
class Bundle:
    """The step at which a part failed, with all that is needed to repeat it.

    Attributes:
        event: the fault, its part and step.
        indices: which samples or tokens were in the batch.
        tensors: what the step is computed from; `views` is the batch.
        settings: plain values: numbers, strings, lists and dictionaries of them.
        left_out: names of tensors that were over the size limit.
    """

    event: Event
    indices: Tensor
    tensors: dict[str, Tensor]
    settings: dict[str, Any]
    left_out: list[str] = field(default_factory=list)


def save_bundle(path: str | Path, bundle: Bundle, limit_mib: float = 64) -> None:
    """Write a bundle, atomically.

    Args:
        path: the file; a missing folder is made.
        bundle: its tensors are copied to the CPU. In its settings, numbers of other libraries
            become Python's, and other objects become their `str`.
        limit_mib: of all tensors together; above it, `views` is left out first, then the largest.

    Raises:
        OSError: the disk is full or the folder cannot be written.
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
    """The value in built-in types alone, so that loading the file executes nothing."""
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
    """Read a bundle; nothing in it is executed.

    Raises:
        FileNotFoundError: there is no such file.
        InputError: it is a file of another kind.
        CorruptFileError: it is damaged, or is not a bundle.
    """
    with open(path, "rb") as file:
        if (start := file.read(2)) and start != b"PK":  # torch writes a bundle as a zip file
            raise InputError(
                f"{path} is a file of another kind. Expected a bundle: one of the files in the "
                "folder faults of a run"
            )
    content = load_tensors(path)
    form = content.pop("format", None) if isinstance(content, dict) else None
    if form != _FORMAT:
        raise CorruptFileError(
            f"{path} is not a bundle of this version's flight recorder: its format is "
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
            f"{path} is damaged: a field of the bundle is missing, unknown, or of the wrong type. "
            f"Expected {', '.join(_KINDS)}, and nothing else."
        )
    return Bundle(**{**content, "event": Event(**content["event"])})


def has_fields(values: object, kinds: Mapping[str, Any]) -> bool:
    """Return whether `values` is a dictionary of exactly these names, each of its type."""
    return (
        isinstance(values, dict)
        and values.keys() == kinds.keys()
        and all(isinstance(values[name], kind) for name, kind in kinds.items())
    )


class FlightRecorder:
    """Saves the first fault of each part, and at most eight bundles in all.

    Args:
        folder: for bundles, `head-3-step300.pt`; made with the first one. Bundles that are there
            already count, so that a resumed run records no part twice.
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
        """Save a fault; return the file, or None where it is not wanted or cannot be written.

        A full disk must not end the run: it is logged as a warning.
        """
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
    """Return the error for a bundle that does not hold a step as a run records it."""
    return CorruptFileError(f"{path} cannot be run again: {reason}. Expected a bundle of a run.")


@dataclass(frozen=True)
class Replay:
    """The result of a replay; as a string, a report of a few lines.

    Attributes:
        bundle: the recorded step.
        reproduced: whether the step went wrong again.
        fault: the first operation whose output was not finite, if there is one.
        diagnosis: why, and what to change.
        sample: which part of the data the fault comes from; empty where it does not.
        seen: (label, text) of further observations, for a step without such an operation.
    """

    bundle: Bundle
    reproduced: bool
    fault: Fault | None
    diagnosis: Diagnosis | None
    sample: str = ""
    seen: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        """A few lines: what, where, inputs, cause, what to change."""
        event, fault, how = self.bundle.event, self.fault, self.bundle.settings["replay"]
        rows = [("fault", f"{event.part}, step {event.step}: {event.reason}")]
        if not how["exact"]:
            rows.append(("note", "the state is of a later step; the fault may not show"))
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
                    "the fault came from outside these numbers: a bit flipped in memory or on the "
                    "device, a kernel of that device, or a test that put it there. If it comes "
                    "back, test the memory and run with --device cpu"
                )
                rows.append(("meaning", meaning))
        return "\n".join(f"{name:<9}{value}" for name, value in rows)
