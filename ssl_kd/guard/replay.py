"""What the replay of a recorded step found, as a person reads it; the same for both modes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ssl_kd.files import CorruptFileError
from ssl_kd.guard.diagnosis import Diagnosis
from ssl_kd.guard.microscope import Fault
from ssl_kd.guard.recorder import Bundle

DTYPES = ("float32", "float16", "bfloat16")
"""What a recorded step may have been computed in."""


def damaged(path: str | Path, reason: str) -> CorruptFileError:
    """The error for a bundle that holds no step as a run records them."""
    return CorruptFileError(f"{path} cannot be run again: {reason}. Expected a bundle of a run.")


@dataclass(frozen=True)
class Replay:
    """What a replay found; as a string, what a person reads.

    Attributes:
        bundle: what was run again.
        reproduced: whether the step went wrong again.
        fault: the first operation whose output was not finite, if there is one.
        diagnosis: why, and what to change.
        sample: which part of the data it comes from, in words; empty where it does not.
        seen: what else there is to say, name -> words; for a step without such an operation.
    """

    bundle: Bundle
    reproduced: bool
    fault: Fault | None
    diagnosis: Diagnosis | None
    sample: str = ""
    seen: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        """A few lines: what, where, inputs, cause, what to change."""
        event, fault, diagnosis = self.bundle.event, self.fault, self.diagnosis
        exact = self.bundle.settings["replay"]["exact"]
        rows = [("fault", f"{event.part}, step {event.step}: {event.reason}")]
        if not exact:
            rows.append(("note", "the state is of a later step; the fault may not show"))
        if fault is not None and diagnosis is not None:
            where = f"backward pass ({fault.node})" if fault.backward else "forward pass"
            rows.append(("first op", f"{fault.op}, {where}"))
            rows += [("at", str(fault.place))] if fault.place else []
            rows += [("input", str(facts)) for facts in fault.inputs]
            rows += [("output", str(facts)) for facts in fault.outputs]
            rows.append(("cause", f"{diagnosis.cause.value}: {diagnosis.words}"))
            rows += [("sample", self.sample)] if self.sample else []
            rows += [("change", str(advice)) for advice in diagnosis.advice]
            rows.append(("remedy", diagnosis.remedy))
        elif self.reproduced or self.seen:
            rows += self.seen
        else:
            device = self.bundle.settings["replay"]["device"]
            seen = f"recorded on {device}; run again on the CPU, the same step is healthy"
            rows.append(("seen", seen))
            if exact:
                meaning = (
                    "the fault came from outside these numbers: a bit flipped in memory or on the "
                    "device, a kernel of that device, or a test that put it there. If it comes "
                    "back, test the memory and run with --device cpu"
                )
                rows.append(("meaning", meaning))
        return "\n".join(f"{name:<9}{value}" for name, value in rows)
