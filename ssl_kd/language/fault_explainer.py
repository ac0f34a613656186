"""Faults of a student's step, explained when they happen and recorded to be run again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ssl_kd.datasets.aligned import AlignedBatch
from ssl_kd.datasets.blocks import Batch
from ssl_kd.guard.diagnosis import Diagnosis, diagnose
from ssl_kd.guard.events import Event
from ssl_kd.guard.faults import Stage
from ssl_kd.guard.loop import Guard
from ssl_kd.guard.memory import is_out_of_memory
from ssl_kd.guard.microscope import Fault, Microscope
from ssl_kd.guard.precision import Precision
from ssl_kd.language.parallel import DistributedStudent
from ssl_kd.language.routed import Routed, fixed
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.sources import named_rows
from ssl_kd.teachers.finite import in_words, of_a_file, suspect_weights
from ssl_kd.training.fault_bundle import Bundle, FlightRecorder
from ssl_kd.training.process_group import ProcessGroup


class Examined(Protocol):
    """A step that can be run again: a `Distiller`."""

    student: nn.Module
    settings: LanguageSettings
    precision: Precision
    guard: Guard
    team: ProcessGroup
    trainee: DistributedStudent
    source: Any
    aligned: Any
    beside: dict[str, nn.Module]

    def weighted_terms(self, batch: Batch | AlignedBatch) -> dict[str, Tensor]:
        """Loss terms of a batch, with gradient."""
        ...


@torch.enable_grad()  # the guard calls back from where none is kept
def examine(
    step: Examined, batch: Batch | AlignedBatch, part: str = "model"
) -> tuple[Fault, Diagnosis] | None:
    """Run a batch again under the microscope; what first went wrong, and why.

    Nothing learns from it.

    Args:
        step: with the weights that it had.
        batch: of the step.
        part: a loss term, or the whole `model`.
    """
    weights = {f"student weight {name}": p for name, p in step.student.named_parameters()}
    for who, module in step.beside.items():
        weights |= {f"{who} weight {name}": p for name, p in module.named_parameters()}
    leaves = [p for p in weights.values() if p.requires_grad]
    source = step.source if step.aligned is None else step.aligned
    teachers = getattr(source, "models", {"teacher": getattr(source, "model", None)})
    named = {name: p.detach() for name, p in weights.items()}
    for name, teacher in teachers.items():
        if teacher is not None:
            named |= suspect_weights(teacher, name)
    with fixed(step.source), Microscope(named) as scope:
        terms = step.weighted_terms(batch)
        looked = [terms[part]] if part in terms else list(terms.values())
        fault = scope.fault(*looked)
        if fault is None:
            total = sum(looked, torch.zeros(()))
            found = torch.autograd.grad(total, leaves, allow_unused=True)
            fault = scope.fault(*(g for g in found if g is not None))
    if fault is None:
        return None
    settings = step.settings
    usual = {"learning_rate": settings.usual_lr}
    found = diagnose(fault, settings.known(), usual)
    return fault, of_a_file(found) if found.words.startswith("teacher ") else found


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """States of the random numbers: the CPU's, and the GPU's where one is used."""
    gpu = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"cpu": torch.get_rng_state()} | gpu


def set_rng_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Take over what `rng_state` gave."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def trained(step: Examined) -> dict[str, Tensor]:
    """What a step trains, by name: the student, and what learns beside it."""
    tensors: dict[str, Tensor] = {}
    tensors |= {f"student {n}": p for n, p in step.student.named_parameters() if p.requires_grad}
    for who, module in step.beside.items():
        tensors |= {f"{who} {name}": t for name, t in module.state_dict().items()}
    if isinstance(step.source, Routed) and step.source.router is not None:
        routers = step.source.mixture.router_parameters()
        tensors |= {f"router {name}": p for name, p in routers.items()}
    return tensors


@dataclass(frozen=True)
class _Seen:
    """What a second run of a step showed.

    Attributes:
        rows: of the batch that failed; of all batches where none did.
        rng: before that batch.
        words: what was found, or why nothing was.
        why: the cause; None where nothing was found.
    """

    rows: Tensor
    rng: Mapping[str, Tensor]
    words: str
    why: Diagnosis | None = None


class FaultExplainer:
    """Names the rows of a sick batch and the operation, once for each part, and records the step.

    Args:
        step: whose faults they are.
        recorder: keeps the first fault of each part; None for none.

    Attributes:
        explained: parts whose cause was found, before a resume too.
        diagnoses: the causes, in this process.
        about: what a replay must find the same, for the bundle.
    """

    def __init__(self, step: Examined, recorder: FlightRecorder | None = None) -> None:
        self._step, self._recorder = step, recorder
        self.explained: set[str] = set()
        self.diagnoses: list[Diagnosis] = []
        self.about: dict[str, Any] = {}
        self._read = 0

    def bundles(self) -> list[Path]:
        """What was recorded, oldest first."""
        return [] if self._recorder is None else self._recorder.bundles()

    def explain(self, batches: Sequence[Batch | AlignedBatch], rng: Mapping[str, Tensor]) -> None:
        """Explain the guard's new events.

        Args:
            batches: of the step; the weights must still be those that it began with.
            rng: from `rng_state`, before the step's first batch.
        """
        log = self._step.guard.events
        new, self._read = log.events[self._read :], len(log)
        for event in new:
            kind = Stage.of(event)
            sick = kind is not None and kind.kind.not_finite and event.action != "used again"
            if sick and event.part != "router" and event.part not in self.explained:
                log.extend([self._explain(event, batches, rng)])

    def _explain(
        self, event: Event, batches: Sequence[Batch | AlignedBatch], rng: Mapping[str, Tensor]
    ) -> Event:
        gathered = self._step.team.of_all(
            f"step {event.step}, why {event.part} failed", self._run_again(event.part, batches, rng)
        )
        seen = next((one for one in gathered if one.why is not None), None)
        if seen is None:
            rows = torch.cat([one.rows for one in gathered])
            words = max(one.words for one in gathered)
            seen = replace(gathered[0], rows=rows, words=words)
        action = "not found again"
        if seen.why is not None:
            self.diagnoses.append(seen.why)
            self.explained.add(event.part)
            action = "explained"
        reason = f"{named_rows(seen.rows)}: {seen.words}"
        self._record(event, seen.rows, seen.rng, reason)
        return Event(event.step, event.part, "replay", reason, action)

    def _run_again(
        self, part: str, batches: Sequence[Batch | AlignedBatch], rng: Mapping[str, Tensor]
    ) -> _Seen:
        """What this rank's own batches show."""
        step, device = self._step, self._step.precision.device
        rows = torch.cat([batch.rows for batch in batches])
        if step.trainee.sharded:  # the microscope takes gradients of whole weights
            return _Seen(rows, rng, "a step of a sharded student is not run again")
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                set_rng_state(rng, device)
                for batch in batches:
                    before = rng_state(device)
                    if (found := examine(step, batch, part)) is not None:
                        return _Seen(batch.rows, before, in_words(*found), found[1])
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return _Seen(rows, rng, "not enough memory to run it again")
        return _Seen(rows, rng, "a second run of the same step is finite")

    def _record(self, event: Event, rows: Tensor, rng: Mapping[str, Tensor], reason: str) -> None:
        if self._recorder is None or not self._recorder.wants(event.part):
            return
        step = self._step
        how = {
            "mode": "language",
            "student": str(step.precision.student).removeprefix("torch."),
            "teacher": str(step.precision.teacher).removeprefix("torch."),
            "scale": step.precision.scale,
            "device": str(step.precision.device),
            "exact": True,
            "explained": reason,
        }
        self._recorder.record(
            Bundle(
                event=event,
                indices=rows.cpu(),
                tensors=trained(step) | {f"rng {name}": state for name, state in rng.items()},
                settings={**step.settings.to_dict(), "replay": how | self.about},
            )
        )
