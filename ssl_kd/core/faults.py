"""Add the words of ssl_kd to the guard: its own kind of fault, and the settings to change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from firstnan import diagnosis
from firstnan.diagnosis import Cause, Diagnosis
from firstnan.faults import Kind, Kinds, Stage
from firstnan.microscope import Fault


class OwnStage(Kinds):
    """The kind of fault that ssl_kd detects itself, next to the guard's `Stage`."""

    TEACHER = Kind(
        1, "the EMA teacher's probabilities are not finite", value="loss", not_finite=True
    )


REMEDIES: dict[Kinds, str] = {
    Stage.LARGE: "lower the learning rate; if norms of this size are normal, raise the threshold "
    "(max_norm, in a run GRAD_NORM_THRESHOLD) or set clip_grad",
    Stage.LOSS: "look for NaN in the inputs and for log(0) or x / 0 in the loss; lower the "
    "learning rate, or raise the student's temperature",
    OwnStage.TEACHER: "raise the teacher's temperature; in a custom head look for log(0) or x / 0",
}
CHANGES = {kind.name.lower(): kind.kind.advice for kind in Stage if kind.kind.advice}
CHANGES |= {kind.name.lower(): remedy for kind, remedy in REMEDIES.items()}
CHANGES["input"] = "rebuild the cached embeddings (--rebuild_damaged), or remove the sample"
"""What to change by the `stage` of an event; a stage that needs no change is absent."""


class Advice(NamedTuple):
    """A setting to change, with its current value and the value to try."""

    setting: str
    now: Any
    value: Any

    def __str__(self) -> str:
        """Return a line such as `LEARNING_RATE 4 -> 0.4`."""
        now, value = (f"{x:.3g}" if isinstance(x, float) else x for x in (self.now, self.value))
        return f"{self.setting.upper()} {now} -> {value}"


def diagnose(
    fault: Fault, settings: Mapping[str, Any] | None = None, usual_lr: float = math.inf
) -> Diagnosis:
    """Return the likely cause of a fault, the code to change, and the settings to change.

    Only `settings` (lower-case name -> value) are advised, and no learning rate above `usual_lr`:
    a tenth of one that is far too large may still be too large.
    """
    found = diagnosis.diagnose(fault)
    now = settings or {}
    new = {}
    is_zero = found.cause in diagnosis.OF_ZERO
    in_fp16 = any(facts.dtype == "float16" for facts in fault.inputs)
    if found.cause == Cause.FP16_OVERFLOW or (is_zero and in_fp16):
        new = {"use_fp16": False, "model_dtype": "float32"}
    elif found.cause == Cause.LEARNING_RATE:
        rate, clip = now.get("learning_rate"), now.get("clip_grad")
        new = {"learning_rate": rate and min(rate / 10, usual_lr), "clip_grad": clip or 1.0}
    elif found.cause == Cause.POISONED_INPUT:
        new = {"rebuild_damaged": True}
    elif found.cause == Cause.TEMPERATURE:
        factor, _, fits = diagnosis.temperature(fault)
        names = ("student_temp", "teacher_temp", "temperature")
        low = [n for n in names if now.get(n, fits) < fits]
        exact = [n for n in low if math.isclose(now[n], 1 / factor, rel_tol=1e-3)]
        new = dict.fromkeys(exact or low, fits)
    advice = [Advice(n, now[n], v) for n, v in new.items() if n in now and now[n] != v]
    return replace(found, advice=tuple(advice))
