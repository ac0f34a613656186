"""The report of a replayed step, the same for both modes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ssl_kd.files import CorruptFileError
from ssl_kd.guard.diagnosis import Diagnosis, report
from ssl_kd.guard.microscope import Fault
from ssl_kd.guard.recorder import Bundle

DTYPES = ("float32", "float16", "bfloat16")
"""What a recorded step may have been computed in."""


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
