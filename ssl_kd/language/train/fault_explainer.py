"""Find the cause of a fault in a training step, and record the step for a replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from firstnan.diagnosis import Diagnosis
from firstnan.events import Event
from firstnan.faults import Stage
from firstnan.loop import Guard
from firstnan.microscope import Fault, Microscope
from ssl_kd.core.faults import diagnose
from ssl_kd.core.memory import is_out_of_memory
from ssl_kd.core.runs.fault_bundle import Bundle, FlightRecorder
from ssl_kd.core.runs.process_group import ProcessGroup
from ssl_kd.language.models.finite import in_words, of_a_file, suspect_weights
from ssl_kd.language.teachers.base import named_rows
from ssl_kd.language.text.aligned import AlignedBatch
from ssl_kd.language.text.blocks import Batch
from ssl_kd.language.train.objective import Objective
from ssl_kd.language.train.rows_left_out import rng_state, set_rng_state


@torch.enable_grad()  # the guard calls back without gradients
def examine(
    objective: Objective, batch: Batch | AlignedBatch, part: str = "model"
) -> tuple[Fault, Diagnosis] | None:
    """Run a batch again with every operation checked; return the first fault and its diagnosis.

    `part` is the name of a loss term, or `model` for all of them. No weight changes.
    """
    weights = {f"student weight {name}": p for name, p in objective.student.named_parameters()}
    leaves = [p for p in weights.values() if p.requires_grad]
    named = {name: p.detach() for name, p in weights.items()}
    for name, teacher in objective.teacher.models.items():
        named |= suspect_weights(teacher, name)
    with objective.teacher.fixed(), Microscope(named) as scope:
        terms = objective.weighted(objective.terms(batch))
        suspects = [terms[part]] if part in terms else list(terms.values())
        fault = scope.fault(*suspects)
        if fault is None:
            total = sum(suspects, torch.zeros(()))
            gradients = torch.autograd.grad(total, leaves, allow_unused=True)
            fault = scope.fault(*(g for g in gradients if g is not None))
    if fault is None:
        return None
    diagnosis = diagnose(fault, objective.settings.known(), objective.settings.usual_lr)
    in_teacher = diagnosis.words.startswith("teacher ")
    return fault, of_a_file(diagnosis) if in_teacher else diagnosis


def trained(objective: Objective) -> dict[str, Tensor]:
    """Return all trained tensors by name: weights of the student and of the router."""
    tensors: dict[str, Tensor] = {
        f"student {n}": p for n, p in objective.student.named_parameters() if p.requires_grad
    }
    return tensors | objective.teacher.trained()


@dataclass(frozen=True)
class _SecondRun:
    """The result of running a step again."""

    rows: Tensor  # indices of the rows of the failed batch; of all batches if none failed
    rng: Mapping[str, Tensor]  # random state before the failed batch
    message: str  # the cause, or why none was found
    diagnosis: Diagnosis | None = None


class FaultExplainer:
    """Finds the rows and the operation that caused a fault, once per part, and records the step."""

    def __init__(
        self,
        objective: Objective,
        guard: Guard,
        ranks: ProcessGroup,
        recorder: FlightRecorder | None = None,
    ) -> None:
        self._objective = objective
        self._guard = guard
        self._ranks = ranks
        self._recorder = recorder
        self.explained: set[str] = set()  # parts, in this process or before a resume
        self.diagnoses: list[Diagnosis] = []  # of this process
        self.facts: dict[str, Any] = {}  # identities of text and models that a replay compares
        self._read = 0

    def bundles(self) -> list[Path]:
        """Return the files of the recorded faults, oldest first."""
        return [] if self._recorder is None else self._recorder.bundles()

    def explain(self, batches: Sequence[Batch | AlignedBatch], rng: Mapping[str, Tensor]) -> None:
        """Explain the guard's new events by running the step again.

        The weights are still those before the update; `rng` is the random state before the step.
        """
        log = self._guard.events
        new, self._read = log.events[self._read :], len(log)
        for event in new:
            stage = Stage.of(event)
            sick = stage is not None and stage.kind.not_finite and event.action != "used again"
            if sick and event.part != "router" and event.part not in self.explained:
                log.extend([self._explain(event, batches, rng)])

    def _explain(
        self, event: Event, batches: Sequence[Batch | AlignedBatch], rng: Mapping[str, Tensor]
    ) -> Event:
        runs = self._ranks.gather(
            f"step {event.step}, the cause of {event.part}",
            self._run_again(event.part, batches, rng),
        )
        run = next((run for run in runs if run.diagnosis is not None), None)
        if run is None:
            rows = torch.cat([run.rows for run in runs])
            run = replace(runs[0], rows=rows, message=max(run.message for run in runs))
        action = "not found again"
        if run.diagnosis is not None:
            self.diagnoses.append(run.diagnosis)
            self.explained.add(event.part)
            action = "explained"
        reason = f"{named_rows(run.rows)}: {run.message}"
        if self._recorder is not None and self._recorder.wants(event.part):
            self._recorder.record(self._bundle(event, run, reason))
        return Event(event.step, event.part, "replay", reason, action)

    def _run_again(
        self, part: str, batches: Sequence[Batch | AlignedBatch], rng: Mapping[str, Tensor]
    ) -> _SecondRun:
        device = self._objective.precision.device
        rows = torch.cat([batch.rows for batch in batches])
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                set_rng_state(rng, device)
                for batch in batches:
                    before = rng_state(device)
                    if (fault := examine(self._objective, batch, part)) is not None:
                        return _SecondRun(batch.rows, before, in_words(*fault), fault[1])
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return _SecondRun(rows, rng, "not enough memory to run the step again")
        return _SecondRun(rows, rng, "a second run of the same step is finite")

    def _bundle(self, event: Event, run: _SecondRun, reason: str) -> Bundle:
        precision = self._objective.precision
        replay = {
            "mode": "language",
            "student": str(precision.student).removeprefix("torch."),
            "teacher": str(precision.teacher).removeprefix("torch."),
            "scale": precision.scale,
            "device": str(precision.device),
            "exact": True,
            "explained": reason,
        }
        rng = {f"rng {name}": state for name, state in run.rng.items()}
        return Bundle(
            event=event,
            indices=run.rows.cpu(),
            tensors=trained(self._objective) | rng,
            settings={**self._objective.settings.to_dict(), "replay": replay | self.facts},
        )
