"""Save the first faulty step of each head or layer to a small file, from which it can be rerun."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from torch import Tensor

from firstnan.bundle_file import BundleError, pack, unpack
from firstnan.diagnosis import Diagnosis, report
from firstnan.events import Event
from firstnan.microscope import Fault
from ssl_kd.core.errors import InputError
from ssl_kd.core.files import CorruptFileError, atomic_write_bytes

logger = logging.getLogger(__name__)

DTYPES = ("float32", "float16", "bfloat16")
"""Data types in which a recorded step may have been computed."""

KIND = "a training step of ssl_kd"
_STEP = {"event": dict, "settings": dict, "left_out": list}
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


class OtherKind(InputError):
    """A file holds a bundle, but of another kind, such as `firstnan.bundle.KIND`."""

    def __init__(self, path: str | Path, kind: str) -> None:
        super().__init__(
            f"{path} holds {kind!r:.80}, expected {KIND!r}: one of the .safetensors files in the "
            "folder `faults` of a run"
        )
        self.kind = kind


def save_bundle(path: str | Path, bundle: Bundle, limit_mib: float = 64) -> None:
    """Write a bundle to a file atomically; above the limit, drop `views`, then the largest tensor.

    In the settings, NumPy numbers become Python numbers, and objects of other types become `str`.
    The file can also be read by `firstnan.bundle_file.unpack` and shown by `python -m firstnan
    replay`.
    """
    tensors = dict(bundle.tensors)
    first = sorted(tensors, key=lambda name: (name == "views", tensors[name].nbytes), reverse=True)
    left_out = list(bundle.left_out)
    while sum(tensor.nbytes for tensor in tensors.values()) > limit_mib * 2**20:
        left_out.append(first.pop(0))
        del tensors[left_out[-1]]
    content = {f"tensor {name}": tensor for name, tensor in tensors.items()}
    event = bundle.event
    step = {"event": asdict(event), "settings": bundle.settings, "left_out": left_out}
    texts = {
        "kind": KIND,
        "contains": "rows of the training data or their numbers, the weights before the step, the "
        "settings of the run",
        "report": f"{event.part}, step {event.step}: {event.reason}\n"
        f"To run the step again: ssl_kd replay {path}",
        "step": json.dumps(step, default=_plain),
    }
    atomic_write_bytes(path, pack(texts, {"indices": bundle.indices, **content}))


def _plain(value: Any) -> Any:
    """Convert what JSON does not know: NumPy numbers, mappings, sets; anything else to `str`."""
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, set | frozenset) else str(value)


def load_bundle(path: str | Path) -> Bundle:
    """Read a bundle, and execute no code from the file.

    Raises:
        OtherKind: the file is a bundle of another kind.
        InputError: the file is not a bundle.
        CorruptFileError: the file is damaged.
        OSError: the file cannot be read.
    """
    texts, tensors = _read(path)
    if texts.get("kind") != KIND:
        raise OtherKind(path, texts.get("kind", "no step"))
    step: Any = None  # of any type, in a file that ssl_kd did not write
    with suppress(KeyError, ValueError):
        step = json.loads(texts["step"])
    if not (
        has_fields(step, _STEP)
        and has_fields(step["event"], _EVENT)
        and "indices" in tensors
        and all(isinstance(name, str) for name in step["left_out"])
    ):
        raise CorruptFileError(
            f"{path} is damaged: a field is missing, unknown, or of the wrong type. Expected "
            f"indices, {', '.join(_STEP)}: run training again to record the fault again."
        )
    named = {name.removeprefix("tensor "): x for name, x in tensors.items() if name != "indices"}
    return Bundle(
        event=Event(**step["event"]),
        indices=tensors["indices"],
        tensors=named,
        settings=step["settings"],
        left_out=step["left_out"],
    )


def _read(path: str | Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    with open(path, "rb") as file:  # raises an OSError that says why the file cannot be read
        start = file.read(9)
    if start[:2] == b"PK":  # torch.save, as in versions before this one
        raise InputError(
            f"{path} is not a fault bundle that this version of ssl_kd can read. Install the "
            "commit that wrote it (`commit` in config.json of the run), or record the fault again"
        )
    if start and start[8:] != b"{":  # safetensors begins with a length of 8 bytes and JSON
        raise InputError(
            f"{path} is not a fault bundle. Expected one of the .safetensors files in the folder "
            "`faults` of a run"
        )
    try:
        return unpack(Path(path))
    except BundleError as error:
        raise CorruptFileError(f"{error}. Run training again to record the fault again") from error


def has_fields(values: object, kinds: Mapping[str, Any]) -> bool:
    """Return whether `values` is a dictionary with exactly the keys and value types of `kinds`."""
    return (
        isinstance(values, dict)
        and values.keys() == kinds.keys()
        and all(isinstance(values[name], kind) for name, kind in kinds.items())
    )


class FlightRecorder:
    """Save the first fault of each part of the model, and at most eight bundles per run.

    The bundles in `folder`, such as `head-3-step300.safetensors`, count after a resume, too.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._recorded = {file.stem.rpartition("-step")[0] for file in self.bundles()}

    def wants(self, part: str) -> bool:
        """Return whether a fault of this part would be saved."""
        return len(self._recorded) < _MOST and _slug(part) not in self._recorded

    def bundles(self) -> list[Path]:
        """Return the saved bundles, oldest first."""
        return sorted(self.folder.glob("*.safetensors"), key=lambda file: file.stat().st_mtime_ns)

    def record(self, bundle: Bundle) -> Path | None:
        """Save a fault and return the path; None if `wants` is false or the write fails."""
        part, step = bundle.event.part, bundle.event.step
        if not self.wants(part):
            return None
        self._recorded.add(_slug(part))
        path = self.folder / f"{_slug(part)}-step{step}.safetensors"
        try:
            save_bundle(path, bundle)
        except (OSError, BundleError) as error:
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
        event = self.bundle.event
        fault = self.fault
        how = self.bundle.settings["replay"]
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
